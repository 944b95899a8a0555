"""DPO: the loss against the formula by hand, in float64, and the script on the miniature."""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import train_rm
from nanorlhf.checkpoint import load_gpt
from nanorlhf.dataset import Comparison, Demonstration, load_comparisons
from nanorlhf.dpo import dpo_loss, implicit_rewards, margin_loss, pair_logprobs, summed_logprobs
from nanorlhf.errors import InputError
from nanorlhf.tokenizer import load_tokenizer
from tests.conftest import TINY, interrupt_at, read_metrics

EOS, PAD = 1, 36
ROWS = [Comparison([5, 6, 7], [8, 9, EOS], [4, EOS], {}), Comparison([10], [11, EOS], [12, 13, 14, EOS], {})]
RESPONSES = "chosen", "rejected"
nats = st.floats(-60, 0)


@given(nats, nats, nats, nats, st.floats(0.01, 2))
def test_loss_and_gradient_are_those_of_the_formula(chosen, rejected, ref_chosen, ref_rejected, beta):
    """In Python floats: -log(1 / (1 + exp(-margin))), with derivative -1 / (1 + exp(margin)) by the margin."""
    logprobs = [torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (chosen, rejected)]
    references = [torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (ref_chosen, ref_rejected)]
    loss, chosen_rewards, rejected_rewards = dpo_loss(*logprobs, *references, beta)
    margin = beta * (chosen - ref_chosen) - beta * (rejected - ref_rejected)
    expected = math.log(1 + math.exp(-abs(margin))) + max(-margin, 0.0)
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert chosen_rewards.item() == pytest.approx(beta * (chosen - ref_chosen), abs=1e-12)
    assert rejected_rewards.item() == pytest.approx(beta * (rejected - ref_rejected), abs=1e-12)
    loss.sum().backward()
    slope = -beta / (1 + math.exp(margin))
    assert [x.grad.item() for x in logprobs] == pytest.approx([slope, -slope], abs=1e-12)
    assert all(reference.grad is None for reference in references)


@given(nats, nats, nats, nats)
def test_swapping_the_pair_negates_the_margin(chosen, rejected, ref_chosen, ref_rejected):
    logprobs = (chosen, rejected, ref_chosen, ref_rejected)
    a, b, ref_a, ref_b = (torch.tensor([x], dtype=torch.float64) for x in logprobs)
    loss, *_ = dpo_loss(a, b, ref_a, ref_b, 0.3)
    swapped, *_ = dpo_loss(b, a, ref_b, ref_a, 0.3)
    margin = 0.3 * (a - ref_a - b + ref_b)
    assert (swapped - loss).item() == pytest.approx(margin.item(), abs=1e-10)  # log sigmoid(m) - log sigmoid(-m) = m


def minus_log_sigmoid(margin: float) -> float:
    return math.log(1 + math.exp(-abs(margin))) + max(-margin, 0.0)


@given(st.floats(-30, 30), st.floats(0.01, 2), st.floats(0.01, 0.49))
def test_the_other_losses_are_those_of_their_papers(log_ratios, beta, share):
    """In Python floats, from h = log(policy / reference) of the chosen response less that of the rejected one."""
    zero, h = torch.zeros(1, dtype=torch.float64), torch.tensor([log_ratios], dtype=torch.float64, requires_grad=True)
    margin = beta * log_ratios
    right, wrong = minus_log_sigmoid(margin), minus_log_sigmoid(-margin)
    expected = {  # the loss and its slope by h
        ("ipo", 0.0): ((log_ratios - 1 / (2 * beta)) ** 2, 2 * (log_ratios - 1 / (2 * beta))),
        ("hinge", 0.0): (max(0.0, 1 - margin), -beta if margin < 1 else 0.0),
        ("sigmoid", share): (
            (1 - share) * right + share * wrong,
            beta * (-(1 - share) / (1 + math.exp(margin)) + share / (1 + math.exp(-margin))),
        ),
        ("robust", share): (
            ((1 - share) * right - share * wrong) / (1 - 2 * share),
            beta * (-(1 - share) / (1 + math.exp(margin)) - share / (1 + math.exp(-margin))) / (1 - 2 * share),
        ),
    }
    for (kind, label_smoothing), (value, slope) in expected.items():
        loss, chosen, rejected = dpo_loss(h, zero, zero, zero, beta, kind, label_smoothing)
        assert loss.item() == pytest.approx(value, rel=1e-9, abs=1e-9), kind
        assert (chosen - rejected).item() == pytest.approx(margin, abs=1e-12)
        assert torch.autograd.grad(loss.sum(), h)[0].item() == pytest.approx(slope, rel=1e-9, abs=1e-9), kind


