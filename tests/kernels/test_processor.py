"""The table of processors."""

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
    ("found", "dtype", "has_int8"),
    [
        (EPYC_ZEN_5, "bfloat16", True),
        (XEON_CASCADE_LAKE, "float32", True),
        (XEON_COOPER_LAKE, "float32", True),
        (XEON_SAPPHIRE_RAPIDS, "bfloat16", True),
        (CORE_ALDER_LAKE, "float32", True),
        (EPYC_ZEN_3, "float32", False),
        ({}, "float32", False),  # an ARM, or a PyTorch that doesn't tell
    ],
)
def test_what_is_chosen_by_instructions_and_maker(monkeypatch, found, dtype, has_int8):
    monkeypatch.setattr(processor, "capabilities", lambda: found)
    monkeypatch.setattr(processor, "maker", lambda: "AuthenticAMD" if "AMD" in found.get("cpu_name", "") else "")
    chosen, reason = processor.faster_dtype("cpu")
    assert chosen == dtype and str(found.get("cpu_name", "unknown")) in reason
    assert processor.has_int8_products() == has_int8


@pytest.mark.parametrize(("supported", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_a_gpu_takes_bfloat16_where_it_has_it(monkeypatch, supported, dtype):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)
    assert processor.faster_dtype("cuda")[0] == dtype


def test_pytorch_names_this_processor():
    """The keys that are looked up exist: with a typing error none would be found, and nothing would say so."""
    names = {"avx512_vnni", "avx_vnni", "amx_bf16", "avx512_bf16", "cpu_name"}
    if processor.capabilities().get("architecture") == "x86_64":
        assert names <= processor.capabilities().keys()
