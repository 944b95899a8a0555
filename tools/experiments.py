"""Experiments of many runs in the embedded worlds. What has finished is not repeated, so a table can grow.

    python -m tools.experiments lab                              # faults of labellers, dial by dial: docs/lab.md
    python -m tools.experiments compare --seeds 7 --grid-seed 8 --out runs/compare7    # docs/compare.md
    python -m tools.experiments mismatch --runs exact/none stale/tis                   # docs/mismatch.md
    python -m tools.experiments sums --seeds 1 2 3 --jobs 2                            # docs/sums.md
    python -m tools.experiments lab --dry-run                    # print the commands

An experiment is a table below and a function that turns its entries into runs. It yields the runs in phases, and the
next phase may read what the last one has found.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from nanorlhf.cli import Count, command_line
from nanorlhf.errors import InputError
from nanorlhf.report.compare import best_point, flags_of

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


RECIPES: dict[str, tuple[str, Args]] = {
    "lab": ("faults of labellers, dial by dial", Lab()),
    "compare": ("algorithms at the same cost", Compare()),
    "mismatch": ("samplers that are not quite the policy", Mismatch()),
    "sums": ("a reward that is checked, not learned", Sums()),
}


# ---------------------------------------------------------------------------------------------------------- 1. runs
@dataclass(frozen=True)
class Run:
    """A command of Python, the file that exists once it has finished, and the files that it waits for."""

    words: Words
    done: Path | None = None  # None: always run
    needs: tuple[Path, ...] = ()
    state: Path | None = None  # what an interrupted run leaves behind

    def command(self) -> list[str]:
        if self.state is None:
            return [sys.executable, *self.words]
        return [sys.executable, *self.words, "--resume" if self.state.exists() else "--overwrite"]


def stage(out: Path, seed: int, *words: object, needs: tuple[Path, ...] = ()) -> Run:
    """A training script, which continues from its last state."""
    command = (*map(str, words), "--out", str(out), "--seed", str(seed))
    return Run(command, out / "summary.json", needs, out / "state")


def evaluation(out: Path, *words: object, needs: tuple[Path, ...] = ()) -> Run:
    command = ("eval.py", *map(str, words), "--out", str(out), "--overwrite")
    return Run(command, out / "eval.json", needs)


# the experiments were run with a larger model and more demonstrations than `make demo` has
START = ("train_sft.py", "--n-layer", 3)


def world(out: Path, seed: int, *words: object) -> Run:
    words = ("--num-demonstrations", 8000, *words)
    command = ("-m", "data.tiny", "--out", str(out), "--seed", str(seed), *map(str, words))
    return Run(command, out / "tokenizer.json")


def flag(entry: str) -> Words:
    """FLAG/VALUE,VALUE -> --FLAG VALUE VALUE; a name without a value has no flags."""
    name, _, values = entry.partition("/")
    return (f"--{name}", *values.split(",")) if values else ()


def execute(runs: list[Run], jobs: int) -> None:
    """Run what has not finished, each after what it needs. Raises InputError when a command fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    waiting = [run for run in dict.fromkeys(runs) if run.done is None or not run.done.exists()]
    running: dict[Future[int], Run] = {}
    with ThreadPoolExecutor(jobs) as pool, tqdm(total=len(waiting), unit="run") as bar:
        while waiting or running:
            unfinished = {run.done for run in running.values()}  # a file may be there before its run ends
            ready = [run for run in waiting if all(file.exists() and file not in unfinished for file in run.needs)]
            for run in ready[: jobs - len(running)]:
                waiting.remove(run)
                running[pool.submit(subprocess.call, run.command(), env=environment)] = run
            assert running, f"nothing writes {waiting[0].needs}"
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                run = running.pop(future)
                if future.result() != 0 or (run.done is not None and not run.done.exists()):
                    raise InputError(f"{shlex.join(run.words)} failed with exit status {future.result()}.")
                bar.update()


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


def algorithm(name: str, place: Path) -> tuple[object, ...]:
    """The command of an algorithm in the world at `place`."""
    data, sft = place / "data", place / "sft"
    if name in OFFLINE:
        return "train_dpo.py", "--data", data, "--sft", sft, *OFFLINE[name]
    if name == "rejection":
        return "train_sft.py", "--model", sft, "--data", place / "winners", "--warmup-steps", 0
    script, *flags = ON_POLICY[name]
    return script, "--data", data, "--sft", sft, "--reward-model", place / "rm", "--total-episodes", 1024, *flags


def compared_world(args: Compare, seed: int) -> list[Run]:
    """The data, the start, the reward model, and the winners that rejection sampling learns from."""
    place = args.out / str(seed)
    data, sft, rm, winners = (place / name for name in ("data", "sft", "rm", "winners"))
    sampled = (
        "-m", "data.best_of", "--policy", sft, "--reward-model", rm, "--data", data, "--out", winners,
        "--num-queries", 60, "--num-validation-queries", 4, "--num-samples", 16, "--seed", seed,
    )  # fmt: skip
    return [
        world(data, seed, "--num-comparisons", 1600, "--num-validation", 512),
        stage(sft, seed, *START, "--data", data, "--num-epochs", 1, needs=(data / "tokenizer.json",)),
        stage(
            rm, seed, "train_rm.py", "--data", data, "--sft", sft, "--num-epochs", 2, "--num-normalisation", 512,
            needs=(sft / "summary.json",),
        ),
        Run(
            tuple(map(str, sampled)), winners / "best_of.json", needs=(rm / "summary.json",),
            state=winners / "best_of.partial.jsonl",
        ),
    ]  # fmt: skip


def judged(out: Path, place: Path, seed: int, policies: list[object]) -> Run:
    """Policies at the temperature that they were trained at: how they answer, and how they differ."""
    return evaluation(
        out / "eval", "tiny", "--data", place / "data", "--reward-model", place / "rm", "--num-queries", 128,
        "--temperature", 0.7, "--num-distinct-samples", 4, "--seed", seed,
        "--policies", "sft", place / "sft", *policies,
    )  # fmt: skip


def points(args: Compare, name: str) -> list[str]:
    """The points of an algorithm's grid, FLAG/VALUE/FLAG/VALUE, which is the directory of its run as well."""
    constraint, values = CONSTRAINTS.get(name, ("kl-coef", args.kl_coefs))
    return [f"lr/{lr}/{constraint}/{value}" for lr in args.lrs for value in values]


def compare(args: Compare) -> Iterator[list[Run]]:
    grid_world = args.out / str(args.grid_seed)
    yield [run for seed in (*args.seeds, args.grid_seed) for run in compared_world(args, seed)]
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


def phases(args: Args) -> Iterator[list[Run]]:
    if isinstance(args, Lab):
        return lab(args)
    if isinstance(args, Compare):
        return compare(args)
    if isinstance(args, Mismatch):
        return mismatch(args)
    assert isinstance(args, Sums)
    return sums(args)


def commands(args: Args) -> Iterator[Words]:
    """The commands of all runs, without `python`."""
    for runs in phases(replace(args, dry_run=True)):
        for run in dict.fromkeys(runs):
            yield (*run.words, *(["--overwrite"] if run.state is not None else []))


def main(args: Args) -> None:
    if args.dry_run:
        print("\n".join(shlex.join(("python", *words)) for words in commands(args)))
        return
    for runs in phases(args):
        execute(runs, args.jobs)


if __name__ == "__main__":
    command_line(main, RECIPES)