@given(st.floats(-10, 10), st.floats(0.01, 0.49))
def test_the_robust_loss_of_flipped_labels_is_on_average_dpos_of_the_true_ones(margin, share):
    m = torch.tensor([margin], dtype=torch.float64)
    flipped_or_not = (margin_loss(sign * m, 0.1, "robust", share).item() for sign in (1, -1))
    mean = sum(p * loss for p, loss in zip((1 - share, share), flipped_or_not, strict=True))
    assert mean == pytest.approx(minus_log_sigmoid(margin), rel=1e-6)
    best = torch.tensor([math.log((1 - share) / share)], dtype=torch.float64, requires_grad=True)
    margin_loss(best, 0.1, "sigmoid", share).backward()
    assert abs(best.grad.item()) < 1e-9  # where conservative DPO stops


def test_ipo_leads_the_log_ratios_to_half_the_inverse_of_beta():
    h = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    for _ in range(200):
        loss, *_ = dpo_loss(h, *torch.zeros(3, 1, dtype=torch.float64), 0.25, "ipo")
        h = (h - 0.1 * torch.autograd.grad(loss.sum(), h)[0]).detach().requires_grad_(True)
    assert h.item() == pytest.approx(2.0)


def test_a_policy_that_is_its_reference_loses_log_2_and_has_no_margin(tiny_gpt):
    loss, num_right, margin, chosen, rejected = train_rm.implicit_loss(tiny_gpt, tiny_gpt, ROWS, PAD, 0.05)
    assert loss.item() == pytest.approx(2 * math.log(2), abs=1e-6)
    assert num_right == 0 and margin == 0 and chosen == 0 and rejected == 0  # a tie counts as wrong


def float64_sum(model, query: list[int], response: list[int]) -> torch.Tensor:
    """One text without padding, from full logits: the sum of its response tokens' log-probabilities."""
    logits = model.logits(model(torch.tensor([query + response])))[0]  # (L, V)
    return sum(F.log_softmax(logits[len(query) - 1 + t], -1)[token] for t, token in enumerate(response))


def test_logprobs_are_summed_over_the_response_with_its_eos_and_without_the_query(tiny_gpt):
    model = tiny_gpt.double()
    pairs, queries = pair_logprobs(model, ROWS, PAD), [row.query for row in ROWS]
    singly = [summed_logprobs(model, queries, [getattr(row, name) for row in ROWS], PAD) for name in RESPONSES]
    for name, *found in zip(RESPONSES, pairs, singly, strict=True):
        expected = [float64_sum(model, row.query, getattr(row, name)).item() for row in ROWS]
        assert all(sums.tolist() == pytest.approx(expected, abs=1e-9) for sums in found)
    chosen, _ = pairs
    without_eos = summed_logprobs(model, [ROWS[0].query], [ROWS[0].chosen[:-1]], PAD)
    assert without_eos.item() > chosen[0].item() + 1e-3


def test_the_gradient_of_a_batch_equals_that_of_single_texts_in_float64(tiny_gpt):
    """Padding, micro-batches and the frozen reference change nothing."""
    policy = tiny_gpt.double()
    torch.manual_seed(1)
    ref_policy = type(policy)(TINY).double()
    loss, *_ = train_rm.implicit_loss(policy, ref_policy, ROWS, PAD, 0.5)
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in policy.parameters()])
    policy.zero_grad()
    total = 0.0
    for row in ROWS:
        ratios = [
            float64_sum(policy, row.query, response) - float64_sum(ref_policy, row.query, response).detach()
            for response in (row.chosen, row.rejected)
        ]
        total = total + torch.log(1 + torch.exp(-0.5 * (ratios[0] - ratios[1])))
    total.backward()
    expected = torch.cat([p.grad.flatten() for p in policy.parameters()])
    assert loss.item() == pytest.approx(total.item(), abs=1e-9)
    assert expected.abs().max() > 1e-2 and torch.allclose(gradient, expected, atol=1e-9)
    assert all(p.grad is None for p in ref_policy.parameters())


