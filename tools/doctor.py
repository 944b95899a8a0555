"""How good is the doctor? Each bug of the course, and twelve that it was not made for, in code and in a run.

    make doctor
    python -m tools.doctor --demo runs/tiny --out runs/doctor --healthy runs/tiny runs/site

Each bug is planted in a copy of the tree. `doctor code` examines the copy; then the stage that has the bug trains on
the demo's world, and `doctor run` examines its run. With --healthy every run below those directories is examined too:
what is found there are false alarms. Out: OUT/verdicts.jsonl, from which an interrupted call goes on, and
docs/doctor.csv, the table.
"""

import csv
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from course.bugs import BUGS, Bug
from course.copies import CODE, ROOT, copy_files
from course.hunt import put_in
from nanorlhf.cli import Workers, check_ranges, run_module
from nanorlhf.doctor import code, run
from nanorlhf.errors import InputError
from tools.other_bugs import OTHER_BUGS

TABLE = ROOT / "docs/doctor.csv"
STAGES = {  # module, or module:function -> the stages in which its bugs show; else PPO
    "train_sft": ("sft",),
    "nanorlhf.training.supervised": ("sft",),
    "nanorlhf.dataset:with_blank": ("sft",),
    "nanorlhf.training.optimizer:lr_factor": ("sft",),  # PPO has no warm-up
    "train_rm": ("rm",),
    "nanorlhf.model:ScalarModel.forward": ("rm", "ppo"),
    "nanorlhf.reward:end_scores": ("rm", "ppo"),
    "nanorlhf.reward:end_index": ("rm", "ppo"),
    "nanorlhf.dpo": ("dpo",),
    "train_dpo": ("dpo",),
    "train_grpo": ("grpo",),
    "train_rlcf": (),
    "nanorlhf.evals.judge": (),
    "nanorlhf.rlcf.execution": (),
}


@dataclass(frozen=True, kw_only=True)
class Args:
    demo: Path = Path("runs/tiny")
    """what `make demo` wrote: data, sft, rm"""
    out: Path = Path("runs/doctor")
    bugs: tuple[str, ...] = ()
    """names; none: all"""
    healthy: tuple[Path, ...] = ()
    """directories of healthy runs, at any depth"""
    jobs: Workers = 2
    """bugs at a time, of two threads each"""


@dataclass(frozen=True)
class Verdict:
    key: str
    """of the bug, the doctor and the code: with the same, the verdict is the same"""
    bug: str
    is_new: bool
    """one that the doctor was not made for"""
    level: int
    by_code: list[str]
    by_run: list[str]
    """names of the findings"""
    words: list[str]
    """the findings themselves"""
    seconds: float


@functools.cache
def digest_of_code() -> bytes:
    digest = hashlib.sha256()
    for path in sorted([*ROOT.glob("train_*.py"), *ROOT.glob("nanorlhf/**/*.py"), *ROOT.glob("kernels/*.py")]):
        digest.update(path.read_bytes())
    return digest.digest()


def key_of(bug: Bug) -> str:
    return hashlib.sha256(digest_of_code() + repr(bug).encode()).hexdigest()[:16]


def stages_of(bug: Bug) -> Sequence[str]:
    return STAGES.get(bug.where, STAGES.get(bug.where.partition(":")[0], ("ppo",)))


