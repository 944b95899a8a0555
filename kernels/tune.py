"""Measure once per machine which kernels are faster: `python -m kernels.tune`.

The result is stored in the user's cache directory, by processor, number of threads and PyTorch
version. The first run that finds no result measures in a separate process.

All candidates are timed in alternation, round by round, so that other work on the machine slows
them equally. The shipped default (`processor.DEFAULT`) is only replaced by what is clearly faster.
"""

import argparse
import fcntl
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import linear_logprobs, processor
from kernels.int8 import Int8Weight
from kernels.linear import PackedWeight, matmul_by_onednn, onednn_matmul
from kernels.processor import CLEAR, DEFAULT, Choice

PACKAGE = processor.__name__.rpartition(".")[0]  # kernels, in an installed copy nanorlhf.kernels
ROOT = Path(__file__).resolve().parents[PACKAGE.count(".") + 1]  # directory to import it from
SECONDS = 8.0  # time limit of a measurement
ROUNDS = 15  # maximum
FEWEST = 4  # minimum number of rounds for a result
RETRY = 3600.0  # seconds before a busy machine, with fewer rounds, is measured again
TIMED = 1e-3  # seconds; faster calls are repeated
# W (outputs, inputs) and rows of x that represent their class
WEIGHTS = {"small": (512, 128), "medium": (768, 768), "large": (2048, 768)}
ROWS = {"1-7": 4, "8-63": 16, "64-511": 128, "512+": 512}
COPIES = 6  # of medium and large weights: a decode step doesn't find its weights in the cache
HEAD = (256, 128, 8192)  # rows, width and ids of the log-probabilities
KEEP_ALL = 2**26  # logits that may be kept if that is faster: 268 MB
OVERRIDES = ("MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")  # emulate another processor

Case = dict[str, Callable[[], object]]  # candidates by name
Times = dict[str, dict[str, list[float]]]  # seconds, by case and candidate


# --------------------------------------------------------------------------------------- 1. measure
def matmul_cases() -> dict[str, Case]:
    """Float32 matmuls of each class with both libraries; decode steps also packed and rounded."""
    cases: dict[str, Case] = {}
    for size, shape in WEIGHTS.items():
        cold = [torch.randn(shape) for _ in range(1 if size == "small" else COPIES)]
        for rows, num_rows in ROWS.items():
            x, grad = torch.randn(num_rows, shape[1]), torch.randn(num_rows, shape[0])
            ws = cold if num_rows < 64 else cold[:1]
            cases[f"forward {rows} {size}"] = both_libraries(x, ws)
            cases[f"input {rows} {size}"] = both_libraries(grad, [w.T for w in ws[:1]])
            cases[f"weight {rows} {size}"] = both_libraries(grad.T, [x.T])
            if num_rows == 16 and size != "medium":
                cases[f"forward {rows} {size}"] |= prepared(x, ws)
            if rows == "512+" and size == "large":
                half = [w.bfloat16() for w in ws]
                cases[f"forward {rows} {size}"]["bfloat16"] = in_bfloat16(x, half)
    return cases


def both_libraries(a: Tensor, bs: list[Tensor]) -> Case:
    """a b^T for each b, with MKL and oneDNN."""
    case: Case = {"mkl": lambda: [F.linear(a, b) for b in bs]}
    if onednn_matmul() is not None:
        case["onednn"] = lambda: [matmul_by_onednn(a, b) for b in bs]
    return case


def prepared(x: Tensor, weights: list[Tensor]) -> Case:
    """The same with weights prepared for a sampler (`nanorlhf.generate.for_sampling`)."""
    case: Case = {"bfloat16": in_bfloat16(x, [weight.bfloat16() for weight in weights])}
    if onednn_matmul() is not None:
        packed = [PackedWeight(weight) for weight in weights]
        case["packed"] = lambda: [weight.matmul(x) for weight in packed]
    if processor.has_int8_matmul():
        rounded = [Int8Weight(weight) for weight in weights]
        case["int8"] = lambda: [weight.matmul(x) for weight in rounded]
    return case


