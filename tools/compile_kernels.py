"""Compile the kernels for GPUs that this machine doesn't have: `python -m tools.compile_kernels --out FILE`.

Compiles every Triton kernel for Ampere, Hopper and Blackwell, as the library launches it and in each configuration
that its autotuner may choose. The compilers (Triton's and ptxas) and the disassembler come with Triton. Each row has:

    registers, spilled_bytes          per thread, from the machine code
    shared_bytes, occupancy           shared memory of a program; share of a multiprocessor's 64 warps that fit
    tensor_cores                      the tensor core instruction, or none
    requested_bytes                   loads and stores of all programs of a launch
    bytes, minimum_bytes, ratio       DRAM traffic, and its minimum: each input and each output once
    predicted_us                      lower bound of a launch's time: the longer of `bytes` at the published bandwidth
                                      and the matmuls at the published rate

`bytes` comes from a model of the L2 cache. Programs start in order, as many as fit on the GPU, and step through their
tiles in lockstep. The cache evicts the least recently used data. We count half of its published size, because each
half of an A100's or H100's cache may store its own copy.

The rows are in kernels/compiled.csv; they depend on the version of Triton, the last column. tests/tools/test_compile.py
recompiles a sample, and compares requested_bytes with the loads and stores of the interpreted kernels.

    python -m tools.compile_kernels --measure kernels/measured.csv    # needs a GPU

times the same launches on random numbers and writes each median. The L2 cache is cleared before each launch.
"""

import csv
import io
import os
import re
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from math import ceil
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget

from nanorlhf.cli import run_module
from nanorlhf.files import write_text

