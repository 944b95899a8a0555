"""Invariants of a rollout: scores, masks, KL, rewards, returns, and their metrics.

Rewards are checked by differences: change the score, the KL or the penalty, and leave the rest unchanged. So a script
may add its own rewards.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kernels import gae
from nanorlhf.dataset import load_demonstrations
from nanorlhf.doctor.cases import (
    B,
    CannotCheckError,
    Cases,
    differ,
    replaced_logprobs,
    unbatched_logprobs,
    unbatched_outputs,
    unpadded,
)
from nanorlhf.doctor.watch import Watched
from nanorlhf.rules.finding import Finding
from nanorlhf.rules.formulas import DISCOUNTED, GAE, K3, KL, evaluate, from_the_right

PPO: dict[str, Any] = {"lam": 1.0, "gamma": 0.9, "reward_model": None, "num_ppo_epochs": 1}
DAPO: dict[str, Any] = {
    "algorithm": "dapo", "kl_coef": 0.0, "reward_model": None, "missing_eos_score": None, "num_epochs": 1,
}  # fmt: skip
LONGER: dict[str, Any] = {"total_episodes": 3 * B, "save_every": 1}
"""three updates, scored by the reward model"""
SCRIPT = "train_ppo.py (2.3 to 2.5)"


def usual_run(cases: Cases) -> Watched:
    """Return PPO's run of three updates with a reward model, which most checks use."""
    return cases.run("train_ppo", **LONGER)


def rule_rollout(cases: Cases, rule: str = "score", **changes: Any) -> dict[str, Tensor]:
    """Return the rollout of one PPO update scored by a rule; the responses are always the same."""
    settings = PPO | {"reward": cases.world.rule(rule), "kl_coef": 0.0} | changes
    return cases.run("train_ppo", **settings).traces()[0][0]


def readings(cases: Cases) -> Iterator[Finding]:
    """Check that a rollout's log-probabilities, scores and values are the same as for each text by itself."""
    pad_id = cases.world.tokenizer.pad_id
    policy, reward_model = cases.policy(), cases.reward_model()
    tensors, about = usual_run(cases).traces()[0]
    temperature = about["settings"]["temperature"]
    names = ("logprobs", "ref_logprobs", "sampled_logprobs", "values", "scores")
    gaps = dict.fromkeys(names, 0.0)
    for row, (query, response) in enumerate(unpadded(tensors, pad_id)):
        t = len(response)
        unbatched = unbatched_logprobs(policy, query, response, temperature)
        outputs = unbatched_outputs(reward_model, query + response)
        expected = {name: unbatched for name in names[:3]} | {"values": outputs[len(query) - 1 : -1]}
        for name, x in expected.items():
            gaps[name] = max(gaps[name], (tensors[name][row, :t] - x).abs().max().item())
        if tensors["has_eos"][row]:
            gaps["scores"] = max(gaps["scores"], (tensors["scores"][row] - outputs[-1]).abs().item())
    description = {
        "logprobs": "the policy's log-probabilities",
        "ref_logprobs": "the reference's log-probabilities",
        "sampled_logprobs": "the sampler's log-probabilities",
        "values": "the values",
        "scores": "the reward model's scores",
    }
    means = {
        "logprobs": "A token is predicted from the wrong position or at another temperature.",
        "ref_logprobs": "The reference is evaluated at another temperature or position than the policy.",
        "sampled_logprobs": "The rollout is not sampled from the policy in the denominator of the ratio: another "
        "temperature, a filter, or a cache that is off by one.",
        "values": "A value must be read at the position before its token, in the same left-padded row.",
        "scores": "A score is the output at the last token, EOS, and depends on neither padding nor later tokens.",
    }
    where = {
        "values": "nanorlhf/logprobs.py (response_values)",
        "scores": "nanorlhf/reward_model.py (end_scores, end_index)",
    }
    for name, gap in gaps.items():
        if not gap < 1e-3:
            yield Finding(
                name="readings",
                seen=f"In the first rollout {description[name]} are up to {gap:.2g} off the same texts by themselves.",
                means=means[name],
                where=where.get(name, "nanorlhf/logprobs.py, nanorlhf/training/sampler.py, --temperature"),
            )


