"""RLCF end to end on a miniature in Python: the discriminator, PPO with the compiler, and the two baselines."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import train_ppo
import train_rm
import train_sft
from data import codenet, programs
from nanorlhf.checkpoint import load_gpt, load_scalar, save
from nanorlhf.code.compilers import PythonCompiler
from nanorlhf.code.discriminator import load_discriminator, save_discriminator
from nanorlhf.dataset import load_programs, write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.model import GPT
from nanorlhf.tokenizer import load_tokenizer, train_tokenizer
from tests.code.test_discriminator import roberta  # noqa: F401  a fixture
from tests.conftest import UNCLIPPED, interrupt_at, read_metrics, run_on_two_processes, weights
from tests.test_train_ppo import Spy

T = 28


@dataclass(frozen=True)
class Miniature:
    root: Path
    discriminator: train_rm.DiscriminatorArgs
    ppo: train_ppo.Args


@pytest.fixture(scope="module")
def miniature(tmp_path_factory) -> Miniature:
    """A policy that has nearly learnt the programs for a few problems, so that some of its own pass.

    In what the later stages read people end their programs with a remark, which no program of the policy has.
    """
    root = tmp_path_factory.mktemp("rlcf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "OWN_NAMES", 0.0)  # too hard for so small a policy
        programs.main(
            programs.Args(
                out=root / "programs", language="python", num_problems=24, num_solutions=3, num_bench=(1, 1, 1), seed=2
            )
        )
    lengths = {"max_query_length": 72, "max_response_length": T}
    codenet.main(
        codenet.Args(
            source=root / "programs/sources", out=root / "data", language="python", cuts=2, validation_share=0.25,
            vocab_size=400, **lengths,
        )
    )  # fmt: skip
    common = {"data": root / "data", "device": "cpu"}
    train_sft.main(
        replace(
            train_sft.RECIPES["tiny"][1],
            **common, **lengths, out=root / "sft", rows="code", n_layer=1, d_model=32, n_head=2, batch_size=12, lr=1e-2,
            warmup_steps=5, num_epochs=35.0, num_samples=1,
        )
    )  # fmt: skip
    for split in ("train", "validation"):
        rows = [json.loads(line) for line in (root / f"data/code.{split}.jsonl").open()]
        rows = [row | {"response": row["response"] + "  # by hand"} for row in rows]
        (root / "remarked").mkdir(exist_ok=True)
        write_jsonl(root / f"remarked/code.{split}.jsonl", rows)
    common = {"data": root / "remarked", "device": "cpu", "sft": str(root / "sft"), "max_query_length": 72}
    discriminator = replace(
        train_rm.RECIPES["rlcf"][1],
        **common, max_response_length=60, out=root / "discriminator", n_layer=1, d_model=16, n_head=2,
        triplet_batch_size=4, micro_batch_size=4, num_triplet_epochs=3.0, warmup_steps=0, batch_size=4,
        num_pair_epochs=3.0, response_length=T, temperature=1.0, lr=1e-3, triplet_lr=5e-4,
    )  # fmt: skip
    train_rm.main(discriminator)
    ppo = replace(
        train_ppo.RECIPES["rlcf"][1],
        **common, out=root / "ppo", discriminator=str(opinionated(root)), response_length=T, total_episodes=16,
        batch_size=16, micro_batch_size=8, rollout_batch_size=16, num_ppo_epochs=2, lr=3e-4, sample_every=1,
    )  # fmt: skip
    return Miniature(root, discriminator, ppo)


def opinionated(root: Path) -> Path:
    """A copy of the discriminator whose D is not nearly 0 everywhere, as it is after a few steps."""
    model = load_discriminator(root / "discriminator")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    save_discriminator(model, root / "opinionated")
    return root / "opinionated"


def programs_of(records: list[dict], texts: list[str]) -> list[str]:
    return [record["prefix"] + text + record["suffix"] for record, text in zip(records, texts, strict=True)]


@dataclass
class Rollout:
    """What a run of one update did, and what it should have done."""

    rows: list[dict]
    sampled: torch.Tensor  # (B, T)
    response: torch.Tensor  # (B, T) as the update saw it
    scores: list[float]
    rewards: torch.Tensor  # (B, T)
    values: torch.Tensor  # (B, T)
    metrics: dict
    texts: list[str]  # whole
    passes: list[bool]  # what the compiler says of the whole program
    ends: list[int]  # of a response that fails, the token to blame; else its last one
    eos_id: int
    pad_id: int


@pytest.fixture
def one_update(miniature, monkeypatch):
    """Run one update with changed settings, and check its rollout by independent means."""

    def run(**changes) -> Rollout:
        names = ("generate", "penalised_gae", "batch_indices", "eos_masks")
        with monkeypatch.context() as patch:
            spies = {name: Spy(patch, name) for name in names}
            args = replace(miniature.ppo, overwrite=True, **changes)
            train_ppo.main(args)
        tokenizer = load_tokenizer(args.sft)
        data = load_programs(args.data / "code.train.jsonl", tokenizer, None, None)
        rows = [data[i].record for i in spies["batch_indices"].calls[0][1]]
        sampled = torch.cat([call[1][0] for call in spies["generate"].calls if call[0][4:5] != (0.0,)])
        ids = [row[: row.index(tokenizer.eos_id)] if tokenizer.eos_id in row else row for row in sampled.tolist()]
        texts = [tokenizer.decode(row) for row in ids]
        with PythonCompiler() as compiler:
            found = compiler.check(programs_of(rows, texts))
        passes, ends = [], []
        for record, row, text, diagnostics, whole in zip(rows, ids, texts, found, sampled.tolist(), strict=True):
            first, last = len(record["prefix"]), len(record["prefix"]) + len(text)
            mine = [d.last for d in diagnostics if first <= d.last < last]
            elsewhere = [d.last for d in diagnostics if d.kind == "error"]
            passes.append(not mine and not elsewhere)
            lengths = [len(tokenizer.decode(row[: n + 1])) for n in range(len(row))]  # in characters, with each token
            if mine:
                ends.append(next(n for n, length in enumerate(lengths) if length > mine[0] - first))
            elif elsewhere:
                ends.append(max(len(row) - 1, 0))
            else:
                ends.append(sum(i != tokenizer.pad_id for i in whole) - 1)
        (_, _, values, scores, *_), (rewards, *_) = spies["penalised_gae"].calls[0]
        return Rollout(
            rows, sampled, spies["eos_masks"].calls[-1][0][0], scores.tolist(), rewards, values,
            read_metrics(args.out)[0], texts, passes, ends, tokenizer.eos_id, tokenizer.pad_id,
        )  # fmt: skip

    return run


def comparisons(where, rollout: Rollout) -> list[float]:
    """D(x, y', y) of each row, one at a time."""
    model = load_discriminator(where)
    with torch.no_grad():
        return [
            model.compare([record["query"]], [text], [record["response"]]).item()
            for record, text in zip(rollout.rows, rollout.texts, strict=True)
        ]


# --------------------------------------------------------------------------------------------------- 1. discriminator
def test_the_discriminator_learns_by_triplets_first_and_then_on_samples_of_the_policy(miniature):
    rows = read_metrics(miniature.discriminator.out)
    stages = ["triplet" if "triplet/loss" in row else "pair" if "discriminator/loss" in row else "" for row in rows]
    num_triplets, num_pairs = stages.count("triplet"), stages.count("pair")
    assert stages == ["triplet"] * num_triplets + ["pair"] * num_pairs + [""] and num_triplets > 2 and num_pairs > 2
    summary = json.loads((miniature.discriminator.out / "summary.json").read_text())
    assert summary["steps"] == num_triplets + num_pairs and 0 < summary["compile_rate"] < 1
    for row in rows[:-1]:
        stage = "triplet" if "triplet/loss" in row else "discriminator"
        assert 0 <= row[f"{stage}/accuracy"] <= 1
        assert row["triplet/loss"] >= 0 if stage == "triplet" else -1 <= row["discriminator/loss"] <= 1


def test_only_samples_that_the_compiler_passes_become_pairs(miniature):
    out, data = miniature.discriminator.out, miniature.discriminator.data
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


def test_the_first_loss_of_each_stage_is_that_of_its_formula(miniature, monkeypatch, tmp_path):
    calls = []
    plain = train_rm.triplet_loss

    def spy(*arguments):
        calls.append((arguments, plain(*arguments)))
        return calls[-1][1]

    pairs, compare = [], train_rm.Discriminator.compare

    def spied(model, queries, first, second):
        pairs.append((queries, first, second, compare(model, queries, first, second)))
        return pairs[-1][-1]

    monkeypatch.setattr(train_rm, "triplet_loss", spy)
    monkeypatch.setattr(train_rm.Discriminator, "compare", spied)
    train_rm.main(replace(miniature.discriminator, out=tmp_path / "d", num_triplet_epochs=1.0, num_pair_epochs=1.0))
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
    records = [json.loads(line) for line in (miniature.discriminator.data / "code.train.jsonl").open()]
    samples = [json.loads(line) for line in (tmp_path / "d/generated.jsonl").open()]
    allowed = {
        (r["query"], g["response"], r["response"]) for r, g in zip(records, samples, strict=False) if g["passes"]
    }
    assert set(zip(queries, generated, written, strict=True)) <= allowed
    row = next(row for row in rows if "discriminator/loss" in row)
    assert row["discriminator/loss"] == pytest.approx(comparison.mean().item(), abs=1e-6)
    assert row["discriminator/accuracy"] == pytest.approx((comparison < 0).float().mean().item())


def test_the_discriminator_learns_to_tell_the_policys_programs(miniature, tmp_path):
    args = replace(miniature.discriminator, out=tmp_path / "d", num_pair_epochs=30.0, lr=3e-3)
    summary = train_rm.main(args)
    losses = [row["discriminator/loss"] for row in read_metrics(args.out) if "discriminator/loss" in row]
    assert abs(losses[0]) < 0.3 and sum(losses[-4:]) / 4 < -0.8 and summary["validation_accuracy"] == 1.0


def test_the_positive_of_a_lone_solution_is_itself_with_renamed_variables(miniature, monkeypatch, tmp_path):
    for split in ("train", "validation"):
        rows = [json.loads(line) for line in (miniature.discriminator.data / f"code.{split}.jsonl").open()]
        write_jsonl(tmp_path / f"code.{split}.jsonl", [row | {"meta": {}} for row in rows])  # a problem each
    embed, seen = train_rm.Discriminator.embed, []

    def spied(model, queries, responses):
        seen.append((queries, responses))
        return embed(model, queries, responses)

    monkeypatch.setattr(train_rm.Discriminator, "embed", spied)
    train_rm.main(replace(miniature.discriminator, data=tmp_path, out=tmp_path / "d", num_triplet_epochs=1.0))
    queries, responses = seen[0]
    assert queries == [""] * 8
    for anchor, positive in zip(responses[:4], responses[4:], strict=True):
        assert anchor != positive and len(anchor.splitlines()) == len(positive.splitlines())
        assert anchor.split("(")[0] == positive.split("(")[0] == "def solve"


def test_resuming_the_discriminator_equals_the_uninterrupted_run(miniature, monkeypatch, tmp_path):
    """To the last bit: interrupted once among the triplets and once among the pairs; nothing is sampled again."""
    whole = replace(miniature.discriminator, out=tmp_path / "whole", save_every=2)
    summary = train_rm.main(whole)
    num_triplets = sum("triplet/loss" in row for row in read_metrics(whole.out))
    plain, steps = train_rm.lr_factor, []
    for name, stop in (("early", 4), ("late", num_triplets + 4)):
        broken = replace(whole, out=tmp_path / name)
        steps.clear()

        def interrupted(*arguments, stop=stop):
            steps.append(1)
            if len(steps) == stop:
                raise KeyboardInterrupt
            return plain(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(train_rm, "lr_factor", interrupted)
            with pytest.raises(KeyboardInterrupt):
                train_rm.main(broken)
            patch.setattr(train_rm, "sample_programs", None)
            assert train_rm.main(replace(broken, resume=True)) == summary
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
def test_bad_settings_of_the_discriminator_are_one_sentence(miniature, tmp_path, change, sentence):
    with pytest.raises(InputError, match=sentence) as raised:
        train_rm.main(replace(miniature.discriminator, out=tmp_path / "d", **change))
    assert "\n" not in str(raised.value)


def test_too_few_programs_that_pass_leave_the_old_run_untouched(miniature, tmp_path):
    """That is known only after sampling: late, but before --overwrite deletes anything."""
    args = replace(miniature.discriminator, out=tmp_path / "d", num_pair_epochs=1.0, num_triplet_epochs=1.0)
    train_rm.main(args)
    before = {path: path.read_bytes() for path in args.out.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match="--batch-size 1000 is more than"):
        train_rm.main(replace(args, batch_size=1000, overwrite=True))
    assert {path: path.read_bytes() for path in args.out.rglob("*") if path.is_file()} == before


def test_rows_need_no_meta(miniature, tmp_path):
    for split in ("train", "validation"):
        rows = [json.loads(line) for line in (miniature.discriminator.data / f"code.{split}.jsonl").open()]
        write_jsonl(tmp_path / f"code.{split}.jsonl", [{k: v for k, v in row.items() if k != "meta"} for row in rows])
    train_rm.main(replace(miniature.discriminator, data=tmp_path, out=tmp_path / "d", num_triplet_epochs=1.0))


@pytest.mark.parametrize("stage", ["discriminator", "ppo"])
def test_bfloat16_trains_too(miniature, tmp_path, stage):
    if stage == "discriminator":
        train_rm.main(replace(miniature.discriminator, out=tmp_path / "d", dtype="bfloat16", num_pair_epochs=1.0))
        assert weights(load_discriminator(tmp_path / "d")).dtype == torch.float32
    else:
        train_ppo.main(replace(miniature.ppo, out=tmp_path / "ppo", dtype="bfloat16"))
        (metrics,) = read_metrics(tmp_path / "ppo")
        assert metrics["policy/first_ratio_error"] < 1e-5 and -1 < metrics["discriminator/score"] < 1


def test_either_stage_can_be_left_out(miniature, tmp_path):
    """Table 4 of the paper: a discriminator without pre-training; Figure 11: one that never saw the policy."""
    for name, change in (("pairs", {"num_triplet_epochs": 0.0}), ("triplets", {"num_pair_epochs": 0.0})):
        train_rm.main(replace(miniature.discriminator, out=tmp_path / name, **change))
        kinds = {key for row in read_metrics(tmp_path / name) for key in row if key.endswith("/loss")}
        assert kinds == {"discriminator/loss" if name == "pairs" else "triplet/loss"}
        load_discriminator(tmp_path / name)


def test_a_pretrained_encoder_becomes_a_discriminator_that_ppo_trains_further(miniature, roberta, tmp_path):  # noqa: F811
    args = replace(miniature.discriminator, encoder=str(roberta), out=tmp_path / "d")
    train_rm.main(args)
    assert {"triplet", "discriminator"} == {k.split("/")[0] for row in read_metrics(args.out) for k in row if "/" in k}
    ppo = replace(miniature.ppo, discriminator=str(args.out), discriminator_lr=1e-3, out=tmp_path / "ppo")
    train_ppo.main(ppo)
    before, after = load_discriminator(args.out), load_discriminator(ppo.out / "discriminator")
    assert after.is_pretrained and not torch.equal(weights(before), weights(after))
    (metrics,) = read_metrics(ppo.out)
    assert -1 < metrics["discriminator/score"] < 1


# ------------------------------------------------------------------------------------------ 2. the score and the cut
def test_a_program_that_fails_scores_minus_one_and_one_that_passes_scores_the_discriminators_output(
    miniature, one_update
):
    rollout = one_update()
    assert 3 <= sum(rollout.passes) <= 13  # of 16
    expected = comparisons(miniature.ppo.discriminator, rollout)
    for score, passes, comparison in zip(rollout.scores, rollout.passes, expected, strict=True):
        assert score == (pytest.approx(comparison, abs=1e-5) if passes else -1.0)
    assert max(map(abs, expected)) > 0.1
    assert rollout.metrics["compile_rate"] == sum(rollout.passes) / 16
    passed = [score for score, passes in zip(rollout.scores, rollout.passes, strict=True) if passes]
    assert rollout.metrics["discriminator/score"] == pytest.approx(sum(passed) / len(passed), abs=1e-5)
    assert rollout.metrics["discriminator/accuracy"] == pytest.approx(sum(d < 0 for d in passed) / len(passed))


def test_a_response_ends_with_the_token_to_blame_and_its_score_lies_there(one_update):
    rollout = one_update(kl_coef=0.0, kl_target=None)
    num_cut = 0
    for b, (passes, end) in enumerate(zip(rollout.passes, rollout.ends, strict=True)):
        kept = rollout.response[b].tolist()
        assert kept[: end + 1] == rollout.sampled[b, : end + 1].tolist() and set(kept[end + 1 :]) <= {rollout.pad_id}
        assert kept[end] != rollout.pad_id and (passes or rollout.eos_id not in kept or end == 0)
        rewards = rollout.rewards[b].tolist()
        assert rewards.pop(end) == pytest.approx(rollout.scores[b], abs=1e-6) and not any(rewards)
        num_cut += kept != rollout.sampled[b].tolist()
    assert num_cut >= 3
    assert rollout.metrics["policy/first_ratio_error"] < 1e-5  # over what was kept
    assert rollout.metrics["response_length"] == pytest.approx(sum(end + 1 for end in rollout.ends) / 16)


def test_tokens_that_were_cut_count_nowhere(one_update, monkeypatch):
    """Neither in the logged entropy nor in the KL, whichever pass the old logprobs come from."""
    kept = {}
    for name in ("recomputed", "sampler"):
        rollout = one_update(rollout_logprobs=name)
        assert any(end < T - 1 and not ok for end, ok in zip(rollout.ends, rollout.passes, strict=True))
        kept[name] = {k: rollout.metrics[k] for k in ("objective/entropy", "objective/kl", "objective/kl_k3")}
    assert kept["sampler"] == pytest.approx(kept["recomputed"], abs=1e-3)


def test_without_localisation_responses_stay_whole(one_update):
    rollout = one_update(localise=False, kl_coef=0.0, kl_target=None)
    assert torch.equal(rollout.response, rollout.sampled) and not all(rollout.passes)
    lengths = (rollout.sampled != rollout.pad_id).sum(1)
    for b in range(16):
        assert (rollout.scores[b] == -1.0) == (not rollout.passes[b])
        rewards = rollout.rewards[b].tolist()
        assert rewards.pop(lengths[b] - 1) == pytest.approx(rollout.scores[b], abs=1e-6) and not any(rewards)


def test_without_a_compiler_the_discriminator_scores_every_program(miniature, one_update):
    rollout = one_update(compiler=False)
    assert torch.equal(rollout.response, rollout.sampled) and not all(rollout.passes)
    assert rollout.scores == pytest.approx(comparisons(miniature.ppo.discriminator, rollout), abs=1e-5)
    assert all(-1 < score < 1 for score in rollout.scores)


def test_without_a_discriminator_the_compiler_alone_scores(one_update):
    rollout = one_update(discriminator=None)
    assert rollout.scores == [1.0 if passes else -1.0 for passes in rollout.passes]
    assert set(rollout.scores) == {1.0, -1.0} and "discriminator/score" not in rollout.metrics


def test_the_number_of_responses_scored_at_once_changes_nothing(one_update):
    together, apart = one_update(), one_update(rollout_batch_size=3)
    assert torch.equal(together.response, apart.response)
    assert together.scores == pytest.approx(apart.scores, abs=1e-5)
    for name in ("compile_rate", "errors/syntax", "errors/cannot_find_symbol", "errors/unused"):
        assert together.metrics[name] == apart.metrics[name]


def test_the_logged_errors_are_those_of_the_programs(one_update):
    rollout = one_update()
    counts = {"syntax": 0, "cannot_find_symbol": 0, "unused": 0}
    with PythonCompiler() as compiler:
        found = compiler.check(programs_of(rollout.rows, rollout.texts))
    for record, text, diagnostics in zip(rollout.rows, rollout.texts, found, strict=True):
        first, last = len(record["prefix"]), len(record["prefix"]) + len(text)
        for d in diagnostics:
            if d.kind == "unused":
                counts["unused"] += first <= d.last < last
            else:
                counts["syntax" if d.code.endswith("Error") else "cannot_find_symbol"] += 1
    assert sum(counts.values()) > 0
    for name, count in counts.items():
        assert rollout.metrics[f"errors/{name}"] == pytest.approx(count / 16)


# ------------------------------------------------------------------------------------------------- 3. what is trained
def test_the_discriminator_takes_one_step_against_the_programs_that_passed(miniature, one_update):
    """To rounding, where the gradient is more than rounding: AdamW's first step has one size whatever the gradient."""
    rollout = one_update(discriminator_lr=1e-3)
    model = load_discriminator(miniature.ppo.discriminator)
    before = weights(model)
    rows = [
        (record["query"], text, record["response"])
        for record, text, passes in zip(rollout.rows, rollout.texts, rollout.passes, strict=True)
        if passes
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    comparison = model.compare(*map(list, zip(*rows, strict=True)))
    comparison.mean().backward()
    optimizer.step()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    clear = gradient.abs() > 1e-6
    assert clear.float().mean() > 0.2
    trained = load_discriminator(miniature.ppo.out / "discriminator")
    assert torch.allclose(weights(trained)[clear], weights(model)[clear], atol=1e-4)
    assert (weights(trained) - before).abs()[~clear].max() < 1.1e-3 and not torch.equal(weights(trained), before)
    with torch.no_grad():
        after = trained.compare(*map(list, zip(*rows, strict=True)))
    assert after.mean() < comparison.mean()  # it detects them better


def test_a_frozen_discriminator_stays_and_is_saved_with_the_run(miniature, one_update):
    rollout = one_update(freeze_discriminator=True, discriminator_lr=1e-3)
    before, after = (load_discriminator(d) for d in (miniature.ppo.discriminator, miniature.ppo.out / "discriminator"))
    assert torch.equal(weights(before), weights(after))
    assert abs(rollout.metrics["discriminator/score"]) > 1e-3  # it still scores


def test_a_rollout_in_which_nothing_passes_trains_the_policy_and_leaves_the_discriminator(
    miniature, one_update, monkeypatch
):
    plain = train_ppo.check_responses

    def refuses(records, *arguments):
        return plain([record | {"suffix": "\n)\n"} for record in records], *arguments)

    monkeypatch.setattr(train_ppo, "check_responses", refuses)
    rollout = one_update(discriminator_lr=1e-3)
    assert rollout.scores == [-1.0] * 16 and rollout.metrics["compile_rate"] == 0
    assert rollout.metrics["discriminator/score"] == 0 and rollout.metrics["discriminator/accuracy"] == 0
    assert not torch.equal(weights(load_gpt(miniature.ppo.out)), weights(load_gpt(miniature.ppo.sft)))
    before, after = (load_discriminator(d) for d in (miniature.ppo.discriminator, miniature.ppo.out / "discriminator"))
    assert torch.allclose(weights(before), weights(after), atol=2e-5)  # but for AdamW's weight decay


@pytest.mark.parametrize("freeze", [False, True])
def test_resuming_equals_the_uninterrupted_run(miniature, monkeypatch, tmp_path, freeze):
    """To the last bit."""
    args = replace(
        miniature.ppo, total_episodes=32, batch_size=8, save_every=2, discriminator_lr=1e-3, freeze_discriminator=freeze
    )
    whole, broken = replace(args, out=tmp_path / "whole"), replace(args, out=tmp_path / "broken")
    train_ppo.main(whole)
    interrupt_at(4, monkeypatch, train_ppo, "penalised_gae")
    with pytest.raises(KeyboardInterrupt):
        train_ppo.main(broken)
    train_ppo.main(replace(broken, resume=True))
    for load, name in ((load_gpt, ""), (load_scalar, "value_model"), (load_discriminator, "discriminator")):
        assert torch.equal(weights(load(whole.out / name)), weights(load(broken.out / name)))
    untimed = [
        [{k: v for k, v in row.items() if k != "episodes_per_second"} for row in read_metrics(out)]
        for out in (whole.out, broken.out)
    ]
    assert untimed[0] == untimed[1] and len(untimed[0]) == 4


def test_the_value_model_starts_at_zero_or_from_a_smaller_policy(miniature, one_update, tmp_path):
    rollout = one_update()
    assert not rollout.values.any()  # a head of zeros, so the first advantages are those of the scores alone
    policy, tokenizer = load_gpt(miniature.ppo.sft), load_tokenizer(miniature.ppo.sft)
    assert load_scalar(miniature.ppo.out / "value_model").config.d_model == policy.config.d_model == 32
    small = GPT(replace(policy.config, d_model=16, d_mlp=32, rotary_dim=4))
    save(small, tmp_path / "small", tokenizer)
    rollout = one_update(value_model=str(tmp_path / "small"), lr=1e-2)
    saved = load_scalar(miniature.ppo.out / "value_model")
    assert saved.config.d_model == 16 and not rollout.values.any()
    assert not torch.equal(weights(saved.transformer), weights(small.transformer))
    assert saved.score.weight.any() and rollout.metrics["value/loss"] > 0


def test_ppo_learns_to_write_programs_that_pass(miniature, tmp_path):
    """The signs are right end to end: with the compiler alone, more programs pass after some updates."""
    args = replace(
        miniature.ppo, out=tmp_path / "ppo", discriminator=None, total_episodes=32 * 24, batch_size=32,
        micro_batch_size=32, lr=3e-3, kl_coef=0.0, kl_target=None, num_ppo_epochs=4, schedule="constant",
    )  # fmt: skip
    train_ppo.main(args)
    rates = [row["compile_rate"] for row in read_metrics(args.out)]
    assert sum(rates[-4:]) / 4 > sum(rates[:4]) / 4 + 0.2


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rows": "sft"}, "--rows code"),
        ({"reward": "rule.py:score"}, "no --reward"),
        ({"reward_model": "/nowhere"}, "--reward-model None"),
        ({"compiler": False, "discriminator": None}, "--reward-model None leaves nothing to score with"),
        ({"discriminator": "/nowhere"}, "/nowhere holds no discriminator.json"),
        ({"value_model": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"data": Path("/nowhere")}, "/nowhere/code.train.jsonl does not exist"),
        ({"discriminator_lr": -1.0}, "--discriminator-lr -1.0"),
        ({"objective": "bipolar_ramp"}, "--objective bipolar_ramp .*--discriminator None"),
        ({"objective": "bipolar_ramp", "discriminator": None}, "--num-ppo-epochs 1"),
        ({"objective": "bipolar_ramp", "num_ppo_epochs": 1, "compiler": False}, "pass --compiler"),
        ({"objective": "coderl", "discriminator": None, "num_minibatches": 2}, "--num-minibatches 1"),
        ({"objective": "coderl", "discriminator": None, "num_ppo_epochs": 1}, "--no-localise"),
    ],
)
def test_flags_that_do_not_fit_together_are_one_sentence(miniature, tmp_path, change, sentence):
    with pytest.raises(InputError, match=sentence) as raised:
        train_ppo.main(replace(miniature.ppo, out=tmp_path / "ppo", **change))
    assert "\n" not in str(raised.value) and not (tmp_path / "ppo").exists()


def test_a_value_model_of_another_vocabulary_is_refused(miniature, tmp_path):
    tokenizer = train_tokenizer(["def f(x): return x"] * 9, 280)
    policy = load_gpt(miniature.ppo.sft)
    save(GPT(replace(policy.config, vocab_size=tokenizer.vocab_size)), tmp_path / "other", tokenizer)
    with pytest.raises(InputError, match="--value-model .*other: its tokenizer differs"):
        train_ppo.main(replace(miniature.ppo, out=tmp_path / "ppo", value_model=str(tmp_path / "other")))
    save(GPT(replace(policy.config, n_ctx=16)), tmp_path / "short", load_tokenizer(miniature.ppo.sft))
    with pytest.raises(InputError, match="more than the 16 positions of --value-model"):
        train_ppo.main(replace(miniature.ppo, out=tmp_path / "ppo", value_model=str(tmp_path / "short")))


# ---------------------------------------------------------------------------------------------------- 4. the baselines
@pytest.fixture
def policy_gradients(monkeypatch):
    """The gradient of the policy's weights, and of the value model's, at each optimizer step."""
    plain, seen = torch.optim.AdamW.step, []

    def step(self, *arguments):
        seen.append([None if p.grad is None else p.grad.clone() for g in self.param_groups for p in g["params"]])
        plain(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    return seen


def logprobs_of(policy: GPT, query: str, response: list[int], tokenizer) -> torch.Tensor:
    """(n,) of one response alone, at temperature 1."""
    row = tokenizer.encode(query)
    table = policy.logits(policy(torch.tensor([row + response])))[0, len(row) - 1 : -1].log_softmax(-1)
    return table[range(len(response)), response]


def test_bipolar_ramp_takes_the_gradient_of_its_loss_with_the_sign_fixed(miniature, one_update, policy_gradients):
    rollout = one_update(objective="bipolar_ramp", discriminator=None, num_ppo_epochs=1, lr=1e-4)
    (gradients,) = policy_gradients
    policy, tokenizer = load_gpt(miniature.ppo.sft), load_tokenizer(miniature.ppo.sft)
    policy.forbid(tokenizer.pad_id, tokenizer.vocab_size)

    def two_terms(model):
        faults, written = [], []
        for b, record in enumerate(rollout.rows):
            answer = tokenizer.encode(record["response"]) + [tokenizer.eos_id]
            written.append(logprobs_of(model, record["query"], answer, tokenizer).sum())
            if not rollout.passes[b]:
                kept = rollout.sampled[b, : rollout.ends[b] + 1].tolist()
                faults.append(logprobs_of(model, record["query"], kept, tokenizer)[-1])
        return torch.stack(faults), torch.stack(written)

    faults, written = two_terms(policy)
    loss = (faults[faults > -10].sum() - written.sum()) / 16
    expected = torch.autograd.grad(loss, list(policy.parameters()))
    for ours, its in zip(gradients, expected, strict=False):
        assert torch.allclose(ours, its, atol=1e-4, rtol=1e-3)
    assert max(g.abs().max() for g in expected) > 1e-2
    assert all(g is None for g in gradients[len(expected) :])  # it has no critic

    with torch.no_grad():
        after = load_gpt(miniature.ppo.out).forbid(tokenizer.pad_id, tokenizer.vocab_size)
        after_faults, after_written = two_terms(after)
    counted = faults > -10
    assert 3 < counted.sum() and after_written.sum() > written.sum()
    assert after_faults[counted].sum() - after_written.sum() < faults[counted].sum() - written.sum()


def test_bipolar_ramp_refuses_written_programs_that_do_not_fit_into_the_policy(miniature, tmp_path):
    """It reads them whole, and they may be longer than what is sampled."""
    tokenizer = load_tokenizer(miniature.ppo.sft)
    rows = load_programs(miniature.ppo.data / "code.train.jsonl", tokenizer, None, None)
    n_ctx = max(len(row.query) for row in rows) + 8
    policy = replace(load_gpt(miniature.ppo.sft).config, n_ctx=n_ctx, positions="learned", rotary_dim=0)
    policy = replace(policy, architecture="gpt2", parallel_residual=False, tied_head=True)
    save(GPT(policy), tmp_path / "short", tokenizer)
    args = replace(
        miniature.ppo, sft=str(tmp_path / "short"), out=tmp_path / "ppo", discriminator=None, response_length=8,
        objective="bipolar_ramp", num_ppo_epochs=1,
    )  # fmt: skip
    with pytest.raises(InputError, match=f"more than the {n_ctx} positions of"):
        train_ppo.main(args)
    assert not args.out.exists()


def test_bipolar_ramp_lowers_the_faults_alone_where_the_other_term_has_no_weight(miniature, one_update):
    rollout = one_update(objective="bipolar_ramp", discriminator=None, num_ppo_epochs=1, lr=1e-3, value_coef=0.0)
    tokenizer = load_tokenizer(miniature.ppo.sft)
    policies = [load_gpt(where) for where in (miniature.ppo.sft, miniature.ppo.out)]
    falls = []
    for b, record in enumerate(rollout.rows):
        if not rollout.passes[b]:
            kept = rollout.sampled[b, : rollout.ends[b] + 1].tolist()
            with torch.no_grad():
                before, after = (logprobs_of(policy, record["query"], kept, tokenizer)[-1] for policy in policies)
            falls.append((after - before).item())
    assert sum(falls) < 0 and sum(fall < 0 for fall in falls) > 0.7 * len(falls)


def test_coderl_takes_the_gradient_of_its_two_losses(miniature, one_update, policy_gradients, monkeypatch):
    """Tokens weighed by r(y') - r(greedy) and the critic's probability; the critic by cross-entropy."""
    greedy_texts, plain = [], train_ppo.check_responses

    def spied(*arguments):
        checked = plain(*arguments)
        greedy_texts.append(checked)
        return checked

    monkeypatch.setattr(train_ppo, "check_responses", spied)
    rollout = one_update(objective="coderl", discriminator=None, num_ppo_epochs=1, localise=False)
    assert torch.equal(rollout.response, rollout.sampled)
    (gradients,) = policy_gradients
    policy, tokenizer = load_gpt(miniature.ppo.sft), load_tokenizer(miniature.ppo.sft)
    policy.forbid(tokenizer.pad_id, tokenizer.vocab_size)
    loss, differs = 0.0, 0
    with PythonCompiler() as compiler:
        for b, record in enumerate(rollout.rows):
            ids = [i for i in rollout.sampled[b].tolist() if i != tokenizer.pad_id]
            greedy, query = [], tokenizer.encode(record["query"])
            while len(greedy) < T and tokenizer.eos_id not in greedy:
                with torch.no_grad():
                    greedy.append(policy.logits(policy(torch.tensor([query + greedy])))[0, -1].argmax().item())
            text = tokenizer.decode(greedy)
            assert text == greedy_texts[-1].texts[b]
            first = len(record["prefix"])
            (diagnostics,) = compiler.check([record["prefix"] + text + record["suffix"]])
            fails = any(d.kind == "error" or first <= d.last < first + len(text) for d in diagnostics)
            difference = (1 if rollout.passes[b] else -1) - (-1 if fails else 1)
            differs += difference != 0
            # the critic's head begins at 0: it says one half of everything
            loss = loss - difference * 0.5 * logprobs_of(policy, record["query"], ids, tokenizer).sum() / 16
    assert 2 < differs < 16
    expected = torch.autograd.grad(loss, list(policy.parameters()))
    for ours, its in zip(gradients, expected, strict=False):
        assert torch.allclose(ours, its, atol=1e-4, rtol=1e-3)
    assert max(g.abs().max() for g in expected) > 1e-2
    critic = gradients[len(expected) :]
    assert rollout.metrics["value/loss"] == pytest.approx(torch.tensor(2.0).log().item(), abs=1e-5)
    share = sum(rollout.passes) / 16
    assert critic[-1].item() == pytest.approx(0.5 - share, abs=1e-5)  # of the head's bias


@pytest.mark.parametrize("objective", ["bipolar_ramp", "coderl"])
def test_a_baseline_runs_and_resumes(miniature, tmp_path, objective):
    args = replace(
        miniature.ppo, out=tmp_path / "ppo", discriminator=None, objective=objective, num_ppo_epochs=1, localise=False,
        total_episodes=24, batch_size=8, save_every=1,
    )  # fmt: skip
    train_ppo.main(args)
    metrics = read_metrics(args.out)
    assert len(metrics) == 3 and all(row["policy/first_ratio_error"] < 1e-5 for row in metrics)
    before = {k: v for k, v in metrics[-1].items() if k != "episodes_per_second"}
    (args.out / "summary.json").unlink()
    summary = train_ppo.main(replace(args, resume=True))
    assert summary == {k: v for k, v in before.items() if k != "step"}


# ------------------------------------------------------------------------------------------------- 5. two processes
@pytest.fixture(scope="module")
def runs(miniature, tmp_path_factory):
    """PPO, CodeRL and the discriminator's training: the directories of the run on one process and of that on two."""
    root = tmp_path_factory.mktemp("two_processes")
    # AdamW blows the rounding of a gradient that is 0 up to a whole step if its epsilon is too small
    ppo = replace(miniature.ppo, total_episodes=32, discriminator_lr=1e-5, adam_eps=1e-5, **UNCLIPPED)
    coderl = replace(ppo, objective="coderl", discriminator=None, localise=False, num_ppo_epochs=1)
    stages = {
        "ppo": (train_ppo.main, ppo),
        "coderl": (train_ppo.main, coderl),
        "discriminator": (train_rm.main, replace(miniature.discriminator, micro_batch_size=2, adam_eps=1e-5)),
    }
    for stage, (main, args) in stages.items():
        main(replace(args, out=root / stage / "one"))
    run_on_two_processes([(main, replace(args, out=root / s / "two")) for s, (main, args) in stages.items()], root)
    return {stage: (root / stage / "one", root / stage / "two") for stage in stages}


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["ppo", "coderl"])
def test_two_processes_equal_one_in_ppo(runs, objective):
    """Weights and metrics equal to rounding, without clipping; samples to the last bit."""
    one, two = runs[objective]
    for load, name in ((load_gpt, ""), (load_scalar, "value_model"), (load_discriminator, "discriminator")):
        if (one / name).exists():
            assert torch.allclose(weights(load(one / name)), weights(load(two / name)), atol=1e-4)
    skipped = {"episodes_per_second", "policy/first_ratio_error", "policy/sampler_gap"}
    for rows in zip(read_metrics(one), read_metrics(two), strict=True):
        first, second = ({key: value for key, value in row.items() if key not in skipped} for row in rows)
        assert first == pytest.approx(second, abs=5e-4)
    texts = [[json.loads(line)["response"] for line in (out / "samples.jsonl").open()] for out in (one, two)]
    assert texts[0] == texts[1] and len(texts[0]) == 8


@pytest.mark.slow
def test_two_processes_equal_one_in_training_the_discriminator(runs):
    """The triplets are mined within a micro-batch: here it is half a batch, each process's share.

    Equal to rounding, as long as no triplet lies at its hinge and no two negatives are equally near; the sampled
    programs to the last bit.
    """
    one, two = runs["discriminator"]
    assert torch.allclose(*(weights(load_discriminator(out)) for out in (one, two)), atol=2e-5)
    assert (one / "generated.jsonl").read_text() == (two / "generated.jsonl").read_text()
    for first, second in zip(read_metrics(one), read_metrics(two), strict=True):
        assert first == pytest.approx(second, abs=2e-4)
