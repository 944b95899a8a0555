"""Which kernels a run takes on a CPU, and what this processor can do.

`chosen` holds until `use` replaces it. kernels/tune.py measures what is faster here; nothing is
timed while a run computes, because a choice that varied would change its digits.
"""

from bisect import bisect
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

PRODUCTS = ("forward", "input", "weight")  # x W^T, and the gradients of x and W
ROWS = {"1-7": 0, "8-63": 8, "64-511": 64, "512+": 512}  # of x, from
SIZES = {"small": 0, "medium": 2**18, "large": 2**20}  # numbers in W, from
CLEAR = 0.9  # below this share of the other's time, one of two is clearly the faster


@dataclass(frozen=True)
class Choice:
    """What a CPU computes with. The fields change time, memory and rounding, not a formula."""

    name: str = "default"
    """default, tuned, or plain"""
    onednn: tuple[str, ...] = ("forward 8-63 large", "forward 64-511 large")
    """float32 products that oneDNN multiplies instead of MKL, as `product_class` names them"""
    pack: bool = True
    """a sampler rearranges its large weights once, for oneDNN"""
    stored_logits: bool = False
    """`linear_logprobs` stores all logits, as plain PyTorch does"""
    block: int = 2**21
    """logits per block of `linear_logprobs`: 8 MB in float32"""
    kept: int = 14 * 2**20
    """logits that it keeps for the backward pass: 59 MB"""
    bfloat16: float | None = None
    """time of a training pass's product in bfloat16 over float32's; None: not measured"""
    rollouts: dict[str, float] = field(default_factory=dict)
    """the same of a decode step, such as "int8 large"; empty: not measured"""

    @classmethod
    def from_json(cls, value: Any) -> "Choice":
        """From `dataclasses.asdict`, read again. Raises ValueError for anything else."""
        types = {
            "name": str, "onednn": list, "pack": bool, "stored_logits": bool, "block": int,
            "kept": int, "bfloat16": float | None, "rollouts": dict,
        }  # fmt: skip
        if not isinstance(value, dict) or value.keys() != types.keys():
            raise ValueError("its fields are not those of a choice of kernels")
        for name, kind in types.items():
            if not isinstance(value[name], kind):
                raise ValueError(f"{name} is {value[name]!r:.80}")
        if value["block"] < 1:
            raise ValueError(f"block is {value['block']}")
        for name, times in value["rollouts"].items():
            if not isinstance(times, float):
                raise ValueError(f"rollouts has {name} {times!r:.80}")
        return cls(**value | {"onednn": tuple(value["onednn"])})


DEFAULT = Choice()
PLAIN = Choice(name="plain", onednn=(), pack=False, stored_logits=True)
chosen = DEFAULT


def use(choice: Choice) -> None:
    """Compute with these kernels from now on, in this process."""
    global chosen
    chosen = choice


def size_class(num_weights: int) -> str:
    """small, medium or large."""
    return list(SIZES)[bisect(list(SIZES.values()), num_weights) - 1]


@cache
def product_class(product: str, num_rows: int, num_weights: int) -> str:
    """Products of one class take the same library: "forward 8-63 large"."""
    rows = list(ROWS)[bisect(list(ROWS.values()), num_rows) - 1]
    return f"{product} {rows} {size_class(num_weights)}"


@cache
def capabilities() -> dict[str, object]:
    """Instruction sets by name, and `cpu_name`; empty where PyTorch doesn't know them."""
    return dict(torch.cpu.get_capabilities())


def has_int8_products() -> bool:
    """Whether the CPU has VNNI, which sums products of bytes in 32 bits.

    Without it AVX2 sums them in 16 bits, inexactly.
    """
    has_vnni = any(capabilities().get(name, False) for name in ("avx512_vnni", "avx_vnni"))
    return has_vnni and torch.backends.mkldnn.is_available()


def faster_dtype(device: str) -> tuple[str, str]:
    """The dtype of faster large products on a device (cpu or cuda), float32 or bfloat16, and why.

    As measured, where it is. Else AMX decides, which multiplies bfloat16 in tiles: AVX512_BF16
    alone takes a quarter of float32's time on one processor and more than all of it on another.
    """
    if device != "cpu":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        if fast:
            return "bfloat16", "the GPU has bfloat16"
        return "float32", "the GPU has no bfloat16"
    name = capabilities().get("cpu_name", "unknown")
    if chosen.bfloat16 is not None:
        dtype = "bfloat16" if chosen.bfloat16 < CLEAR else "float32"
        share = f"{chosen.bfloat16:.2f} of float32's time in bfloat16"
        return dtype, f"a product takes {share} on the processor, {name}"
    if capabilities().get("amx_bf16", False):
        return "bfloat16", f"the processor, {name}, has AMX"
    return "float32", f"the processor, {name}, is not known to be faster in bfloat16"