def test_implicit_rewards_do_not_depend_on_the_other_rows(tiny_gpt):
    torch.manual_seed(1)
    ref_policy = type(tiny_gpt)(TINY)
    rows = [Demonstration([5] * n, [7] * (9 - n) + [EOS], {}) for n in (1, 4, 8)]
    together = implicit_rewards(tiny_gpt, ref_policy, rows, PAD, 2.0)
    alone = torch.cat([implicit_rewards(tiny_gpt, ref_policy, [row], PAD, 2.0) for row in rows])
    assert together.abs().min() > 0.5 and torch.allclose(together, alone, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------- the script
@pytest.fixture(scope="module")
def dpo(miniature) -> train_rm.Args:
    args = replace(miniature.rm, loss="dpo", out=None, num_epochs=4, lr=3e-3, eval_every=5)
    train_rm.main(args)
    return replace(args, out=miniature.root / "dpo")  # the default: beside the data


def test_the_first_step_starts_at_log_2_and_the_policy_learns_the_labels(dpo):
    rows = read_metrics(dpo.out)
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[0]["margin"] == rows[0]["chosen_reward"] == rows[0]["rejected_reward"] == 0
    trained = [row for row in rows if "lr" in row]
    assert len(trained) == 32 and trained[-1]["loss"] < 0.6 and trained[-1]["margin"] > 0.2
    for row in trained:
        assert row["margin"] == pytest.approx(row["chosen_reward"] - row["rejected_reward"], abs=1e-5)
    assert {"validation_loss", "validation_accuracy", "validation_margin"} <= rows[4].keys()


@pytest.mark.parametrize("kind", ["ipo", "robust", "hinge"])
def test_the_script_trains_by_the_loss_it_is_told(miniature, tmp_path, kind):
    """At a margin of 0 before the first step, and less on all pairs after some."""
    smoothing = {"robust": 0.1}.get(kind, 0.0)
    args = replace(miniature.rm, loss="dpo", dpo_loss=kind, dpo_label_smoothing=smoothing, dpo_beta=0.5)
    train_rm.main(replace(args, out=tmp_path / "dpo", num_epochs=4, lr=3e-3))
    rows = [row for row in read_metrics(tmp_path / "dpo") if "lr" in row]
    assert rows[0]["loss"] == pytest.approx({"ipo": 1.0, "robust": math.log(2), "hinge": 1.0}[kind], abs=1e-5)
    last = sum(row["loss"] for row in rows[-8:]) / 8
    assert last < 0.98 * rows[0]["loss"] and sum(row["margin"] for row in rows[-8:]) > 0, last


def test_validation_metrics_equal_a_recount_over_the_reward_models_pairs(dpo, miniature):
    tokenizer = load_tokenizer(dpo.out)
    policy, ref_policy = (
        load_gpt(place).double().forbid(tokenizer.pad_id, tokenizer.vocab_size) for place in (dpo.out, dpo.sft)
    )
    margins = [
        dpo.dpo_beta
        * sum(
            sign * (float64_sum(policy, row.query, response) - float64_sum(ref_policy, row.query, response)).item()
            for response, sign in ((row.chosen, 1), (row.rejected, -1))
        )
        for row in load_comparisons(dpo.data / "comparisons.validation.jsonl", tokenizer, None, None)
    ]
    summary, of_rm = (json.loads((out / "summary.json").read_text()) for out in (dpo.out, miniature.root / "rm"))
    assert summary["validation_accuracy"] == sum(margin > 0 for margin in margins) / len(margins)
    assert summary["validation_margin"] == pytest.approx(sum(margins) / len(margins), abs=1e-5)
    assert summary["num_validation_pairs"] == of_rm["num_validation_pairs"] == len(margins)


def test_the_data_comes_in_the_reward_models_order(miniature, monkeypatch, tmp_path):
    seen = {}
    for loss, name in (("contrastive", "pair_scores"), ("dpo", "pair_logprobs")):
        plain, rows_of = getattr(train_rm, name), seen.setdefault(loss, [])

        def spy(model, rows, pad_id, plain=plain, rows_of=rows_of):
            rows_of += [row.record["query"] for row in rows] if torch.is_grad_enabled() else []
            return plain(model, rows, pad_id)

        monkeypatch.setattr(train_rm, name, spy)
        train_rm.main(replace(miniature.rm, loss=loss, out=tmp_path / loss, num_epochs=0.5))
    assert seen["dpo"] == seen["contrastive"] and len(seen["dpo"]) == 32


def test_resuming_equals_the_uninterrupted_run(dpo, monkeypatch, tmp_path):
    args = replace(dpo, save_every=2, num_epochs=1)
    whole, broken = replace(args, out=tmp_path / "whole"), replace(args, out=tmp_path / "broken")
    summary = train_rm.main(whole)
    interrupt_at(6, monkeypatch, train_rm, "lr_factor")
    with pytest.raises(KeyboardInterrupt):
        train_rm.main(broken)
    assert train_rm.main(replace(broken, resume=True)) == summary
    assert read_metrics(whole.out) == read_metrics(broken.out)
    for a, b in zip(load_gpt(whole.out).parameters(), load_gpt(broken.out).parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"trainable": "linear"}, "--trainable linear"),
        ({"dpo_beta": 0.0}, "--dpo-beta 0.0: it must be above 0"),
        ({"dpo_loss": "robust"}, "--dpo-loss robust needs --dpo-label-smoothing"),
        ({"dpo_loss": "ipo", "dpo_label_smoothing": 0.1}, "is of sigmoid and robust, not --dpo-loss ipo"),
        ({"dpo_label_smoothing": 0.5}, "--dpo-label-smoothing 0.5: it must be at least 0 and below 0.5"),
        ({"loss": "contrastive", "dpo_loss": "ipo"}, "are of --loss dpo, not contrastive"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_anything_is_written(miniature, tmp_path, change, sentence):
    with pytest.raises(InputError, match=sentence):
        train_rm.main(replace(miniature.rm, **{"loss": "dpo", "out": tmp_path / "dpo"} | change))
    assert not (tmp_path / "dpo").exists()
