"""Choice of CPU kernels for a run, and the capabilities of this processor.

`chosen` is used until `use` replaces it. kernels/tune.py measures which kernels are faster on this
machine. Nothing is timed during a run, because a changing choice would change its results.
"""

from bisect import bisect
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

MATMULS = ("forward", "input", "weight")  # x W^T, and the gradients of x and W
ROWS = {"1-7": 0, "8-63": 8, "64-511": 64, "512+": 512}  # lower bounds of rows of x
SIZES = {"small": 0, "medium": 2**18, "large": 2**20}  # lower bounds of weights in W
CLEAR = 0.9  # a candidate is clearly faster below this fraction of the other's time


@dataclass(frozen=True)
class Choice:
    """CPU kernels of a run. The fields change time, memory and rounding, not what is computed."""

    name: str = "default"
    """default, tuned, or plain"""
    onednn: tuple[str, ...] = ("forward 8-63 large", "forward 64-511 large")
    """classes of float32 matmuls that use oneDNN instead of MKL, see `matmul_class`"""
    pack: bool = True
    """whether a sampler packs its large weights once, for oneDNN"""
    stored_logits: bool = False
    """whether `linear_logprobs` stores all logits, like plain PyTorch"""
    block: int = 2**21
    """logits per block of `linear_logprobs`: 8 MB in float32"""
    kept: int = 2**26
    """most logits that `linear_logprobs` keeps for the backward pass: 268 MB in float32"""
    bfloat16: float | None = None
    """time of a training matmul in bfloat16 relative to float32; None: not measured"""
    rollouts: dict[str, float] = field(default_factory=dict)
    """the same for decode steps, by dtype and size such as "int8 large"; empty: not measured"""

    @classmethod
    def from_json(cls, value: Any) -> "Choice":
        """Load the output of `dataclasses.asdict`. Raises ValueError for anything else."""
        types = {
            "name": str, "onednn": list, "pack": bool, "stored_logits": bool, "block": int,
            "kept": int, "bfloat16": float | None, "rollouts": dict,
        }  # fmt: skip
        if not isinstance(value, dict) or value.keys() != types.keys():
            raise ValueError("expected the fields of a choice of kernels")
        for name, kind in types.items():
            if not isinstance(value[name], kind):
                raise ValueError(f"{name} has the wrong type: {value[name]!r:.80}")
        if value["block"] < 1:
            raise ValueError(f"block must be at least 1, got {value['block']}")
        for name, times in value["rollouts"].items():
            if not isinstance(times, float):
                raise ValueError(f"rollouts: {name} must be a float, got {times!r:.80}")
        return cls(**value | {"onednn": tuple(value["onednn"])})


DEFAULT = Choice()
PLAIN = Choice(name="plain", onednn=(), pack=False, stored_logits=True)
chosen = DEFAULT


def use(choice: Choice) -> None:
    """Use these kernels in this process from now on."""
    global chosen
    chosen = choice


def size_class(num_weights: int) -> str:
    """Return small, medium or large."""
    return list(SIZES)[bisect(list(SIZES.values()), num_weights) - 1]


@cache
def matmul_class(kind: str, num_rows: int, num_weights: int) -> str:
    """Return the class of a matmul, such as "forward 8-63 large"; a class uses one library."""
    rows = list(ROWS)[bisect(list(ROWS.values()), num_rows) - 1]
    return f"{kind} {rows} {size_class(num_weights)}"


@cache
def capabilities() -> dict[str, object]:
    """Return instruction sets by name, and `cpu_name`; empty if PyTorch doesn't know them."""
    return dict(torch.cpu.get_capabilities())


def has_int8_matmul() -> bool:
    """Return whether the CPU has VNNI, which sums products of bytes in 32 bits.

    Without VNNI, AVX2 sums them in 16 bits, which can saturate.
    """
    has_vnni = any(capabilities().get(name, False) for name in ("avx512_vnni", "avx_vnni"))
    return has_vnni and torch.backends.mkldnn.is_available()


def faster_dtype(device: str) -> tuple[str, str]:
    """Return the faster dtype for large matmuls on cpu or cuda, float32 or bfloat16, and why.

    Uses the measurement if there is one. Otherwise bfloat16 needs AMX, which multiplies it in
    tiles: AVX512_BF16 takes a quarter of float32's time on one processor, but more than float32 on
    another.
    """
    if device != "cpu":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        if fast:
            return "bfloat16", "the GPU supports bfloat16"
        return "float32", "the GPU doesn't support bfloat16"
    name = capabilities().get("cpu_name", "unknown")
    if chosen.bfloat16 is not None:
        dtype = "bfloat16" if chosen.bfloat16 < CLEAR else "float32"
        share = f"{chosen.bfloat16:.2f} of float32's time in bfloat16"
        return dtype, f"a matmul takes {share} on the processor, {name}"
    if capabilities().get("amx_bf16", False):
        return "bfloat16", f"the processor, {name}, has AMX"
    return "float32", f"the processor, {name}, is not known to be faster in bfloat16"