def reference(cases: Cases) -> Iterator[Finding]:
    """Check that the reference doesn't change during training, with full weights or LoRA."""
    pad_id = cases.world.tokenizer.pad_id
    policy = cases.policy()
    for tune in ("full", "lora"):
        run = usual_run(cases) if tune == "full" else cases.run("train_ppo", tune="lora", lr=0.1, **LONGER)
        tensors, about = run.traces()[-1]
        gap, moved = 0.0, 0.0
        for row, (query, response) in enumerate(unpadded(tensors, pad_id)):
            t = len(response)
            unbatched = unbatched_logprobs(policy, query, response, about["settings"]["temperature"])
            gap = max(gap, (tensors["ref_logprobs"][row, :t] - unbatched).abs().max().item())
            moved = max(moved, (tensors["logprobs"][row, :t] - unbatched).abs().max().item())
        if not gap < 1e-3:
            yield Finding(
                name="reference-moves",
                seen=f"With --tune {tune} the reference's log-probabilities after two updates are up to {gap:.2g} "
                "nats off the initial policy's.",
                means="The reference is not a frozen copy of the initial policy, so the KL is meaningless.",
                where="nanorlhf/peft.py (reference) and nanorlhf/training/loading.py (prepare_policy)",
            )
        elif moved < 1e-3:
            yield Finding(
                name="policy-stays",
                seen=f"With --tune {tune} two updates did not change the policy.",
                means="Its parameters are not in the optimizer, or no gradient reaches them.",
                where="the script's optimizer, and nanorlhf/peft.py (tune)",
            )


def rule_inputs(cases: Cases) -> Iterator[Finding]:
    """Check that a reward function gets the text of the response, without its query, and the matching example."""
    tokenizer = cases.world.tokenizer
    rows = load_demonstrations(cases.world.data / "sft.train.jsonl", tokenizer, None, None)
    answers = {row.record["query"]: row.record["response"] for row in rows}
    runs: dict[str, tuple[str, dict[str, Any], Callable[[str, str], float]]] = {
        "score": ("train_ppo", PPO | {"kl_coef": 0.0}, lambda text, query: len(text) % 5 - 2.0),
        "truth": (
            "train_ppo",
            PPO | {"kl_coef": 0.0},
            lambda text, query: len(text) % 5 + 10.0 * len(answers[query]),
        ),
        "seldom": ("train_grpo", DAPO, lambda text, query: float(len(text) > 6)),
    }
    description = {
        "score": "A rule that counts characters",
        "truth": "A rule that counts characters of the response and of the example's demonstration",
        "seldom": "With --algorithm dapo, which resamples groups with equal scores, a rule",
    }
    means = {
        "score": "The rule gets more than the response: the query, or tokens after EOS.",
        "truth": "The rule gets the example of another query: examples and responses are in different orders.",
        "seldom": "A response was replaced but kept the old score, or the other way round.",
    }
    where = {
        "score": "nanorlhf/rewards/function_reward.py (FunctionReward._score)",
        "truth": "nanorlhf/batch.py (Batch.__getitem__, read), nanorlhf/rewards/function_reward.py (_score)",
        "seldom": "nanorlhf/grpo.py (refill) and nanorlhf/batch.py (Batch.replace)",
    }
    for name, (script, settings, rule) in runs.items():
        run = cases.run(script, reward=cases.world.rule(name), **settings)
        tensors, about = run.traces()[0]
        for row, (_, response) in enumerate(unpadded(tensors, tokenizer.pad_id)):
            expected = rule(tokenizer.decode(response), about["queries"][row])
            keeps_score = tensors["has_eos"][row] or script == "train_grpo"  # which has no penalty here
            if keeps_score and abs(tensors["scores"][row].item() - expected) > 1e-4:
                yield Finding(
                    name="rule-inputs",
                    seen=f"{description[name]} gave a response the score {tensors['scores'][row]:.3g} instead of "
                    f"{expected:.3g}.",
                    means=means[name],
                    where=where[name],
                )
                break


