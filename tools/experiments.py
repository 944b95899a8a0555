"""Experiments of many runs in the embedded worlds. What has finished is not repeated, so a table can grow.

    python -m tools.experiments lab                              # faults of labellers, dial by dial: docs/lab.md
    python -m tools.experiments compare --seeds 7 --grid-seed 8 --out runs/compare7    # docs/compare.md
    python -m tools.experiments mismatch --runs exact/none stale/tis                   # docs/mismatch.md
    python -m tools.experiments sums --seeds 1 2 3 --jobs 2                            # docs/sums.md
    python -m tools.experiments worlds --share 3/8 --phase final                       # docs/compare.md
    python -m tools.experiments scaling --seeds 1 2 3 4                                # docs/scaling.md
    python -m tools.experiments lab --dry-run                    # print the commands

An experiment is a table below and a function that turns its entries into runs. It yields the runs in phases, and the
next phase may read what the last one has found.
"""

import fcntl
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal

import numpy as np
from tqdm import tqdm

from data.tiny import LOWEST
from nanorlhf.cli import MAY_BE_EMPTY, Count, PositiveFloat, Seed, command_line
from nanorlhf.errors import InputError
from nanorlhf.files import check_out, write_text
from nanorlhf.launch import KERNELS_VARIABLE
from nanorlhf.report import scaling
from nanorlhf.report import worlds as table
from nanorlhf.report.compare import best_point, flags_of
from nanorlhf.report.worlds import Row

Words = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Args:
    out: Path
    """directory of the runs"""
    jobs: Count = 2
    """runs at a time, of one thread each"""
    dry_run: bool = False
    """print the commands of all runs, finished ones too, and run none"""


@dataclass(frozen=True, kw_only=True)
class Lab(Args):
    """An entry FLAG/VALUE is a flag of data.tiny and the directory of its runs; a comma separates several values."""

    out: Path = Path("runs/lab")
    seed: int = 1
    labellers: Words = (
        *("temperature/0.1", "temperature/1.6", "temperature/6.4", "flip-rate/0.2", "flip-rate/0.4"),
        *("num-comparisons/200", "num-comparisons/6400", "random-workers/3", "random-workers/6"),
    )
    """of whose comparisons a reward model learns"""
    policies: Words = (
        *("base", "length-bonus/0.3", "length-bonus/0.6"),
        *("summarisers/reference,good", "summarisers/terse,lead,rambler,repeater"),
    )
    """of whose comparisons a reward model learns, and from it a policy"""
    remedies: Words = ("kl-coef/0.2", "reward-weights/uncertainty")
    """flags of train_ppo.py, each against the reward model of BIASED"""


@dataclass(frozen=True, kw_only=True)
class Compare(Args):
    out: Path = Path("runs/compare")
    algorithms: Words = (
        *("ppo", "rloo", "grpo", "dr-grpo", "reinforce++", "gspo", "dapo", "cispo", "online-dpo"),
        *("dpo", "kto", "orpo", "simpo"),
        "rejection",
    )
    seeds: tuple[int, ...] = (1, 2, 3, 4)
    grid_seed: int = 5
    """seed of the world in which the learning rate and the KL coefficient are chosen"""
    lrs: Words = ("3e-4", "1e-3")
    kl_coefs: Words = ("0.02", "0.1")
    best_of: tuple[int, ...] = (4, 16, 64)
    """numbers of samples per answer of best of n"""


