"""Evaluate the doctor on the course's bugs, on twelve bugs it was not designed for, and on right and wrong changes.

    python -m tools.doctor --demo runs/tiny --out runs/doctor --healthy runs/tiny runs/site

Each bug, and each change in tools/changes.py, is planted in a copy of the repository. `doctor code` examines the copy;
then the affected stage trains on the demo's data, and `doctor run` examines the run. With --healthy, every run below
those directories is examined too; findings there are false alarms, unless the run is not healthy after all. Writes
OUT/verdicts.jsonl, from which an interrupted call continues, and the table docs/doctor.csv.
"""

import contextlib
import csv
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from course.bugs import BUGS, Bug
from course.copies import CODE, ROOT, copy_files
from course.hunt import put_in
from nanorlhf.cli import Workers, check_ranges, run_module
from nanorlhf.doctor import code, diagnosis
from nanorlhf.errors import InputError
from nanorlhf.progress import Progress
from nanorlhf.rules.finding import Finding
from tools.changes import CHANGES
from tools.other_bugs import OTHER_BUGS

TABLE = ROOT / "docs/doctor.csv"
STAGES = {  # module or module:function -> stages that show its bugs; default: PPO
    "train_sft": ("sft",),
    "nanorlhf.training.supervised": ("sft",),
    "nanorlhf.dataset:with_leading_space": ("sft",),
    "nanorlhf.training.optimizer:lr_factor": ("sft",),  # PPO has no warm-up
    "train_rm": ("rm",),
    "nanorlhf.model:ScalarModel.forward": ("rm", "ppo"),
    "nanorlhf.reward_model:end_scores": ("rm", "ppo"),
    "nanorlhf.reward_model:end_index": ("rm", "ppo"),
    "nanorlhf.dpo": ("dpo",),
    "train_dpo": ("dpo",),
    "train_grpo": ("grpo",),
    "nanorlhf.grpo": ("grpo",),
    "train_rlcf": (),
    "nanorlhf.evals.judge": (),
    "nanorlhf.sandbox.execution": (),
}


@dataclass(frozen=True, kw_only=True)
class Args:
    demo: Path = Path("runs/tiny")
    """output of `make demo`, with data, sft and rm"""
    out: Path = Path("runs/doctor")
    bugs: tuple[str, ...] = ()
    """names of bugs or changes; default: all"""
    healthy: tuple[Path, ...] = ()
    """directories with healthy runs, at any depth"""
    jobs: Workers = 2
    """number of bugs to examine in parallel"""


Kind = Literal["course", "new", "right", "wrong"]
"""a bug of the course; a bug that the doctor was not designed for; a change done right; a change done wrong"""


