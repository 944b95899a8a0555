"""What this processor's products gain by: 8-bit integers, bfloat16.

Chosen by a table of the instructions that it has and its maker, not by timing: a choice that varies between runs would
change their digits.
"""

from functools import cache
from pathlib import Path

import torch

CPUINFO = Path("/proc/cpuinfo")


@cache
def maker() -> str:
    """AuthenticAMD, GenuineIntel, or nothing where the system doesn't tell."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.is_file() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")


@cache
def capabilities() -> dict[str, object]:
    """Instruction sets by name, and `cpu_name`; empty where PyTorch doesn't know them."""
    return dict(torch.cpu.get_capabilities())


def has_int8_products() -> bool:
    """A CPU with VNNI, which multiplies bytes and sums them in 32 bits; without it AVX2 sums them in 16, inexactly."""
    has_vnni = any(capabilities().get(name, False) for name in ("avx512_vnni", "avx_vnni"))
    return has_vnni and torch.backends.mkldnn.is_available()


def faster_dtype(device: str) -> tuple[str, str]:
    """The dtype, float32 or bfloat16, in which large products are faster on a device, cpu or cuda; and why.

    AMX multiplies bfloat16 in tiles. AVX512_BF16 alone takes a quarter of float32's time on AMD's Zen 5 and more than
    all of it where Intel has it; without either, bfloat16 is converted first (1.6 times float32's time on a Xeon).
    """
    if device != "cpu":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        return ("bfloat16", "the GPU has bfloat16") if fast else ("float32", "the GPU has no bfloat16")
    has, name = capabilities(), str(capabilities().get("cpu_name", "unknown"))
    if has.get("amx_bf16", False):
        return "bfloat16", f"the processor, {name}, has AMX"
    if has.get("avx512_bf16", False) and maker() == "AuthenticAMD":
        return "bfloat16", f"the processor, {name}, has fast AVX512_BF16"
    return "float32", f"the processor, {name}, is not known to be faster in bfloat16"