activation, decode, gae, kl, logprobs, norm, rotary = (
    import_module(f"kernels.{name}") for name in ("activation", "decode", "gae", "kl", "logprobs", "norm", "rotary")
)


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU, with the limits of its compute capability from the CUDA C++ Programming Guide."""

    name: str
    multiprocessors: int
    shared_bytes: int
    """per multiprocessor; each program takes 1 KB more than it requests"""
    cache_bytes: int
    """L2"""
    bandwidth: float
    """bytes per second"""
    rate: float
    """dense bfloat16 FLOP/s on tensor cores"""


CARDS = {
    80: Card(  # the A100 80GB SXM: NVIDIA A100 Tensor Core GPU Architecture (2020), and its data sheet
        name="A100 80GB", multiprocessors=108, shared_bytes=164 * 2**10, cache_bytes=40 * 2**20, bandwidth=2.039e12,
        rate=312e12,
    ),
    90: Card(  # the H100 SXM: NVIDIA H100 Tensor Core GPU Architecture (2022), and its data sheet
        name="H100", multiprocessors=132, shared_bytes=228 * 2**10, cache_bytes=50 * 2**20, bandwidth=3.35e12,
        rate=989e12,
    ),
    100: Card(  # the HGX B200: NVIDIA Blackwell Architecture Technical Brief (2024), and the Blackwell Tuning Guide
        name="B200", multiprocessors=148, shared_bytes=228 * 2**10, cache_bytes=126 * 2**20, bandwidth=8e12,
        rate=2250e12,
    ),
}  # fmt: skip
WARPS, PROGRAMS, REGISTERS, TENSOR_COLUMNS = 64, 32, 2**16, 512  # per multiprocessor, on all three

# the head of Pythia 1B, and a GAE batch larger than any recipe's PPO micro-batch
N, V, C = 2048, 50304, 2048
B, T = 512, 1024
# a decode step of Pythia 1B and of a model with 124 million weights: rows, heads and head width; columns of the cache
DECODE, LENGTH = ((64, 8, 256), (8, 12, 64)), 565
# between the matmuls, of N tokens. Norms of GPT-2 124M and Llama 8B: channels and kind. Without a residual: Pythia 1B
NORMS, ALONE = ((768, "layer"), (4096, "rms")), 2048
# rotations of Pythia 1B and Llama 8B: heads, of keys and values, head width, rotated channels; MLPs of the same
ROTATIONS, MLPS = ((8, 8, 256, 64), (32, 8, 128, 128)), (8192, 14336)

MEASURED = Path(__file__).parent.parent / "kernels" / "measured.csv"


# ---------------------------------------------------------------------------------------------------- the launches
@dataclass(frozen=True)
class Launch:
    """A kernel with the arguments and the configuration of one call."""

    kernel: triton.JITFunction
    arguments: tuple
    constants: dict
    config: triton.Config
    grid: tuple | Callable

    @property
    def dtype(self) -> torch.dtype:
        return self.arguments[0].dtype

    @property
    def setting(self) -> str:
        """The configuration, which distinguishes this launch from others with the same kernel and dtype."""
        flags = [flag.removeprefix("HAS_").lower() for flag in ("HAS_BIAS", "HAS_CAP") if self.constants.get(flag)]
        sizes = [f"{name.removeprefix('BLOCK_')}={size}" for name, size in self.config.kwargs.items()]
        sizes += [f"SPLITS={self.constants['SPLITS']}"] if "SPLITS" in self.constants else []
        return " ".join([*sizes, f"warps={self.config.num_warps}", f"stages={self.config.num_stages}", *flags])


def launches() -> list[Launch]:
    """Return every kernel in every configuration that the library can launch, recorded from calls on meta tensors."""
    result = []
    for length in (2**i for i in range(gae.BLOCK.bit_length())):
        result += record_launches(gae.gae_triton, empty(B, length), empty(B, length), 1.0, 0.95)
    for num_rows, heads, width in DECODE:
        q = empty(num_rows, heads, 1, width, dtype=torch.bfloat16)
        cache = empty(num_rows, heads, LENGTH, width, dtype=torch.bfloat16)
        first, last = empty(num_rows, dtype=torch.int64), empty(1, dtype=torch.int64)
        columns = decode.Columns(first, last, None)
        result += record_launches(decode.decode_attention, q, cache, cache, columns, 1.0)
    rows, ids = empty(N), slice(0, logprobs.GPU_BLOCK // N)
    for dtype in (torch.float32, torch.bfloat16):
        logits = empty(N, V, dtype=dtype)
        result += record_launches(kl.kl_triton, logits, logits)
    hidden, weight = empty(N, C, dtype=torch.bfloat16), empty(V, C, dtype=torch.bfloat16)
    labels = empty(N, dtype=torch.int64)
    # with neither bias nor cap, and with both
    for bias, cap in ((None, None), (empty(V), 30.0)):
        result += record_launches(logprobs.linear_forward_triton, hidden, weight, labels, bias, 0.7, cap, None)
        result += record_launches(
            logprobs.linear_backward_triton, hidden, weight, labels, bias, 0.7, cap, rows, rows, (rows, rows), ids, None
        )  # fmt: skip
    return result + launches_between_matmuls()


def launches_between_matmuls() -> list[Launch]:
    """Under autocast: the residual stream is float32, the matmuls' outputs are bfloat16."""
    result, half = [], torch.bfloat16
    for width, kind in NORMS:
        x, weight, dtypes = empty(N, width), empty(width), (torch.float32, half)
        residual, bias = empty(N, width, dtype=half), empty(width) if kind == "layer" else None
        result += record_launches(norm.add_norm_triton, x, residual, weight, bias, 1e-5, kind, half)
        trained = True, kind == "layer"
        result += record_launches(norm.add_norm_backward_triton, x, weight, x, residual, 1e-5, kind, dtypes, trained)
    x, weight, dtypes = empty(N, ALONE), empty(ALONE), (torch.float32,) * 2
    grad = empty(N, ALONE, dtype=half)
    result += record_launches(norm.add_norm_triton, x, None, weight, weight, 1e-5, "layer", half)
    result += record_launches(norm.add_norm_backward_triton, x, weight, None, grad, 1e-5, "layer", dtypes, (True, True))
    for heads, kv_heads, width, rotated in ROTATIONS:
        qkv, table = empty(1, N, heads + 2 * kv_heads, width, dtype=half), empty(1, N, 1, rotated // 2)
        result += record_launches(rotary.rotary_triton_, qkv, table, table, heads, False)
    for heads, kv_heads, width, rotated in ROTATIONS:  # a decode step, which also stores k and v
        rows, at = DECODE[0][0], empty(1, dtype=torch.int64)
        qkv, table = empty(rows, 1, heads + 2 * kv_heads, width, dtype=half), empty(rows, 1, 1, rotated // 2)
        cache = empty(rows, kv_heads, LENGTH, width, dtype=half)
        result += record_launches(rotary.rotary_store_triton, qkv, table, table, heads, False, cache, cache, at)
    (up, bias), gate = (empty(N, MLPS[0], dtype=half), empty(MLPS[0])), empty(N, MLPS[1], dtype=half)
    for kind in ("gelu", "gelu_new"):
        result += record_launches(activation.activated_triton, up, bias, kind)
        result += record_launches(activation.activated_backward_triton, up, bias, up, kind, True)
    for kind in ("silu", "gelu_new"):
        result += record_launches(activation.gated_triton, gate, gate, kind)
        result += record_launches(activation.gated_backward_triton, gate, gate, gate, kind)
    return result


def empty(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


def record_launches(call: Callable, *inputs) -> list[Launch]:
    """Record what a call launches, once per configuration of the autotuner, without running it."""
    recorded: list[tuple] = []
    kernels = (
        gae.gae_kernel, kl.kl_kernel, logprobs.linear_forward_kernel, logprobs.linear_backward_kernel,
        decode.decode_kernel, decode.combine_kernel, norm.add_norm_kernel, norm.add_norm_backward_kernel,
        rotary.rotary_kernel, rotary.rotary_store_kernel, activation.activated_kernel,
        activation.activated_backward_kernel, activation.gated_kernel, activation.gated_backward_kernel,
    )  # fmt: skip
    for kernel in kernels:
        kernel.run = lambda *arguments, kernel=kernel, **settings: recorded.append((kernel, arguments, settings))
    try:
        call(*inputs)
    finally:
        for kernel in kernels:
            del kernel.run
    result = []
    for kernel, arguments, settings in recorded:
        grid, constants = settings["grid"], {name: value for name, value in settings.items() if name.isupper()}
        if isinstance(kernel, triton.runtime.Autotuner):
            result += [Launch(kernel.fn, arguments, constants, config, grid) for config in kernel.configs]
        else:
            config = triton.Config(constants, num_warps=settings.get("num_warps", 4))
            result.append(Launch(kernel, arguments, {}, config, grid))
    return result


# ---------------------------------------------------------------------------------------------------- the compilation
class NoDriver:
    """A stand-in for a GPU's driver, which Triton asks for the target architecture."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return self.architecture  # a separate cache of compiled kernels per architecture

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(launch: Launch, architecture: int) -> dict:
    """Read registers, spilled bytes, shared memory and the tensor core instruction from the machine code."""
    triton.runtime.driver.set_active(NoDriver(architecture))
    binary = launch.kernel.warmup(*launch.arguments, grid=(1,), **launch.constants, **launch.config.all_kwargs())
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", code).groups())
    instructions = set(re.findall(r"\b(HMMA|HGMMA|UTCHMMA)\b", code))
    return {
        "registers": registers,
        "spilled_bytes": stack,  # no kernel has local arrays, so the stack has only spilled registers
        "shared_bytes": binary.metadata.shared,
        "tensor_columns": getattr(binary.metadata, "tmem_size", None) or 0,
        "tensor_cores": " ".join(sorted(instructions)) or "none",
    }


def resident_programs(card: Card, warps: int, registers: int, shared_bytes: int, tensor_columns: int) -> int:
    """Return the number of a kernel's programs that fit on a multiprocessor at a time; may be 0."""
    per_warp = ceil(registers * 32 / 256) * 256  # registers are allocated in units of 256
    shared = shared_bytes + 1024
    if shared > card.shared_bytes:
        return 0
    fit = [PROGRAMS, WARPS // warps, REGISTERS // (per_warp * warps), card.shared_bytes // (ceil(shared / 128) * 128)]
    if tensor_columns:
        fit.append(TENSOR_COLUMNS // tensor_columns)
    return min(fit)


# ----------------------------------------------------------------------------------------------------- memory traffic
Step = list[tuple[tuple, int]]
"""the reads and writes of a program in one step: name of the data, bytes"""


def programs(launch: Launch) -> Iterator[list[Step]]:
    """Yield the steps of each program, in the order that programs start."""
    name, arguments = launch.kernel.__name__, dict(zip(launch.kernel.arg_names, launch.arguments, strict=False))
    width = launch.dtype.itemsize
    if name == "gae_kernel":
        rows, length = arguments["rewards"].shape
        for row in range(rows):
            inputs = [
                (("rewards", row), 4 * length),
                (("values", row), 4 * length),
                (("values", row), 4 * (length - 1)),
            ]
            yield [[*inputs, (("advantages", row), 4 * length), (("returns", row), 4 * length)]]
    elif name == "kl_kernel":
        for row in range(len(arguments["logits"])):
            yield [[((x, row), width * arguments["V"]) for x in ("logits", "ref_logits")] + [(("kl", row), 4)]]
    elif name == "decode_kernel":
        yield from decode_programs(arguments, width, launch.constants["SPLITS"], launch.config.kwargs["BLOCK_L"])
    elif name == "combine_kernel":
        num_rows, splits, channels = arguments["parts"].shape
        for row in range(num_rows):
            inputs = [((x, row), 4 * splits) for x in ("tops", "totals")] + [(("parts", row), 4 * splits * channels)]
            yield [[*inputs, (("y", row), arguments["y"].itemsize * channels)]]
    elif name.startswith("linear"):
        yield from linear_programs(name, arguments, width, launch.constants, launch.config.kwargs)
    elif name.startswith("add_norm"):
        yield from norm_programs(arguments, launch.grid[0], launch.config.kwargs)
    elif name == "rotary_kernel":
        yield from rotary_programs(arguments, width, launch.config.kwargs["HEADS"])
    elif name == "rotary_store_kernel":
        yield from rotary_store_programs(arguments, launch.config.kwargs["HEADS"])
    elif name.startswith("activated"):
        yield from activated_programs(arguments, width, launch.config.kwargs)
    else:
        arrays, block = ("gate", "up", "y", "grad_y", "grad_gate", "grad_up"), launch.config.kwargs["BLOCK"]
        for start in range(0, arguments["size"], block):
            size = width * min(block, arguments["size"] - start)
            yield [[((x, start), size) for x in arrays if x in arguments]]


def decode_programs(arguments: dict, width: int, splits: int, block: int) -> Iterator[list[Step]]:
    """A meta tensor has no columns: the cache is then full and has no padding."""
    rows, heads, _, channels = arguments["q"].shape
    for split, row, head in product(range(splits), range(rows), range(heads)):
        known = not arguments["first"].is_meta
        begin = int(arguments["first"][row]) if known else 0
        end = int(arguments["last"]) + 1 if known else arguments["k"].size(2)
        share = ceil((end - begin) / splits)
        begin, end = begin + split * share, min(end, begin + (split + 1) * share)
        steps = [[(("first", row), 8), (("last",), 8), (("q", row, head), width * channels)]]
        for start in range(begin, end, block):
            size = width * channels * min(block, end - start)
            shared = head // arguments["group"]
            steps.append([((x, row, shared, start), size) for x in ("k", "v")])
        if splits == 1:
            steps.append([(("y", row, head), width * channels)])
        else:
            steps.append([(("parts", row, head, split), 4 * channels), (("tops and totals", row, head, split), 8)])
        yield steps


def linear_programs(name: str, arguments: dict, width: int, constants: dict, sizes: dict) -> Iterator[list[Step]]:
    num_rows, num_ids, channels, block = arguments["N"], arguments["V"], arguments["C"], sizes["BLOCK_N"]
    split = constants.get("SPLIT", sizes["BLOCK_V"])  # ids per program
    row_blocks, group = ceil(num_rows / block), max(arguments["group"] // block, 1)
    for first_block in range(0, row_blocks, group):
        blocks = range(first_block, min(first_block + group, row_blocks))
        for first, row_block in product(range(0, num_ids, split), blocks):
            rows, stop = min(block, num_rows - row_block * block), min(first + split, num_ids)
            steps = []
            for start in range(first, stop, sizes["BLOCK_V"]):
                ids = min(sizes["BLOCK_V"], stop - start)
                step = [(("hidden", row_block), rows * channels * width), (("weight", start), ids * channels * width)]
                steps.append(step + ([(("bias", start), 4 * ids)] if constants["HAS_BIAS"] else []))
            steps[0].append((("labels", row_block), 8 * rows))
            if name == "linear_forward_kernel":
                steps[-1] += [((x, row_block, first), 4 * rows) for x in ("normalisers", "moments", "chosen")]
            else:
                steps[0].append((("four numbers per row", row_block), 16 * rows))
                steps[0].append((("grad", row_block, first), width * rows * ids))
            yield steps


def norm_programs(arguments: dict, num_programs: int, flags: dict) -> Iterator[list[Step]]:
    """A program of the forward pass has one row, a program of the backward pass every num_programs-th."""
    channels, is_backward = arguments["C"], "grad_x" in arguments
    rows = arguments["N"] if is_backward else num_programs
    arrays = ("s", "grad_y", "grad_x") if is_backward else ("x", "y")
    if flags["ADDS"]:
        arrays += ("grad_s",) if is_backward else ("residual", "s")
    arrays += ("grad_residual",) if is_backward and not flags["SAME"] else ()
    vectors = ("weight", "bias") if flags.get("HAS_BIAS") else ("weight",)
    sums = [x for x in ("weight", "bias") if flags.get(f"SUMS_{x.upper()}")]
    for program in range(num_programs):
        steps = [[((x,), arguments[x].itemsize * channels) for x in vectors]]
        for row in range(program, rows, num_programs):
            steps.append([((x, row), arguments[x].itemsize * channels) for x in arrays])
        yield [*steps, [((f"{x}_sums", program), 4 * channels) for x in sums]]


def rotary_programs(arguments: dict, width: int, block: int) -> Iterator[list[Step]]:
    tokens, heads, pairs = arguments["qkv"].shape[:2].numel(), arguments["heads"], arguments["pairs"]
    for first, token in product(range(0, heads, block), range(tokens)):
        size = width * 2 * pairs * min(block, heads - first)
        tables = [((x, token), 4 * pairs) for x in ("cos", "sin")]
        yield [tables + [((x, token, first), size) for x in ("before", "after")]]


def rotary_store_programs(arguments: dict, block: int) -> Iterator[list[Step]]:
    """q's pairs go back to qkv; k and v, whole, to the cache."""
    qkv, keys, channels = arguments["qkv"], arguments["keys"], arguments["D"]
    rows, _, num_heads, _ = qkv.shape
    for first, row in product(range(0, num_heads, block), range(rows)):
        heads = range(first, min(first + block, num_heads))
        num_q = sum(head < arguments["H"] for head in heads)
        turned, stored = num_q * 2 * arguments["pairs"], (len(heads) - num_q) * channels
        step = [((x, row), 4 * arguments["pairs"]) for x in ("cos", "sin")] + [(("at",), 8)]
        step += [(("before", row, first), qkv.itemsize * (turned + stored))]
        step += [(("after", row, first), qkv.itemsize * turned), (("cache", row, first), keys.itemsize * stored)]
        yield [step]


def activated_programs(arguments: dict, width: int, sizes: dict) -> Iterator[list[Step]]:
    num_rows, channels, step = arguments["N"], arguments["M"], sizes["STEP"]
    per_program, block = sizes.get("ROWS", step), sizes["BLOCK_M"]
    arrays = [x for x in ("x", "y", "grad_y", "grad_x") if x in arguments]
    for column, first in product(range(0, channels, block), range(0, num_rows, per_program)):
        columns = min(block, channels - column)
        steps = [[(("bias", column), arguments["bias"].itemsize * columns)]]
        for row in range(first, min(first + per_program, num_rows), step):
            size = width * columns * min(step, num_rows - row)
            steps.append([((x, row, column), size) for x in arrays])
        steps.append([(("sums", first, column), 4 * columns)] if sizes.get("SUMS_ROWS") else [])
        yield steps


def requested_bytes(launch: Launch) -> int:
    return sum(size for steps in programs(launch) for step in steps for _, size in step)


def minimum_bytes(launch: Launch) -> int:
    """Return the bytes of each input and each output, counted once."""
    sizes: dict[tuple, int] = {}
    for data, size in (access for steps in programs(launch) for step in steps for access in step):
        sizes[data] = max(size, sizes.get(data, 0))
    return sum(sizes.values())


def moved_bytes(launch: Launch, at_a_time: int, cache_bytes: int) -> int:
    """Return the DRAM traffic when this many programs run at a time with an L2 cache of this size."""
    cache: OrderedDict[tuple, int] = OrderedDict()
    held = moved = 0
    waiting = list(programs(launch))
    for begin in range(0, len(waiting), at_a_time):
        wave = waiting[begin : begin + at_a_time]
        for i in range(max(map(len, wave))):
            for data, size in (access for steps in wave if i < len(steps) for access in steps[i]):
                if data in cache:
                    cache.move_to_end(data)
                    continue
                moved += size
                held += size
                cache[data] = size
                while held > cache_bytes:
                    held -= cache.popitem(last=False)[1]
    return moved


def predicted_seconds(launch: Launch, card: Card, num_bytes: int) -> float:
    """Return a lower bound of a launch's time: no kernel reaches the published bandwidth or rate."""
    matmul_seconds = 0.0
    if launch.kernel.__name__.startswith("linear"):
        arguments = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False))
        matmul_seconds = 2 * arguments["N"] * arguments["V"] * arguments["C"] / card.rate
    return max(num_bytes / card.bandwidth, matmul_seconds)


# ---------------------------------------------------------------------------------------------------------- the table
def make_row(launch: Launch, architecture: int) -> dict:
    card, binary = CARDS[architecture], compiled(launch, architecture)
    columns, warps = binary.pop("tensor_columns"), launch.config.num_warps
    resident = resident_programs(card, warps, binary["registers"], binary["shared_bytes"], columns)
    moved = moved_bytes(launch, max(resident, 1) * card.multiprocessors, card.cache_bytes // 2)
    minimum = minimum_bytes(launch)
    return {
        **row_key(launch, architecture),
        **binary,
        "occupancy": resident * warps / WARPS,
        "requested_bytes": requested_bytes(launch),
        "bytes": moved,
        "minimum_bytes": minimum,
        "ratio": f"{moved / minimum:.2f}",
        "predicted_us": short(predicted_seconds(launch, card, moved) * 1e6),
        "triton": triton.__version__,
    }


def row_key(launch: Launch, architecture: int) -> dict:
    """Return the columns that identify a row."""
    return {
        "kernel": launch.kernel.__name__,
        "dtype": str(launch.dtype).removeprefix("torch."),
        "setting": launch.setting,
        "architecture": f"sm_{architecture}",
    }


def short(microseconds: float) -> str:
    return f"{float(f'{microseconds:.3g}'):g}"


def random_arguments(launch: Launch, device: str) -> list:
    """Return the launch's arguments with random numbers; a decode step's cache is full, as in `decode_programs`."""
    arguments = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False))

    def filled(name: str, x: torch.Tensor) -> torch.Tensor:
        if launch.kernel.__name__ == "decode_kernel" and name in ("first", "last"):
            return torch.full(x.shape, 0 if name == "first" else arguments["k"].size(2) - 1, device=device)
        if launch.kernel.__name__ == "rotary_store_kernel" and name == "at":
            return torch.full(x.shape, arguments["keys"].size(2) - 1, device=device)
        if x.dtype == torch.int64:  # labels
            return torch.randint(V, x.shape, device=device)
        return torch.randn(x.shape, device=device, dtype=x.dtype)

    return [filled(name, x) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()]


def measured_row(launch: Launch) -> dict:
    """Measure the median time of a launch on this machine's GPU, with random inputs of the same shapes."""
    arguments = random_arguments(launch, "cuda")

    def start() -> None:
        launch.kernel[launch.grid](*arguments, **launch.constants, **launch.config.all_kwargs())

    major, minor = torch.cuda.get_device_capability()
    return {
        **row_key(launch, 10 * major + minor),
        "measured_us": short(1e3 * triton.testing.do_bench(start, return_mode="median")),
        "gpu": torch.cuda.get_device_name(),
        "triton": triton.__version__,
    }


def summary(rows: list[dict], measured: list[dict]) -> str:
    """Format the table of kernels/README.md: ranges over configurations and GPUs, and the slowest prediction.

    The last column has the measured times of the fastest configuration, which the autotuner picks, and of the slowest.
    """
    names = [card.name for card in CARDS.values()]
    lines = [
        "| kernel | dtype | registers | occupancy | bytes / minimum | " + ", µs | ".join(names) + ", µs | measured |"
    ]
    lines.append("|---" * (6 + len(names)) + "|")
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row["kernel"], row["dtype"]), []).append(row)
    for (kernel, dtype), group in groups.items():
        registers, occupancy, ratio = ([float(row[x]) for row in group] for x in ("registers", "occupancy", "ratio"))
        cells = [f"`{kernel}`", dtype, f"{min(registers):.0f} to {max(registers):.0f}"]
        ends = f"{min(occupancy):.0%}", f"{max(occupancy):.0%}"
        cells += [" to ".join(dict.fromkeys(ends)), f"{max(ratio):.2f}"]
        for architecture in CARDS:
            times = [float(row["predicted_us"]) for row in group if row["architecture"] == f"sm_{architecture}"]
            cells.append(f"{max(times):,g}")
        times = [float(row["measured_us"]) for row in measured if (row["kernel"], row["dtype"]) == (kernel, dtype)]
        cells.append(" to ".join(f"{time:,g}" for time in dict.fromkeys((min(times), max(times)))) if times else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Args:
    out: Path = Path("kernels/compiled.csv")
    """output table"""
    measure: Path | None = None
    """instead, time the launches on this machine's GPU and write them to this table"""


def main(args: Args) -> None:
    rows = []
    if args.measure is not None:
        if not torch.cuda.is_available():
            sys.exit("error: --measure needs a CUDA device; this PyTorch finds none.")
        for launch in launches():
            rows.append(measured_row(launch))
            print(*rows[-1].values(), flush=True)
        write_table(args.measure, rows)
        return
    for launch, architecture in product(launches(), CARDS):
        rows.append(make_row(launch, architecture))
        print(*rows[-1].values(), flush=True)
    write_table(args.out, rows)
    print(summary(rows, read_table(MEASURED)))


def write_table(file: Path, rows: list[dict]) -> None:
    table = io.StringIO()
    writer = csv.DictWriter(table, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(file, table.getvalue())


def read_table(file: Path) -> list[dict]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("error: unset TRITON_INTERPRET: Triton's interpreter doesn't compile.")
    run_module(main, Args)
