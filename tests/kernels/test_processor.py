"""Capabilities of processors, and the dtype that `--dtype auto` picks."""

import pytest
import torch

from kernels import processor

EPYC_ZEN_5 = {"cpu_name": "AMD EPYC 9V45", "avx512_vnni": True, "avx512_bf16": True}
XEON_CASCADE_LAKE = {"cpu_name": "Intel Xeon 2.50GHz", "avx512_vnni": True, "avx512_bf16": False}
XEON_COOPER_LAKE = {"cpu_name": "Intel Xeon 8380H", "avx512_vnni": True, "avx512_bf16": True, "amx_bf16": False}
XEON_SAPPHIRE_RAPIDS = {**XEON_COOPER_LAKE, "amx_bf16": True}
CORE_ALDER_LAKE = {"cpu_name": "12th Gen Intel Core", "avx512_vnni": False, "avx_vnni": True}
EPYC_ZEN_3 = {"cpu_name": "AMD EPYC 7763", "avx512_vnni": False, "avx_vnni": False}


@pytest.mark.parametrize(
    ("capabilities", "dtype", "has_int8"),
    [
        (EPYC_ZEN_5, "float32", True),
        (XEON_CASCADE_LAKE, "float32", True),
        (XEON_COOPER_LAKE, "float32", True),
        (XEON_SAPPHIRE_RAPIDS, "bfloat16", True),
        (CORE_ALDER_LAKE, "float32", True),
        (EPYC_ZEN_3, "float32", False),
        ({}, "float32", False),  # ARM, or a PyTorch version that doesn't report it
    ],
)
def test_instruction_sets_decide_the_dtype_and_int8(monkeypatch, capabilities, dtype, has_int8):
    monkeypatch.setattr(processor, "capabilities", lambda: capabilities)
    chosen, reason = processor.faster_dtype("cpu")
    assert chosen == dtype and str(capabilities.get("cpu_name", "unknown")) in reason
    assert processor.has_int8_matmul() == has_int8


@pytest.mark.parametrize(("supported", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_a_gpu_uses_bfloat16_if_it_supports_it(monkeypatch, supported, dtype):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)
    assert processor.faster_dtype("cuda")[0] == dtype


def test_pytorch_names_this_processor():
    """The keys we look up exist: a misspelt key would silently never be found."""
    names = {"avx512_vnni", "avx_vnni", "amx_bf16", "avx512_bf16", "cpu_name"}
    if processor.capabilities().get("architecture") == "x86_64":
        assert names <= processor.capabilities().keys()
