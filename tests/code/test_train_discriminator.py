"""The discriminator end to end on a miniature in Python: triplets, pairs, resuming."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train_ppo
from nanorlhf.code import train_discriminator
from nanorlhf.code.compilers import PythonCompiler
from nanorlhf.code.discriminator import load_discriminator
from nanorlhf.dataset import write_jsonl
from nanorlhf.errors import InputError
from tests.code.test_discriminator import roberta  # noqa: F401  a fixture
from tests.conftest import read_metrics, weights
from tests.rlcf import programs_of


def test_the_discriminator_learns_by_triplets_first_and_then_on_samples_of_the_policy(rlcf):
    rows = read_metrics(rlcf.discriminator.out)
    stages = ["triplet" if "triplet/loss" in row else "pair" if "discriminator/loss" in row else "" for row in rows]
    num_triplets, num_pairs = stages.count("triplet"), stages.count("pair")
    assert stages == ["triplet"] * num_triplets + ["pair"] * num_pairs + [""] and num_triplets > 2 and num_pairs > 2
    summary = json.loads((rlcf.discriminator.out / "summary.json").read_text())
    assert summary["steps"] == num_triplets + num_pairs and 0 < summary["compile_rate"] < 1
    for row in rows[:-1]:
        stage = "triplet" if "triplet/loss" in row else "discriminator"
        assert 0 <= row[f"{stage}/accuracy"] <= 1
        assert row["triplet/loss"] >= 0 if stage == "triplet" else -1 <= row["discriminator/loss"] <= 1


def test_only_samples_that_the_compiler_passes_become_pairs(rlcf):
    out, data = rlcf.discriminator.out, rlcf.discriminator.data
    records = [json.loads(line) for s in ("train", "validation") for line in (data / f"code.{s}.jsonl").open()]
    generated = [json.loads(line) for line in (out / "generated.jsonl").open()]
    assert len(generated) == len(records)
    with PythonCompiler() as compiler:
        found = compiler.check(programs_of(records, [row["response"] for row in generated]))
    for record, row, diagnostics in zip(records, generated, found, strict=True):
        first, last = len(record["prefix"]), len(record["prefix"]) + len(row["response"])
        failures = [d for d in diagnostics if d.kind == "error" or first <= d.last < last]
        assert row["passes"] == (not failures)
    summary = json.loads((out / "summary.json").read_text())
    num_train = sum(1 for _ in (data / "code.train.jsonl").open())
    assert summary["num_validation_pairs"] == sum(row["passes"] for row in generated[num_train:])
    assert summary["compile_rate"] == pytest.approx(sum(row["passes"] for row in generated) / len(generated))


def test_the_first_loss_of_each_stage_is_that_of_its_formula(rlcf, monkeypatch, tmp_path):
    calls = []
    plain = train_discriminator.triplet_loss

    def spy(*arguments):
        calls.append((arguments, plain(*arguments)))
        return calls[-1][1]

    pairs, compare = [], train_discriminator.Discriminator.compare

    def spied(model, queries, first, second):
        pairs.append((queries, first, second, compare(model, queries, first, second)))
        return pairs[-1][-1]

    monkeypatch.setattr(train_discriminator, "triplet_loss", spy)
    monkeypatch.setattr(train_discriminator.Discriminator, "compare", spied)
    train_discriminator.main(
        replace(rlcf.discriminator, out=tmp_path / "d", num_triplet_epochs=1.0, num_pair_epochs=1.0)
    )
    first, *_ = rows = read_metrics(tmp_path / "d")
    (anchors, positives, problems, margin), _ = calls[0]
    total = 0.0
    for i in range(4):
        negatives = [p for p, k in zip([*anchors, *positives], [*problems] * 2, strict=True) if k != problems[i]]
        far = min((((anchors[i] - p) ** 2).sum().item() for p in negatives), default=float("inf"))
        total += max(0.0, ((anchors[i] - positives[i]) ** 2).sum().item() - far + margin)
    assert margin == 0.5 and first["triplet/loss"] == pytest.approx(total / 4, abs=1e-5)
    # [RLCF section 4] D(x, y', y), the generated one first, as it is scored later; minimised
    queries, generated, written, comparison = pairs[0]
    records = [json.loads(line) for line in (rlcf.discriminator.data / "code.train.jsonl").open()]
    samples = [json.loads(line) for line in (tmp_path / "d/generated.jsonl").open()]
    allowed = {
        (r["query"], g["response"], r["response"]) for r, g in zip(records, samples, strict=False) if g["passes"]
    }
    assert set(zip(queries, generated, written, strict=True)) <= allowed
    row = next(row for row in rows if "discriminator/loss" in row)
    assert row["discriminator/loss"] == pytest.approx(comparison.mean().item(), abs=1e-6)
    assert row["discriminator/accuracy"] == pytest.approx((comparison < 0).float().mean().item())


def test_the_discriminator_learns_to_tell_the_policys_programs(rlcf, tmp_path):
    args = replace(rlcf.discriminator, out=tmp_path / "d", num_pair_epochs=30.0, lr=3e-3)
    summary = train_discriminator.main(args)
    losses = [row["discriminator/loss"] for row in read_metrics(args.out) if "discriminator/loss" in row]
    assert abs(losses[0]) < 0.3 and sum(losses[-4:]) / 4 < -0.8 and summary["validation_accuracy"] == 1.0


def test_the_positive_of_a_lone_solution_is_itself_with_renamed_variables(rlcf, monkeypatch, tmp_path):
    for split in ("train", "validation"):
        rows = [json.loads(line) for line in (rlcf.discriminator.data / f"code.{split}.jsonl").open()]
        write_jsonl(tmp_path / f"code.{split}.jsonl", [row | {"meta": {}} for row in rows])  # a problem each
    embed, seen = train_discriminator.Discriminator.embed, []

    def spied(model, queries, responses):
        seen.append((queries, responses))
        return embed(model, queries, responses)

    monkeypatch.setattr(train_discriminator.Discriminator, "embed", spied)
    train_discriminator.main(replace(rlcf.discriminator, data=tmp_path, out=tmp_path / "d", num_triplet_epochs=1.0))
    queries, responses = seen[0]
    assert queries == [""] * 8
    for anchor, positive in zip(responses[:4], responses[4:], strict=True):
        assert anchor != positive and len(anchor.splitlines()) == len(positive.splitlines())
        assert anchor.split("(")[0] == positive.split("(")[0] == "def solve"


def test_resuming_the_discriminator_equals_the_uninterrupted_run(rlcf, monkeypatch, tmp_path):
    """To the last bit: interrupted once among the triplets and once among the pairs; nothing is sampled again."""
    whole = replace(rlcf.discriminator, out=tmp_path / "whole", save_every=2)
    summary = train_discriminator.main(whole)
    num_triplets = sum("triplet/loss" in row for row in read_metrics(whole.out))
    plain, steps = train_discriminator.lr_factor, []
    for name, stop in (("early", 4), ("late", num_triplets + 4)):
        broken = replace(whole, out=tmp_path / name)
        steps.clear()

        def interrupted(*arguments, stop=stop):
            steps.append(1)
            if len(steps) == stop:
                raise KeyboardInterrupt
            return plain(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(train_discriminator, "lr_factor", interrupted)
            with pytest.raises(KeyboardInterrupt):
                train_discriminator.main(broken)
            patch.setattr(train_discriminator, "sample_programs", None)
            assert train_discriminator.main(replace(broken, resume=True)) == summary
        assert len(steps) < stop + summary["steps"]
        assert torch.equal(weights(load_discriminator(broken.out)), weights(load_discriminator(whole.out)))
        assert read_metrics(broken.out) == read_metrics(whole.out)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"batch_size": 1000}, "--batch-size 1000 is more than the .* sampled programs that pass"),
        ({"n_head": 3}, "--n-head 3 must divide --d-model 16"),
        ({"sft": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"encoder": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"max_query_length": 10}, "--max-query-length"),
        ({"data": Path("/nowhere")}, "/nowhere/code.train.jsonl does not exist"),
        ({"triplet_margin": -1.0}, "--triplet-margin -1.0"),
        ({"num_pair_epochs": float("nan")}, "--num-pair-epochs nan"),
    ],
)
def test_bad_settings_of_the_discriminator_are_one_sentence(rlcf, tmp_path, change, sentence):
    with pytest.raises(InputError, match=sentence) as raised:
        train_discriminator.main(replace(rlcf.discriminator, out=tmp_path / "d", **change))
    assert "\n" not in str(raised.value)


def test_too_few_programs_that_pass_leave_the_old_run_untouched(rlcf, tmp_path):
    """That is known only after sampling: late, but before --overwrite deletes anything."""
    args = replace(rlcf.discriminator, out=tmp_path / "d", num_pair_epochs=1.0, num_triplet_epochs=1.0)
    train_discriminator.main(args)
    before = {path: path.read_bytes() for path in args.out.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match="--batch-size 1000 is more than"):
        train_discriminator.main(replace(args, batch_size=1000, overwrite=True))
    assert {path: path.read_bytes() for path in args.out.rglob("*") if path.is_file()} == before


def test_rows_need_no_meta(rlcf, tmp_path):
    for split in ("train", "validation"):
        rows = [json.loads(line) for line in (rlcf.discriminator.data / f"code.{split}.jsonl").open()]
        write_jsonl(tmp_path / f"code.{split}.jsonl", [{k: v for k, v in row.items() if k != "meta"} for row in rows])
    train_discriminator.main(replace(rlcf.discriminator, data=tmp_path, out=tmp_path / "d", num_triplet_epochs=1.0))


@pytest.mark.parametrize("stage", ["discriminator", "ppo"])
def test_bfloat16_trains_too(rlcf, tmp_path, stage):
    if stage == "discriminator":
        train_discriminator.main(replace(rlcf.discriminator, out=tmp_path / "d", dtype="bfloat16", num_pair_epochs=1.0))
        assert weights(load_discriminator(tmp_path / "d")).dtype == torch.float32
    else:
        train_ppo.main(replace(rlcf.ppo, out=tmp_path / "ppo", dtype="bfloat16"))
        (metrics,) = read_metrics(tmp_path / "ppo")
        assert metrics["policy/first_ratio_error"] < 1e-5 and -1 < metrics["discriminator/score"] < 1


def test_either_stage_can_be_left_out(rlcf, tmp_path):
    """Table 4 of the paper: a discriminator without pre-training; Figure 11: one that never saw the policy."""
    for name, change in (("pairs", {"num_triplet_epochs": 0.0}), ("triplets", {"num_pair_epochs": 0.0})):
        train_discriminator.main(replace(rlcf.discriminator, out=tmp_path / name, **change))
        kinds = {key for row in read_metrics(tmp_path / name) for key in row if key.endswith("/loss")}
        assert kinds == {"discriminator/loss" if name == "pairs" else "triplet/loss"}
        load_discriminator(tmp_path / name)


def test_a_pretrained_encoder_becomes_a_discriminator_that_ppo_trains_further(rlcf, roberta, tmp_path):  # noqa: F811
    args = replace(rlcf.discriminator, encoder=str(roberta), out=tmp_path / "d")
    train_discriminator.main(args)
    assert {"triplet", "discriminator"} == {k.split("/")[0] for row in read_metrics(args.out) for k in row if "/" in k}
    ppo = replace(rlcf.ppo, discriminator=str(args.out), discriminator_lr=1e-3, out=tmp_path / "ppo")
    train_ppo.main(ppo)
    before, after = load_discriminator(args.out), load_discriminator(ppo.out / "discriminator")
    assert after.is_pretrained and not torch.equal(weights(before), weights(after))
    (metrics,) = read_metrics(ppo.out)
    assert -1 < metrics["discriminator/score"] < 1
