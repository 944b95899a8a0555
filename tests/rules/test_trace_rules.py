"""Tests of the trace rules on three responses computed in plain Python: healthy, then with one wrong tensor."""

import pytest
import torch

from nanorlhf.rules.record import Record
from nanorlhf.rules.trace_rules import Traced, examine_traces
from nanorlhf.tokenizer import Tokenizer

PAD, EOS, T = 0, 1, 5
# last index of each response, has_eos, score, log ratios to the reference, values up to the state after EOS
ROWS = (
    (2, True, 1.5, (0.1, -0.2, 0.3), (0.5, 0.4, 0.9, 1.5)),
    (1, True, -0.5, (0.0, 0.4), (0.2, -0.1, -0.5)),
    (4, False, -1.0, (0.2, 0.1, 0.0, -0.1, 0.3), (0.3, 0.2, 0.1, 0.0, -0.2)),
)
BETA, GAMMA, LAM, MEAN, VARIANCE = 0.1, 0.9, 0.8, 0.05, 2.0
SETTINGS = {
    "dtype": "float32",
    "num_minibatches": 1,
    "missing_eos_score": -1.0,
    "score_at": "after_eos",
    "gamma": GAMMA,
    "lam": LAM,
    "whiten_rewards": False,
    "whiten_advantages": True,
    "reward_model": "runs/tiny/rm",
    "value_model": None,
    "sampler.correction": "none",
}
TOKENIZER = Tokenizer(None, eos_id=EOS, pad_id=PAD)  # type: ignore[arg-type]  # the rules read the two ids


def ppo_tensors(update: int = 3) -> dict[str, torch.Tensor]:
    """Return the tensors of a healthy PPO update. In update 0 the reference is the policy."""
    n = len(ROWS)
    names = (
        *("logprobs", "ref_logprobs", "token_rewards", "rewards"),
        *("values", "raw_advantages", "returns", "advantages"),
    )
    x = {name: torch.zeros(n, T, dtype=torch.float64) for name in names}
    x |= {name: torch.zeros(n, T, dtype=torch.bool) for name in ("actions", "states")}
    x |= {"response": torch.full((n, T), PAD), "index": torch.arange(n)}
    x["eos_index"] = torch.tensor([end for end, *_ in ROWS])
    x["score_index"] = torch.tensor([min(end + 1, T - 1) for end, *_ in ROWS])
    x["has_eos"] = torch.tensor([has_eos for _, has_eos, *_ in ROWS])
    x["scores"] = torch.tensor([score for _, _, score, *_ in ROWS], dtype=torch.float64)
    for row, (end, has_eos, score, ratios, values) in enumerate(ROWS):
        last = min(end + 1, T - 1)  # state
        for t in range(end + 1):
            x["response"][row, t] = EOS if has_eos and t == end else 5 + t
            x["actions"][row, t] = True
            x["logprobs"][row, t] = -1.0 - 0.1 * t
            x["ref_logprobs"][row, t] = -1.0 - 0.1 * t - (ratios[t] if update else 0.0)
            x["token_rewards"][row, t] = 0.03 * t
            x["rewards"][row, t] = 0.03 * t - BETA * (ratios[t] if update else 0.0)
        x["rewards"][row, last] += score
        after = 0.0
        for t in reversed(range(last + 1)):
            x["states"][row, t] = True
            x["values"][row, t] = values[t]
            next_value = values[t + 1] if t < last else 0.0
            after = x["rewards"][row, t].item() + GAMMA * next_value - values[t] + GAMMA * LAM * after
            x["raw_advantages"][row, t] = after
            x["returns"][row, t] = after + values[t]
            if t <= end:
                x["advantages"][row, t] = (after - MEAN) / (VARIANCE + 1e-8) ** 0.5
    x["new_logprobs"] = x["logprobs"].repeat(2, 1, 1)
    x["new_logprobs"][1] += 0.05
    return x