@dataclass(frozen=True, kw_only=True)
class Mismatch(Args):
    out: Path = Path("runs/mismatch")
    seed: int = 1
    """seed of the world"""
    runs: Words = (
        *("exact/none", "bfloat16/none", "bfloat16/tis", "int8/none", "int8/tis", "stale/none", "stale/tis"),
        *("stale/ratio", "top-p/none", "top-p/tis", "top-p/ratio"),
    )
    """SAMPLER/CORRECTION, of SAMPLERS and CORRECTIONS; int8 needs a CPU with VNNI"""
    seeds: tuple[int, ...] = (1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Sums(Args):
    out: Path = Path("runs/sums_study")
    seeds: tuple[int, ...] = (1, 2, 3)
    runs: Words = (
        *("ppo", "grpo", "rloo", "gspo", "dapo", "dr-grpo", "reinforce++", "cispo", "online-dpo"),
        *("ppo/process", "reinforce++/process", "ppo/learned", "grpo/learned", "ppo/leak", "grpo/leak"),
        *("ppo/bfloat16", "ppo/bfloat16,tis", "ppo/top-p", "ppo/top-p,tis"),
    )
    """ALGORITHM or ALGORITHM/VARIANT, of CHECKED and VARIANTS"""
    total_episodes: int = 15_360
    """responses that each of them samples"""
    num_queries: int = 128
    """queries that each policy answers 64 times"""


PPO_VARIANTS: dict[str, dict[str, str]] = {  # what differs from PPO as tuned; what doesn't is not run again
    "lambda 1": {"lam": "1"},
    "value model from the reward model": {"value_model": "reward model"},
    "value model from the policy": {"value_model": "policy"},
    "value model from scratch": {"value_model": "scratch"},
    "value model of a first run": {"value_model": "first run"},
    "values not clipped": {"value_clip": "None"},
    "rollouts of 256": {"batch_size": "256"},
}


@dataclass(frozen=True, kw_only=True)
class Worlds(Args):
    """Runs whose row is in the CSV are not repeated, even where their directories are gone."""

    out: Path = Path("runs/worlds")
    csv: Path = table.Args.csv
    """table of all finished runs: the study's memory"""
    phase: Literal["all", "tune", "final"] = "all"
    """tune: the tuning alone; final: the runs of algorithms that have been tuned"""
    share: str = "1/1"
    """K/N: the K-th of N shares: of the tuning every N-th algorithm, then every N-th world"""
    keep: bool = False
    """keep the directory of a run whose row is written"""
    algorithms: Words = tuple(table.SPACE)
    tune_seeds: tuple[Seed, ...] = table.TUNING_WORLDS
    """worlds of the tuning: all points run in the first, half in the next two, a quarter in the others"""
    num_points: Count = 12
    """points of each algorithm"""
    draw_seed: Seed = 38
    """seed of the points"""
    seeds: tuple[Seed, ...] = table.WORLDS
    """worlds of the final runs"""
    budgets: tuple[Count, ...] = table.BUDGETS
    """responses sampled by a final run"""
    budget: Count = 1024
    """responses sampled by a run of the tuning, and by PPO's variants"""
    best_of: tuple[Count, ...] = (4, 16, 64)
    """numbers of samples per answer of best of n"""
    variants: Annotated[Words, MAY_BE_EMPTY] = tuple(PPO_VARIANTS)
    """of PPO as tuned; its flags are in PPO_VARIANTS"""
    num_demonstrations: Count = 8000
    num_comparisons: Count = 1600
    num_queries: Count = 256
    """queries of an evaluation"""


@dataclass(frozen=True, kw_only=True)
class Scaling(Args):
    out: Path = Path("runs/scaling")
    seeds: tuple[Seed, ...] = (1, 2, 3, 4)
    cases: Words = tuple(scaling.CASES)
    """of CASES in nanorlhf/report/scaling.py"""
    lr: PositiveFloat = 4e-4
    """of PPO: slow enough for a curve, fast enough to go far"""
    total_episodes: Count = 4096
    """responses of a PPO run"""
    best_of: tuple[Count, ...] = (2, 4, 8, 16, 32, 64)
    """numbers of samples per answer of best of n"""
    num_demonstrations: Count = 8000
    num_queries: Count = 256
    """queries that best of n answers"""


RECIPES: dict[str, tuple[str, Args]] = {
    "lab": ("faults of labellers, dial by dial", Lab()),
    "compare": ("algorithms at the same cost", Compare()),
    "mismatch": ("samplers that are not quite the policy", Mismatch()),
    "sums": ("a reward that is checked, not learned", Sums()),
    "worlds": ("the algorithms tuned alike, in twenty worlds", Worlds()),
    "scaling": ("how far a reward model carries, by its size, its data and the policy's size", Scaling()),
}


# ---------------------------------------------------------------------------------------------------------- 1. runs
@dataclass(frozen=True)
class Run:
    """A command of Python, the file that exists once it has finished, and the files that it waits for."""

    words: Words
    done: Path | None = None  # None: always run
    needs: tuple[Path, ...] = ()
    state: Path | None = None  # directory of the states that an interrupted run leaves behind
    then: Callable[[], None] | None = field(default=None, compare=False)  # called when it has ended well
    diverged: Callable[[], None] | None = field(default=None, compare=False)  # called when its loss is not finite

    def command(self) -> list[str]:
        if self.state is None:
            return [sys.executable, *self.words]
        return [sys.executable, *self.words, "--resume" if [*self.state.glob("step-*")] else "--overwrite"]


def stage(out: Path, seed: int, *words: object, needs: tuple[Path, ...] = ()) -> Run:
    """A training script, which continues from its last state."""
    command = (*map(str, words), "--out", str(out), "--seed", str(seed))
    return Run(command, out / "summary.json", needs, out / "state")


def evaluation(out: Path, *words: object, needs: tuple[Path, ...] = ()) -> Run:
    command = ("eval.py", *map(str, words), "--out", str(out), "--overwrite")
    return Run(command, out / "eval.json", needs)


# the experiments were run with a larger model and more demonstrations than `make demo` has
START = ("train_sft.py", "--n-layer", 3)


def world(out: Path, seed: int, *words: object, num_demonstrations: int = 8000) -> Run:
    words = ("--num-demonstrations", num_demonstrations, *words)
    command = ("-m", "data.tiny", "--out", str(out), "--seed", str(seed), *map(str, words))
    return Run(command, out / "tokenizer.json")


def flag(entry: str) -> Words:
    """FLAG/VALUE,VALUE -> --FLAG VALUE VALUE; a name without a value has no flags."""
    name, _, values = entry.partition("/")
    return (f"--{name}", *values.split(",")) if values else ()


def execute(runs: list[Run], jobs: int) -> None:
    """Run what has not finished, each after what it needs. Raises InputError when a command fails."""
    waiting = [run for run in dict.fromkeys(runs) if run.done is None or not run.done.exists()]
    running: dict[Future[tuple[int, bytes]], Run] = {}
    with ThreadPoolExecutor(jobs) as pool, tqdm(total=len(waiting), unit="run") as bar:
        while waiting or running:
            unfinished = {run.done for run in running.values()}  # a file may be there before its run ends
            ready = [run for run in waiting if all(file.exists() and file not in unfinished for file in run.needs)]
            for run in ready[: jobs - len(running)]:
                waiting.remove(run)
                running[pool.submit(call, run.command())] = run
            assert running, f"nothing writes {waiting[0].needs}"
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                run, (status, said) = running.pop(future), future.result()
                bar.update()
                if status != 0 and run.diverged is not None and b"not finite" in said:
                    run.diverged()
                    after = [other for other in waiting if run.done in other.needs]
                    bar.update(len(after))
                    waiting = [other for other in waiting if other not in after]
                    continue
                if status == 0 and run.then is not None:
                    run.then()
                if status != 0 or (run.done is not None and not run.done.exists()):
                    raise InputError(f"{shlex.join(run.words)} failed with exit status {status}.")


def call(command: list[str]) -> tuple[int, bytes]:
    """Run a command on one thread; returns its exit status, and the end of what it says on stderr, which is shown."""
    end = b""
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        assert process.stderr is not None
        while said := process.stderr.read1():
            sys.stderr.write(said.decode(errors="replace"))
            sys.stderr.flush()
            end = (end + said)[-2000:]
    return process.returncode, end


# ------------------------------------------------------------------------------------------------- 2. the laboratory
BIASED = "length-bonus/0.6"
# what the base is called where its dial is turned, and the biased one where a remedy is
BASE = (
    "temperature/0.4",
    "flip-rate/0",
    "num-comparisons/1600",
    "random-workers/0",
    "length-bonus/0",
    "summarisers/all",
)
UNTREATED = "remedy/none"


def labels(args: Lab, entry: str) -> list[Run]:
    """The world of a labeller, the policy that all start from, a reward model and its evaluation."""
    place, sft = args.out / entry, args.out / "sft"
    base = world(args.out / "base/data", args.seed, "--num-comparisons", 1600, "--num-triads", 100)
    data = world(place / "data", args.seed, "--num-comparisons", 1600, "--num-triads", 100, *flag(entry))
    needs = (args.out / "base/data/tokenizer.json",)
    return [
        base,
        stage(sft, args.seed, *START, "--num-epochs", 1.5, "--data", args.out / "base/data", needs=needs),
        data,
        reward_model(args, entry, "rm", args.seed),
        evaluation(
            place / "eval_rm", "tiny-rm", "--data", place / "data", "--reward-models", "rm", place / "rm",
            "--ref-policy", sft, needs=(place / "rm/summary.json",),
        ),
    ]  # fmt: skip


def reward_model(args: Lab, entry: str, name: str, seed: int) -> Run:
    place, sft = args.out / entry, args.out / "sft"
    return stage(
        place / name, seed, "train_rm.py", "--data", place / "data", "--sft", sft, "--num-epochs", 2,
        "--num-normalisation", 512, needs=(place / "data/tokenizer.json", sft / "summary.json"),
    )  # fmt: skip


def trained_policy(args: Lab, name: str, entry: str, members: Words = ("rm",), flags: Words = ()) -> list[Run]:
    """PPO in the directory `name` against the reward models of a labeller, and its evaluation."""
    place, sft, out = args.out / entry, args.out / "sft", args.out / name
    models = [place / member for member in members]
    return [
        stage(
            out / "ppo", args.seed, "train_ppo.py", "--data", place / "data", "--sft", sft, "--reward-model", *models,
            "--total-episodes", 1280, "--kl-coef", 0.05, *flags,
            needs=tuple(model / "summary.json" for model in models),
        ),
        evaluation(
            out / "eval", "tiny", "--data", place / "data", "--policies", "sft", sft, "ppo", out / "ppo",
            "--reward-model", place / "rm", "--num-queries", 256, "--seed", args.seed,
            needs=(out / "ppo/summary.json",),
        ),
    ]  # fmt: skip


def lab(args: Lab) -> Iterator[list[Run]]:
    runs = []
    for entry in args.remedies:
        members: Words = ("rm",)
        if entry.startswith("reward-weights/"):  # with two more reward models of the same labels
            members = ("rm", "rm_2", "rm_3")
        runs += labels(args, BIASED)
        runs += [reward_model(args, BIASED, name, int(f"{args.seed}{name[3:]}")) for name in members[1:]]
        runs += trained_policy(args, f"remedy/{entry.replace('/', ',')}", BIASED, members, flag(entry))
    for entry in args.policies:
        runs += labels(args, entry)
        runs += trained_policy(args, entry, entry)
    for entry in args.labellers:
        runs += labels(args, entry)
    yield runs
    if not args.dry_run:
        for link, target in {**dict.fromkeys(BASE, "base"), UNTREATED: BIASED}.items():
            (args.out / link).parent.mkdir(parents=True, exist_ok=True)
            (args.out / link).unlink(missing_ok=True)
            (args.out / link).symlink_to(Path("..") / target)
    yield [Run(("-m", "nanorlhf.report.lab", "--runs", str(args.out), "--out", str(args.out / "report")))]


# ------------------------------------------------------------------------------------------------- 3. the comparison
GROUPED = ("train_grpo.py", "--num-epochs", 2, "--samples-per-query")
WITHOUT_KL = ("train_grpo.py", "--kl-coef", 0, "--samples-per-query", 4)
# 1,024 responses each, and what DAPO samples again
ON_POLICY = {
    "ppo": ("train_ppo.py", "--num-ppo-epochs", 2),
    "rloo": (*GROUPED, 4, "--algorithm", "rloo"),
    "grpo": (*GROUPED, 4, "--algorithm", "grpo"),
    "dr-grpo": (*GROUPED, 4, "--algorithm", "dr_grpo"),
    "reinforce++": (*GROUPED, 1, "--algorithm", "reinforce++"),
    "gspo": (*GROUPED, 4, "--algorithm", "gspo", "--clip-range", 0.03, 0.04),
    "dapo": (*WITHOUT_KL, "--algorithm", "dapo"),
    "cispo": (*WITHOUT_KL, "--algorithm", "cispo"),
    "online-dpo": ("train_grpo.py", "--num-epochs", 1, "--samples-per-query", 4, "--algorithm", "online_dpo"),
}
# no responses, but as many steps as the comparisons give
OFFLINE = {
    "dpo": (),
    "kto": ("--loss", "kto"),
    "orpo": ("--loss", "orpo"),
    "simpo": ("--loss", "simpo", "--labels.target-margin", 1),
}
# what keeps the policy near its start, where that is not the KL coefficient; of ORPO and SimPO their beta, which
# scales something else
CONSTRAINTS = {
    "dpo": ("beta", ("0.02", "0.1")),
    "kto": ("beta", ("0.02", "0.1")),
    "orpo": ("beta", ("0.1", "1")),
    "simpo": ("beta", ("2", "10")),
    "rejection": ("num-epochs", ("4", "16")),
    "dapo": ("num-epochs", ("1", "2")),
    "cispo": ("num-epochs", ("1", "2")),
}


def algorithm(name: str, place: Path, num_responses: int = 1024, winners: str = "winners") -> tuple[object, ...]:
    """The command of an algorithm in the world at `place`."""
    data, sft = place / "data", place / "sft"
    if name in OFFLINE:
        return "train_dpo.py", "--data", data, "--sft", sft, *OFFLINE[name]
    if name == "rejection":
        return "train_sft.py", "--model", sft, "--data", place / winners, "--warmup-steps", 0
    script, *flags = ON_POLICY[name]
    models = ("--data", data, "--sft", sft, "--reward-model", place / "rm")
    return script, *models, "--total-episodes", num_responses, *flags


def compared_world(place: Path, seed: int, num_demonstrations: int = 8000, num_comparisons: int = 1600) -> list[Run]:
    """The data, the start and the reward model."""
    data, sft, rm = (place / name for name in ("data", "sft", "rm"))
    sizes = ("--num-comparisons", num_comparisons, "--num-validation", 512)
    return [
        world(data, seed, *sizes, num_demonstrations=num_demonstrations),
        stage(sft, seed, *START, "--data", data, "--num-epochs", 1, needs=(data / "tokenizer.json",)),
        stage(
            rm, seed, "train_rm.py", "--data", data, "--sft", sft, "--num-epochs", 2, "--num-normalisation", 512,
            needs=(sft / "summary.json",),
        ),
    ]  # fmt: skip


def sampled_winners(place: Path, seed: int, name: str = "winners", num_responses: int = 1024) -> Run:
    """The best of 16 responses to each query, of which rejection sampling learns; four queries are for validation."""
    rm, winners = place / "rm", place / name
    sampled = (
        "-m", "data.best_of", "--policy", place / "sft", "--reward-model", rm, "--data", place / "data",
        "--out", winners, "--num-queries", num_responses // 16 - 4, "--num-validation-queries", 4,
        "--num-samples", 16, "--seed", seed,
    )  # fmt: skip
    return Run(
        tuple(map(str, sampled)), winners / "best_of.json", needs=(rm / "summary.json",),
        state=winners / "best_of.partial.jsonl",
    )  # fmt: skip


def judged(out: Path, place: Path, seed: int, policies: list[object], num_queries: int = 128) -> Run:
    """Policies at the temperature that they were trained at: how they answer, and how they differ."""
    return evaluation(
        out / "eval", "tiny", "--data", place / "data", "--reward-model", place / "rm", "--num-queries", num_queries,
        "--temperature", 0.7, "--num-distinct-samples", 4, "--seed", seed,
        "--policies", "sft", place / "sft", *policies,
    )  # fmt: skip


def points(args: Compare, name: str) -> list[str]:
    """The points of an algorithm's grid, FLAG/VALUE/FLAG/VALUE, which is the directory of its run as well."""
    constraint, values = CONSTRAINTS.get(name, ("kl-coef", args.kl_coefs))
    return [f"lr/{lr}/{constraint}/{value}" for lr in args.lrs for value in values]


def compare(args: Compare) -> Iterator[list[Run]]:
    grid_world = args.out / str(args.grid_seed)
    places = {seed: args.out / str(seed) for seed in (*args.seeds, args.grid_seed)}
    yield [
        run for seed, place in places.items() for run in (*compared_world(place, seed), sampled_winners(place, seed))
    ]
    yield [
        stage(args.out / "grid" / name / point, args.grid_seed, *algorithm(name, grid_world), *flags_of(point).split())
        for name in args.algorithms
        for point in points(args, name)
    ]
    grids = {name: args.out / "grid" / name for name in args.algorithms}
    evaluations = []
    for name, grid in grids.items():
        policies = [word for point in points(args, name) for word in (point, grid / point)]
        evaluations.append(judged(grid, grid_world, args.grid_seed, policies))
    yield evaluations
    runs = []
    for name, grid in grids.items():
        found = grid / "eval/eval.json"
        point = best_point(found) if found.exists() else points(args, name)[0]  # --dry-run may come first
        for seed in args.seeds:
            place = args.out / str(seed)
            runs.append(stage(place / name, seed, *algorithm(name, place), *flags_of(point).split()))
    yield runs
    evaluations = []
    for seed in args.seeds:
        place = args.out / str(seed)
        policies = [word for name in args.algorithms for word in (name, place / name)]
        policies += [word for n in args.best_of for word in (f"best-of-{n}", f"best-of-{n}:{place / 'sft'}")]
        evaluations.append(judged(place, place, seed, policies))
    yield evaluations
    yield [Run(("-m", "nanorlhf.report.compare", "--runs", str(args.out), "--out", str(args.out / "report")))]


# --------------------------------------------------------------------- 4. samplers that are not quite the policy
SAMPLERS: dict[str, Words] = {
    "exact": (),
    "bfloat16": ("--sampler.dtype", "bfloat16"),
    "int8": ("--sampler.dtype", "int8"),
    "stale": ("--sampler.sync-every", "8"),
    "top-p": ("--sampler.top-p", "0.9"),
}
CORRECTIONS: dict[str, Words] = {
    "none": (),
    "tis": ("--sampler.correction", "tis"),
    "ratio": ("--sampler.correction", "sampler_logprobs"),
}


def mismatch(args: Mismatch) -> Iterator[list[Run]]:
    """One start and one reward model, the laboratory's base; exact samples judge the trained policies."""
    yield labels(Lab(out=args.out, seed=args.seed), "base")
    data, sft, rm = args.out / "base/data", args.out / "sft", args.out / "base/rm"
    runs, policies = [], []
    for entry in args.runs:
        sampler, _, correction = entry.partition("/")
        if sampler not in SAMPLERS or correction not in CORRECTIONS:
            raise InputError(f"--runs {entry}: write it as SAMPLER/CORRECTION, of {[*SAMPLERS]} and {[*CORRECTIONS]}.")
        for seed in args.seeds:
            out = args.out / entry / str(seed)
            flags = SAMPLERS[sampler] + CORRECTIONS[correction]
            words = ("train_ppo.py", "--data", data, "--sft", sft, "--reward-model", rm)
            runs.append(stage(out, seed, *words, "--total-episodes", 1280, "--kl-coef", 0.05, *flags))
            policies += [f"{sampler}-{correction}-{seed}", out]
    yield runs
    yield [
        evaluation(
            args.out / "eval", "tiny", "--data", data, "--reward-model", rm, "--num-queries", 256,
            "--num-report-samples", 0, "--seed", args.seed, "--policies", "sft", sft, *policies,
        )
    ]  # fmt: skip
    yield [Run(("-m", "nanorlhf.report.mismatch", "--runs", str(args.out), "--out", str(args.out / "report")))]


# ------------------------------------------------------------------------------- 5. sums, whose answers are checked
CHECKED = {  # the outcome as reward, and the recipe's settings where the algorithm allows them
    "ppo": ("train_ppo.py", "sums"),
    "grpo": ("train_grpo.py", "sums"),
    "rloo": ("train_grpo.py", "sums", "--algorithm", "rloo"),
    "gspo": ("train_grpo.py", "sums", "--algorithm", "gspo"),
    "dapo": ("train_grpo.py", "sums", "--algorithm", "dapo", "--kl-coef", 0),
    "dr-grpo": ("train_grpo.py", "sums", "--algorithm", "dr_grpo"),
    "reinforce++": ("train_grpo.py", "sums", "--algorithm", "reinforce++"),
    "cispo": ("train_grpo.py", "sums", "--algorithm", "cispo", "--kl-coef", 0),
    "online-dpo": (
        *("train_grpo.py", "sums", "--algorithm", "online_dpo"),
        *("--num-epochs", 1, "--num-minibatches", 1, "--kl-coef", 0.1),
    ),
}
VARIANTS: dict[str, Words] = {
    "process": ("--reward", "data/sums.py:process"),
    "learned": (),  # --reward is the reward model of the seed
    "leak": ("--reward", "data/sums.py:outcome", "data/sums.py:layout", "--reward-weights", "1", "0.5"),
    "bfloat16": SAMPLERS["bfloat16"],
    "bfloat16,tis": SAMPLERS["bfloat16"] + CORRECTIONS["tis"],
    "top-p": SAMPLERS["top-p"],
    "top-p,tis": SAMPLERS["top-p"] + CORRECTIONS["tis"],
}


def sums(args: Sums) -> Iterator[list[Run]]:
    """At each seed a world, a start and a reward model; every run samples as many responses, and is evaluated alike."""
    runs = []
    for seed in args.seeds:
        place = args.out / str(seed)
        data, sft, rm = place / "data", place / "sft", place / "rm"
        command = ("-m", "data.sums", "--out", str(data), "--seed", str(seed))
        runs += [
            Run(command, data / "long/comparisons.train.jsonl"),
            stage(
                sft, seed, "train_sft.py", "sums", "--data", data / "short",
                needs=(data / "long/comparisons.train.jsonl",),
            ),
            stage(
                rm, seed, "train_rm.py", "sums", "--data", data / "long", "--sft", sft,
                needs=(sft / "summary.json",),
            ),
        ]  # fmt: skip
        policies: list[object] = ["sft", sft]
        for entry in args.runs:
            name, _, variant = entry.partition("/")
            if name not in CHECKED or variant not in ("", *VARIANTS):
                raise InputError(
                    f"--runs {entry}: write it as ALGORITHM or ALGORITHM/VARIANT, of {[*CHECKED]} and {[*VARIANTS]}."
                )
            flags = ("--reward", str(rm)) if variant == "learned" else VARIANTS.get(variant, ())
            out = place / entry.replace("/", "-")
            words = (*CHECKED[name], "--data", data / "long", "--sft", sft, "--total-episodes", args.total_episodes)
            runs.append(stage(out, seed, *words, *flags, needs=(rm / "summary.json",)))
            policies += [out.name, out]
        trained = tuple(Path(str(out)) / "summary.json" for out in policies[3::2])
        runs.append(
            evaluation(
                place / "eval", "sums", "--data", data / "long", "--num-queries", args.num_queries, "--seed", seed,
                "--policies", *policies, needs=trained,
            )
        )  # fmt: skip
    yield runs
    yield [Run(("-m", "nanorlhf.report.sums", "--runs", str(args.out), "--out", str(args.out / "report")))]


# ------------------------------------------------------------------------------------------------- 6. twenty worlds
BATCH_SIZE = 64  # responses of a rollout
# core seconds on two cores of an AMD EPYC (Zen 4), where the CSV has none: what makes a world; an evaluation and the
# start of two programs; training on 1,024 responses, of DPO and the best of n all of it
A_WORLD, AROUND_A_RUN = 70, 25
TRAINING = {"ppo": 24, "rloo": 14, "grpo": 14, "reinforce++": 14, "dpo": 32, "rejection": 12, table.START: 60}


@dataclass(frozen=True)
class Job:
    """A run of the study and its evaluation."""

    world: int
    keys: tuple[Row, ...]  # KEY of its rows of the CSV: one, or the start's and one for each best of n
    runs: tuple[Run, ...]


def home(args: Worlds) -> Path:
    """Where a share keeps its worlds and runs: two shares may run at once, on one disk."""
    return args.out if args.share == "1/1" else args.out / f"share_{args.share.replace('/', '_of_')}"


def of_share(args: Worlds, values: tuple) -> tuple:
    """The K-th of every N."""
    found = re.fullmatch(r"(\d{1,4})/(\d{1,4})", args.share)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise InputError(f"--share {args.share}: write K/N with K from 1 to N, such as 3/8.")
    return values[int(found[1]) - 1 :: int(found[2])]


# the CSV
def known_rows(args: Worlds) -> list[Row]:
    """The rows of the CSV and of all files in OUT/rows, whether a run wrote them or they come from another machine."""
    return table.joined(row for path in (args.csv, *args.out.glob("rows/*.csv")) for row in table.read_rows(path))


def join(args: Worlds) -> None:
    """Write all known rows to the CSV. No job can undo what another has added meanwhile."""
    with (args.out / "rows" / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_text(args.csv, table.csv_text(known_rows(args)))


def record(args: Worlds, keys: tuple[Row, ...], out: Path, has_diverged: bool = False) -> None:
    """Write the rows of the run in `out`, each named in its evaluation as its algorithm, and delete the run.

    A run whose loss is no longer finite has no evaluation: it counts as one whose responses are all empty.
    """
    made = {"processor": processor(), "revision": revision()}
    rows = []
    for key in keys:
        lost = dict.fromkeys(table.MEASURED, "") | {"gold_score": str(LOWEST), "gold_win_rate": "0"}
        rows.append(key | (lost if has_diverged else table.measured(out, key["algorithm"])) | made)
    write_text(rows_file(args, out), table.csv_text(rows))
    join(args)
    if not args.keep:
        shutil.rmtree(out)


def rows_file(args: Worlds, out: Path) -> Path:
    return args.out / "rows" / f"{out.name}.csv"


@cache
def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return found[1] if found else platform.processor()


@cache
def revision() -> str:
    """Of this checkout, with + where its code was changed since; empty where it is none."""
    root = Path(__file__).parent.parent
    if shutil.which("git") is None or not (root / ".git").exists():
        return ""
    head, changes = (
        subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
        for words in (("rev-parse", "--short", "HEAD"), ("status", "--short", "-uno", "--", ".", ":!docs"))
    )
    return head + "+" * bool(changes)


# the tuning
def drawn(args: Worlds, name: str) -> list[Row]:
    """The points of an algorithm. Each setting is stratified: of its range every 1/N-th has one of the N points."""
    generator = np.random.default_rng([args.draw_seed, *name.encode()])
    n = args.num_points
    columns = {}
    for setting, values in table.SPACE[name].items():
        shares = (generator.permutation(n) + generator.random(n)) / n  # (n,) from 0 to 1
        low, high = values[0], values[-1]
        if isinstance(low, float) and isinstance(high, float):
            columns[setting] = [f"{low * (high / low) ** share:.3g}" for share in shares]
        else:
            columns[setting] = [str(values[int(share * len(values))]) for share in shares]
    return [{name: columns[name][i] if name in columns else "" for name in table.SETTINGS} for i in range(n)]


def rungs(args: Worlds) -> list[tuple[tuple[int, ...], int]]:
    """Successive halving: worlds, and the number of points that run in them."""
    seeds, n = args.tune_seeds, args.num_points
    groups = ((seeds[:1], n), (seeds[1:3], max(1, n // 2)), (seeds[3:], max(1, n // 4)))
    return [group for group in groups if group[0]]


def standing(args: Worlds, rows: list[Row], name: str, rung: int) -> list[Row] | None:
    """The points of an algorithm that run in a rung; after the last one its choice alone.

    They have the highest mean gold score over the worlds so far. None where a run of an earlier rung has no row; in a
    dry run then the first ones.
    """
    golds = {table.key_of(row): float(row["gold_score"]) for row in rows}
    points, worlds = drawn(args, name), ()
    for seeds, num_points in rungs(args)[:rung]:
        points, worlds = points[:num_points], worlds + seeds
        scores = []
        for point in points:
            keys = (table.key_of(key_of_run(args, "tune", seed, name, args.budget, point)) for seed in worlds)
            scores.append([golds.get(key) for key in keys])
        if any(score is None for of_point in scores for score in of_point):
            if not args.dry_run:
                return None
            break
        means = [fmean(score for score in of_point if score is not None) for of_point in scores]
        points = [points[i] for i in sorted(range(len(points)), key=lambda i: -means[i])]
    return points[: rungs(args)[rung][1] if rung < len(rungs(args)) else 1]


# the runs
def key_of_run(args: Worlds, phase: str, seed: int, name: str, budget: int, settings: Row, variant: str = "") -> Row:
    """KEY of its row; what samples nothing in training has the budget 0."""
    samples = name in ON_POLICY or name == "rejection"
    key = {"phase": phase, "world": str(seed), "algorithm": name, "variant": variant}
    return key | {"budget": str(budget if samples else 0)} | settings


def setting_flags(key: Row, place: Path) -> Iterator[object]:
    """How a script is told the settings of its row."""
    flags = {"lr": "--lr", "kl_coef": "--kl-coef", "beta": "--beta", "lam": "--lam", "value_clip": "--value-clip-range"}
    flags["epochs"] = "--num-ppo-epochs" if key["algorithm"] == "ppo" else "--num-epochs"
    for setting, flag in flags.items():
        if key[setting]:
            yield from (flag, key[setting])
    value_models = {"policy": "sft", "scratch": "scratch", "first run": "first_run/value_model"}
    if key["value_model"] in value_models:
        yield from ("--value-model", place / value_models[key["value_model"]])
    if key["batch_size"]:  # with as many optimizer steps
        yield from ("--batch-size", key["batch_size"], "--num-minibatches", int(key["batch_size"]) // BATCH_SIZE)


def job_of(args: Worlds, key: Row) -> Job:
    """A training, with what it needs besides the world, and its evaluation."""
    name, seed, budget = key["algorithm"], int(key["world"]), int(key["budget"])
    place = home(args) / str(seed)
    out = home(args) / "runs" / "_".join(word.replace(" ", "-") for word in key.values() if word)
    runs = []
    if name == "rejection":
        runs.append(sampled_winners(place, seed, f"winners_{budget}", budget))
    if key["value_model"] == "scratch":  # the policy's shape, and no step away from its first weights
        one_step = ("--num-epochs", 20 / args.num_demonstrations, "--lr", 0, "--warmup-steps", 0)
        words = (*START, "--data", place / "data", *one_step)
        runs.append(stage(place / "scratch", seed, *words, needs=(place / "data/tokenizer.json",)))
    if key["value_model"] == "first run":  # it takes a quarter of the responses; what becomes of its policy is not used
        first, budget = budget // 4, budget - budget // 4
        words = (*algorithm(name, place, first), *setting_flags(key | {"value_model": ""}, place))
        runs.append(stage(place / "first_run", seed, *words, needs=(place / "rm/summary.json",)))
    needs = (place / "rm/summary.json", *(run.done for run in runs if run.done is not None))
    words = (*algorithm(name, place, budget, f"winners_{budget}"), *setting_flags(key, place))
    if name == "ppo":
        words = (*words, "--trace", BATCH_SIZE)  # of which the report takes the explained variance
    training = stage(out, seed, *words, needs=needs)
    runs.append(replace(training, diverged=partial(record, args, (key,), out, has_diverged=True)))
    return Job(seed, (key,), (*runs, rated(args, (key,), out, [name, out], out / "summary.json")))


def start_of(args: Worlds, seed: int) -> Job:
    """The evaluation of the start and of the best of its n."""
    place = home(args) / str(seed)
    names = (table.START, *(f"best-of-{n}" for n in args.best_of))
    keys = tuple(key_of_run(args, "final", seed, name, 0, dict.fromkeys(table.SETTINGS, "")) for name in names)
    policies: list[object] = [word for name in names[1:] for word in (name, f"{name}:{place / 'sft'}")]
    out = home(args) / "runs" / f"final_{seed}_best-of-{'-'.join(map(str, args.best_of))}"
    return Job(seed, keys, (rated(args, keys, out, policies, place / "rm/summary.json"),))


def rated(args: Worlds, keys: tuple[Row, ...], out: Path, policies: list[object], needed: Path) -> Run:
    """The evaluation of a job, which ends with its rows."""
    seed = int(keys[0]["world"])
    run = judged(out, home(args) / str(seed), seed, policies, args.num_queries)
    return replace(run, done=rows_file(args, out), needs=(needed,), then=partial(record, args, keys, out))


def finals_of(args: Worlds, seed: int, choices: dict[str, Row]) -> Iterator[Job]:
    """All final runs in a world."""
    yield start_of(args, seed)
    for name, settings in choices.items():
        keys = [key_of_run(args, "final", seed, name, budget, settings) for budget in args.budgets]
        if name == "ppo":
            for variant in args.variants:
                if (other := settings | PPO_VARIANTS[variant]) != settings:
                    keys.append(key_of_run(args, "final", seed, name, args.budget, other, variant))
        yield from (job_of(args, key) for key in {table.key_of(key): key for key in keys}.values())


def job_lists(args: Worlds) -> Iterator[list[Job]]:
    """All jobs of a share, finished ones too: a list for each rung of the tuning, then one of the final runs."""
    names = of_share(args, args.algorithms)
    for rung, (seeds, _) in enumerate(rungs(args)) if args.phase != "final" else ():
        rows = known_rows(args)
        yield [
            job_of(args, key_of_run(args, "tune", seed, name, args.budget, point))
            for seed in seeds
            for name in names
            for point in standing(args, rows, name, rung) or ()
        ]
    if args.phase != "tune":
        rows, choices = known_rows(args), {}
        for name in args.algorithms:
            if found := standing(args, rows, name, len(rungs(args))):
                choices[name] = found[0]
                for setting in [] if args.dry_run else table.at_edge(name, found[0]):
                    print(f"{name}: its best {setting}, {found[0][setting]}, is in the outer tenth of the range.")
            else:
                print(f"{name}: not all runs of its tuning have rows in {args.csv}, so it has no final runs yet.")
        yield [job for seed in of_share(args, args.seeds) for job in finals_of(args, seed, choices)]


def without_row(args: Worlds, jobs: Iterable[Job]) -> list[Job]:
    known = {table.key_of(row) for row in known_rows(args)}
    return [job for job in jobs if not all(table.key_of(key) in known for key in job.keys)]


def worlds(args: Worlds) -> Iterator[list[Run]]:
    """Jobs without rows, world by world, each after what makes its world."""
    check_worlds(args)
    if not args.dry_run:
        os.environ.setdefault(KERNELS_VARIABLE, "default")  # measured ones differ by machine, and round otherwise
        (args.out / "rows").mkdir(parents=True, exist_ok=True)
        join(args)
    for jobs in job_lists(args):
        runs: list[Run] = []
        for job in jobs if args.dry_run else without_row(args, jobs):
            place = home(args) / str(job.world)
            runs += compared_world(place, job.world, args.num_demonstrations, args.num_comparisons)
            runs += job.runs
        yield runs


def check_worlds(args: Worlds) -> None:
    for name in args.algorithms:
        if name not in table.SPACE:
            raise InputError(f"--algorithms {name}: choose from {', '.join(table.SPACE)}.")
    for name in args.variants:
        if name not in PPO_VARIANTS:
            raise InputError(f"--variants {name!r}: choose from {', '.join(PPO_VARIANTS)}.")
    if both := {*args.seeds} & {*args.tune_seeds}:
        raise InputError(f"--seeds {min(both)}: it is one of --tune-seeds, so what it shows was chosen in it.")
    for flag, budget in (("--budget", args.budget), *(("--budgets", budget) for budget in args.budgets)):
        if budget % 256:
            raise InputError(f"{flag} {budget}: write a multiple of 256, the largest rollout.")
    check_out(args.out)
    check_out(args.csv.parent, "--csv")


def hours_left(args: Worlds) -> float:
    """Core hours of the jobs without rows: from the CSV's seconds where it has some, else from what we measured."""
    measured: dict[tuple[str, str], list[float]] = {}
    for row in known_rows(args):
        if row["seconds"]:
            measured.setdefault((row["algorithm"], row["budget"]), []).append(float(row["seconds"]))
    jobs = without_row(args, (job for jobs in job_lists(args) for job in jobs))
    seconds = float(A_WORLD * len({job.world for job in jobs}))
    for job in jobs:
        name, budget = job.keys[0]["algorithm"], job.keys[0]["budget"]
        found = measured.get((name, budget))
        guess = TRAINING[name] * (int(budget) / 1024 if budget != "0" else 1)
        seconds += AROUND_A_RUN + (fmean(found) if found else guess)
    return seconds / 3600


# ------------------------------------------------------------------------------- 7. how far a reward model carries
def reward_models(place: Path, seed: int, case: scaling.Case) -> list[Run]:
    """Its data and its start, which other cases share, and its reward models; an ensemble's differ by their seeds."""
    data, sft = place / f"data_{case.num_comparisons}", place / f"sft_{case.reward_model}"
    runs = []
    for i in range(1, case.num_members + 1):
        out = place / f"rm_{case.reward_model}_{case.num_comparisons}_{i}"
        words = ("--data", data, "--sft", sft, "--num-epochs", 2, "--num-normalisation", 512)
        needs = (data / "tokenizer.json", sft / "summary.json")
        runs.append(stage(out, int(f"{seed}{i}"), "train_rm.py", *words, needs=needs))
    return runs


def scaling_runs(args: Scaling) -> Iterator[list[Run]]:
    """In each world the cases; what some of them share is made once."""
    for name in args.cases:
        if name not in scaling.CASES:
            raise InputError(f"--cases {name!r}: choose from {', '.join(map(repr, scaling.CASES))}.")
    base = scaling.CASES[scaling.BASE]
    runs = []
    for seed in args.seeds:
        place = args.out / str(seed)
        shared = place / f"data_{base.num_comparisons}"
        for name in args.cases:
            case, out = scaling.CASES[name], scaling.place_of(args.out, seed, name)
            for number in {base.num_comparisons, case.num_comparisons}:
                sizes = ("--num-comparisons", number, "--num-validation", 512)
                runs.append(world(place / f"data_{number}", seed, *sizes, num_demonstrations=args.num_demonstrations))
            for width in {case.policy, case.reward_model}:
                shape = ("train_sft.py", "--n-layer", 3, "--d-model", width, "--n-head", 4)
                words = (*shape, "--data", shared, "--num-epochs", 1)
                runs.append(stage(place / f"sft_{width}", seed, *words, needs=(shared / "tokenizer.json",)))
            models = reward_models(place, seed, case)
            runs += models
            policy = place / f"sft_{case.policy}"
            needs = (policy / "summary.json", *(run.done for run in models if run.done is not None))
            members = [run.words[run.words.index("--out") + 1] for run in models]
            words = (
                "train_ppo.py", "--data", shared, "--sft", policy, "--value-model", policy, "--reward-model", *members,
                "--lr", args.lr, "--num-ppo-epochs", 2, "--total-episodes", args.total_episodes,
                "--kl-coef", case.kl_coef, *(("--reward-weights", case.weights) if case.weights else ()),
            )  # fmt: skip
            runs.append(stage(out, seed, *words, needs=needs))
            if scaling.has_best_of(case):
                policies = [word for n in args.best_of for word in (f"best-of-{n}", f"best-of-{n}:{policy}")]
                words = (
                    "tiny", "--data", shared, "--reward-model", *members, "--num-queries", args.num_queries,
                    "--temperature", 0.7, "--seed", seed, "--policies", "sft", policy, *policies,
                )  # fmt: skip
                runs.append(evaluation(out / "best_of", *words, needs=needs))
    yield runs
    if not args.dry_run:
        yield [Run(("-m", "nanorlhf.report.scaling", "--runs", str(args.out)))]


def phases(args: Args) -> Iterator[list[Run]]:
    if isinstance(args, Lab):
        return lab(args)
    if isinstance(args, Compare):
        return compare(args)
    if isinstance(args, Mismatch):
        return mismatch(args)
    if isinstance(args, Sums):
        return sums(args)
    if isinstance(args, Worlds):
        return worlds(args)
    assert isinstance(args, Scaling)
    return scaling_runs(args)


def commands(args: Args) -> Iterator[Words]:
    """The commands of all runs, without `python`."""
    for runs in phases(replace(args, dry_run=True)):
        for run in dict.fromkeys(runs):
            yield (*run.words, *(["--overwrite"] if run.state is not None else []))


def main(args: Args) -> None:
    if args.dry_run:
        print("\n".join(shlex.join(("python", *words)) for words in commands(args)))
        if isinstance(args, Worlds):
            print(f"# about {hours_left(args):.1f} core hours for what has no row in {args.csv}")
        return
    for runs in phases(args):
        execute(runs, args.jobs)


if __name__ == "__main__":
    command_line(main, RECIPES)
