"""Choice of kernels without a measurement, and its JSON file."""

import json
from dataclasses import asdict, replace

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
def test_without_a_measurement_the_instruction_sets_decide(monkeypatch, capabilities, dtype, has_int8):
    monkeypatch.setattr(processor, "capabilities", lambda: capabilities)
    chosen, reason = processor.faster_dtype("cpu")
    assert chosen == dtype and str(capabilities.get("cpu_name", "unknown")) in reason
    assert processor.has_int8_matmul() == has_int8


@pytest.mark.parametrize(("measured", "dtype"), [(0.3, "bfloat16"), (0.95, "float32"), (1.6, "float32")])
def test_a_measurement_overrides_the_instruction_sets(monkeypatch, measured, dtype):
    monkeypatch.setattr(processor, "capabilities", lambda: XEON_SAPPHIRE_RAPIDS)
    monkeypatch.setattr(processor, "chosen", replace(processor.DEFAULT, bfloat16=measured))
    chosen, reason = processor.faster_dtype("cpu")
    assert chosen == dtype and f"{measured:.2f} of float32's time" in reason and "Xeon" in reason


@pytest.mark.parametrize(("supported", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_a_gpu_uses_bfloat16_if_it_supports_it(monkeypatch, supported, dtype):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)
    assert processor.faster_dtype("cuda")[0] == dtype


def test_pytorch_names_this_processor():
    """The keys we look up exist: a misspelt key would silently never be found."""
    names = {"avx512_vnni", "avx_vnni", "amx_bf16", "avx512_bf16", "cpu_name"}
    if processor.capabilities().get("architecture") == "x86_64":
        assert names <= processor.capabilities().keys()


CHOICE = processor.Choice("tuned", ("weight 512+ small",), False, False, 2**20, 2**26, 0.4, {"int8 large": 0.3})


@pytest.mark.parametrize("choice", [CHOICE, processor.DEFAULT, processor.PLAIN])
def test_a_choice_survives_a_json_round_trip(choice):
    assert processor.Choice.from_json(json.loads(json.dumps(asdict(choice)))) == choice


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"onednn": "all"}, "onednn has the wrong type: 'all'"),
        ({"block": 0}, "block must be at least 1, got 0"),
        ({"block": "2"}, "block has the wrong type: '2'"),
        ({"rollouts": {"int8 large": None}}, "int8 large must be a float, got None"),
        ({"colour": 1}, "expected the fields"),
    ],
)
def test_a_malformed_choice_is_rejected(change, message):
    with pytest.raises(ValueError, match=message):
        processor.Choice.from_json(json.loads(json.dumps(asdict(CHOICE) | change)))
    with pytest.raises(ValueError, match="expected the fields"):
        processor.Choice.from_json([])


@pytest.mark.parametrize(
    ("rows", "weights", "name"),
    [(0, 0, "1-7 small"), (7, 2**18 - 1, "1-7 small"), (8, 2**18, "8-63 medium"), (63, 2**20 - 1, "8-63 medium"),
     (64, 2**20, "64-511 large"), (511, 2**30, "64-511 large"), (512, 1, "512+ small"), (10**6, 1, "512+ small")],
)  # fmt: skip
def test_class_boundaries_match_their_names(rows, weights, name):
    assert processor.matmul_class("input", rows, weights) == f"input {name}"