def token_rewards(cases: Cases) -> Iterator[Finding]:
    """Check that rewards per token are added at their own tokens."""
    dense, nothing = rule_rollout(cases, "per_token"), rule_rollout(cases, "nothing")
    T = dense["rewards"].size(1)
    moved = dense["rewards"] - nothing["rewards"]
    expected = torch.where(dense["actions"], 0.25 * (1.0 + torch.arange(T)).double(), 0.0)
    if differ(moved, expected):
        row, t = divmod(int((moved - expected).abs().argmax()), T)
        yield Finding(
            name="token-rewards",
            seen=f"A rule gives {expected[row, t]:.3g} at position {t} of a response, but the reward there changes by "
            f"{moved[row, t]:.3g}.",
            means="The reward of a token belongs to the state in which the token was chosen. One position later it is "
            "credited to the next token; after the end it is lost.",
            where=f"{SCRIPT} and nanorlhf/rewards/function_reward.py (as_scores)",
        )


def score_placement(cases: Cases) -> Iterator[Finding]:
    """Check that a change of the score changes the reward at exactly one position, a state, by the same amount."""
    base, higher = rule_rollout(cases), rule_rollout(cases, "higher")
    lower_penalty = rule_rollout(cases, missing_eos_score=-3.0)
    for changed, is_moved, difference, change in (
        (higher, base["has_eos"], 3.0, "raising scores by 3"),
        (lower_penalty, ~base["has_eos"], -2.0, "lowering --missing-eos-score by 2"),
    ):
        if not torch.equal(base["response"], changed["response"]):
            raise CannotCheckError("the responses of the first update depend on the reward")
        moved = changed["rewards"] - base["rewards"]
        for row in range(len(moved)):
            expected = difference if is_moved[row] else 0.0
            positions = (moved[row].abs() > 1e-4).nonzero().flatten().tolist()
            ending = "with" if base["has_eos"][row] else "without"
            last = int(base["states"][row].sum()) - 1
            problem = None
            if not expected and positions:
                problem = f"changes the rewards of a response {ending} EOS"
            elif expected and len(positions) != 1:
                problem = f"changes the rewards of a response {ending} EOS at {len(positions)} positions"
            elif expected and abs(moved[row, positions[0]].item() - expected) > 1e-4:
                problem = f"changes one reward of a response {ending} EOS by {moved[row, positions[0]]:.3g}"
            elif expected and positions[0] > last:
                problem = f"changes the reward at position {positions[0]} of a response with its last state at {last}"
            if problem is not None:
                yield Finding(
                    name="score-placement",
                    seen=f"In the same rollout, {change} {problem}.",
                    means="A score is added once, at the last state of its response. A response without EOS gets the "
                    "penalty instead of its score, not both.",
                    where=f"{SCRIPT} and nanorlhf/batch.py (score_index)",
                )
                break


def kl_penalty(cases: Cases) -> Iterator[Finding]:
    """Check that raising the reference's log-probability of a token raises only its reward, by beta times as much."""
    base = rule_rollout(cases, kl_coef=0.5)
    T = base["rewards"].size(1)
    table = 0.1 * torch.arange(1, T + 1)

    def other_reference(batch: Any, logprobs: Tensor, ref_logprobs: Tensor) -> tuple[Tensor, Tensor]:
        return logprobs, torch.where(batch.actions, ref_logprobs + table, ref_logprobs)

    settings = PPO | {"reward": cases.world.rule("score"), "kl_coef": 0.5}
    changed = cases.run("train_ppo", patches=replaced_logprobs("train_ppo", other_reference), **settings).traces()[0][0]
    moved = changed["rewards"] - base["rewards"]
    expected = torch.where(base["actions"], 0.5 * table.double(), 0.0)
    if differ(moved, expected):
        row, t = divmod(int((moved - expected).abs().argmax()), T)
        yield Finding(
            name="kl-penalty",
            seen=f"With beta 0.5, raising the reference by {table[t]:.2g} nats at token {t} changes its reward by "
            f"{moved[row, t]:.3g} instead of {expected[row, t]:.3g}.",
            means="The reward of a token is -beta * (log policy - log reference). A wrong sign rewards leaving the "
            "reference, a wrong mask includes padding.",
            where=SCRIPT,
        )


