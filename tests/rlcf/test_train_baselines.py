"""BipolarRamp and CodeRL end to end: each has the gradient of its formula."""

from dataclasses import replace

import pytest
import torch

from nanorlhf.checkpoint import load_gpt, save
from nanorlhf.dataset import load_programs
from nanorlhf.errors import InputError
from nanorlhf.model import GPT
from nanorlhf.rlcf import train_baselines
from nanorlhf.rlcf.compilers import Diagnostic, PythonCompiler
from nanorlhf.tokenizer import load_tokenizer
from nanorlhf.training.run import TIME_METRICS
from tests.conftest import read_metrics
from tests.helpers.miniature_rlcf import T, whole_programs


@pytest.fixture
def policy_gradients(monkeypatch):
    """The gradient of the policy's weights, and of the value model's, at each optimizer step."""
    plain, seen = torch.optim.AdamW.step, []

    def step(self, *arguments):
        seen.append([None if p.grad is None else p.grad.clone() for g in self.param_groups for p in g["params"]])
        plain(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    return seen


def token_logprobs(policy: GPT, query: str, response: list[int], tokenizer) -> torch.Tensor:
    """Log-probabilities of a single response, (n,), at temperature 1."""
    row = tokenizer.encode(query)
    table = policy.logits(policy(torch.tensor([row + response])))[0, len(row) - 1 : -1].log_softmax(-1)
    return table[range(len(response)), response]


def test_bipolar_ramp_takes_the_gradient_of_its_loss_with_the_sign_fixed(rlcf, one_update, policy_gradients):
    rollout = one_update(train_baselines, lr=1e-4)
    (gradients,) = policy_gradients
    policy, tokenizer = load_gpt(rlcf.baseline.sft), load_tokenizer(rlcf.baseline.sft)
    policy.forbid(tokenizer.pad_id, tokenizer.vocab_size)

    def two_terms(model):
        faults, written = [], []
        for b, record in enumerate(rollout.rows):
            answer = tokenizer.encode(record["response"]) + [tokenizer.eos_id]
            written.append(token_logprobs(model, record["query"], answer, tokenizer).sum())
            if not rollout.passes[b]:
                kept = rollout.sampled[b, : rollout.ends[b] + 1].tolist()
                faults.append(token_logprobs(model, record["query"], kept, tokenizer)[-1])
        return torch.stack(faults), torch.stack(written)

    faults, written = two_terms(policy)
    loss = (faults[faults > -10].sum() - written.sum()) / 16
    expected = torch.autograd.grad(loss, list(policy.parameters()))
    for ours, its in zip(gradients, expected, strict=False):
        assert torch.allclose(ours, its, atol=1e-4, rtol=1e-3)
    assert max(g.abs().max() for g in expected) > 1e-2
    assert all(g is None for g in gradients[len(expected) :])  # it has no critic

    with torch.no_grad():
        after = load_gpt(rlcf.baseline.out).forbid(tokenizer.pad_id, tokenizer.vocab_size)
        after_faults, after_written = two_terms(after)
    counted = faults > -10
    assert 3 < counted.sum() and after_written.sum() > written.sum()
    assert after_faults[counted].sum() - after_written.sum() < faults[counted].sum() - written.sum()


def test_bipolar_ramp_refuses_written_programs_that_do_not_fit_into_the_policy(rlcf, tmp_path):
    """It reads them whole, and they may be longer than what is sampled."""
    tokenizer = load_tokenizer(rlcf.baseline.sft)
    rows = load_programs(rlcf.baseline.data / "code.train.jsonl", tokenizer, None, None)
    n_ctx = max(len(row.query) for row in rows) + 8
    policy = replace(load_gpt(rlcf.baseline.sft).config, n_ctx=n_ctx, positions="learned", rotary_dim=0)
    policy = replace(policy, architecture="gpt2", parallel_residual=False, tied_head=True)
    save(GPT(policy), tmp_path / "short", tokenizer)
    args = replace(
        rlcf.baseline, sft=str(tmp_path / "short"), out=tmp_path / "ppo", response_length=8,
    )  # fmt: skip
    with pytest.raises(InputError, match=f"more than the {n_ctx} positions of"):
        train_baselines.main(args)
    assert not args.out.exists()


def test_bipolar_ramp_only_lowers_faults_if_the_other_term_has_no_weight(rlcf, one_update):
    rollout = one_update(train_baselines, lr=1e-3, second_coef=0.0)
    tokenizer = load_tokenizer(rlcf.baseline.sft)
    policies = [load_gpt(where) for where in (rlcf.baseline.sft, rlcf.baseline.out)]
    falls = []
    for b, record in enumerate(rollout.rows):
        if not rollout.passes[b]:
            kept = rollout.sampled[b, : rollout.ends[b] + 1].tolist()
            with torch.no_grad():
                before, after = (token_logprobs(policy, record["query"], kept, tokenizer)[-1] for policy in policies)
            falls.append((after - before).item())
    assert sum(falls) < 0 and sum(fall < 0 for fall in falls) > 0.7 * len(falls)


def test_coderl_takes_the_gradient_of_its_two_losses(rlcf, one_update, policy_gradients, monkeypatch):
    """Tokens weighed by r(y') - r(greedy) and the critic's probability; the critic by cross-entropy."""
    greedy_texts, plain = [], train_baselines.check_responses

    def spied(*arguments, **settings):
        checked = plain(*arguments, **settings)
        greedy_texts.append(checked)
        return checked

    monkeypatch.setattr(train_baselines, "check_responses", spied)
    rollout = one_update(train_baselines, objective="coderl", localise=False)
    assert torch.equal(rollout.response, rollout.sampled)
    (gradients,) = policy_gradients
    policy, tokenizer = load_gpt(rlcf.baseline.sft), load_tokenizer(rlcf.baseline.sft)
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
            (diagnostics,) = compiler.check([record["prefix"] + text + record["suffix"]])
            fails = any(d.kind == "error" for d in diagnostics)
            difference = (1 if rollout.passes[b] else -1) - (-1 if fails else 1)
            differs += difference != 0
            # the critic's head is initialised to 0, so it predicts one half
            loss = loss - difference * 0.5 * token_logprobs(policy, record["query"], ids, tokenizer).sum() / 16
    assert 2 < differs < 16
    expected = torch.autograd.grad(loss, list(policy.parameters()))
    for ours, its in zip(gradients, expected, strict=False):
        assert torch.allclose(ours, its, atol=1e-4, rtol=1e-3)
    assert max(g.abs().max() for g in expected) > 1e-2
    critic = gradients[len(expected) :]
    assert rollout.metrics["critic/loss"] == pytest.approx(torch.tensor(2.0).log().item(), abs=1e-5)
    share = sum(rollout.passes) / 16
    assert critic[-1].item() == pytest.approx(0.5 - share, abs=1e-5)  # of the head's bias


@pytest.mark.parametrize("objective", ["bipolar_ramp", "coderl"])
def test_unused_variables_do_not_fail_a_baselines_program(one_update, monkeypatch, objective):
    """[RLCF section 8.6] Only RLCF uses them. Here every character of every program declares one."""
    plain = PythonCompiler.check

    def littered(self, programs, spans=None):
        unused = [[Diagnostic("unused", "unused.variable", k, k + 1, "") for k in range(len(p))] for p in programs]
        return [added + reported for added, reported in zip(unused, plain(self, programs, spans), strict=True)]

    with monkeypatch.context() as patch:
        patch.setattr(PythonCompiler, "check", littered)
        rollout = one_update(train_baselines, objective=objective, localise=objective == "bipolar_ramp")
    with PythonCompiler() as compiler:
        checked = compiler.check(whole_programs(rollout.rows, rollout.texts))
    compiles = [all(d.kind != "error" for d in diagnostics) for diagnostics in checked]
    assert rollout.scores == [1.0 if ok else -1.0 for ok in compiles] and set(compiles) == {True, False}
    # the metrics are the same as PPO's, which count unused variables
    assert rollout.metrics["compile_rate"] == 0 and rollout.metrics["errors/unused"] > 1


@pytest.mark.parametrize("objective", ["bipolar_ramp", "coderl"])
def test_a_baseline_runs_and_resumes(rlcf, tmp_path, objective):
    args = replace(
        rlcf.baseline, out=tmp_path / "ppo", objective=objective, localise=False,
        total_episodes=16, batch_size=8, save_every=1,
    )  # fmt: skip
    train_baselines.main(args)
    metrics = read_metrics(args.out)
    assert len(metrics) == 2 and all(row["policy/first_ratio_error"] < 1e-5 for row in metrics)
    before = {k: v for k, v in metrics[-1].items() if k not in TIME_METRICS}
    (args.out / "summary.json").unlink()
    summary = train_baselines.main(replace(args, resume=True))
    assert summary == {k: v for k, v in before.items() if k != "step"}
