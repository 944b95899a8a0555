"""RLCF end to end on a miniature in Python: PPO with the compiler and the discriminator."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train_rlcf
from nanorlhf.checkpoint import load_gpt, load_scalar, save
from nanorlhf.errors import InputError
from nanorlhf.model import GPT
from nanorlhf.rlcf import train_baselines, train_discriminator
from nanorlhf.rlcf.compilers import PythonCompiler
from nanorlhf.rlcf.discriminator import load_discriminator
from nanorlhf.tokenizer import load_tokenizer, train_tokenizer
from nanorlhf.training.run import TIME_METRICS
from nanorlhf.training.settings import AdamSettings
from tests.conftest import UNCLIPPED, interrupt_at, read_metrics, weights
from tests.helpers.miniature_rlcf import Rollout, T, whole_programs
from tests.helpers.two_processes import on_processes, run_all


def comparisons(where, rollout: Rollout) -> list[float]:
    """Compute D(x, y', y) of each row, one at a time."""
    model = load_discriminator(where)
    with torch.no_grad():
        return [
            model.compare([record["query"]], [text], [record["response"]]).item()
            for record, text in zip(rollout.rows, rollout.texts, strict=True)
        ]


def test_failing_programs_score_minus_one_and_passing_programs_the_discriminators_output(rlcf, usual_update):
    rollout = usual_update
    assert 3 <= sum(rollout.passes) <= 13  # of 16
    expected = comparisons(rlcf.ppo.discriminator, rollout)
    for score, passes, comparison in zip(rollout.scores, rollout.passes, expected, strict=True):
        assert score == (pytest.approx(comparison, abs=1e-5) if passes else -1.0)
    assert max(map(abs, expected)) > 0.05
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
    assert rollout.metrics["policy/first_ratio_error"] < 1e-5  # over the kept tokens
    assert rollout.metrics["response_length"] == pytest.approx(sum(end + 1 for end in rollout.ends) / 16)


@torch.no_grad()
def test_cut_tokens_count_nowhere(rlcf, usual_update):
    """The logged entropy equals a recount over the kept tokens, one response at a time."""
    rollout, policy = usual_update, load_gpt(rlcf.ppo.sft)
    tokenizer = load_tokenizer(rlcf.ppo.sft)
    policy.forbid(tokenizer.pad_id, tokenizer.vocab_size)
    assert any(end < T - 1 and not ok for end, ok in zip(rollout.ends, rollout.passes, strict=True))
    entropy = 0.0
    for record, response in zip(rollout.rows, rollout.response.tolist(), strict=True):
        query = tokenizer.encode(record["query"])
        kept = [i for i in response if i != rollout.pad_id]
        table = policy.logits(policy(torch.tensor([query + kept])))[0].double() / rlcf.ppo.temperature
        table = table.log_softmax(-1)[len(query) - 1 : -1]
        entropy -= table[range(len(kept)), kept].sum().item() / 16
    assert rollout.metrics["objective/entropy"] == pytest.approx(entropy, rel=1e-4)


def test_without_localisation_responses_stay_whole(one_update):
    rollout = one_update(localise=False, kl_coef=0.0, kl_target=None)
    assert torch.equal(rollout.response, rollout.sampled) and not all(rollout.passes)
    lengths = (rollout.sampled != rollout.pad_id).sum(1)
    for b in range(16):
        assert (rollout.scores[b] == -1.0) == (not rollout.passes[b])
        rewards = rollout.rewards[b].tolist()
        assert rewards.pop(lengths[b] - 1) == pytest.approx(rollout.scores[b], abs=1e-6) and not any(rewards)


def test_without_a_compiler_the_discriminator_scores_every_program(rlcf, one_update):
    rollout = one_update(compiler=False)
    assert torch.equal(rollout.response, rollout.sampled) and not all(rollout.passes)
    assert rollout.scores == pytest.approx(comparisons(rlcf.ppo.discriminator, rollout), abs=1e-5)
    assert all(-1 < score < 1 for score in rollout.scores)


def test_without_a_discriminator_only_the_compiler_scores(one_update):
    rollout = one_update(discriminator=None)
    assert rollout.scores == [1.0 if passes else -1.0 for passes in rollout.passes]
    assert set(rollout.scores) == {1.0, -1.0} and "discriminator/score" not in rollout.metrics
    rollout = one_update(discriminator=None, pass_score=0.25)
    assert rollout.scores == [0.25 if passes else -1.0 for passes in rollout.passes]


def test_the_scoring_batch_size_changes_nothing(usual_update, one_update):
    together, apart = usual_update, one_update(micro_batch_size=1)
    assert torch.equal(together.response, apart.response)
    assert together.scores == pytest.approx(apart.scores, abs=1e-5)
    for name in ("compile_rate", "errors/syntax", "errors/cannot_find_symbol", "errors/unused"):
        assert together.metrics[name] == apart.metrics[name]


def test_the_logged_errors_equal_a_recount_of_the_programs(usual_update):
    rollout = usual_update
    counts = {"syntax": 0, "cannot_find_symbol": 0, "unused": 0}
    with PythonCompiler() as compiler:
        results = compiler.check(whole_programs(rollout.rows, rollout.texts))
    for record, text, diagnostics in zip(rollout.rows, rollout.texts, results, strict=True):
        first, last = len(record["prefix"]), len(record["prefix"]) + len(text)
        for d in diagnostics:
            if d.kind == "unused":
                counts["unused"] += first <= d.last < last
            else:
                counts["syntax" if d.code.endswith("Error") else "cannot_find_symbol"] += 1
    assert sum(counts.values()) > 0
    for name, count in counts.items():
        assert rollout.metrics[f"errors/{name}"] == pytest.approx(count / 16)


def test_the_discriminator_takes_one_step_against_the_programs_that_passed(rlcf, one_update):
    """Equal up to rounding where gradients exceed rounding: AdamW's first step has the same size for any gradient."""
    rollout = one_update(discriminator_lr=1e-3)
    model = load_discriminator(rlcf.ppo.discriminator)
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
    trained = load_discriminator(rlcf.ppo.out / "discriminator")
    assert torch.allclose(weights(trained)[clear], weights(model)[clear], atol=1e-4)
    assert (weights(trained) - before).abs()[~clear].max() < 1.1e-3 and not torch.equal(weights(trained), before)
    with torch.no_grad():
        after = trained.compare(*map(list, zip(*rows, strict=True)))
    assert after.mean() < comparison.mean()  # it recognises them better


def test_a_frozen_discriminator_does_not_change_and_is_saved_with_the_run(rlcf, one_update):
    rollout = one_update(freeze_discriminator=True, discriminator_lr=1e-3)
    before, after = (load_discriminator(d) for d in (rlcf.ppo.discriminator, rlcf.ppo.out / "discriminator"))
    assert torch.equal(weights(before), weights(after))
    assert abs(rollout.metrics["discriminator/score"]) > 1e-3  # it still scores


def test_a_rollout_without_passing_programs_trains_only_the_policy(rlcf, one_update, monkeypatch):
    plain = train_rlcf.check_responses

    def refuses(records, *arguments):
        return plain([record | {"suffix": "\n)\n"} for record in records], *arguments)

    monkeypatch.setattr(train_rlcf, "check_responses", refuses)
    rollout = one_update(discriminator_lr=1e-3)
    assert rollout.scores == [-1.0] * 16 and rollout.metrics["compile_rate"] == 0
    assert rollout.metrics["discriminator/score"] == 0 and rollout.metrics["discriminator/accuracy"] == 0
    assert not torch.equal(weights(load_gpt(rlcf.ppo.out)), weights(load_gpt(rlcf.ppo.sft)))
    before, after = (load_discriminator(d) for d in (rlcf.ppo.discriminator, rlcf.ppo.out / "discriminator"))
    assert torch.allclose(weights(before), weights(after), atol=2e-5)  # except for AdamW's weight decay


@pytest.mark.slow
@pytest.mark.parametrize("freeze", [False, True])
def test_resuming_equals_the_uninterrupted_run(rlcf, monkeypatch, tmp_path, freeze):
    """Equal to the last bit."""
    args = replace(
        rlcf.ppo, total_episodes=24, batch_size=8, save_every=1, discriminator_lr=1e-3, freeze_discriminator=freeze
    )
    whole, broken = replace(args, out=tmp_path / "whole"), replace(args, out=tmp_path / "broken")
    train_rlcf.main(whole)
    interrupt_at(3, monkeypatch, train_rlcf, "gae")
    with pytest.raises(KeyboardInterrupt):
        train_rlcf.main(broken)
    train_rlcf.main(replace(broken, resume=True))
    for load, name in ((load_gpt, ""), (load_scalar, "value_model"), (load_discriminator, "discriminator")):
        assert torch.equal(weights(load(whole.out / name)), weights(load(broken.out / name)))
    untimed = [
        [{k: v for k, v in row.items() if k not in TIME_METRICS} for row in read_metrics(out)]
        for out in (whole.out, broken.out)
    ]
    assert untimed[0] == untimed[1] and len(untimed[0]) == 3


def test_the_value_model_starts_at_zero_or_from_a_smaller_policy(rlcf, one_update, tmp_path):
    rollout = one_update()
    assert not rollout.values.any()  # the head is 0, so the first advantages come only from the scores
    policy, tokenizer = load_gpt(rlcf.ppo.sft), load_tokenizer(rlcf.ppo.sft)
    assert load_scalar(rlcf.ppo.out / "value_model").config.d_model == policy.config.d_model == 32
    small = GPT(replace(policy.config, d_model=16, d_mlp=32, rotary_dim=4))
    save(small, tmp_path / "small", tokenizer)
    rollout = one_update(value_model=str(tmp_path / "small"), lr=1e-2)
    saved = load_scalar(rlcf.ppo.out / "value_model")
    assert saved.config.d_model == 16 and not rollout.values.any()
    assert not torch.equal(weights(saved.transformer), weights(small.transformer))
    assert saved.score.weight.any() and rollout.metrics["value/loss"] > 0


@pytest.mark.slow
def test_ppo_learns_to_write_programs_that_pass(rlcf, tmp_path):
    """All signs are right end to end: with only the compiler, more programs pass after some updates."""
    args = replace(
        rlcf.ppo, out=tmp_path / "ppo", discriminator=None, total_episodes=32 * 24, batch_size=32,
        micro_batch_size=32, lr=3e-3, kl_coef=0.0, kl_target=None, num_ppo_epochs=4, schedule="constant",
    )  # fmt: skip
    train_rlcf.main(args)
    rates = [row["compile_rate"] for row in read_metrics(args.out)]
    assert sum(rates[12:]) / 12 > sum(rates[:4]) / 4 + 0.15  # averages, because one batch of 32 is noisy


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"compiler": False, "discriminator": None}, "--discriminator None: nothing is left to score with"),
        ({"compiler": False, "localise": False}, "--no-localise needs the compiler"),
        ({"discriminator": None, "freeze_discriminator": True}, "--freeze-discriminator needs a --discriminator"),
        ({"pass_score": 0.0}, "--pass-score 0 needs --discriminator None"),
        ({"discriminator": "/nowhere"}, "/nowhere has no discriminator.json"),
        ({"value_model": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"data": Path("/nowhere")}, "/nowhere/code.train.jsonl does not exist"),
        ({"discriminator_lr": -1.0}, "--discriminator-lr -1.0"),
    ],
)
def test_conflicting_flags_raise_a_one_sentence_error(rlcf, tmp_path, change, sentence):
    with pytest.raises(InputError, match=sentence) as raised:
        train_rlcf.main(replace(rlcf.ppo, out=tmp_path / "ppo", **change))
    assert "\n" not in str(raised.value) and not (tmp_path / "ppo").exists()


