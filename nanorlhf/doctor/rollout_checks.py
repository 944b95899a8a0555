"""What must hold for the numbers of a rollout: scores, masks, KL, rewards, returns, and what is logged of them.

Rewards are examined by differences: another score, another KL, another penalty, and all else as it was. So a script
that adds rewards of its own passes.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kernels import gae
from nanorlhf.dataset import load_demonstrations
from nanorlhf.doctor.cases import B, CannotCheckError, Cases, far, logprobs_alone, outputs_alone, rereading, unpadded
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


def usual(cases: Cases) -> Watched:
    """Three updates of PPO with a reward model, as most checks read them."""
    return cases.run("train_ppo", **LONGER)


def by_rule(cases: Cases, rule: str = "score", **changes: Any) -> dict[str, Tensor]:
    """The rollout of one update of PPO, scored by a rule: the same responses each time."""
    settings = PPO | {"reward": cases.world.rule(rule), "kl_coef": 0.0} | changes
    return cases.run("train_ppo", **settings).traces()[0][0]


def readings(cases: Cases) -> Iterator[Finding]:
    """Log-probabilities, scores and values of a rollout are those of each text read alone."""
    pad_id = cases.world.tokenizer.pad_id
    policy, reward_model = cases.policy(), cases.reward_model()
    tensors, about = usual(cases).traces()[0]
    temperature = about["settings"]["temperature"]
    names = ("logprobs", "ref_logprobs", "sampled_logprobs", "values", "scores")
    gaps = dict.fromkeys(names, 0.0)
    for row, (query, response) in enumerate(unpadded(tensors, pad_id)):
        t = len(response)
        alone = logprobs_alone(policy, query, response, temperature)
        outputs = outputs_alone(reward_model, query + response)
        expected = {name: alone for name in names[:3]} | {"values": outputs[len(query) - 1 : -1]}
        for name, x in expected.items():
            gaps[name] = max(gaps[name], (tensors[name][row, :t] - x).abs().max().item())
        if tensors["has_eos"][row]:
            gaps["scores"] = max(gaps["scores"], (tensors["scores"][row] - outputs[-1]).abs().item())
    said = {
        "logprobs": "the policy's log-probabilities",
        "ref_logprobs": "the reference's log-probabilities",
        "sampled_logprobs": "the sampler's log-probabilities",
        "values": "the values",
        "scores": "the reward model's scores",
    }
    means = {
        "logprobs": "A token is predicted from the wrong position or at another temperature.",
        "ref_logprobs": "The reference is read at another temperature or position than the policy.",
        "sampled_logprobs": "The rollout is sampled from another distribution than the one that the ratio is taken "
        "against: another temperature, a filter, or a cache that is off by one.",
        "values": "A value must be read before its token is known, from the same left-padded row.",
        "scores": "A score is the output at the last token, EOS, and depends on neither padding nor other tokens.",
    }
    where = {"values": "nanorlhf/logprobs.py (response_values)", "scores": "nanorlhf/reward.py (end_scores, end_index)"}
    for name, gap in gaps.items():
        if not gap < 1e-3:
            yield Finding(
                name="readings",
                seen=f"In the first rollout {said[name]} are up to {gap:.2g} off those of the same texts alone.",
                means=means[name],
                where=where.get(name, "nanorlhf/logprobs.py, nanorlhf/training/sampler.py, --temperature"),
            )


def reference(cases: Cases) -> Iterator[Finding]:
    """The reference never changes, whatever is trained."""
    pad_id = cases.world.tokenizer.pad_id
    policy = cases.policy()
    for tune in ("full", "lora"):
        run = usual(cases) if tune == "full" else cases.run("train_ppo", tune="lora", lr=0.1, **LONGER)
        tensors, about = run.traces()[-1]
        gap, moved = 0.0, 0.0
        for row, (query, response) in enumerate(unpadded(tensors, pad_id)):
            t = len(response)
            alone = logprobs_alone(policy, query, response, about["settings"]["temperature"])
            gap = max(gap, (tensors["ref_logprobs"][row, :t] - alone).abs().max().item())
            moved = max(moved, (tensors["logprobs"][row, :t] - alone).abs().max().item())
        if not gap < 1e-3:
            yield Finding(
                name="reference-moves",
                seen=f"With --tune {tune} the reference's log-probabilities after two updates are up to {gap:.2g} "
                "nats off those of the initial policy.",
                means="The reference is not a frozen copy of the initial policy, so the KL means nothing.",
                where="nanorlhf/peft.py (reference) and nanorlhf/training/loading.py (prepare_policy)",
            )
        elif moved < 1e-3:
            yield Finding(
                name="policy-stays",
                seen=f"With --tune {tune} two updates did not change the policy.",
                means="Its parameters are not those of the optimizer, or no gradient reaches them.",
                where="the script's optimizer, and nanorlhf/peft.py (tune)",
            )


def rule_inputs(cases: Cases) -> Iterator[Finding]:
    """A reward function gets the text of the response, without its query, and the row of the data that was asked."""
    tokenizer = cases.world.tokenizer
    rows = load_demonstrations(cases.world.data / "sft.train.jsonl", tokenizer, None, None)
    truth = {row.record["query"]: row.record["response"] for row in rows}
    runs: dict[str, tuple[str, dict[str, Any], Callable[[str, str], float]]] = {
        "score": ("train_ppo", PPO | {"kl_coef": 0.0}, lambda text, query: len(text) % 5 - 2.0),
        "truth": ("train_ppo", PPO | {"kl_coef": 0.0}, lambda text, query: len(text) % 5 + 10.0 * len(truth[query])),
        "seldom": ("train_grpo", DAPO, lambda text, query: float(len(text) > 6)),
    }
    said = {
        "score": "A rule that counts characters",
        "truth": "A rule that counts characters, also of the demonstration in the row of the data,",
        "seldom": "With --algorithm dapo, which samples groups without a difference again, a rule",
    }
    means = {
        "score": "The rule gets something else than the response: the query, or tokens after EOS.",
        "truth": "The rule gets the row of another query: rows were put in another order than their responses.",
        "seldom": "A response was replaced and kept the score of the old one, or the other way round.",
    }
    where = {
        "score": "nanorlhf/rewards/rule.py (Rule._score)",
        "truth": "nanorlhf/batch.py (Batch.__getitem__, read) and nanorlhf/rewards/rule.py (Rule._score)",
        "seldom": "nanorlhf/grpo.py (refill) and nanorlhf/batch.py (Batch.replace)",
    }
    for name, (script, settings, rule) in runs.items():
        run = cases.run(script, reward=cases.world.rule(name), **settings)
        tensors, about = run.traces()[0]
        for row, (_, response) in enumerate(unpadded(tensors, tokenizer.pad_id)):
            expected = rule(tokenizer.decode(response), about["queries"][row])
            keeps_score = tensors["has_eos"][row] or script == "train_grpo"  # there without a penalty
            if keeps_score and abs(tensors["scores"][row].item() - expected) > 1e-4:
                yield Finding(
                    name="rule-inputs",
                    seen=f"{said[name]} gave a response {tensors['scores'][row]:.3g}, and gives its text "
                    f"{expected:.3g}.",
                    means=means[name],
                    where=where[name],
                )
                break


def token_rewards(cases: Cases) -> Iterator[Finding]:
    """A reward for a token is added at that token, and nowhere else."""
    dense, nothing = by_rule(cases, "per_token"), by_rule(cases, "nothing")
    T = dense["rewards"].size(1)
    moved = dense["rewards"] - nothing["rewards"]
    expected = torch.where(dense["actions"], 0.25 * (1.0 + torch.arange(T)).double(), 0.0)
    if far(moved, expected):
        row, t = divmod(int((moved - expected).abs().argmax()), T)
        yield Finding(
            name="token-rewards",
            seen=f"A rule gives {expected[row, t]:.3g} at position {t} of a response, and the reward there moves by "
            f"{moved[row, t]:.3g}.",
            means="The reward of a token belongs to the state in which the token was chosen. Added one position later "
            "it counts as the consequence of the next token; after the end it is lost.",
            where=f"{SCRIPT} and nanorlhf/rewards/rule.py (as_scores)",
        )


def score_placement(cases: Cases) -> Iterator[Finding]:
    """A score moves the reward at exactly one position, that of a state, and by as much."""
    base, higher = by_rule(cases), by_rule(cases, "higher")
    lower_penalty = by_rule(cases, missing_eos_score=-3.0)
    for other, is_moved, difference, what in (
        (higher, base["has_eos"], 3.0, "scores that are 3 higher"),
        (lower_penalty, ~base["has_eos"], -2.0, "--missing-eos-score 2 lower"),
    ):
        if not torch.equal(base["response"], other["response"]):
            raise CannotCheckError("the responses of the first update depend on the reward")
        moved = other["rewards"] - base["rewards"]
        for row in range(len(moved)):
            expected = difference if is_moved[row] else 0.0
            places = (moved[row].abs() > 1e-4).nonzero().flatten().tolist()
            ending = "with" if base["has_eos"][row] else "without"
            last = int(base["states"][row].sum()) - 1
            found = None
            if not expected and places:
                found = f"change the rewards of a response {ending} EOS, whose score is the penalty or the rule's"
            elif expected and len(places) != 1:
                found = f"change the rewards of a response {ending} EOS at {len(places)} positions"
            elif expected and abs(moved[row, places[0]].item() - expected) > 1e-4:
                found = f"change one reward of a response {ending} EOS by {moved[row, places[0]]:.3g}"
            elif expected and places[0] > last:
                found = f"change the reward at position {places[0]} of a response whose last state is {last}"
            if found is not None:
                yield Finding(
                    name="score-placement",
                    seen=f"In the same rollout, {what} {found}.",
                    means="A score counts once, at the last state of its response; a response without EOS has the "
                    "penalty instead of its score, and nothing of both.",
                    where=f"{SCRIPT} and nanorlhf/batch.py (score_index)",
                )
                break


def kl_penalty(cases: Cases) -> Iterator[Finding]:
    """A token that the reference finds likelier is rewarded by beta times the difference, and no other is."""
    base = by_rule(cases, kl_coef=0.5)
    T = base["rewards"].size(1)
    table = 0.1 * torch.arange(1, T + 1)

    def other_reference(batch: Any, logprobs: Tensor, ref_logprobs: Tensor) -> tuple[Tensor, Tensor]:
        return logprobs, torch.where(batch.actions, ref_logprobs + table, ref_logprobs)

    settings = PPO | {"reward": cases.world.rule("score"), "kl_coef": 0.5}
    other = cases.run("train_ppo", patches=rereading("train_ppo", other_reference), **settings).traces()[0][0]
    moved = other["rewards"] - base["rewards"]
    expected = torch.where(base["actions"], 0.5 * table.double(), 0.0)
    if far(moved, expected):
        row, t = divmod(int((moved - expected).abs().argmax()), T)
        yield Finding(
            name="kl-penalty",
            seen=f"With a reference {table[t]:.2g} nats higher at token {t}, and beta 0.5, its reward moves by "
            f"{moved[row, t]:.3g} and not by {expected[row, t]:.3g}.",
            means="The reward of a token is -beta * (log policy - log reference): a wrong sign rewards leaving the "
            "reference, a wrong mask counts padding.",
            where=SCRIPT,
        )


def returns(cases: Cases) -> Iterator[Finding]:
    """At lambda 1 a return is the discounted sum of the rewards to come, and the advantage is what exceeds the value.

    At any lambda the kernel equals the sums of its definition, and nothing after the end matters.
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
            means="The targets are not returns, the discount is missing, or a value counts after the end.",
            where="train_ppo.py (2.5) and kernels/gae.py",
        )
    excess = (tensors["returns"] - evaluate(GAE["returns"][0], tensors))[states].abs().max().item()
    if not excess < 1e-3:
        yield Finding(
            name="returns",
            seen=f"Advantages plus values are up to {excess:.2g} off the value model's targets.",
            means="Advantage and target come from different rewards or values.",
            where="train_ppo.py (2.5)",
        )
    yield from gae_by_hand()


