"""Run everything that needs a CUDA device in a few minutes: GPU tests, every script in miniature, and the benchmark.

    python -m tools.gpu --out runs/gpu          # make gpu
    python -m tools.gpu --dry-run               # print the parts and their commands; needs no device
    python -m tools.gpu --only bench            # only the benchmark

Each part runs in a separate process group with a time limit. A part that fails or hangs is stopped, and the next one
starts. After each part, gpu.json and gpu.md in --out have all results so far: the outcome of each test, and the
benchmark's rows. Exit code 0: every part passed; 1: some failed; 3: no CUDA device.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bench.stopwatch import rates
from nanorlhf.cli import run_module
from nanorlhf.errors import InputError
from nanorlhf.files import to_json, write_text
from nanorlhf.launch import die_with_parent

NO_DEVICE = 3  # exit code
GRACE = 5.0  # seconds between SIGTERM and SIGKILL
PEERS = () if find_spec("trl") is None else ("--peers",)


@dataclass(frozen=True, kw_only=True)
class Args:
    out: Path = Path("runs/gpu")
    """output directory for gpu.json, gpu.md and each part's log"""
    seconds: float = 480.0
    """time limit for all parts together, seconds"""
    dry_run: bool = False
    """print the parts, their time limits and commands without running them"""
    only: str = ""
    """run only the parts with this word in their names, such as tests, bench or PPO"""


@dataclass(frozen=True)
class Part:
    name: str
    command: tuple[str, ...]
    """{json} stands for the file that a benchmark writes, {out} for the output directory"""
    limit: float
    """seconds"""