def make_trace(tensors: dict[str, torch.Tensor], update: int = 3, algorithm: str = "ppo", **settings) -> Traced:
    return Traced(
        update=update,
        kl_coef=BETA,
        algorithm=algorithm,
        statistics={"advantage_mean": MEAN, "advantage_var": VARIANCE},
        tensors=tensors,
        record=Record(settings=SETTINGS | settings, rows=[], summary={}),
        tokenizer=TOKENIZER,
    )


def names(*traces: Traced) -> list[str]:
    return [finding.name for finding in examine_traces(traces)]


@pytest.mark.parametrize("update", [0, 3])
def test_a_healthy_update_has_no_findings(update):
    assert names(make_trace(ppo_tensors(update), update)) == []


@pytest.mark.parametrize(
    "name, tensor, at, value",
    [
        ("text-after-eos", "response", (1, 3), 7),
        ("masks", "actions", (0, 2), False),  # EOS is not an action
        ("masks", "states", (1, 3), True),  # a state two positions after EOS
        ("masks", "eos_index", 2, 3),
        ("masks", "response", (0, 1), EOS),  # an EOS before eos_index
        ("first-ratio", "new_logprobs", (0, 0, 1), -1.0),
        ("missing-eos-score", "scores", 2, 0.4),
        ("reward-sum", "rewards", (0, 1), -0.02),  # the penalty with the wrong sign
        ("reward-sum", "rewards", (0, 3), 0.0),  # no score
        ("gae", "raw_advantages", (2, 4), 0.0),
        ("returns", "returns", (0, 1), 0.0),
        ("whitening", "advantages", (1, 0), 0.0),
    ],
)
def test_one_wrong_element_is_found(name, tensor, at, value):
    tensors = ppo_tensors()
    tensors[tensor][at] = value
    assert name in names(make_trace(tensors))


def test_token_rewards_one_token_late_are_found():
    tensors = ppo_tensors()
    token_rewards = tensors["token_rewards"]
    tensors["rewards"] -= token_rewards
    token_rewards[2] = 0.0  # this response has no EOS: its last reward would be lost, and the sum wrong
    tensors["rewards"][:, 1:] += token_rewards[:, :-1]
    assert "token-rewards" in names(make_trace(tensors))


def test_a_reference_that_differs_in_the_first_update_is_found():
    assert (
        names(make_trace(ppo_tensors(3), update=0)) == ["first-kl"]
        and names(make_trace(ppo_tensors(3), update=3)) == []
    )
    to_sampler = {"sampler.correction": "sampler_logprobs", "sampler.top_p": 0.7}
    assert names(make_trace(ppo_tensors(3), update=0, **to_sampler)) == ["first-kl"]


def test_in_the_first_update_a_score_that_differs_from_the_value_is_found():
    tensors = ppo_tensors(0)
    tensors["values"][0, 3] = 0.8
    assert "score-at-the-end" in names(make_trace(tensors, update=0))
    assert "score-at-the-end" not in names(make_trace(tensors, update=1))
    assert "score-at-the-end" not in names(make_trace(tensors, update=0, value_model="runs/other"))


@pytest.mark.parametrize(
    "name, tensor, settings",
    [
        ("first-ratio", "new_logprobs", {"num_minibatches": 2}),
        ("missing-eos-score", "scores", {"missing_eos_score": None}),
        ("whitening", "advantages", {"sampler.correction": "tis"}),
    ],
)
def test_a_setting_that_explains_the_number_disables_its_rule(name, tensor, settings):
    tensors = ppo_tensors()
    tensors[tensor] = tensors[tensor] + 0.3
    assert name in names(make_trace(tensors))
    assert name not in names(make_trace(tensors, **settings))