def gae_by_hand() -> Iterator[Finding]:
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
    named = {"its definition": (rewards, values), "itself without numbers after the end": poisoned}
    for what, (r, v) in named.items():
        advantages, _ = gae(r, v, gamma, lam, states)
        gap = (advantages.double() - expected)[states].abs().max().item()
        if not gap < 1e-3:
            yield Finding(
                name="gae",
                seen=f"GAE at gamma {gamma} and lambda {lam} is up to {gap:.2g} off {what}.",
                means="The recursion is delta_t + gamma * lambda * A_(t+1); after the last state both are 0.",
                where="kernels/gae.py",
            )
            return


def whitening(cases: Cases) -> Iterator[Finding]:
    """Whitened advantages have mean 0 and variance 1 over the tokens; whitened rewards keep their mean."""
    tensors, _ = usual(cases).traces()[0]
    counted = tensors["advantages"][tensors["actions"]]
    mean, variance = counted.mean().item(), counted.var(correction=0).item()
    if abs(mean) > 1e-3 or abs(variance - 1) > 1e-2:
        yield Finding(
            name="whitening",
            seen=f"Whitened advantages have mean {mean:.3g} and variance {variance:.3g} over the tokens that count.",
            means="Mean and variance count padding, or states instead of tokens: the step's size then depends on "
            "--response-length.",
            where="train_ppo.py (2.5) and nanorlhf/ppo.py (whiten)",
        )
    plain, whitened = by_rule(cases), by_rule(cases, whiten_rewards=True)
    states = plain["states"]
    before, after = plain["rewards"][states], whitened["rewards"][states]
    shift, variance = (after.mean() - before.mean()).item(), after.var(correction=0).item()
    if abs(shift) > 1e-3 or abs(variance - 1) > 1e-2:
        yield Finding(
            name="whitening",
            seen=f"--whiten-rewards moves the mean of the rewards by {shift:.3g} and gives them the variance "
            f"{variance:.3g}.",
            means="Rewards are divided by their standard deviation over the states and keep their mean.",
            where="nanorlhf/ppo.py (whiten)",
        )