def test_a_value_model_with_another_vocabulary_is_rejected(rlcf, tmp_path):
    tokenizer = train_tokenizer(["def f(x): return x"] * 9, 280)
    policy = load_gpt(rlcf.ppo.sft)
    save(GPT(replace(policy.config, vocab_size=tokenizer.vocab_size)), tmp_path / "other", tokenizer)
    with pytest.raises(InputError, match="--value-model .*other: its tokenizer differs from"):
        train_rlcf.main(replace(rlcf.ppo, out=tmp_path / "ppo", value_model=str(tmp_path / "other")))
    save(GPT(replace(policy.config, n_ctx=16)), tmp_path / "short", load_tokenizer(rlcf.ppo.sft))
    with pytest.raises(InputError, match="more than the 16 positions of --value-model"):
        train_rlcf.main(replace(rlcf.ppo, out=tmp_path / "ppo", value_model=str(tmp_path / "short")))


# ---------------------------------------------------------------------------------------------------- two processes
@pytest.fixture(scope="module")
def runs(rlcf, tmp_path_factory):
    """Run PPO, CodeRL and discriminator training on one process and on two; return the directories."""
    root = tmp_path_factory.mktemp("two_processes")
    # with a small epsilon, AdamW turns the rounding error of a zero gradient into a full step
    adam = replace(rlcf.ppo.adam, eps=1e-5)
    ppo = replace(rlcf.ppo, total_episodes=32, discriminator_lr=1e-5, adam=adam, **UNCLIPPED)
    coderl = replace(rlcf.baseline, total_episodes=32, adam=adam, objective="coderl", localise=False)
    stages = {
        "ppo": (train_rlcf.main, ppo),
        "coderl": (train_baselines.main, coderl),
        "discriminator": (
            train_discriminator.main,
            replace(rlcf.discriminator, micro_batch_size=2, num_rows=24, adam=AdamSettings(eps=1e-5)),
        ),
    }
    for stage, (main, args) in stages.items():
        main(replace(args, out=root / stage / "one"))
    on_processes(run_all, [(main, replace(args, out=root / s / "two")) for s, (main, args) in stages.items()], root)
    return {stage: (root / stage / "one", root / stage / "two") for stage in stages}


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["ppo", "coderl"])
def test_two_processes_equal_one_in_ppo(runs, objective):
    """Weights and metrics are equal up to rounding, without clipping; samples to the last bit."""
    one, two = runs[objective]
    for load, name in (
        (load_gpt, ""),
        (load_scalar, "value_model"),
        (load_scalar, "critic"),
        (load_discriminator, "discriminator"),
    ):
        if (one / name).exists():
            assert torch.allclose(weights(load(one / name)), weights(load(two / name)), atol=1e-4)
    skipped = {*TIME_METRICS, "policy/first_ratio_error", "policy/sampler_gap"}
    for rows in zip(read_metrics(one), read_metrics(two), strict=True):
        first, second = ({key: value for key, value in row.items() if key not in skipped} for row in rows)
        assert first == pytest.approx(second, abs=5e-4)
    texts = [[json.loads(line)["response"] for line in (out / "samples.jsonl").open()] for out in (one, two)]
    assert texts[0] == texts[1] and len(texts[0]) == 8


@pytest.mark.slow
def test_two_processes_equal_one_in_training_the_discriminator(runs):
    """Triplets are mined within a micro-batch, which is half a batch here, each process's share.

    Equal up to rounding, as long as no triplet is at its hinge and no two negatives are equally near; the sampled
    programs are equal to the last bit.
    """
    one, two = runs["discriminator"]
    assert torch.allclose(*(weights(load_discriminator(out)) for out in (one, two)), atol=2e-5)
    assert (one / "generated.jsonl").read_text() == (two / "generated.jsonl").read_text()
    for rows in zip(read_metrics(one), read_metrics(two), strict=True):
        # held-out triplets are mined within each process's share
        first, second = ({k: v for k, v in row.items() if "validation_triplet" not in k} for row in rows)
        assert first == pytest.approx(second, abs=2e-4)