def test_rewards_are_whitened_with_the_rollouts_statistics():
    average, variance = 0.2, 0.5
    tensors = ppo_tensors()
    tensors["rewards"] = (tensors["rewards"] - average) / (variance + 1e-8) ** 0.5 + average
    trace = make_trace(tensors, whiten_rewards=True)
    trace.statistics.update(reward_mean=average, reward_var=variance)
    assert "reward-sum" not in names(trace)
    trace.statistics.update(reward_mean=0.0)
    assert "reward-sum" in names(trace)


def test_the_finding_names_the_first_update():
    sick = ppo_tensors()
    sick["returns"][0, 1] = 0.0
    (finding,) = examine_traces([make_trace(ppo_tensors(1), 1), make_trace(sick, 5), make_trace(sick, 9)])
    assert finding.seen.startswith("Update 5 (the first of 2 of 3 traced): ")


# -------------------------------------------------------------------------------------------------------------- groups
def group_tensors(advantages: list[float], scores: list[float]) -> dict[str, torch.Tensor]:
    """Return tensors of one-token responses (EOS), two per query; the second one's KL is 0.5."""
    n = len(scores)
    ones = torch.ones(n, 1, dtype=torch.bool)
    logprobs = torch.zeros(n, 1, dtype=torch.float64)
    return {
        "index": torch.arange(n),
        "response": torch.full((n, 1), EOS),
        "actions": ones,
        "states": ones,
        "eos_index": torch.zeros(n, dtype=torch.long),
        "score_index": torch.zeros(n, dtype=torch.long),
        "has_eos": ones[:, 0],
        "logprobs": logprobs,
        "ref_logprobs": logprobs - torch.tensor([[0.0], [0.5]]).repeat(n // 2, 1),
        "new_logprobs": logprobs[None],
        "scores": torch.tensor(scores, dtype=torch.float64),
        "advantages": torch.tensor(advantages, dtype=torch.float64)[:, None],
    }


@pytest.mark.parametrize(
    "algorithm, advantages",
    [
        ("grpo", [1.0, -1.0]),  # scores 3 and 1: mean 2, deviation 1
        ("dr_grpo", [1.0, -1.0]),
        ("maxrl", [0.5, -0.5]),
        ("rloo", [2.05, -2.05]),  # rewards 3 and 1 - 0.1 * 0.5, each minus the other
        *((name, [1.0, -1.0]) for name in ("gspo", "cispo", "dapo")),  # all have the same length penalty
        ("online_dpo", [0.1024994793, -0.1024994793]),  # 2 * 0.1 * sigmoid(0.1 * 0.5)
    ],
)
def test_group_advantages_match_handwritten_ones(algorithm, advantages):
    settings = {"samples_per_query": 2, "score_at": None}
    healthy = make_trace(group_tensors(advantages, [3.0, 1.0]), algorithm=algorithm, **settings)
    assert names(healthy) == []
    swapped = make_trace(group_tensors(advantages[::-1], [3.0, 1.0]), algorithm=algorithm, **settings)
    assert names(swapped) == ["group-advantages"]


def test_reinforce_plus_plus_whitens_its_returns():
    settings = {"samples_per_query": 2, "score_at": None}
    tensors = group_tensors([0.5, -0.5], [3.0, 1.0])
    tensors["returns"] = tensors["scores"][:, None].clone()  # mean 2, variance 4 in the rollout
    for average, expected in ((2.0, []), (1.0, ["whitening"])):
        trace = make_trace(tensors, algorithm="reinforce++", **settings)
        trace.statistics.update(return_mean=average, return_var=4.0)
        assert names(trace) == expected


def test_groups_with_equal_scores_are_found():
    settings = {"samples_per_query": 2, "score_at": None}
    alike = make_trace(group_tensors([0.0] * 10, [3.0, 3.0] * 5), algorithm="grpo", **settings)
    assert names(alike) == ["groups-alike"]
    one_differs = [*[0.0] * 8, 1.0, -1.0]
    assert names(make_trace(group_tensors(one_differs, [*[3.0] * 8, 3.0, 1.0]), algorithm="grpo", **settings)) == []