def returns(cases: Cases) -> Iterator[Finding]:
    """Check that at lambda 1 returns are discounted sums of future rewards, and advantages are returns minus values.

    For any lambda, GAE must equal its definition as a sum and ignore positions after the end.
    """
    tensors = cases.run("train_ppo", lam=1.0, gamma=0.9).traces()[0][0]
    states = tensors["states"]
    rewards = torch.where(states, tensors["rewards"], 0.0)
    expected = from_the_right("returns", DISCOUNTED, {"rewards": rewards, "gamma": 0.9})
    gap = (tensors["returns"] - expected)[states].abs().max().item()
    if not gap < 1e-3:
        yield Finding(
            name="returns",
            seen=f"At lambda 1 and gamma 0.9 the value model's targets are up to {gap:.2g} off the discounted sums of "
            "rewards.",
            means="The targets are not returns, the discount is missing, or a value after the end is included.",
            where="train_ppo.py (2.5) and kernels/gae.py",
        )
    excess = (tensors["returns"] - evaluate(GAE["returns"][0], tensors))[states].abs().max().item()
    if not excess < 1e-3:
        yield Finding(
            name="returns",
            seen=f"Advantages plus values are up to {excess:.2g} off the value model's targets.",
            means="Advantages and targets are computed from different rewards or values.",
            where="train_ppo.py (2.5)",
        )
    yield from gae_definition()


def gae_definition() -> Iterator[Finding]:
    gamma, lam, lengths = 0.9, 0.7, (5, 8, 1)
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn((2, 3, 8), generator=generator)
    states = torch.arange(8) < torch.tensor(lengths)[:, None]
    expected = torch.zeros((3, 8), dtype=torch.float64)
    for row, length in enumerate(lengths):
        following = [*values[row, 1:length].tolist(), 0.0]
        deltas = [rewards[row, t].item() + gamma * following[t] - values[row, t].item() for t in range(length)]
        for t in range(length):
            expected[row, t] = sum((gamma * lam) ** (s - t) * deltas[s] for s in range(t, length))
    poisoned = [torch.where(states, x, 1e3) for x in (rewards, values)]
    cases = {"its definition": (rewards, values), "its definition if numbers after the end aren't 0": poisoned}
    for description, (r, v) in cases.items():
        advantages, _ = gae(r, v, gamma, lam, states)
        gap = (advantages.double() - expected)[states].abs().max().item()
        if not gap < 1e-3:
            yield Finding(
                name="gae",
                seen=f"GAE at gamma {gamma} and lambda {lam} is up to {gap:.2g} off {description}.",
                means="The recursion is A_t = delta_t + gamma * lambda * A_(t+1), and 0 after the last state.",
                where="kernels/gae.py",
            )
            return


def whitening(cases: Cases) -> Iterator[Finding]:
    """Check that whitened advantages have mean 0 and variance 1 over actions, and whitened rewards keep their mean."""
    tensors, _ = usual_run(cases).traces()[0]
    counted = tensors["advantages"][tensors["actions"]]
    mean, variance = counted.mean().item(), counted.var(correction=0).item()
    if abs(mean) > 1e-3 or abs(variance - 1) > 1e-2:
        yield Finding(
            name="whitening",
            seen=f"Whitened advantages have mean {mean:.3g} and variance {variance:.3g} over the actions.",
            means="Mean and variance include padding, or states instead of actions: the step size then depends on "
            "--response-length.",
            where="train_ppo.py (2.5) and nanorlhf/ppo.py (whiten)",
        )
    plain, whitened = rule_rollout(cases), rule_rollout(cases, whiten_rewards=True)
    states = plain["states"]
    before, after = plain["rewards"][states], whitened["rewards"][states]
    shift, variance = (after.mean() - before.mean()).item(), after.var(correction=0).item()
    if abs(shift) > 1e-3 or abs(variance - 1) > 1e-2:
        yield Finding(
            name="whitening",
            seen=f"--whiten-rewards changes the mean of the rewards by {shift:.3g}, and their variance is then "
            f"{variance:.3g}.",
            means="Whitened rewards have variance 1 over the states and must keep their mean.",
            where="nanorlhf/ppo.py (whiten)",
        )


