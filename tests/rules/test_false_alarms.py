"""Tests of false alarms in simulated correct runs with few responses, few tokens and many updates."""

import math

import numpy as np
import pytest

from nanorlhf.grpo import ALGORITHMS
from nanorlhf.rules.kl_rules import is_below_zero
from nanorlhf.rules.metric_rules import examine_metrics
from nanorlhf.rules.record import Record
from tests.rules.healthy import PPO_SETTINGS

EOS, V = 0, 12


def distribution(logits: np.ndarray) -> np.ndarray:
    exp = np.exp(logits - logits.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def rollouts(
    policies: np.ndarray, reference: np.ndarray, n: int, T: int, rng: np.random.Generator, filtered: float = 0.0
) -> dict[str, np.ndarray]:
    """Sample n responses per update from policies (U, V) with independent tokens, and return sums over their tokens.

    filtered: tokens less likely than this are never sampled.
    """
    U = len(policies)
    sampled = np.where(policies < filtered, 0.0, policies)
    upper = (sampled / sampled.sum(1, keepdims=True)).cumsum(1)  # (U, V)
    tokens = (rng.random((U, n, T))[..., None] > upper[:, None, None]).sum(-1).clip(max=V - 1)  # (U, n, T)
    ended = (tokens == EOS).cumsum(-1) - (tokens == EOS)  # tokens after EOS
    counted = ended == 0
    log_ratios = np.log(policies / reference)  # (U, V)
    update = np.arange(U)[:, None, None]
    k1 = log_ratios[update, tokens]
    exact, entropy = (policies * log_ratios).sum(1), -(policies * np.log(policies)).sum(1)  # (U,)
    sums = {
        "kl": k1,
        "kl_k3": np.expm1(-k1) + k1,
        "kl_exact": np.broadcast_to(exact[:, None, None], k1.shape),
        "entropy": -np.log(policies)[update, tokens],
        "length": np.ones_like(k1),
        "expected_entropy": np.broadcast_to(entropy[:, None, None], k1.shape),
    }
    totals = {name: (x * counted).sum(-1) for name, x in sums.items()}
    return totals | {"ends": (tokens == EOS).any(-1), "first": tokens[..., 0]}


def drifting(updates: int, size: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return policies (U, V) that drift from a reference (V,) with rare tokens, starting at the reference."""
    logits = 2.5 * rng.standard_normal(V)
    logits[EOS] = logits.max()
    direction = rng.standard_normal(V)
    direction[EOS] = 1.0  # responses end as often as before
    path = logits + size * np.linspace(0, 1, updates)[:, None] * direction
    return distribution(path), distribution(logits)


def run_metrics(seen: dict[str, np.ndarray], settings: dict, rng: np.random.Generator) -> list[dict[str, float]]:
    """Return the metrics of a correct run with these rollouts: sparse scores of 0 and 1, few clipped tokens."""
    updates, n = seen["kl"].shape
    chance = 0.02 + 0.1 * np.linspace(0, 1, updates)[:, None]
    scores = (rng.random((updates, n)) < chance).astype(float)
    means = {name: x.mean(1) for name, x in seen.items()}
    num_tokens = seen["length"].sum(1)
    return [
        {
            "step": u,
            **{f"objective/{name}": means[name][u] for name in ("kl", "kl_k3", "kl_exact", "entropy")},
            "objective/score": scores[u].mean(),
            "objective/score_std": scores[u].std(ddof=1),
            "objective/rlhf_reward": scores[u].mean() - settings["kl_coef"] * means["kl"][u],
            "objective/kl_coef": settings["kl_coef"],
            "eos_rate": means["ends"][u],
            "response_length": means["length"][u],
            "policy/entropy": seen["expected_entropy"][u].sum() / num_tokens[u],
            "policy/approx_kl": 1e-3,
            "policy/clip_fraction": rng.binomial(num_tokens[u], 0.02) / num_tokens[u],
            "policy/ratio": 1 + 0.02 * rng.standard_normal(),
            "policy/first_ratio_error": 1e-6,
            "groups/alike": 0.5,
            "skipped_steps": 0,
            "lr": 1e-5,
        }
        for u in range(updates)
    ]


@pytest.mark.parametrize("n", [2, 4, 16, 64])
def test_a_kl_near_0_is_never_negative_in_thousands_of_updates(n):
    """Three standard errors are not enough for few responses: with two, one update in 24 is that far below 0."""
    rng = np.random.default_rng(n)
    num_below = num_by_errors = num_updates = 0
    record = Record(settings=PPO_SETTINGS | {"batch_size": n}, rows=[], summary={})
    for _ in range(10):
        policies, reference = drifting(300, 0.3 * rng.random(), rng)
        kl, length = (rollouts(policies, reference, n, 4, rng)[name] for name in ("kl", "length"))
        for update in range(1, 300):
            row = {"objective/kl": kl[update].mean(), "response_length": length[update].mean()}
            num_below += is_below_zero(record, [row])
            num_by_errors += row["objective/kl"] < -3 * kl[update].std(ddof=1) / math.sqrt(n) - 1e-3
            num_updates += 1
    assert num_below == 0
    assert n > 2 or num_by_errors > 0.01 * num_updates


def test_filtered_samples_can_make_the_kl_negative():
    """Tokens that are rare under the policy are much rarer under the reference, and none of them is sampled."""
    rng = np.random.default_rng(0)
    policies, _ = drifting(1, 1.0, rng)
    reference = distribution(np.log(policies[0]) - 3 * (policies[0] < 0.1))
    record = Record(settings=PPO_SETTINGS | {"batch_size": 128}, rows=[], summary={})
    for filtered, expected in ((0.0, False), (0.1, True)):
        seen = rollouts(policies, reference, 128, 4, rng, filtered)
        row = {"objective/kl": seen["kl"].mean(), "response_length": seen["length"].mean()}
        assert is_below_zero(record, [row]) == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_correct_runs_with_few_responses_have_no_findings(algorithm):
    """With sparse rewards and short responses; the rules run after each quarter of a run."""
    rng = np.random.default_rng(0)
    alarms: list[str] = []
    for number in range(24):
        n, T = (2, 4, 16, 64)[number % 4], (1, 4, 8)[number % 3]
        settings = PPO_SETTINGS | {"algorithm": algorithm, "batch_size": n, "response_length": T, "num_epochs": 4}
        settings |= {"kl_coef": 0.0 if ALGORITHMS[algorithm].is_without_kl else 0.05, "missing_eos_score": None}
        policies, reference = drifting(40, 1.0, rng)
        rows = run_metrics(rollouts(policies, reference, n, T, rng), settings, rng)
        for end in (10, 20, 30, 40):
            findings = examine_metrics(Record(settings=settings, rows=rows[:end], summary={}))
            alarms += [f"{finding.name} of {n} responses of {T} tokens" for finding in findings]
    assert alarms == []


SPARSE = [{"step": u, "objective/score_std": 0.0, "objective/score": 0.0} for u in range(12)]


@pytest.mark.parametrize("n, expected", [(2, []), (64, ["scores-alike"])])
def test_equal_scores_are_found_if_there_are_enough(n, expected):
    findings = examine_metrics(Record(settings=PPO_SETTINGS | {"batch_size": n}, rows=SPARSE, summary={}))
    assert [finding.name for finding in findings] == expected
