"""Per-token logits, KL, rewards and values of one response against forward passes of each prefix."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import train_ppo
from nanorlhf.checkpoint import load_gpt, load_scalar
from nanorlhf.metrics.token_rewards import token_rewards
from nanorlhf.report.token_report import ppo_figure, reward_logit_figure, section, token_lines
from nanorlhf.tokenizer import load_tokenizer
from tests.conftest import read_metrics


@pytest.fixture(scope="module")
def ppo(miniature, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("token_rewards") / "ppo"
    train_ppo.main(replace(miniature.ppo, out=out, lr=1e-2))
    return out


def compute_columns(miniature, ppo: Path, response: list[int], directory: Path | None = None) -> dict[str, list]:
    tokenizer = load_tokenizer(ppo)
    policy, ref_policy = (
        load_gpt(p).forbid(tokenizer.pad_id, tokenizer.vocab_size) for p in (ppo, miniature.root / "sft")
    )
    query = torch.tensor([tokenizer.encode("POST: a b c\n\nTL;DR:")])
    ids = torch.tensor([[tokenizer.pad_id if i is None else i for i in response]])
    reward_model = load_scalar(miniature.root / "rm")
    return token_rewards(str(directory or ppo), policy, ref_policy, reward_model, query, ids, tokenizer, 0.7)


def test_every_number_is_that_of_its_prefix(miniature, ppo):
    tokenizer = load_tokenizer(ppo)
    words = tokenizer.encode(" so we met")
    columns = compute_columns(miniature, ppo, [*words, tokenizer.eos_id, None, None])
    settings = json.loads((ppo / "args.json").read_text())
    kl_coef = read_metrics(ppo)[-1]["objective/kl_coef"]
    reward_model, value_model = load_scalar(miniature.root / "rm"), load_scalar(ppo / "value_model")
    models = [load_gpt(p).forbid(tokenizer.pad_id, tokenizer.vocab_size) for p in (ppo, miniature.root / "sft")]
    ids, response = tokenizer.encode("POST: a b c\n\nTL;DR:"), [*words, tokenizer.eos_id]
    kl = []
    for t, token in enumerate(response):
        before, after = torch.tensor([ids + response[:t]]), torch.tensor([ids + response[: t + 1]])
        logprobs = [F.log_softmax(m.logits(m(before))[0, -1] / settings["temperature"], -1)[token] for m in models]
        kl.append((logprobs[0] - logprobs[1]).item())
        assert columns["rm_logit"][t] == pytest.approx(reward_model(after)[0, -1].item(), abs=1e-5)
        assert columns["kl"][t] == pytest.approx(kl[-1], abs=1e-5)
        assert columns["value"][t] == pytest.approx(value_model(before)[0, -1].item(), abs=1e-5)
        assert columns["reward"][t] == pytest.approx(-kl_coef * kl[-1], abs=1e-5)
    # the state after EOS gets the score
    assert columns["reward"][-1] == pytest.approx(columns["rm_logit"][len(response) - 1], abs=1e-5)
    assert columns["value"][-1] == pytest.approx(value_model(after)[0, -1].item(), abs=1e-5)
    assert columns["rm_logit"][-1] is None and columns["kl"][-1] is None
    assert columns["text"] == [tokenizer.backend.decode([i]) for i in words] + ["[EOS]", ""]


def test_without_eos_the_score_is_that_of_the_eos_trick_on_the_last_token(miniature, ppo):
    words = load_tokenizer(ppo).encode(" so we met")
    columns = compute_columns(miniature, ppo, words)
    settings = json.loads((ppo / "args.json").read_text())
    kl_coef = read_metrics(ppo)[-1]["objective/kl_coef"]
    assert len(columns["text"]) == len(words)
    expected = settings["missing_eos_score"] - kl_coef * columns["kl"][-1]
    assert columns["reward"][-1] == pytest.approx(expected, abs=1e-5)


def test_a_policy_without_a_value_model_has_logits_and_kl_only(miniature, ppo):
    words = load_tokenizer(ppo).encode(" so we met")
    columns = compute_columns(miniature, ppo, words, directory=miniature.root / "sft")
    assert columns.keys() == {"text", "rm_logit", "kl"}


TOKENS = {"text": [" so", "[EOS]", ""], "rm_logit": [0.5, -1.0, None], "kl": [0.0, 0.25, None],
          "reward": [0.0, -0.01, -1.0], "value": [0.1, 0.2, 0.3]}  # fmt: skip


def test_the_figures_and_the_table_show_the_columns():
    bars = reward_logit_figure("ppo", TOKENS).axes[0].patches
    assert [bar.get_height() for bar in bars][:2] == [0.5, -1.0]
    assert bars[0].get_facecolor() != bars[1].get_facecolor()  # the last one is the score
    axes = ppo_figure("ppo", TOKENS).axes[0]
    assert [bar.get_height() for bar in axes.patches] == TOKENS["reward"]
    assert axes.lines[1].get_ydata().tolist() == TOKENS["value"]
    lines = token_lines(TOKENS)
    assert lines[0] == ["token", "RM logit", "KL, nats", "reward", "value"]
    assert lines[2] == ["[EOS]", "-1.00", "0.25", "-0.01", "0.20"] and lines[3][1] == "-"


def test_texts_are_escaped_on_the_page():
    text = section("<i>query</i>", {"<b>": {**TOKENS, "text": ["<script>", "[EOS]", ""]}})
    assert "<script>" not in text and "<i>" not in text and "<b>" not in text
