"""Tests of the formulas: handwritten numbers, definitions, and docs/algorithms.md."""

import re

import pytest
import torch

from nanorlhf.grpo import ALGORITHMS
from nanorlhf.rules import formulas
from nanorlhf.rules.formulas import GAE, evaluate, from_the_right, make_formulas
from tests.conftest import ROOT

SETTINGS = {"score_at": "after_eos", "whiten_rewards": True, "value_clip_range": 0.2, "sampler.correction": "tis"}


def test_a_formula_is_evaluated_in_float64_at_each_position():
    numbers = {"x": torch.tensor([[1.0, 2.0, 4.0], [3.0, 0.5, -1.0]]), "y": torch.tensor([[10.0], [20.0]]), "z": 0.5}
    assert evaluate("{x+1} - {x} * {z}", numbers).tolist() == [[1.5, 3.0, -2.0], [-1.0, -1.25, 0.5]]
    assert evaluate("max({x}, {y} / 10)", numbers).tolist() == [[1.0, 2.0, 4.0], [3.0, 2.0, 2.0]]
    assert evaluate("clip({x}, 1 - {z}, 1 + {z}) != {x}", numbers).tolist() == [
        [False, True, True],
        [True, False, True],
    ]
    assert evaluate("min(exp(0 * {x}), sqrt({z}))", numbers)[0].tolist() == pytest.approx([0.5**0.5] * 3, abs=1e-15)
    assert evaluate("-{x}**2", {"x": 3}).item() == -9.0
    with pytest.raises(KeyError, match="unheard_of"):
        evaluate("{unheard_of} + 1", numbers)


@pytest.mark.parametrize("algorithm", ["ppo", *ALGORITHMS])
def test_every_algorithm_has_its_formulas(algorithm):
    by_name = make_formulas(algorithm, SETTINGS)
    assert by_name.keys() >= {"actions", "states", "kl", "advantages", "ratio", "clip", "policy_loss", "push"}
    assert all(len(texts) == 1 or name in formulas.CASE for name, texts in by_name.items())


def test_gae_is_the_discounted_sum_of_later_deltas():
    """Responses have 1 to 5 states; after the end the recursion is 0."""
    rewards, values = torch.randn((2, 5, 5), generator=torch.Generator().manual_seed(0), dtype=torch.float64).tril()
    numbers = {"rewards": rewards, "values": values, "gamma": 0.9, "lam": 0.8}
    delta = numbers["delta"] = evaluate(GAE["delta"][0], numbers)
    expected = torch.stack([sum(0.72 ** (s - t) * delta[:, s] for s in range(t, 5)) for t in range(5)], dim=1)
    assert torch.allclose(from_the_right("raw_advantages", GAE, numbers), expected)
    assert (delta.triu(1) == 0).all() and delta[1, 0] == rewards[1, 0] + 0.9 * values[1, 1] - values[1, 0]


# ---------------------------------------------------------------------------------------------- docs/algorithms.md
SYMBOLS = {
    "rewards": "r_t", "values": "V_t", "values+1": "V_{t+1}", "delta": r"\delta_t", "raw_advantages": "A_t",
    "raw_advantages+1": "A_{t+1}", "advantages": "A_t", "returns": "R_t", "ratio": r"\rho_t", "gamma": r"\gamma",
    "lam": r"\lambda", "kl_coef": r"\beta", "below": r"\epsilon", "above": r"\epsilon", "value_clip_range": r"\epsilon",
    "score": "s_i", "group_mean": r"mean(s_1,\ldots,s_k)", "group_std": r"std(s_1,\ldots,s_k)", "kl": "d",
}  # fmt: skip
LOG_RATIO = r"\log\dfrac{\pi(y_t\midx,y_{<t})}{\pi_{ref}(y_t\midx,y_{<t})}"


def plain(latex):
    """Normalise a formula of the docs: no spaces or bracket sizes; fractions as (a)/b."""
    latex = re.sub(r"\\left|\\right|\\[,;]|\\qquad|\s|\\mathrm\{([a-z]+)\}", r"\1", latex)
    return re.sub(r"\\dfrac\{([^{}]*)\}\{([^{}]*)\}", r"(\1)/\2", latex).replace(r"\max", "max")


def in_symbols(text, **other_symbols):
    """Rewrite a formula in the docs' symbols; squares as `^2`, products without a sign."""
    text = text.replace("sqrt({group_var} + 1e-8)", "{group_std}")
    text = re.sub(r"\{([^}]+)\}", lambda name: (SYMBOLS | other_symbols)[name[1]], text)
    return re.sub(r"\s|\*", "", text.replace("**", "^"))


def test_the_docs_have_the_same_formulas():
    settings = SETTINGS | {"whiten_rewards": False, "sampler.correction": "none"}
    by_name = {name: texts[0] for name, texts in make_formulas("ppo", settings).items()}
    gae = by_name["raw_advantages"].replace("{carried}", by_name["carried"])
    old = {"values": "V_{old}", "new_values": "V_t"}
    value_loss = by_name["value_loss"].replace("{clipped_values}", by_name["clipped_values"]).removeprefix("0.5 * ")
    expected = (
        "r_t=" + in_symbols(formulas.reward(settings, False)[1], kl=LOG_RATIO, score="r(x,y)[t=e]"),
        r"\delta_t=" + in_symbols(by_name["delta"]),
        "A_t=" + in_symbols(gae),
        "R_t=" + in_symbols(by_name["returns"]),
        in_symbols(by_name["policy_loss"]),
        in_symbols(value_loss, **old),
        "k_3=" + in_symbols(formulas.K3).replace("exp(-d)", "e^{-d}"),
        "A_i=" + in_symbols(formulas.NORMALISED),
    )
    text = plain((ROOT / "docs" / "algorithms.md").read_text())
    for formula in expected:
        assert formula in text, formula