@dataclass(frozen=True)
class Case:
    """The edits to plant, and the stages of the demo to train with them."""

    name: str
    kind: Kind
    level: int
    edits: tuple[Bug, ...]
    stages: tuple[str, ...]
    flags: tuple[str, ...] = ()
    """extra flags for the stages"""

    @property
    def key(self) -> str:
        """A hash of the case, the doctor and the code, which determine the verdict."""
        return hashlib.sha256(hash_code() + repr(self).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Verdict:
    key: str
    """the key of its case"""
    bug: str
    kind: Kind
    level: int
    by_code: list[str]
    by_run: list[str]
    """names of the findings"""
    words: list[str]
    """text of the findings"""
    seconds: float


@functools.cache
def hash_code() -> bytes:
    digest = hashlib.sha256()
    for path in sorted([*ROOT.glob("train_*.py"), *ROOT.glob("nanorlhf/**/*.py"), *ROOT.glob("kernels/*.py")]):
        digest.update(path.read_bytes())
    return digest.digest()


def bug_stages(bug: Bug) -> tuple[str, ...]:
    return STAGES.get(bug.where, STAGES.get(bug.where.partition(":")[0], ("ppo",)))


def all_cases() -> list[Case]:
    cases = [Case(bug.name, "course", bug.level, (bug,), bug_stages(bug)) for bug in BUGS]
    cases += [Case(bug.name, "new", bug.level, (bug,), bug_stages(bug)) for bug in OTHER_BUGS]
    for change in CHANGES:
        stages = (change.stage,) if change.stage else ()
        right = () if change.right is None else (change.right,)
        cases.append(Case(change.wrong.name, "right", change.wrong.level, right, stages, change.flags))
        cases.append(Case(change.wrong.name, "wrong", change.wrong.level, (change.wrong,), stages, change.flags))
    return cases


@contextlib.contextmanager
def planted(edits: tuple[Bug, ...]) -> Iterator[Path]:
    """Make a copy of the repository with these edits."""
    with tempfile.TemporaryDirectory(prefix="doctor-bug-") as directory:
        copy_files(ROOT, Path(directory), CODE)
        for bug in edits:
            put_in(Path(directory), bug)
        yield Path(directory)


@functools.cache
def code_findings(edits: tuple[Bug, ...]) -> list[Finding]:
    """Run `doctor code` on the edited tree; cached, because several right changes have no edits."""
    with planted(edits) as tree:
        return code.examine(tree)[0]


def judge(case: Case, args: Args) -> Verdict:
    """Run both forms of the doctor on the code with this case's edits."""
    began = time.monotonic()
    findings = code_findings(case.edits)
    runs: list[Path] = []
    crashed: list[str] = []
    with planted(case.edits) as tree:
        for stage in case.stages:
            out = args.out.absolute() / "runs" / (f"{case.name}-right" if case.kind == "right" else case.name) / stage
            if start(tree, stage, args.demo.absolute(), out, (*case.flags, "--overwrite")).wait() == 0:
                runs.append(out)
            else:
                crashed.append(stage)
    run_findings = diagnosis.examine(runs) if runs else []
    return Verdict(
        case.key, case.name, case.kind, case.level, names(findings),
        names(run_findings) + [f"{stage} fails" for stage in crashed], [*map(str, [*findings, *run_findings])],
        round(time.monotonic() - began, 1),
    )  # fmt: skip


def names(findings: Sequence) -> list[str]:
    return list(dict.fromkeys(finding.name for finding in findings))


def start(
    tree: Path, stage: str, demo: Path, out: Path, extra_flags: Sequence[str], seed: int = 1, log: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start to train a stage of the demo with the tree's scripts, which print to `log`.

    The extra flags contain --overwrite or --resume.
    """
    flags: dict[str, object] = {"data": demo / "data", "out": out, "seed": seed, "device": "cpu"}
    if stage != "sft":
        flags["sft"] = demo / "sft"
    if stage in ("ppo", "grpo"):  # a bug in the reward model has trained a separate one
        new_reward_model = out.parent / "rm"
        flags |= {"reward-model": new_reward_model if new_reward_model.exists() else demo / "rm", "trace": 4}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, str(tree / f"train_{stage}.py"), *words, *extra_flags]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    with (log or Path(os.devnull)).open("ab") as stream:
        return subprocess.Popen(command, cwd=tree, env=environment, stdout=stream, stderr=stream)


def examine_below(directories: Sequence[Path]) -> dict[Path, list[Finding]]:
    """Return the findings in each run below the directories, skipping runs that haven't logged anything yet."""
    files = {path for directory in directories for path in directory.rglob("metrics.jsonl") if path.stat().st_size}
    runs = [path.parent for path in sorted(files) if path.with_name("args.json").exists()]
    return {path: diagnosis.examine([path]) for path in runs}


def table_rows(verdicts: Sequence[Verdict]) -> list[tuple[str, str, int, str, str]]:
    return [(v.bug, v.kind, v.level, " ".join(v.by_code), " ".join(v.by_run)) for v in verdicts]


def summary(verdicts: Sequence[Verdict]) -> str:
    lines = []
    for what, group in (
        ("bugs of the course", [v for v in verdicts if v.kind == "course"]),
        ("bugs of the course, level 1", [v for v in verdicts if v.kind == "course" and v.level == 1]),
        ("new bugs", [v for v in verdicts if v.kind == "new"]),
        ("right changes", [v for v in verdicts if v.kind == "right"]),
        ("wrong changes", [v for v in verdicts if v.kind == "wrong"]),
    ):
        if not group:
            continue
        by_code, by_run = sum(bool(v.by_code) for v in group), sum(bool(v.by_run) for v in group)
        neither = [v.bug for v in group if not v.by_code and not v.by_run]
        lines.append(f"{what}: {len(group)}, found by code {by_code}, by run {by_run}, by neither: {neither or 'none'}")
    return "\n".join(lines)


def main(args: Args) -> None:
    check_ranges(args)
    for name in ("data", "sft", "rm"):
        if not (args.demo / name).is_dir():
            raise InputError(f"--demo {args.demo} has no {name}: run `make demo` first.")
    known = all_cases()
    for name in args.bugs:
        if all(case.name != name for case in known):
            raise InputError(f"--bugs {name}: unknown bug.")
    args.out.mkdir(parents=True, exist_ok=True)
    cases = [case for case in known if not args.bugs or case.name in args.bugs]
    wanted = {case.key for case in cases}
    file = args.out / "verdicts.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    by_key = {line["key"]: Verdict(**line) for line in lines if line["key"] in wanted}
    pending = [case for case in cases if case.key not in by_key]
    with ThreadPoolExecutor(args.jobs) as pool, Progress(total=len(pending), desc="bugs") as bar:
        for verdict in pool.map(lambda case: judge(case, args), pending):
            by_key[verdict.key] = verdict
            with file.open("a") as stream:
                stream.write(json.dumps(asdict(verdict)) + "\n")
            bar.update()
            seen = f"code: {' '.join(verdict.by_code) or '-'}; run: {' '.join(verdict.by_run) or '-'}"
            bar.write(f"{verdict.bug} ({verdict.kind}, level {verdict.level}): {seen}")
    verdicts = [by_key[case.key] for case in cases]
    print(summary(verdicts))
    if not args.bugs:
        with TABLE.open("w", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(("bug", "from", "level", "code", "run"))
            writer.writerows(table_rows(verdicts))
    if args.healthy:
        run_findings = examine_below(args.healthy)
        print(f"{len(run_findings)} runs, {sum(map(bool, run_findings.values()))} with findings")
        for path, findings in run_findings.items():
            print(*(f"{path}: {finding}" for finding in findings), sep="\n", end="\n" if findings else "")


if __name__ == "__main__":
    run_module(main, Args)
