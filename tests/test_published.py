"""Miniatures of published tokenizers: each ends texts like its model, and no setting is lost."""

import json
from dataclasses import replace

import pytest
from transformers import AutoTokenizer, GenerationConfig

from data import chat
from nanorlhf.checkpoint import load_gpt, save
from nanorlhf.config import GPTConfig
from nanorlhf.dataset import load_demonstrations
from nanorlhf.errors import InputError
from nanorlhf.generate import sample_answers
from nanorlhf.model import GPT
from nanorlhf.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.published_tokenizers import SHAPES, publish


@pytest.fixture(params=SHAPES)
def shape(request):
    return SHAPES[request.param]


def marked(shape):
    """Return a text with the names of all special tokens, between spaces and letters."""
    return "the cat" + "".join(f"{name}\n the  {name} mat {name}x" for name in shape.tokens)


def test_eos_and_bos_are_the_models_own(tmp_path, shape):
    publish(tmp_path, shape)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos, tokenizer.bos) == (shape.eos, shape.bos)
    assert tokenizer.stop_ids == [tokenizer.backend.token_to_id(name) for name in (shape.eos, *shape.stops)]


def test_loading_a_tokenizer_changes_no_ids_of_a_text(tmp_path, shape):
    raw, text = publish(tmp_path, shape), marked(shape)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode(text, parse_special=True) == raw.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode("the  cat\n sat") == raw.encode("the  cat\n sat", add_special_tokens=False).ids
    assert tokenizer.pad_id not in raw.get_vocab().values()
    special = {raw.token_to_id(name) for name, flags in shape.tokens.items() if flags.get("special", True)}
    special -= {raw.token_to_id("<unk>")}  # for characters outside the vocabulary
    assert not (special | {tokenizer.eos_id, tokenizer.pad_id}) & set(tokenizer.encode(text + "[PAD]"))


def test_a_saved_tokenizer_is_the_same_here_and_in_transformers(tmp_path, shape):
    raw, text = publish(tmp_path, shape), marked(shape)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.fingerprint == tokenizer.fingerprint
    assert (again.bos, again.chat_template, again.stop_ids) == (shape.bos, tokenizer.chat_template, tokenizer.stop_ids)
    judge = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert judge(text, add_special_tokens=False).input_ids == raw.encode(text, add_special_tokens=False).ids
    ids = (judge.eos_token_id, judge.pad_token_id, judge.bos_token_id)
    assert ids == (tokenizer.eos_id, tokenizer.pad_id, shape.bos and raw.token_to_id(shape.bos))


def test_generation_config_keeps_its_settings_and_stops_at_the_new_eos_too(tmp_path):
    raw = publish(tmp_path, SHAPES["phi-3"])
    before = json.loads((tmp_path / "generation_config.json").read_text())
    end = raw.token_to_id("<|end|>")
    replace(load_tokenizer(tmp_path), eos_id=end).save(tmp_path / "saved")
    after = json.loads((tmp_path / "saved/generation_config.json").read_text())
    assert after == before | {"eos_token_id": [end, *(i for i in before["eos_token_id"] if i != end)]}


def checkpoint(directory, tokenizer):
    """Save a small model and a tokenizer as training does."""
    sizes = dict(n_ctx=16, d_model=8, n_layer=1, n_head=2, d_mlp=16, rotary_dim=2)
    save(GPT(GPTConfig(vocab_size=tokenizer.pad_id + 1, **sizes)), directory, tokenizer)
    return directory


@pytest.mark.parametrize("name", ["llama-3.1-instruct", "qwen2.5-instruct", "gemma-2-it", "gpt-neo", "t5"])
def test_a_checkpoint_names_its_bos_and_eos_and_transformers_stops_at_all_stop_ids(tmp_path, name):
    publish(tmp_path, SHAPES[name])
    tokenizer = load_tokenizer(tmp_path)
    directory = checkpoint(tmp_path / "saved", tokenizer)
    config = json.loads((directory / "config.json").read_text())
    bos = tokenizer.bos and tokenizer.backend.token_to_id(tokenizer.bos)
    assert (config["bos_token_id"], config["eos_token_id"]) == (bos, tokenizer.eos_id)
    if (directory / "generation_config.json").exists():  # otherwise transformers makes it from config.json
        generation = GenerationConfig.from_pretrained(directory)
        assert generation.eos_token_id == (tokenizer.stop_ids if SHAPES[name].stops else tokenizer.eos_id)
    assert load_tokenizer(directory).stop_ids == tokenizer.stop_ids


