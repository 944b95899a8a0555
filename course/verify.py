"""Checks of the course itself: exercises fail when empty and pass when solved, and the tests catch each bug.

An exercise is valid if its tests pass in a tree where only the exercise and its `needs` are solved, and fail with its
name once it is emptied too. So no exercise depends on a later one, emptying an exercise breaks only those that list it
in `needs`, and a student who solves one after the other earns each exercise's points in turn.

A bug is valid if its guarding tests pass without it and fail with it, and all stages still run to the end with it. The
metrics that it changes are listed.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from course.bugs import BUGS, Bug
from course.copies import ROOT, source_path
from course.exercises import EXERCISES, Exercise, closure
from course.grader.grade import temporary_tree
from course.grader.worker import Outcome, Worker
from course.hunt import put_in
from course.start import empty
from nanorlhf.errors import InputError

WHOLE_RUN, METRICS = "tests/course/whole_run.py::test_every_stage_runs_to_its_end", "metrics.json"


def restore(tree: Path) -> None:
    """Undo all edits of a tree. We reuse one tree because a new one would have to be compiled."""
    functions = [function for exercise in EXERCISES for function in exercise.functions] + [bug.where for bug in BUGS]
    for path in {source_path(function) for function in functions}:
        if (ROOT / path).read_bytes() != (tree / path).read_bytes():
            shutil.copyfile(ROOT / path, tree / path)


def exercise_holds(exercise: Exercise, tree: Path, worker: Worker, limit: float) -> dict:
    """Run an exercise's tests in a tree with only the exercise and its needs solved, then with the exercise emptied."""
    restore(tree)
    for other in EXERCISES:
        if other.name not in closure(exercise) | {exercise.name}:
            empty(tree, other)
    solved = worker.run(tree, exercise.tests, limit)
    empty(tree, exercise)
    emptied = worker.run(tree, exercise.tests, limit)
    holds = solved.passed and not emptied.passed and f"exercise {exercise.name}:" in emptied.reason
    return {"name": exercise.name, "holds": holds, "solved": asdict(solved), "empty": asdict(emptied)}


def bug_is_caught(bug: Bug, tree: Path, worker: Worker, limit: float) -> dict:
    """Run the tests that guard against a bug in a tree with the bug."""
    restore(tree)
    put_in(tree, bug)
    caught = worker.run(tree, bug.guard, limit)
    return {"name": bug.name, "holds": not caught.passed, "caught": asdict(caught)}


def bug_runs(bug: Bug, tree: Path, worker: Worker, limit: float, usual: dict) -> dict:
    """Run all stages with a bug: do they finish, and which metrics change?"""
    restore(tree)
    put_in(tree, bug)
    ran, metrics = run_whole(tree, worker, limit)
    return {"name": bug.name, "holds": ran.passed, "ran": asdict(ran), "changed": changed(metrics, usual)}


def run_whole(tree: Path, worker: Worker, limit: float) -> tuple[Outcome, dict[str, float]]:
    """Run all stages in miniature and return their metrics, {} if they didn't finish."""
    result = worker.run(tree, [WHOLE_RUN], limit)
    return result, json.loads((tree / METRICS).read_text()) if result.passed else {}


def changed(metrics: dict, usual: dict) -> list[str]:
    """Return the names of metrics, without stage and row, that differ by more than rounding."""
    names = {key.rpartition(" ")[2]: None for key in metrics | usual if differ(metrics.get(key), usual.get(key))}
    return sorted(names)


def differ(one: float | None, other: float | None) -> bool:
    return (one is None) != (other is None) or (
        one is not None and other is not None and abs(one - other) > 1e-4 * max(1.0, abs(one), abs(other))
    )


def verify(parts: Sequence[str], names: Sequence[str], limit: float, file: Path | None) -> None:
    """Print a line for each exercise, bug and run. Raises InputError at the end if any is wrong."""
    known = {exercise.name for exercise in EXERCISES} | {bug.name for bug in BUGS}
    for name in names:
        if name not in known:
            raise InputError(f"unknown exercise or bug: {name!r}.")
    exercises = [exercise for exercise in EXERCISES if not names or exercise.name in names]
    bugs = [bug for bug in BUGS if not names or bug.name in names]
    results: dict[str, list[dict]] = {part: [] for part in parts}

    def keep(part: str, result: dict, text: str) -> None:
        results[part].append(result)
        print(f"{'ok   ' if result['holds'] else 'WRONG'} {part:9} {result['name']:34} {text}".rstrip(), flush=True)
        if file is not None:
            file.write_text(json.dumps(results, indent=2) + "\n")

    with temporary_tree(ROOT) as tree, Worker() as worker:
        for exercise in exercises if "exercises" in parts else []:
            result = exercise_holds(exercise, tree, worker, limit)
            solved, emptied = (result[state]["claim"] + " " + result[state]["reason"] for state in ("solved", "empty"))
            text = f"{result['solved']['seconds']:.1f} s"
            keep("exercises", result, text if result["holds"] else f"solved: {solved}; empty: {emptied}")
        if "bugs" in parts and bugs:
            restore(tree)
            clean = worker.run(tree, sorted({test for bug in bugs for test in bug.guard}), limit * len(bugs))
            if not clean.passed:
                raise InputError(f"without a bug, {clean.claim!r} fails ({clean.reason}): fix it first.")
        for bug in bugs if "bugs" in parts else []:
            result = bug_is_caught(bug, tree, worker, limit)
            keep("bugs", result, f"level {bug.level}: {result['caught']['claim'] or 'no test catches it'}")
        if "runs" in parts and bugs:
            restore(tree)
            ran, usual = run_whole(tree, worker, limit)
            if not ran.passed:
                raise InputError(f"all stages in miniature fail without a bug ({ran.reason}): fix this first.")
            for bug in bugs:
                result = bug_runs(bug, tree, worker, limit, usual)
                names = ", ".join(result["changed"][:5]) or "no metric changes"
                text = f"level {bug.level}: {len(result['changed'])} metrics: {names}"
                keep("runs", result, text if result["holds"] else result["ran"]["reason"])
    wrong = [result["name"] for part_results in results.values() for result in part_results if not result["holds"]]
    if wrong:
        raise InputError(f"{len(wrong)} exercises or bugs are wrong: {', '.join(wrong)}.")
