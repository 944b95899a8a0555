"""Choice of CPU kernels, and the capabilities of this processor.

`DEFAULT` is used on every machine, unless `use` replaces it. Nothing is timed during a run, because
a changing choice would change its results.
"""

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Choice:
    """CPU kernels. The fields change time, memory and rounding, not what is computed."""

    onednn: bool = True
    """whether some float32 matmuls use oneDNN instead of MKL, see `linear.is_for_onednn`"""
    pack: bool = True
    """whether a sampler packs its large weights once, for oneDNN"""
    block: int = 2**21
    """logits per block of `linear_logprobs`: 8 MB in float32"""
    kept: int = 2**26
    """most logits that `linear_logprobs` keeps for the backward pass: 268 MB in float32"""


DEFAULT = Choice()
PLAIN = Choice(onednn=False, pack=False)  # the matmuls of `torch.nn.functional.linear`
chosen = DEFAULT


def use(choice: Choice) -> None:
    """Use these kernels in this process from now on."""
    global chosen
    chosen = choice


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


def widest_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on Apple's GPUs, which have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def faster_dtype(device: str) -> tuple[str, str]:
    """Return the faster dtype for large matmuls on cpu, cuda or mps, float32 or bfloat16, and why.

    On a CPU, bfloat16 needs AMX, which multiplies it in tiles: AVX512_BF16 takes a quarter of
    float32's time on one processor, but more than float32 on another.
    """
    if device == "mps":
        return "float32", "only float32 works on mps"
    if device != "cpu":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        if fast:
            return "bfloat16", "the GPU supports bfloat16"
        return "float32", "the GPU doesn't support bfloat16"
    name = capabilities().get("cpu_name", "unknown")
    if capabilities().get("amx_bf16", False):
        return "bfloat16", f"the processor, {name}, has AMX"
    return "float32", f"the processor, {name}, is not known to be faster in bfloat16"