def tests(name: str, limit: float, *words: str) -> Part:
    # -vv: pytest prints a test's name before it runs and its outcome after, so we know which test was killed
    workers = ("-n", str(min(8, os.cpu_count() or 1)))  # compilers take most of the time
    return Part(name, (sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", *workers, *words), limit)


def bench(name: str, limit: float, *flags: str) -> Part:
    command = (sys.executable, "-m", "bench", "--device", "cuda", "--dtype", "bfloat16", "--json", "{json}", *flags)
    return Part(name, command, limit)


KERNELS = ("logprobs", "kl", "gae", "decode", "norm", "rotary", "activation", "between_matmuls")
PARTS = (
    # all kernel tests: with a device, they run the Triton kernels on it
    tests("tests: kernels", 110, *(f"tests/kernels/test_{name}.py" for name in KERNELS)),
    tests(
        "tests: packing, generation, a PPO update, NCCL and FSDP2", 90, "-m", "gpu",
        *(
            f"tests/test_{name}.py"
            for name in ("packing", "cuda_graph", "generate", "train_ppo", "mismatch", "distributed")
        ),
        "tests/tools/test_compile.py",
    ),
    # --dist worksteal: each worker initializes CUDA once, which takes longer than a command
    tests("tests: every script in miniature", 150, "--dist", "worksteal", "-m", "gpu", "tests/test_on_a_device.py"),
    bench("bench: log-probabilities and GAE, 1b", 60, "--shape", "1b", "--parts", "logprobs", "gae", "--rounds", "3"),
    bench("bench: generation, 124m", 60, "--shape", "124m", "--parts", "generate", "decode", "--rounds", "3"),
    bench("bench: generation, 1b", 75, "--shape", "1b", "--parts", "generate", "decode", "--rounds", "2"),
    bench("bench: a micro-batch and profiles, 1b", 90, "--shape", "1b", "--parts", "micro_batch", "--rounds", "3"),
    bench("bench: a PPO iteration, 124m", 90, "--shape", "124m", "--parts", "ppo", "--rounds", "1"),
    bench("bench: a PPO iteration, 1b", 200, "--shape", "1b", "--parts", "ppo", "--rounds", "1"),
    bench("bench: between the matmuls, 1b", 75, "--shape", "1b", "--parts", "fused", "--rounds", "3"),
    Part(
        "each kernel at the sizes of the compilers' table",
        (sys.executable, "-m", "tools.compile_kernels", "--measure", "{out}/measured.csv"), 75,
    ),
    bench("bench: a GRPO iteration, 1b", 100, "--shape", "1b", "--parts", "grpo", "--rounds", "1", *PEERS),
    bench("bench: generation, 6.9b", 60, "--shape", "6.9b", "--parts", "generate", "--rounds", "1"),
)  # fmt: skip


def chosen(args: Args) -> tuple[Part, ...]:
    """Return the parts that --only names; raise InputError if there are none."""
    parts = tuple(part for part in PARTS if args.only in part.name)
    if not parts:
        raise InputError(f"--only {args.only}: no part has this word in its name: {', '.join(p.name for p in PARTS)}.")
    return parts


def main(args: Args, parts: tuple[Part, ...] = PARTS) -> int:
    """Run the parts, write the two files, and return the exit code."""
    args.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + args.seconds - GRACE - 1
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    report: dict[str, Any] = {"device": device, "torch": torch.__version__, "cuda": torch.version.cuda}
    report["parts"] = [{"name": part.name, "status": "not started", "seconds": 0.0} for part in parts]
    for number, part in enumerate(parts):
        limit = min(part.limit, deadline - time.monotonic())
        if limit > 1:
            log, rows = (args.out / f"{number}.{ending}" for ending in ("log", "json"))
            report["parts"][number] = {"name": part.name, "status": "interrupted", "seconds": 0.0}
            write(args.out, report)
            report["parts"][number] = run(part, limit, log, rows)
        write(args.out, report)
    print((args.out / "gpu.md").read_text())
    return int(any(part["status"] != "passed" for part in report["parts"]))


def run(part: Part, limit: float, log: Path, rows: Path) -> dict[str, Any]:
    """Run one part for at most `limit` + GRACE seconds, and return what it wrote by then."""
    rows.unlink(missing_ok=True)
    command = [word.replace("{json}", str(rows)).replace("{out}", str(log.parent)) for word in part.command]
    print(f"{part.name}: at most {limit:.0f} s", flush=True)
    start = time.monotonic()
    environment = os.environ | {"NANORLHF_TEST_DEVICE": "cuda"}  # by default the tests hide the GPU
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
            preexec_fn=die_with_parent,
        )  # fmt: skip
        try:
            code = process.wait(limit)
            status = "passed" if code == 0 else f"failed with code {code}"
        except subprocess.TimeoutExpired:
            status = f"timed out ({limit:.0f} s)"
        finally:  # also stop processes that it left behind
            end_group(process)
    text = log.read_text(errors="replace")
    result = {"name": part.name, "command": command, "status": status, "seconds": round(time.monotonic() - start, 1)}
    result["tests"] = outcomes(text)
    result["bench"] = json.loads(rows.read_text()) if rows.exists() else None
    if status != "passed":
        result["tail"] = text[-4000:]
    return result


def end_group(process: subprocess.Popen) -> None:
    """Send SIGTERM to the process group, and SIGKILL if any of it is still alive after GRACE seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        last = time.monotonic() + GRACE
        while number == signal.SIGTERM and time.monotonic() < last and group_lives(process):
            time.sleep(0.02)
    process.wait()


def group_lives(process: subprocess.Popen) -> bool:
    process.poll()  # a zombie would count
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def outcomes(text: str) -> dict[str, str]:
    """Read the outcome of each test from pytest's -vv output; `unfinished`: was running when pytest was killed."""
    matches = re.findall(r"^(tests?\S*::.+?) ?(PASSED|FAILED|ERROR|SKIPPED|XFAIL|$)(?: .*)?$", text, re.MULTILINE)
    outcomes = re.findall(r"^\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED|XFAIL) (.+?) *$", text, re.MULTILINE)
    matches += [(name, outcome) for outcome, name in outcomes]
    return {name: outcome.lower() or "unfinished" for name, outcome in matches}


def write(out: Path, report: dict[str, Any]) -> None:
    """Write both files atomically."""
    for name, text in (("gpu.json", to_json(report, indent=2) + "\n"), ("gpu.md", table(report))):
        write_text(out / name, text)


def table(report: dict[str, Any]) -> str:
    """Format the report as Markdown: a row per part, the tests that did not pass, and the benchmark's rows."""
    lines = [f"{report['device']}, torch {report['torch']}, CUDA {report['cuda']}", ""]
    lines += ["| part | status | seconds | tests |", "|---|---|---|---|"]
    not_passed, rows = [], []
    for part in report["parts"]:
        results = list(part.get("tests", {}).values())
        counts = ", ".join(f"{results.count(outcome)} {outcome}" for outcome in dict.fromkeys(results))
        lines.append(f"| {part['name']} | {part['status']} | {part['seconds']} | {counts} |")
        not_passed += [f"- {name}: {outcome}" for name, outcome in part.get("tests", {}).items() if outcome != "passed"]
        rows += (part.get("bench") or {}).get("rows", [])
    if not_passed:
        lines += ["", *not_passed]
    if rows:
        names = ("what", "size", "way", "ms", "times ours", "peak MB", "of the limit", "")
        lines += ["", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in rows:
        share = f"{row['limit_seconds'] / row['seconds']:.0%}" if "limit_seconds" in row else ""
        lines.append(
            f"| {row['what']} | {row['size']} | {row['way']} | {1e3 * row['seconds']:.2f} | {row['ratio']:.2f} | "
            f"{row['peak_bytes'] / 1e6:.1f} | {share} | {rates(row)} |"
        )
    return "\n".join(lines) + "\n"


def command(args: Args) -> None:
    parts = chosen(args)
    if args.dry_run:
        for part in parts:
            print(f"{part.name}, at most {part.limit:.0f} s\n    {shlex.join(part.command)}")
        return
    if not torch.cuda.is_available():
        print("make gpu: this PyTorch finds no CUDA device; nothing was run.", file=sys.stderr)
        sys.exit(NO_DEVICE)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # also stops the running part
    sys.exit(main(args, parts))


if __name__ == "__main__":
    run_module(command, Args)
