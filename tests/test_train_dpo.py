"""DPO: the losses against their formulas, and the script on the miniature."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import train_dpo
import train_rm
from nanorlhf.checkpoint import load_gpt
from nanorlhf.dataset import batch_indices, iter_jsonl, load_comparisons, load_unpaired, write_jsonl
from nanorlhf.dpo import Labels
from nanorlhf.errors import InputError
from nanorlhf.tokenizer import load_tokenizer
from tests.conftest import interrupt_at, read_metrics
from tests.test_dpo import float64_sum
from tests.test_train_sft import gradients  # noqa: F401  a fixture
from train_dpo import margin_loss


def minus_log_sigmoid(margin: float) -> float:
    return math.log(1 + math.exp(-abs(margin))) + max(-margin, 0.0)


@given(st.floats(-60, 60))
def test_loss_and_gradient_are_those_of_the_formula(margin):
    """Expected in Python floats: -log(1 / (1 + exp(-margin))), with derivative -1 / (1 + exp(margin))."""
    m = torch.tensor([margin], dtype=torch.float64, requires_grad=True)
    loss = margin_loss(m, 0.3, "sigmoid", 0.0)
    assert loss.item() == pytest.approx(minus_log_sigmoid(margin), abs=1e-12)
    [slope] = torch.autograd.grad(loss.sum(), m)
    assert slope.item() == pytest.approx(-1 / (1 + math.exp(margin)), abs=1e-12)


@given(st.floats(-60, 60))
def test_a_flipped_label_costs_the_margin(margin):
    """log sigmoid(m) - log sigmoid(-m) = m"""
    m = torch.tensor([margin], dtype=torch.float64)
    loss, flipped = (margin_loss(sign * m, 0.3, "sigmoid", 0.0) for sign in (1, -1))
    assert (flipped - loss).item() == pytest.approx(margin, abs=1e-10)


@given(st.floats(-30, 30), st.floats(0.01, 2), st.floats(0.01, 0.49))
def test_the_other_losses_are_those_of_their_papers(log_ratios, beta, share):
    """Expected in Python floats from h, the log(policy / reference) of the chosen minus the rejected response."""
    h = torch.tensor([log_ratios], dtype=torch.float64, requires_grad=True)
    margin = beta * log_ratios
    assume(abs(margin - 1) > 1e-6)  # hinge has no slope at its kink
    right, wrong = minus_log_sigmoid(margin), minus_log_sigmoid(-margin)
    expected = {  # loss and derivative with respect to h
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
        loss = margin_loss(beta * h, beta, kind, label_smoothing)
        assert loss.item() == pytest.approx(value, rel=1e-9, abs=1e-9), kind
        assert torch.autograd.grad(loss.sum(), h)[0].item() == pytest.approx(slope, rel=1e-9, abs=1e-9), kind


@given(st.floats(-10, 10), st.floats(0.01, 0.49))
def test_the_robust_loss_on_flipped_labels_averages_to_dpo_on_true_labels(margin, share):
    m = torch.tensor([margin], dtype=torch.float64)
    flipped_or_not = (margin_loss(sign * m, 0.1, "robust", share).item() for sign in (1, -1))
    mean = sum(p * loss for p, loss in zip((1 - share, share), flipped_or_not, strict=True))
    assert mean == pytest.approx(minus_log_sigmoid(margin), rel=1e-6)
    best = torch.tensor([math.log((1 - share) / share)], dtype=torch.float64, requires_grad=True)
    margin_loss(best, 0.1, "sigmoid", share).backward()
    assert abs(best.grad.item()) < 1e-9  # conservative DPO's optimum


def test_ipo_drives_the_log_ratio_difference_to_half_the_inverse_of_beta():
    h = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    for _ in range(200):
        loss = margin_loss(0.25 * h, 0.25, "ipo", 0.0)
        h = (h - 0.1 * torch.autograd.grad(loss.sum(), h)[0]).detach().requires_grad_(True)
    assert h.item() == pytest.approx(2.0)


def write_unpaired(miniature, directory):
    """Write the miniature's comparisons as an unpaired file: mostly chosen responses, every third time the rejected."""
    directory.mkdir()
    for split in ("train", "validation"):
        rows = []
        for i, (_, row) in enumerate(iter_jsonl(miniature.root / "data" / f"comparisons.{split}.jsonl")):
            is_good = i % 3 != 2
            response = row["chosen" if is_good else "rejected"]
            rows.append({"query": row["query"], "response": response, "label": is_good})
        write_jsonl(directory / f"unpaired.{split}.jsonl", rows)
    return directory


