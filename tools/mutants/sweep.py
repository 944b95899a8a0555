"""Test mutants: each exercise's function is changed in one place at a time, and the exercise's tests should fail.

A mutant is killed if a test of its exercise fails, ends the process or takes too long, and survives if all pass. A
mutant that survives in a process that has imported the unchanged function is tested again in a fresh process.
"""

import ast
import csv
import functools
import hashlib
import json
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from course.copies import ROOT, path_and_name, source_path
from course.edit import fixed_names, local_names
from course.exercises import Exercise
from course.grader.grade import temporary_tree
from course.grader.worker import Outcome, Worker, outcome
from course.grader.worker_main import write
from nanorlhf.errors import InputError
from tools.mutants.equivalent import EQUIVALENT
from tools.mutants.operators import Mutant, make_mutants

PATIENCE = 600.0  # time limit for the tests in a fresh process, seconds
BATCH = 40  # mutants per process; starting one takes as long as testing a few mutants


@dataclass(frozen=True)
class Task:
    """A mutant of an exercise's function."""

    exercise: Exercise
    function: str
    mutant: Mutant
    key: str
    """hash of the mutant's file and the tests, which determine the verdict"""


@dataclass(frozen=True)
class Verdict:
    key: str
    exercise: str
    function: str
    operator: str
    line: int
    change: str
    killed: bool
    claim: str
    """name of the failing test, in words"""
    reason: str
    seconds: float

    @property
    def explained(self) -> bool:
        return self.change in equivalent_changes(self.function)

    @property
    def survived(self) -> bool:
        return not self.killed and not self.explained


def reads_like(change: str, other: str, fixed: set[str]) -> bool:
    """Return whether two mutated statements (`Mutant.change`) are the same except for local names."""
    deleted = "pass  # "
    if change.startswith(deleted) != other.startswith(deleted):
        return False
    ours, theirs = (ast.parse(text.removeprefix(deleted) + " pass" * text.endswith(":")) for text in (change, other))
    return local_names(ours, theirs, fixed) is not None


@functools.cache
def equivalent_changes(function: str) -> frozenset[str]:
    """Return the mutants of a function, `module:name`, listed in EQUIVALENT, ignoring the names of local variables.

    Raises LookupError for an entry of EQUIVALENT that isn't a mutant.
    """
    path, name = path_and_name(function)
    source = (ROOT / path).read_text(encoding="utf-8")
    changes = {mutant.change for mutant in make_mutants(source, name)}
    fixed = fixed_names(source)
    result: set[str] = set()
    for change in (change for known in EQUIVALENT if known.function == function for change in known.changes):
        like = {change} & changes or {other for other in changes if reads_like(change, other, fixed)}
        if not like:
            raise LookupError(f"{function} has no mutant {change!r}")
        result |= like
    return frozenset(result)


def make_tasks(exercises: Iterable[Exercise], sample: int | None, seed: int) -> list[Task]:
    """Return all mutants of each exercise, or a random sample of them."""
    result = []
    for exercise in exercises:
        files = sorted({test.partition("::")[0] for test in exercise.tests})
        tests = [*exercise.tests, *((ROOT / file).read_text(encoding="utf-8") for file in files)]
        tasks = []
        for function in exercise.functions:
            path, name = path_and_name(function)
            source = (ROOT / path).read_text(encoding="utf-8")
            for mutant in make_mutants(source, name):
                key = hashlib.sha256(json.dumps([mutant.source, *tests]).encode()).hexdigest()[:16]
                tasks.append(Task(exercise, function, mutant, key))
        if sample is not None and sample < len(tasks):
            drawn = random.Random(f"{seed} {exercise.name}").sample(range(len(tasks)), sample)
            tasks = [tasks[i] for i in sorted(drawn)]
        result += tasks
    return result


def batches(tasks: Iterable[Task]) -> list[list[Task]]:
    """Split tasks into batches of one exercise and at most BATCH tasks."""
    result: list[list[Task]] = []
    for task in tasks:
        if not result or result[-1][0].exercise is not task.exercise or len(result[-1]) == BATCH:
            result.append([])
        result[-1].append(task)
    return result


def judge(batch: Sequence[Task], tree: Path, worker: Worker, limit: float) -> Iterator[Verdict]:
    """Yield the verdicts on a batch of one exercise, survivors last."""
    exercise = batch[0].exercise
    requests = []
    for task in batch:
        module, _, function = task.function.partition(":")
        requests.append({"module": module, "function": function, "source": task.mutant.source})
    outcomes = run_mutants(worker, tree, exercise.tests, requests, limit)
    clean = next(outcomes, None)
    if clean is not None and not clean.passed:
        assert next(outcomes, None) is None
        raise InputError(f"{exercise.name} fails without a mutation, fix it first: {clean.claim}: {clean.reason}.")
    survivors, judged = [], 0
    for result, task in zip(outcomes, batch, strict=False):  # in this order zip reads the worker's last answer
        judged += 1
        if result.passed:
            survivors.append(task)
        else:
            yield verdict(task, result)
    if judged < len(batch):
        raise InputError(f"{exercise.name}: the process that tests its mutants has died: run the command again.")
    for task in survivors:
        path = tree / source_path(task.function)
        source = path.read_text(encoding="utf-8")
        write(path, task.mutant.source)
        yield verdict(task, worker.run(tree, exercise.tests, PATIENCE))
        write(path, source)


