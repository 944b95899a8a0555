"""SFT, reward model and PPO on conversations, with the end-of-turn token as EOS."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_ppo
import train_rm
import train_sft
from data import chat
from nanorlhf.checkpoint import load_gpt, save
from nanorlhf.config import GPTConfig
from nanorlhf.dataset import load_demonstrations
from nanorlhf.model import GPT
from nanorlhf.tokenizer import load_tokenizer
from tests.conftest import read_metrics
from tests.helpers.chat_templates import chat_tokenizer
from tests.helpers.shared_directories import made_once

LENGTHS = {"max_query_length": 64, "max_response_length": 12}
REPLIES = ("it is a cat.", "no")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A pretrained model with EOS <|endoftext|>, conversations in its format, and a policy fine-tuned on them."""
    root = made_once(tmp_path_factory, "chat", make_world)
    return root, json.loads((root / "sft/summary.json").read_text())


def make_world(root):
    tokenizer = chat_tokenizer("chatml")
    config = GPTConfig(
        vocab_size=tokenizer.vocab_size, n_ctx=80, d_model=32, n_layer=1, n_head=2, d_mlp=64, rotary_dim=16,
        positions="rotary_half",
    )  # fmt: skip
    torch.manual_seed(0)
    save(GPT(config), root / "model", tokenizer)
    with (root / "source.jsonl").open("w") as file:
        for i in range(72):
            prompt = [{"role": "user", "content": f"what is it? {i}"}]
            record = {"prompt": prompt, "chosen": REPLIES[0], "rejected": REPLIES[1]}
            file.write(json.dumps(record) + "\n")
    chat.main(chat.Args(source=str(root / "source.jsonl"), tokenizer=str(root / "model"), out=root / "data"))
    common = {"data": root / "data", "device": "cpu", "warmup_steps": 0, "batch_size": 8, "num_epochs": 6.0}
    train_sft.main(
        replace(
            train_sft.RECIPES["tiny"][1], **common, **LENGTHS, model=str(root / "model"), tokenizer=str(root / "data"),
            out=root / "sft", num_samples=6, lr=1e-2, loss_on="response",
        )
    )  # fmt: skip
    rm = replace(
        train_rm.RECIPES["tiny"][1], **common | {"num_epochs": 1.0}, **LENGTHS, sft=str(root / "sft"), out=root / "rm",
        num_normalisation=None,
    )  # fmt: skip
    train_rm.main(rm)


def test_a_policy_learns_to_end_its_turn(world):
    root, sft = world
    assert load_tokenizer(root / "model").eos_id != load_tokenizer(root / "sft").eos_id
    for stage in ("data", "sft", "rm"):
        tokenizer = load_tokenizer(root / stage)
        assert tokenizer.backend.id_to_token(tokenizer.eos_id) == "<|im_end|>"
    assert sft["eos_rate"] == 1.0  # at temperature 0.7
    samples = [json.loads(line) for line in (root / "sft/samples.jsonl").read_text().splitlines()]
    assert {sample["sample"] for sample in samples} == {REPLIES[0]}
    assert all(sample["query"].endswith("<|im_start|>assistant\n") for sample in samples)


def test_transformers_can_chat_with_the_policy(world):
    """Its chat template, EOS and generation settings produce the trained reply."""
    root, _ = world
    tokenizer, model = AutoTokenizer.from_pretrained(root / "sft"), AutoModelForCausalLM.from_pretrained(root / "sft")
    asked = [{"role": "user", "content": "what is it? 7"}]
    query = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    ids = model.generate(**query, max_new_tokens=12, do_sample=False)[0]
    assert tokenizer.decode(ids[query["input_ids"].size(1) :]) == REPLIES[0] + "<|im_end|>"


def test_ppo_samples_after_the_chat_markers_and_stops_at_the_end_of_a_turn(world, tmp_path, monkeypatch):
    root, _ = world
    seen, plain = [], train_ppo.load_demonstrations

    def load(*arguments, **settings):
        seen.append(plain(*arguments, **settings))
        return seen[-1]

    monkeypatch.setattr(train_ppo, "load_demonstrations", load)
    train_ppo.main(
        replace(
            train_ppo.RECIPES["tiny"][1], data=root / "data", device="cpu", out=tmp_path / "ppo",
            sft=str(root / "sft"), reward_model=str(root / "rm"), gold=str(root / "rm"), max_query_length=64,
            response_length=12, total_episodes=16, batch_size=8, micro_batch_size=8, num_ppo_epochs=1,
        )
    )  # fmt: skip
    judge = AutoTokenizer.from_pretrained(tmp_path / "ppo")
    [rows] = seen
    for row in rows[:4]:
        content = row.record["query"].split("user\n")[1].split("<|im_end|>")[0]
        expected = judge.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        assert row.query == expected["input_ids"]
    metrics = read_metrics(tmp_path / "ppo")
    assert len(metrics) == 2 and metrics[0]["eos_rate"] > 0.9
    assert metrics[0]["gold_score"] == pytest.approx(metrics[0]["objective/score"], abs=1e-4)  # the same model
    assert load_tokenizer(tmp_path / "ppo").chat_template == load_tokenizer(root / "model").chat_template
    assert load_gpt(tmp_path / "ppo").config == load_gpt(root / "sft").config


def test_a_model_without_the_data_tokenizer_uses_its_own_eos(world, tmp_path):
    root, _ = world
    shutil.copy(root / "data/sft.validation.jsonl", tmp_path)
    [row, *_] = load_demonstrations(tmp_path / "sft.validation.jsonl", load_tokenizer(root / "model"), None, None)
    assert row.response[-1] == load_tokenizer(root / "model").eos_id  # unless --tokenizer DATA is passed