WEIGHTS = Labels(desirable_weight=1.25, undesirable_weight=0.75)
CASES = {
    "sigmoid": {},
    "kto": {"labels": WEIGHTS},
    "kto_unpaired": {"labels": WEIGHTS},
    "orpo": {},
    "simpo": {"labels": Labels(target_margin=0.3)},
}


def log_sigmoid(x):
    return -torch.log(1 + torch.exp(-x))


def paper_loss(args, rows, log_ratio, logprob) -> tuple[torch.Tensor, float]:
    """Compute a batch's mean loss one response at a time, and KTO's z0.

    log_ratio, logprob: (query, response) -> log(policy / reference), log policy of one unpadded text.
    """
    if args.loss.startswith("kto"):
        unrelated = []
        for i, row in enumerate(rows):
            other = rows[(i + 1) % len(rows)]
            unrelated += [log_ratio(row.query, y).item() for y in (other.chosen, other.rejected) if y]
        z0 = max(0.0, sum(unrelated) / len(unrelated))
        losses = []
        for row in rows:
            if row.chosen:
                value = torch.sigmoid(args.beta * (log_ratio(row.query, row.chosen) - z0))
                losses.append(args.labels.desirable_weight * (1 - value))
            if row.rejected:
                value = torch.sigmoid(args.beta * (z0 - log_ratio(row.query, row.rejected)))
                losses.append(args.labels.undesirable_weight * (1 - value))
        return sum(losses) / len(losses), z0
    losses = []
    for row in rows:
        chosen, rejected = (logprob(row.query, y) / len(y) for y in (row.chosen, row.rejected))
        if args.loss == "orpo":
            odds_w, odds_l = (torch.exp(mean) / (1 - torch.exp(mean)) for mean in (chosen, rejected))
            losses.append(-chosen - args.beta * log_sigmoid(torch.log(odds_w / odds_l)))
        elif args.loss == "simpo":
            losses.append(-log_sigmoid(args.beta * chosen - args.beta * rejected - args.labels.target_margin))
        else:
            ratios = [log_ratio(row.query, y) for y in (row.chosen, row.rejected)]
            losses.append(-log_sigmoid(args.beta * (ratios[0] - ratios[1])))
    return sum(losses) / len(losses), 0.0


@pytest.mark.parametrize("kind", CASES)
def test_the_gradient_equals_that_of_single_texts_in_float64(miniature, tmp_path, monkeypatch, gradients, kind):  # noqa: F811
    """Padding, micro-batches and the reference don't change it, and KTO's reference point has no gradient."""
    loaded = []

    def load(path, *_):
        """Return the policy on the first call, then a reference that differs from it."""
        model = load_gpt(path).double()
        for parameter in model.parameters():
            parameter.data -= 0.1 * len(loaded) * torch.sin(parameter)
        loaded.append(copy.deepcopy(model))
        return model

    monkeypatch.setattr(train_dpo, "load_gpt", load)
    settings = {"loss": kind, "beta": 0.5, "num_epochs": 0.125} | CASES[kind]
    if kind == "kto_unpaired":
        settings["data"] = write_unpaired(miniature, tmp_path / "data")
    for size in (1, 3):
        loaded.clear()
        args = replace(miniature.dpo, out=tmp_path / str(size), micro_batch_size=size, **settings)
        train_dpo.main(args)
    tokenizer = load_tokenizer(args.sft)
    models = [model.forbid(tokenizer.pad_id, tokenizer.vocab_size) for model in loaded]
    assert len(models) == (1 if kind in ("orpo", "simpo") else 2)  # ORPO and SimPO have no reference
    if kind == "kto_unpaired":
        rows = load_unpaired(args.data / "unpaired.train.jsonl", tokenizer, None, None)
    else:
        rows = load_comparisons(args.data / "comparisons.train.jsonl", tokenizer, None, None)
    batch = [rows[i] for i in batch_indices(len(rows), args.batch_size, 0, args.seed)]

    def log_ratio(query, response):
        logprob, ref_logprob = (float64_sum(model, query, response) for model in models)
        return logprob - ref_logprob.detach()

    loss, z0 = paper_loss(args, batch, log_ratio, lambda query, y: float64_sum(models[0], query, y))
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in models[0].parameters()])
    [first] = [row for row in read_metrics(args.out) if row.get("episode") == args.batch_size]
    assert first["loss"] == pytest.approx(loss.item(), abs=1e-6)
    if kind.startswith("kto"):
        assert z0 > 0.1 and first["reference_point"] == pytest.approx(z0, abs=1e-5)
    assert len(gradients) == 2 and expected.abs().max() > 1e-2
    # z0 is float32
    assert all(torch.allclose(gradient, expected, atol=1e-6 if z0 else 1e-9) for gradient in gradients)