def controller(cases: Cases) -> Iterator[Finding]:
    """Check that the adaptive KL coefficient rises if the KL per response is above the target."""
    kl = usual_run(cases).metrics[1]["objective/kl"]
    if not kl > 0.05:
        raise CannotCheckError(f"the KL is {kl:.3g} after an update")
    run = cases.run("train_ppo", kl_target=kl / 1.1, **LONGER)
    before, after = (row["objective/kl_coef"] for row in run.metrics[1:3])
    if not after > before:
        yield Finding(
            name="kl-controller",
            seen=f"With --kl-target {kl / 1.1:.3g} and a KL of {kl:.3g} nats per response the coefficient goes from "
            f"{before:.6g} to {after:.6g}.",
            means="The error has the wrong sign, or the controller gets another KL than the KL per response.",
            where="nanorlhf/ppo.py (KLCoefficient) and the last line of the script's loop",
        )


def statistics(cases: Cases) -> Iterator[Finding]:
    """Check the logged metrics against metrics recomputed from the rollout."""
    run = usual_run(cases)
    for (tensors, _), row in zip(run.traces()[1:], run.metrics[1:], strict=True):
        actions = tensors["actions"]
        log_ratio = torch.where(actions, evaluate(KL, tensors), 0.0)
        kl = log_ratio.sum(1).mean().item()
        expected = {
            "objective/kl": kl,
            "objective/kl_k3": evaluate(K3, {"kl": log_ratio}).sum(1).mean().item(),
            "objective/entropy": -torch.where(actions, tensors["logprobs"], 0.0).sum(1).mean().item(),
            "objective/score": tensors["scores"].mean().item(),
            "objective/rlhf_reward": tensors["scores"].mean().item() - row["objective/kl_coef"] * kl,
            "eos_rate": tensors["has_eos"].double().mean().item(),
            "response_length": actions.sum(1).double().mean().item(),
        }
        for name, value in expected.items():
            if name in row and abs(row[name] - value) > 1e-3 * max(1.0, abs(value)):
                yield Finding(
                    name="statistics",
                    seen=f"{name} is logged as {row[name]:.4g}, but is {value:.4g} in the rollout.",
                    means="A mean includes padding, has the wrong denominator, or has a wrong sign.",
                    where="nanorlhf/training/update_metrics.py and kernels/kl.py",
                )
        yield from explained_variance(tensors, row)
        return


def explained_variance(tensors: dict[str, Tensor], row: dict[str, float]) -> Iterator[Finding]:
    """Check a logged explained variance, 1 - Var(returns - values) / Var(returns), over the states or the actions."""
    expected = []
    for mask in (tensors["states"], tensors["actions"]):
        returns, values = tensors["returns"][mask], tensors["values"][mask]
        error, variance = returns - values, returns.var(correction=0)
        expected += [(1 - x / variance).item() for x in (error.var(correction=0), error.square().mean())]
    for name, logged in row.items():
        if "explained_variance" in name and min(abs(logged - value) for value in expected) > 1e-3:
            yield Finding(
                name="statistics",
                seen=f"{name} is logged as {logged:.4g}, but is {expected[0]:.4g} over the states.",
                means="A variance includes padding, or the two variances are swapped.",
                where="the script's metrics",
            )


CHECKS = (
    *(readings, reference, rule_inputs, token_rewards, score_placement, kl_penalty, returns, whitening),
    *(controller, statistics),
)  # fmt: skip
