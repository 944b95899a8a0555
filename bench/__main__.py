"""Compare speed and memory of generation, log-probabilities, GAE, training steps and compilers with alternatives.

    python -m bench                                   # all parts on shape tiny, against plain PyTorch
    python -m bench --shape small --parts ppo --peers # also transformers' generate and TRL's PPO trainer
    python -m bench --shape 124m --json speed.json
    python -m bench --parts compile                   # needs a JDK
    python -m bench --quick                           # tiny, and 16 tokens of small, once: two minutes

Each part alternates between the implementations round by round and reports medians. "x ours" is a time divided by ours;
"of the limit" is the least time that the arithmetic needs on this machine (bench/limit.py) divided by the measured
time. Model FLOPs per second are shares of the card's published rate (MFU) and of the measured rate of a large matmul.
Weights are random. Peak memory is what the allocator adds during the call (linear_logprobs: without the two
gradients; PPO on a CPU and compilers: the peak resident size of the process).

`--peers` needs `pip install -e .[bench]`: TRL 1.12.0, the last release with a PPO trainer. For GRPO a later one
will also do.
"""

import importlib.util
import shutil
from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend

from bench.compilers import bench_compile
from bench.fused import bench_fused
from bench.generation import bench_decode, bench_generate
from bench.micro_batch import bench_micro_batch
from bench.operations import bench_gae, bench_logprobs
from bench.settings import SHAPES, Args, Shape
from bench.stopwatch import rates
from bench.updates import bench_grpo, bench_ppo, bench_supervised
from nanorlhf import launch
from nanorlhf.cli import run_module
from nanorlhf.errors import InputError
from nanorlhf.files import to_json
from nanorlhf.packing import can_pack


def attention_backend(shape: Shape, device: torch.device, dtype: torch.dtype, biased: bool) -> str:
    """Return PyTorch's attention backend for a training pass of this shape, such as flash_attention."""
    config, L = shape.config, shape.query_length + shape.response_length
    q = torch.empty(1, config.n_head, L, config.head_width, device=device, dtype=dtype, requires_grad=True)
    bias = torch.zeros(1, 1, L, L, device=device, dtype=dtype) if biased else None
    return SDPBackend(torch._fused_sdp_choice(q, q, q, bias, is_causal=not biased)).name.lower()


def print_table(rows: list[dict]) -> None:
    print(f"{'way':42} {'ms':>10} {'x ours':>7} {'peak MB':>9} {'of the limit':>12}")
    for first, row in zip([None, *rows], rows, strict=False):
        title = f"{row['what']}, {row['size']}"
        if first is None or title != f"{first['what']}, {first['size']}":
            print(title)
        share = f"{row['limit_seconds'] / row['seconds']:.0%}" if "limit_seconds" in row else "-"
        numbers = f"{1e3 * row['seconds']:10.2f} {row['ratio']:7.2f} {row['peak_bytes'] / 1e6:9.1f} {share:>12}"
        print(f"    {row['way']:38} {numbers}  {rates(row)}")


def main(args: Args) -> None:
    if args.quick and (args.shape, args.parts, args.rounds) != (Args.shape, Args.parts, Args.rounds):
        raise InputError("--quick can't be combined with --shape, --parts or --rounds.")
    if args.rounds < 1:
        raise InputError(f"--rounds must be at least 1, got {args.rounds}.")
    if args.peers and importlib.util.find_spec("trl") is None:
        raise InputError("--peers needs trl: pip install -e .[bench]")
    if args.peers and SHAPES[args.shape].gpt2 and {"ppo", "grpo"} & set(args.parts):
        raise InputError("--peers measures TRL on a GPT-NeoX: choose another --shape, or --parts without ppo and grpo.")
    if args.peers and "ppo" in args.parts and importlib.util.find_spec("trl.experimental.ppo") is None:
        raise InputError("--peers with ppo in --parts needs TRL 1.12.0, the last release with a PPO trainer.")
    if args.json is not None and not args.json.parent.is_dir():
        raise InputError(f"--json {args.json}: the directory does not exist.")
    if "compile" in args.parts and shutil.which("javac") is None:
        if args.parts != Args().parts:
            raise InputError("--parts compile needs javac: install a JDK 17 or later.")
        print("skipping compile: javac not found; install a JDK 17 or later to measure it")
        args = replace(args, parts=tuple(part for part in args.parts if part != "compile"))
    device = launch.setup(args.device)
    args = replace(args, device=device.type)
    parts = {
        "generate": bench_generate, "decode": bench_decode, "logprobs": bench_logprobs, "gae": bench_gae,
        "fused": bench_fused, "micro_batch": bench_micro_batch, "supervised": bench_supervised, "ppo": bench_ppo,
        "grpo": bench_grpo, "compile": bench_compile,
    }  # fmt: skip
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    if args.quick:
        args = replace(args, rounds=1, parts=("generate", "logprobs", "gae", "ppo"))
    print(f"torch {torch.__version__}, {where}, shape {args.shape}, medians of {args.rounds} rounds")
    measured = [(part, SHAPES[args.shape]) for part in args.parts]
    if args.quick:
        measured.append(("generate", replace(SHAPES["small"], response_length=16)))
    config, dtype = SHAPES[args.shape].config, getattr(torch, args.dtype)
    if can_pack(config, device, dtype):
        attention = ["flash_attention"]
        print("attention: flash_attention over packed rows")
    else:
        attention = [attention_backend(SHAPES[args.shape], device, dtype, biased) for biased in (False, True)]
        print(f"attention: {attention[0]} on a GPU if padding is only on the right; {attention[1]} otherwise")
    rows = []
    for part, shape in measured:
        torch.manual_seed(0)
        rows += parts[part](args, shape, device)
    print_table(rows)
    if args.json is not None:
        report = {"torch": torch.__version__, "where": where, "attention": attention, "rows": rows}
        args.json.write_text(to_json(report, indent=2) + "\n")


if __name__ == "__main__":
    run_module(main, Args)