# ----------------------------------------------------------------------------------------------------------- the script
def test_the_micro_batch_size_changes_the_gradient_only_by_rounding(miniature, tmp_path, gradients):  # noqa: F811
    """In the first step."""
    for size in (1, 3, 8):
        train_dpo.main(replace(miniature.dpo, out=tmp_path / str(size), micro_batch_size=size, num_epochs=0.125))
    assert len(gradients) == 3 and gradients[0].abs().max() > 1e-3
    for gradient in gradients[:-1]:
        assert torch.allclose(gradient, gradients[-1], atol=1e-6) and not torch.equal(gradient, gradients[-1])


@pytest.fixture(scope="module")
def dpo(miniature) -> train_dpo.Args:
    args = replace(miniature.dpo, out=None, num_epochs=4, lr=3e-3, eval_every=5)
    train_dpo.main(args)
    return replace(args, out=miniature.root / "dpo")  # the default is next to the data


def test_the_first_step_starts_at_log_2_and_the_policy_learns_the_labels(dpo):
    rows = read_metrics(dpo.out)
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[0]["margin"] == rows[0]["chosen_reward"] == rows[0]["rejected_reward"] == 0
    assert rows[0]["accuracy"] == 0  # a tie counts as wrong
    trained = [row for row in rows if "lr" in row]
    assert len(trained) == 32 and trained[-1]["loss"] < 0.6 and trained[-1]["margin"] > 0.2
    for row in trained:
        assert row["margin"] == pytest.approx(row["chosen_reward"] - row["rejected_reward"], abs=1e-5)
    assert {"validation_loss", "validation_accuracy", "validation_margin"} <= rows[4].keys()


FIRST_LOSSES = {"ipo": 1.0, "robust": math.log(2), "hinge": 1.0, "kto": 0.5, "kto_unpaired": 0.5}


@pytest.mark.parametrize("kind", [*FIRST_LOSSES, "orpo", "simpo"])
def test_the_script_trains_with_each_loss(miniature, tmp_path, kind):
    """With a reference, the margin is 0 before the first step; after some steps, the loss on all rows is lower."""
    labels = {"robust": Labels(smoothing=0.1), "simpo": Labels(target_margin=0.5)}.get(kind, Labels())
    args = replace(miniature.dpo, loss=kind, labels=labels, beta=2.0 if kind == "simpo" else 0.5)
    if kind == "kto_unpaired":
        args = replace(args, data=write_unpaired(miniature, tmp_path / "data"))
    summary = train_dpo.main(replace(args, out=tmp_path / "dpo", num_epochs=4, lr=3e-3))
    rows = [row for row in read_metrics(tmp_path / "dpo") if "lr" in row]
    if kind in FIRST_LOSSES:
        assert rows[0]["loss"] == pytest.approx(FIRST_LOSSES[kind], abs=1e-5)
    first, last = (sum(row["loss"] for row in part) / len(part) for part in (rows[:4], rows[-8:]))
    assert last < 0.98 * first and sum(row["margin"] for row in rows[-8:]) > 0, last
    counted = "num_validation_rows" if kind == "kto_unpaired" else "num_validation_pairs"
    assert counted in summary and ("reference_point" in rows[0]) == kind.startswith("kto")