def controller(cases: Cases) -> Iterator[Finding]:
    """The adaptive KL coefficient rises where a response's KL is above the target."""
    kl = usual(cases).metrics[1]["objective/kl"]
    if not kl > 0.05:
        raise CannotCheckError(f"the KL is {kl:.3g} after an update")
    run = cases.run("train_ppo", kl_target=kl / 1.1, **LONGER)
    before, after = (row["objective/kl_coef"] for row in run.metrics[1:3])
    if not after > before:
        yield Finding(
            name="kl-controller",
            seen=f"With --kl-target {kl / 1.1:.3g} and a KL of {kl:.3g} nats per response the coefficient goes from "
            f"{before:.6g} to {after:.6g}.",
            means="The error has the wrong sign, or the controller is given another KL than that of a response.",
            where="nanorlhf/ppo.py (KLCoefficient) and the last line of the script's loop",
        )


def statistics(cases: Cases) -> Iterator[Finding]:
    """What is logged is what the rollout's own numbers give."""
    run = usual(cases)
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
                    seen=f"{name} is logged as {row[name]:.4g}, and the rollout gives {value:.4g}.",
                    means="A mean counts padding, divides by another number than it sums over, or has a wrong sign.",
                    where="nanorlhf/training/update_metrics.py and kernels/kl.py",
                )
        yield from explained_variance(tensors, row)
        return


def explained_variance(tensors: dict[str, Tensor], row: dict[str, float]) -> Iterator[Finding]:
    """For a script that logs it, over the states or the actions: 1 - Var(returns - values) / Var(returns)."""
    expected = []
    for mask in (tensors["states"], tensors["actions"]):
        returns, values = tensors["returns"][mask], tensors["values"][mask]
        error, variance = returns - values, returns.var(correction=0)
        expected += [(1 - x / variance).item() for x in (error.var(correction=0), error.square().mean())]
    for name, logged in row.items():
        if "explained_variance" in name and min(abs(logged - value) for value in expected) > 1e-3:
            yield Finding(
                name="statistics",
                seen=f"{name} is logged as {logged:.4g}, and returns and values of the states give {expected[0]:.4g}.",
                means="A variance counts padding, or the two variances change places.",
                where="the script's metrics",
            )


CHECKS = (
    *(readings, reference, rule_inputs, token_rewards, score_placement, kl_penalty, returns, whitening),
    *(controller, statistics),
)  # fmt: skip