def test_a_checkpoint_keeps_no_settings_of_the_tokenizer_that_it_replaces(tmp_path):
    for name in ("phi-3", "llama-3"):
        publish(tmp_path / name, SHAPES[name])
    directory = checkpoint(tmp_path / "saved", load_tokenizer(tmp_path / "phi-3"))
    (directory / "chat_template.jinja").write_text("another's")
    tokenizer = load_tokenizer(tmp_path / "llama-3")
    again = load_tokenizer(checkpoint(directory, tokenizer))
    assert (again.chat_template, again.stop_ids) == (None, [tokenizer.eos_id])


def test_each_stop_token_of_a_model_ends_a_response_and_is_not_decoded(tmp_path):
    publish(tmp_path, SHAPES["qwen2.5-instruct"])
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer.backend.id_to_token(i) for i in tokenizer.stop_ids] == ["<|im_end|>", "<|endoftext|>"]
    policy = load_gpt(checkpoint(tmp_path / "model", tokenizer)).forbid(tokenizer.pad_id, tokenizer.vocab_size)
    _, response = sample_answers(policy, [tokenizer.encode("the cat")], tokenizer, 128, 20, batch_size=128, seed=0)
    for ids in response.tolist():
        length = next((t for t, i in enumerate(ids) if i in tokenizer.stop_ids), 20)
        assert set(ids[length + 1 :]) <= {tokenizer.pad_id}
        assert tokenizer.decode(ids) == tokenizer.decode(ids[:length])
    assert all((response == stop_id).any() for stop_id in tokenizer.stop_ids)


CHATS = [name for name in SHAPES if "chat_template" in SHAPES[name].settings]


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("contents", [("the cat", "sat on"), ("sat", " on", "the cat", "\n sat ")])
def test_chat_ids_equal_transformers_up_to_the_end_of_the_turn(tmp_path, name, contents):
    """Tested with the data's template, where EOS ends a turn, and with the model's template."""
    publish(tmp_path / "tokenizer", SHAPES[name])
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}))
    chat.main(
        chat.Args(
            source=str(tmp_path / "chats.jsonl"), tokenizer=str(tmp_path / "tokenizer"), out=tmp_path / "out",
            validation_share=0.0,
        )
    )  # fmt: skip
    tokenizer = load_tokenizer(tmp_path / "out")
    [row] = load_demonstrations(tmp_path / "out/sft.train.jsonl", tokenizer, None)
    for directory in ("tokenizer", "out"):
        judge = AutoTokenizer.from_pretrained(tmp_path / directory)
        query = judge.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
        conversation = judge.apply_chat_template(messages, return_dict=False)
        assert row.query == query and row.query + row.response == conversation[: len(row.query + row.response)]
        assert judge.convert_ids_to_tokens(row.response[-1]) == tokenizer.eos
    [ids] = tokenizer.encode_responses([f"x{tokenizer.eos}"], [row.record["query"]])
    assert not set(ids) & set(judge.all_special_ids)  # names of special tokens in a response are text


# -------------------------------------------------------------------------------------------------------------- errors
def test_a_tokenizer_that_changes_when_saved_is_rejected_before_training(tmp_path, monkeypatch):
    publish(tmp_path / "a", SHAPES["granite"])
    reloaded = publish(tmp_path / "b", SHAPES["lowercase"])
    monkeypatch.setattr(Tokenizer, "_parsing_special", property(lambda _: reloaded))
    with pytest.raises(InputError, match="a: the tokenizer encodes .*end_of_text.* to other ids after saving"):
        load_tokenizer(tmp_path / "a")


def test_pad_never_gets_the_id_of_another_token(tmp_path):
    raw = publish(tmp_path, SHAPES["granite"])
    settings = json.loads(raw.to_str())
    settings["added_tokens"] = []
    vocabulary = settings["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.get)
    vocabulary |= {last: len(vocabulary), "<|end_of_text|>": vocabulary[last]}  # ids include the next free one
    vocabulary[last] = len(vocabulary)
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=rf"ids have gaps, so the next free one, {len(vocabulary)}, isn't free for"):
        load_tokenizer(tmp_path)