def run_mutants(
    worker: Worker, tree: Path, tests: Sequence[str], mutants: Sequence[dict], limit: float
) -> Iterator[Outcome]:
    """Yield the outcome of these tests in the unchanged tree, then with each of the mutants; see `worker.py`.

    Ends after the first outcome if the tests don't pass or can't be imported.
    """
    judged = False
    for answer in worker.answers(root=str(tree), tests=list(tests), limit=limit, mutants=list(mutants)):
        last = answer.pop("last", False)
        if not (last and judged):
            yield outcome(answer)
        if last:
            return
        judged = True


def verdict(task: Task, result: Outcome) -> Verdict:
    mutant = task.mutant
    return Verdict(
        task.key, task.exercise.name, task.function, mutant.operator, mutant.line, mutant.change, not result.passed,
        result.claim, result.reason, result.seconds,
    )  # fmt: skip


def sweep(tasks: Sequence[Task], jobs: int, limit: float, on_verdict: Callable[[Verdict], None]) -> None:
    """Test all tasks, `jobs` at a time, and call `on_verdict` with each verdict."""
    waiting: SimpleQueue[list[Task]] = SimpleQueue()
    for batch in batches(tasks):
        waiting.put(batch)
    results: SimpleQueue[Verdict | Exception] = SimpleQueue()

    def work(worker: Worker, tree: Path) -> None:
        try:
            while True:
                for verdict in judge(waiting.get_nowait(), tree, worker, limit):
                    results.put(verdict)
        except Exception as error:  # raised again below; Empty: no batches left
            results.put(error)

    with ExitStack() as stack:
        working = min(jobs, waiting.qsize())
        for _ in range(working):
            tree, worker = stack.enter_context(temporary_tree(ROOT)), Worker("tools.mutants.worker")
            thread = threading.Thread(target=work, args=(worker, tree))
            stack.callback(thread.join)
            stack.enter_context(worker)  # exited before the join: a thread ends when its worker has ended
            thread.start()
        while working:
            result = results.get()
            if isinstance(result, Verdict):
                on_verdict(result)
            elif isinstance(result, Empty):
                working -= 1
            else:
                raise result


def read_verdicts(file: Path) -> dict[str, Verdict]:
    """Read the verdicts of an earlier sweep, by key. Raises InputError for a line that isn't a verdict."""
    verdicts = {}
    for number, line in enumerate(file.read_text().splitlines() if file.exists() else [], start=1):
        try:
            verdict = Verdict(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise InputError(
                f"{file}:{number}: not a verdict of `python -m tools.mutants`: delete the line."
            ) from error
        verdicts[verdict.key] = verdict
    return verdicts


def append(file: Path, verdict: Verdict) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as stream:
        stream.write(json.dumps(asdict(verdict)) + "\n")


def counts(verdicts: Sequence[Verdict]) -> list[tuple[str, int, int, int]]:
    """Count (name, mutants, equivalent, killed) for each exercise, and for all in the last row."""
    rows = []
    for name in [*dict.fromkeys(verdict.exercise for verdict in verdicts), "all"]:
        group = [verdict for verdict in verdicts if name in (verdict.exercise, "all")]
        rows.append((name, len(group), sum(v.explained for v in group), sum(v.killed for v in group)))
    return rows


def table(verdicts: Sequence[Verdict]) -> str:
    """Format `counts` as a table, with the killed share of the mutants that aren't equivalent."""
    rows = counts(verdicts)
    width = max(len(name) for name, *_ in rows)
    lines = [
        f"| {'exercise':{width}} | mutants | equivalent | killed | share |",
        f"|{'-' * (width + 2)}|--:|--:|--:|--:|",
    ]
    for name, number, equivalent, killed in rows:
        share = 100 * killed // (number - equivalent)
        lines.append(f"| {name:{width}} | {number:7} | {equivalent:10} | {killed:6} | {share:4}% |")
    return "\n".join(lines)


def write_counts(file: Path, verdicts: Sequence[Verdict]) -> None:
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(("exercise", "mutants", "equivalent", "killed"))
        writer.writerows(counts(verdicts))


def listed(verdicts: Iterable[Verdict]) -> str:
    """List unexplained survivors, and killed mutants that EQUIVALENT lists by mistake."""
    lines = []
    for verdict in verdicts:
        location = f"{source_path(verdict.function)}:{verdict.line}"
        if verdict.survived:
            lines.append(f"survived  {verdict.exercise}, {location}, {verdict.operator}: {verdict.change}")
        elif verdict.killed and verdict.explained:
            lines.append(f"not equivalent  {verdict.exercise}, {location}: {verdict.change} ({verdict.claim})")
    return "\n".join(lines)