def test_validation_metrics_equal_a_recount_over_the_reward_models_pairs(dpo, miniature):
    tokenizer = load_tokenizer(dpo.out)
    policy, ref_policy = (
        load_gpt(path).double().forbid(tokenizer.pad_id, tokenizer.vocab_size) for path in (dpo.out, dpo.sft)
    )
    margins = [
        dpo.beta
        * sum(
            sign * (float64_sum(policy, row.query, response) - float64_sum(ref_policy, row.query, response)).item()
            for response, sign in ((row.chosen, 1), (row.rejected, -1))
        )
        for row in load_comparisons(dpo.data / "comparisons.validation.jsonl", tokenizer, None, None)
    ]
    summary, rm_summary = (json.loads((out / "summary.json").read_text()) for out in (dpo.out, miniature.root / "rm"))
    assert summary["validation_accuracy"] == sum(margin > 0 for margin in margins) / len(margins)
    assert summary["validation_margin"] == pytest.approx(sum(margins) / len(margins), abs=1e-5)
    assert summary["num_validation_pairs"] == rm_summary["num_validation_pairs"] == len(margins)


def test_the_data_order_equals_the_reward_models(miniature, monkeypatch, tmp_path):
    seen = {}
    scripts = (
        (train_rm, miniature.rm, train_rm, "pair_scores"),
        (train_dpo, miniature.dpo, train_dpo.dpo, "pair_logprobs"),
    )
    for script, args, module, name in scripts:
        plain, queries = getattr(module, name), seen.setdefault(script, [])

        def spy(model, rows, pad_id, plain=plain, queries=queries):
            queries += [row.record["query"] for row in rows] if torch.is_grad_enabled() else []
            return plain(model, rows, pad_id)

        monkeypatch.setattr(module, name, spy)
        script.main(replace(args, out=tmp_path / name, num_epochs=0.5))
    assert seen[train_dpo] == seen[train_rm] and len(seen[train_dpo]) == 32


def test_resuming_equals_the_uninterrupted_run(dpo, monkeypatch, tmp_path):
    args = replace(dpo, save_every=2, num_epochs=1)
    whole, broken = replace(args, out=tmp_path / "whole"), replace(args, out=tmp_path / "broken")
    summary = train_dpo.main(whole)
    interrupt_at(6, monkeypatch, train_dpo, "lr_factor")
    with pytest.raises(KeyboardInterrupt):
        train_dpo.main(broken)
    assert train_dpo.main(replace(broken, resume=True)) == summary
    assert read_metrics(whole.out) == read_metrics(broken.out)
    for a, b in zip(load_gpt(whole.out).parameters(), load_gpt(broken.out).parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"beta": 0.0}, "--beta 0.0: must be above 0"),
        ({"loss": "robust"}, "--loss robust needs --labels.smoothing"),
        (
            {"loss": "ipo", "labels": Labels(smoothing=0.1)},
            "--labels.smoothing is for --loss sigmoid and robust, not ipo",
        ),
        ({"labels": Labels(smoothing=0.5)}, "--labels.smoothing 0.5: must be at least 0, below 0.5"),
        ({"labels": Labels(smoothing=-0.1)}, "--labels.smoothing -0.1: must be at least 0, below 0.5"),
        ({"labels": Labels(target_margin=1.0)}, "--labels.target-margin is for --loss simpo, not sigmoid"),
        (
            {"loss": "orpo", "labels": Labels(desirable_weight=2.0)},
            "--labels.desirable-weight is for --loss kto and kto_unpaired, not orpo",
        ),
        ({"loss": "kto", "batch_size": 1}, "--batch-size must be at least 2: KTO pairs each query"),
        ({"loss": "kto_unpaired"}, r"unpaired\.train\.jsonl does not exist"),
        ({"batch_size": 1000}, "--batch-size 1000 is more than the 64 rows"),
        ({"warmup_steps": 100}, "--warmup-steps 100 must be less than the 8 steps of the run"),
    ],
)
def test_bad_settings_are_rejected_before_anything_is_written(miniature, tmp_path, change, sentence):
    with pytest.raises(InputError, match=sentence):
        train_dpo.main(replace(miniature.dpo, out=tmp_path / "dpo", **change))
    assert not (tmp_path / "dpo").exists()