def in_bfloat16(x: Tensor, weights: list[Tensor]) -> Callable[[], object]:
    return lambda: [F.linear(x.bfloat16(), weight) for weight in weights]


def logprob_cases() -> dict[str, Case]:
    """`linear_logprobs`, forward and backward: two block sizes, and with all logits kept."""
    num_rows, width, num_ids = HEAD
    hidden, weight = torch.randn(num_rows, width), torch.randn(num_ids, width) / width**0.5
    labels = torch.randint(num_ids, (num_rows,))
    hidden.requires_grad_()
    weight.requires_grad_()

    def run(block: int, kept: int) -> None:
        processor.use(replace(DEFAULT, block=block, kept=kept))
        values, _ = linear_logprobs(hidden, weight, labels)
        torch.autograd.grad(values.sum(), (hidden, weight))
        processor.use(DEFAULT)

    block = DEFAULT.block
    case: Case = {"default": lambda: run(block, 0), "half blocks": lambda: run(block // 2, 0)}
    return {"log-probabilities": case | {"all kept": lambda: run(block, KEEP_ALL)}}


def alternate(cases: dict[str, Case], seconds: float) -> Times:
    """Time all candidates in alternation until time is up; the first round isn't counted."""
    # CPU time of a single thread excludes other work; several threads wait for each other
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    end = time.perf_counter() + seconds
    times: Times = {case: {name: [] for name in ways} for case, ways in cases.items()}
    repeats: dict[tuple[str, str], int] = {}
    for _ in range(1 + ROUNDS):
        for case, ways in cases.items():
            for name, function in ways.items():
                if time.perf_counter() > end:
                    return times
                start = clock()
                number = repeats.get((case, name), 1)
                for _ in range(number):
                    function()
                took = (clock() - start) / number
                if (case, name) in repeats:
                    times[case][name].append(took)
                repeats.setdefault((case, name), math.ceil(TIMED / took))
    return times


# ---------------------------------------------------------------------------------------- 2. choose
def is_faster(times: dict[str, list[float]], name: str, than: str) -> bool:
    """Return whether `name` is clearly faster than `than`, in both the median and the minimum."""
    candidate, baseline = times.get(name, []), times.get(than, [])
    if min(len(candidate), len(baseline)) < FEWEST:
        return False
    return all(statistic(candidate) < CLEAR * statistic(baseline) for statistic in (median, min))


def choose(times: Times) -> Choice:
    """Return the default, changed where something else is clearly faster."""
    onednn = []
    for case, ways in times.items():
        usual, other = ("onednn", "mkl") if case in DEFAULT.onednn else ("mkl", "onednn")
        if "onednn" in ways and (other if is_faster(ways, other, usual) else usual) == "onednn":
            onednn.append(case)
    decode = times["forward 8-63 large"]
    pack = not any(is_faster(decode, name, "packed") for name in ("mkl", "onednn"))
    head = times["log-probabilities"]
    halved, all_kept = (is_faster(head, name, "default") for name in ("half blocks", "all kept"))
    rollouts = {
        f"{dtype} {size}": relative
        for size in ("small", "large")
        for dtype in ("bfloat16", "int8")
        if (relative := over_float32(times[f"forward 8-63 {size}"], dtype)) is not None
    }
    return Choice(
        name="tuned",
        onednn=tuple(onednn),
        pack=pack,
        block=DEFAULT.block // 2 if halved else DEFAULT.block,
        kept=KEEP_ALL if all_kept else DEFAULT.kept,
        bfloat16=over_float32(times["forward 512+ large"], "bfloat16"),
        rollouts=rollouts,
    )


def over_float32(times: dict[str, list[float]], dtype: str) -> float | None:
    """Return a dtype's time relative to the fastest float32 matmul; None if not measured."""
    float32 = [median(times[name]) for name in ("mkl", "onednn", "packed") if times.get(name)]
    if len(times.get(dtype, [])) < FEWEST:
        return None
    return round(median(times[dtype]) / min(float32), 3)


# ------------------------------------------------------------------------------------------ 3. keep
def machine(threads: int) -> dict[str, object]:
    """Everything that a measurement depends on."""
    has = processor.capabilities()
    return {
        "format": 1,
        "processor": has.get("cpu_name") or platform.processor() or platform.machine(),
        "instructions": sorted(name for name, value in has.items() if value is True),
        "used": [torch.backends.cpu.get_cpu_capability(), *map(os.environ.get, OVERRIDES)],
        "threads": threads,
        "torch": torch.__version__,
    }


def cache_file(threads: int) -> Path:
    """Path of this machine's measurement. Raises RuntimeError if there is no home directory."""
    xdg_cache = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg_cache):  # the XDG specification ignores relative paths
        directory = Path(xdg_cache)
    else:
        directory = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    key = hashlib.sha256(json.dumps(machine(threads)).encode()).hexdigest()[:16]
    return directory / "nanorlhf" / f"kernels-{key}.json"


def read(path: Path, threads: int) -> Choice | None:
    """Read a choice; None if the file is missing, damaged, stale or from another machine."""
    try:
        content = json.loads(path.read_text())
        is_stale = content["rounds"] < FEWEST and time.time() - path.stat().st_mtime > RETRY
        if is_stale or content["machine"] != machine(threads):
            return None
        return Choice.from_json(content["choice"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def write(path: Path, threads: int, choice: Choice, times: Times) -> None:
    """Write atomically, so that readers never find half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    milliseconds = {
        case: {name: round(1e3 * median(samples), 4) for name, samples in ways.items() if samples}
        for case, ways in times.items()
    }
    content = {
        "machine": machine(threads),
        "choice": asdict(choice),
        "rounds": num_rounds(times),
        "milliseconds": milliseconds,
    }
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        try:
            json.dump(content, file, indent=1)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def num_rounds(times: Times) -> int:
    """Return the number of complete rounds."""
    return min((len(samples) for ways in times.values() for samples in ways.values()), default=0)


def tuned(threads: int) -> Choice:
    """Return this machine's choice, measured now if necessary; the default if it can't be stored.

    Measures in a separate process, so that this one's memory, threads and random numbers don't
    change.
    """
    try:
        path = cache_file(threads)
        if (choice := read(path, threads)) is not None:
            return choice
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / "lock").open("w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)  # only one process measures
            if (choice := read(path, threads)) is None:
                message = f"measuring this machine's kernels once, {SECONDS:g} s: {path}"
                print(message, file=sys.stderr)
                command = [sys.executable, "-m", f"{PACKAGE}.tune"]
                command += ["--threads", str(threads), "--seconds", str(SECONDS)]
                subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
                choice = read(path, threads)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        print(f"using the default kernels, the measurement failed: {error}", file=sys.stderr)
        choice = None
    return choice or DEFAULT


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kernels.tune", description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit")
    args = parser.parse_args()
    if args.threads < 1:
        parser.error(f"--threads must be at least 1, got {args.threads}.")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    start = time.perf_counter()
    times = alternate(matmul_cases() | logprob_cases(), args.seconds)
    choice = choose(times)
    rounds = num_rounds(times)
    if rounds < FEWEST:
        message = f"keeping the default after only {rounds} rounds; will retry in an hour"
        print(f"this machine is busy: {message}, or run python -m kernels.tune", file=sys.stderr)
    print(f"median milliseconds of {rounds} rounds; {machine(args.threads)}")
    for case, ways in times.items():
        medians = "  ".join(
            f"{name} {1e3 * median(samples):.3f}" for name, samples in ways.items() if samples
        )
        print(f"{case:22} {medians}{'  -> onednn' if case in choice.onednn else ''}")
    path = cache_file(args.threads)
    print(f"{choice}\n{path}, {time.perf_counter() - start:.1f} s")
    try:
        write(path, args.threads, choice, times)
    except OSError as error:
        parser.exit(1, f"error: can't write {path} ({error.strerror}).\n")


if __name__ == "__main__":
    main()