def judge(bug: Bug, args: Args) -> Verdict:
    """What both forms of the doctor say of the code with this bug."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="doctor-bug-") as directory:
        tree = Path(directory)
        copy_files(ROOT, tree, CODE)
        put_in(tree, bug)
        findings, _ = code.examine(tree)
        runs: list[Path] = []
        crashed: list[str] = []
        for stage in stages_of(bug):
            out = args.out.absolute() / "runs" / bug.name / stage
            if train(tree, stage, args.demo.absolute(), out):
                runs.append(out)
            else:
                crashed.append(stage)
    of_runs = run.examine(runs) if runs else []
    return Verdict(
        key_of(bug), bug.name, bug in OTHER_BUGS, bug.level, names(findings),
        names(of_runs) + [f"{stage} fails" for stage in crashed], [*map(str, [*findings, *of_runs])],
        round(time.monotonic() - began, 1),
    )  # fmt: skip


def names(findings: Sequence) -> list[str]:
    return list(dict.fromkeys(finding.name for finding in findings))


def train(tree: Path, stage: str, demo: Path, out: Path) -> bool:
    """Train a stage of the demo by the scripts of the tree; whether it came to its end."""
    flags: dict[str, object] = {"data": demo / "data", "out": out, "seed": 1, "device": "cpu"}
    if stage != "sft":
        flags["sft"] = demo / "sft"
    if stage in ("ppo", "grpo"):  # a bug of the reward model has one of its own
        own = out.parent / "rm"
        flags |= {"reward-model": own if own.exists() else demo / "rm", "trace": 4}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, str(tree / f"train_{stage}.py"), *words, "--overwrite"]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True).returncode == 0


def false_alarms(directories: Sequence[Path]) -> tuple[int, list[str]]:
    """How many runs lie below the directories, and what is found in them."""
    runs = sorted({path.parent for directory in directories for path in directory.rglob("args.json")})
    runs = [path for path in runs if (path / "metrics.jsonl").exists()]
    return len(runs), [f"{path}: {finding}" for path in runs for finding in run.examine([path])]


def table_rows(verdicts: Sequence[Verdict]) -> list[tuple[str, str, int, str, str]]:
    return [
        (v.bug, "new" if v.is_new else "course", v.level, " ".join(v.by_code), " ".join(v.by_run)) for v in verdicts
    ]


def summary(verdicts: Sequence[Verdict]) -> str:
    lines = []
    for what, group in (
        ("the course's bugs", [v for v in verdicts if not v.is_new]),
        ("those of level 1", [v for v in verdicts if not v.is_new and v.level == 1]),
        ("new bugs", [v for v in verdicts if v.is_new]),
    ):
        by_code, by_run = sum(bool(v.by_code) for v in group), sum(bool(v.by_run) for v in group)
        neither = [v.bug for v in group if not v.by_code and not v.by_run]
        lines.append(f"{what}: {len(group)}, named by code {by_code}, by run {by_run}, by neither: {neither or 'none'}")
    return "\n".join(lines)


def main(args: Args) -> None:
    check_ranges(args)
    for name in ("data", "sft", "rm"):
        if not (args.demo / name).is_dir():
            raise InputError(f"--demo {args.demo} has no {name}: run `make demo` first.")
    known = {bug.name: bug for bug in (*BUGS, *OTHER_BUGS)}
    for name in args.bugs:
        if name not in known:
            raise InputError(f"--bugs {name}: there is no such bug.")
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "verdicts.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    found = {verdict.key: verdict for verdict in (Verdict(**json.loads(line)) for line in lines)}
    bugs = [bug for name, bug in known.items() if not args.bugs or name in args.bugs]
    open_ = [bug for bug in bugs if key_of(bug) not in found]
    with ThreadPoolExecutor(args.jobs) as pool, tqdm(total=len(open_), desc="bugs") as bar:
        for verdict in pool.map(lambda bug: judge(bug, args), open_):
            found[verdict.key] = verdict
            with file.open("a") as stream:
                stream.write(json.dumps(asdict(verdict)) + "\n")
            bar.update()
            seen = f"code: {' '.join(verdict.by_code) or '-'}; run: {' '.join(verdict.by_run) or '-'}"
            bar.write(f"{verdict.bug} (level {verdict.level}): {seen}")
    verdicts = [found[key_of(bug)] for bug in bugs]
    print(summary(verdicts))
    if not args.bugs:
        with TABLE.open("w", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(("bug", "from", "level", "code", "run"))
            writer.writerows(table_rows(verdicts))
    if args.healthy:
        number, alarms = false_alarms(args.healthy)
        print(f"{number} healthy runs, {len(alarms)} false alarms", *alarms, sep="\n")


if __name__ == "__main__":
    run_module(main, Args)
