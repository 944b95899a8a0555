"""The discriminator end to end on a miniature in Python: triplets, pairs, resuming."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train_rlcf
from nanorlhf.dataset import write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.rlcf import train_discriminator
from nanorlhf.rlcf.compilers import PythonCompiler
from nanorlhf.rlcf.discriminator import load_discriminator
from nanorlhf.training.run import SAMPLING
from tests.conftest import interrupt_at, read_metrics, weights
from tests.helpers.miniature_rlcf import whole_programs

pytestmark = pytest.mark.slow

SHORT = {"num_pair_epochs": 1.0, "num_rows": 24}
"""a few steps on pairs"""


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
        checked = compiler.check(whole_programs(records, [row["response"] for row in generated]))
    for record, row, diagnostics in zip(records, generated, checked, strict=True):
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
    args = replace(rlcf.discriminator, out=tmp_path / "d", num_triplet_epochs=0.0, num_pair_epochs=6.0, lr=1e-2)
    summary = train_discriminator.main(replace(args, warmup_steps=0))
    losses = [row["discriminator/loss"] for row in read_metrics(args.out) if "discriminator/loss" in row]
    assert abs(losses[0]) < 0.3 and sum(losses[-4:]) / 4 < -0.8 and summary["validation_accuracy"] == 1.0


def test_measuring_on_validation_pairs_along_the_way_changes_nothing_else(rlcf, tmp_path):
    args = replace(rlcf.discriminator, out=tmp_path / "d", eval_every=3, **SHORT)
    summary = train_discriminator.main(args)
    *rows, last = read_metrics(args.out)
    measured = {row["step"]: row.pop("validation_accuracy") for row in rows if "validation_accuracy" in row}
    assert [*measured] == list(range(2, len(rows), 3)) and all(0 <= accuracy <= 1 for accuracy in measured.values())
    rarely = replace(args, out=tmp_path / "rarely", eval_every=1000)
    assert train_discriminator.main(rarely) == summary and read_metrics(rarely.out) == [*rows, last]
    # a run that ends at a measurement reports the same number
    train_discriminator.main(replace(args, out=tmp_path / "each", eval_every=1))
    *rows, last = read_metrics(tmp_path / "each")
    assert rows[-1]["validation_accuracy"] == last["validation_accuracy"]


def test_the_positive_of_a_lone_solution_is_itself_with_renamed_variables(rlcf, monkeypatch, tmp_path):
    for split in ("train", "validation"):
        rows = [json.loads(line) for line in (rlcf.discriminator.data / f"code.{split}.jsonl").open()]
        rows = [{k: v for k, v in row.items() if k != "meta"} for row in rows]  # a problem each
        write_jsonl(tmp_path / f"code.{split}.jsonl", rows)
    embed, seen = train_discriminator.Discriminator.embed, []

    def spied(model, queries, responses):
        seen.append((queries, responses))
        return embed(model, queries, responses)

    monkeypatch.setattr(train_discriminator.Discriminator, "embed", spied)
    train_discriminator.main(replace(rlcf.discriminator, data=tmp_path, out=tmp_path / "d", num_pair_epochs=0.0))
    queries, responses = seen[0]
    assert queries == [""] * 8
    for anchor, positive in zip(responses[:4], responses[4:], strict=True):
        assert anchor != positive and len(anchor.splitlines()) == len(positive.splitlines())
        assert anchor.split("(")[0] == positive.split("(")[0] == "def solve"


def test_resuming_the_discriminator_equals_the_uninterrupted_run(rlcf, monkeypatch, tmp_path):
    """To the last bit: interrupted once among the triplets and once among the pairs; nothing is sampled again."""
    whole = replace(rlcf.discriminator, out=tmp_path / "whole", save_every=1, **SHORT)
    summary = train_discriminator.main(whole)
    num_triplets = sum("triplet/loss" in row for row in read_metrics(whole.out))
    plain, steps = train_discriminator.lr_factor, []
    for name, stop in (("early", 3), ("late", num_triplets + 2)):
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
        ({"batch_size": 1000}, r"--batch-size 1000 exceeds the \d+ rows that the policy answers"),
        ({"triplet_batch_size": 1000}, r"--triplet-batch-size 1000 exceeds the \d+ programs in .*remarked"),
        ({"warmup_steps": 1000}, r"--warmup-steps 1000 must be less than the \d+ steps of the run"),
        ({"n_head": 3}, "--n-head 3 must divide --d-model 16"),
        ({"sft": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"encoder": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"max_query_length": 10}, "--max-query-length"),
        ({"data": Path("/nowhere")}, "/nowhere/code.train.jsonl does not exist"),
        ({"triplet_margin": -1.0}, "--triplet-margin -1.0"),
        ({"num_pair_epochs": float("nan")}, "--num-pair-epochs nan"),
    ],
)
def test_bad_settings_of_the_discriminator_are_reported_in_one_sentence(rlcf, tmp_path, change, sentence):
    with pytest.raises(InputError, match=sentence) as raised:
        train_discriminator.main(replace(rlcf.discriminator, out=tmp_path / "d", **change))
    assert "\n" not in str(raised.value) and not (tmp_path / "d").exists()


def test_too_few_programs_that_pass_leave_the_old_run_untouched(rlcf, monkeypatch, tmp_path):
    """This is only known after sampling, but before --overwrite deletes anything. The samples are kept."""
    args = replace(rlcf.discriminator, out=tmp_path / "d", **SHORT)
    train_discriminator.main(args)
    before = {path: path.read_bytes() for path in args.out.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match="--batch-size 24 exceeds the .* of 24 sampled programs that pass"):
        train_discriminator.main(replace(args, batch_size=24, overwrite=True))
    assert {path: path.read_bytes() for path in before} == before
    assert {path.name for path in args.out.rglob("*") if path.is_file() and path not in before} == {SAMPLING}
    with pytest.raises(InputError, match="contains a finished run"):
        train_discriminator.main(args)
    monkeypatch.setattr(train_discriminator, "generate", None)
    train_discriminator.main(replace(args, seed=args.seed, lr=2e-3, resume=True))
    assert (args.out / "generated.jsonl").read_bytes() == before[args.out / "generated.jsonl"]
    assert not (args.out / SAMPLING).exists()


@pytest.mark.parametrize("stage", ["discriminator", "ppo"])
def test_bfloat16_trains_too(rlcf, tmp_path, stage):
    if stage == "discriminator":
        train_discriminator.main(replace(rlcf.discriminator, out=tmp_path / "d", dtype="bfloat16", **SHORT))
        assert weights(load_discriminator(tmp_path / "d")).dtype == torch.float32
    else:
        train_rlcf.main(replace(rlcf.ppo, out=tmp_path / "ppo", dtype="bfloat16"))
        (metrics,) = read_metrics(tmp_path / "ppo")
        assert metrics["policy/first_ratio_error"] < 5e-3 and -1 < metrics["discriminator/score"] < 1


def test_either_stage_can_be_left_out(rlcf, monkeypatch, tmp_path):
    """Table 4 of the paper has no samples, so none are taken. Without both stages, it is a new discriminator."""
    pairs = replace(rlcf.discriminator, out=tmp_path / "pairs", num_triplet_epochs=0.0, num_rows=24)
    train_discriminator.main(pairs)
    monkeypatch.setattr(train_discriminator, "sample_programs", None)
    triplets = replace(rlcf.discriminator, out=tmp_path / "triplets", num_pair_epochs=0.0)
    train_discriminator.main(triplets)
    for args, kind in ((pairs, "discriminator/loss"), (triplets, "triplet/loss")):
        assert {key for row in read_metrics(args.out) for key in row if key.endswith("/loss")} == {kind}
        load_discriminator(args.out)
    assert not (triplets.out / "generated.jsonl").exists()
    neither = replace(triplets, out=tmp_path / "neither", num_triplet_epochs=0.0)
    assert train_discriminator.main(neither) == {"steps": 0}
    assert not torch.equal(weights(load_discriminator(neither.out)), weights(load_discriminator(triplets.out)))


def test_each_program_is_the_anchor_of_one_triplet_per_epoch(rlcf, monkeypatch, tmp_path):
    """The positive is another program for its problem, and at the paper's size the rate reaches its peak."""
    embed, seen = train_discriminator.Discriminator.embed, []

    def spied(model, queries, responses):
        seen.append(responses)
        return embed(model, queries, responses)

    monkeypatch.setattr(train_discriminator.Discriminator, "embed", spied)
    rows = [json.loads(line) for line in (rlcf.discriminator.data / "code.train.jsonl").open()]
    problems = {row["prefix"] + row["response"] + row["suffix"]: row["meta"]["problem"] for row in rows}
    args = replace(rlcf.discriminator, out=tmp_path / "d", num_triplet_epochs=1.0, num_pair_epochs=0.0)
    args = replace(args, triplet_batch_size=2, micro_batch_size=2)
    summary = train_discriminator.main(args)
    triplets = [
        (one, other) for texts in seen[: summary["steps"]] for one, other in zip(texts[:2], texts[2:], strict=True)
    ]
    anchors = {anchor for anchor, _ in triplets}
    assert len(triplets) == len(anchors) == len(problems) // 2 * 2 and anchors <= set(problems)  # whole batches
    sizes = Counter(problems.values())
    assert max(sizes.values()) > 1 == min(sizes.values())
    for anchor, positive in triplets:  # a problem's only program is renamed
        positive_problem = problems[anchor] if sizes[problems[anchor]] > 1 else None
        assert anchor != positive and problems.get(positive) == positive_problem
    rates = [row["lr"] for row in read_metrics(args.out)[:-1]]
    assert max(rates) == args.triplet_lr and len(rates) == len(problems) // 2
    # all validation programs, shuffled: otherwise programs of one problem share a batch without negatives
    assert 0 < summary["validation_triplet_accuracy"] <= 1 and 0 <= summary["validation_triplet_loss"] < 2


