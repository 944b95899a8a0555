"""Whether this processor multiplies faster in 8-bit integers or in bfloat16.

Decided by its maker and its instruction sets, not by timing: a choice that varies between runs
would change their digits.
"""

from functools import cache
from pathlib import Path

import torch

CPUINFO = Path("/proc/cpuinfo")


@cache
def maker() -> str:
    """AuthenticAMD, GenuineIntel, or "" where the system doesn't tell."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.is_file() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")


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

    AMX multiplies bfloat16 in tiles. AVX512_BF16 alone takes a quarter of float32's time on AMD's
    Zen 5, and more than float32's time on Intel. Without either, bfloat16 is converted first, which
    takes 1.6 times float32's time on a Xeon.
    """
    if device != "cpu":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        if fast:
            return "bfloat16", "the GPU has bfloat16"
        return "float32", "the GPU has no bfloat16"
    has = capabilities()
    name = has.get("cpu_name", "unknown")
    if has.get("amx_bf16", False):
        return "bfloat16", f"the processor, {name}, has AMX"
    if has.get("avx512_bf16", False) and maker() == "AuthenticAMD":
        return "bfloat16", f"the processor, {name}, has fast AVX512_BF16"
    return "float32", f"the processor, {name}, is not known to be faster in bfloat16"