def test_interrupted_sampling_continues_where_it_stopped(rlcf, monkeypatch, tmp_path):
    """To the last bit, also after a line that was cut off; with other settings it is refused."""
    whole = replace(rlcf.discriminator, out=tmp_path / "whole", rollout_batch_size=8, **SHORT)
    summary = train_discriminator.main(whole)
    broken = replace(whole, out=tmp_path / "broken")
    with monkeypatch.context() as patch:
        interrupt_at(4, patch, train_discriminator, "generate")
        with pytest.raises(KeyboardInterrupt):
            train_discriminator.main(broken)
    with (broken.out / SAMPLING).open("a") as file:  # one that the next batch had begun, and half of the second
        file.write('{"response": "x", "passes": true}\n{"response": "re')
    assert sorted(path.name for path in broken.out.iterdir()) == [SAMPLING]
    with pytest.raises(InputError, match="interrupted run.*--resume.*--overwrite"):
        train_discriminator.main(broken)
    with pytest.raises(InputError, match=f"{SAMPLING} was started with --top-p 0.95, not 0.5: pass the same"):
        train_discriminator.main(replace(broken, top_p=0.5, resume=True))
    text = (broken.out / SAMPLING).read_text()
    _, digest = json.loads(text.splitlines()[0])["inputs"]["sft"]["model.safetensors"]
    (broken.out / SAMPLING).write_text(text.replace(digest, "of another policy"))
    with pytest.raises(InputError, match="--resume: .*sft/model.safetensors has changed since the sampling in"):
        train_discriminator.main(replace(broken, resume=True))
    (broken.out / SAMPLING).write_text(text)
    num_batches = -(-len((whole.out / "generated.jsonl").read_text().splitlines()) // 8)
    calls = interrupt_at(0, monkeypatch, train_discriminator, "generate")
    assert train_discriminator.main(replace(broken, resume=True)) == summary
    assert len(calls) == num_batches - 3 > 1
    assert (broken.out / "generated.jsonl").read_bytes() == (whole.out / "generated.jsonl").read_bytes()
    assert torch.equal(weights(load_discriminator(broken.out)), weights(load_discriminator(whole.out)))
    assert read_metrics(broken.out) == read_metrics(whole.out) and not (broken.out / SAMPLING).exists()
