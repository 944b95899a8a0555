"""The formulas of PPO and related algorithms as strings, which are evaluated in float64.

The microscope displays these formulas and computes its page with them, the doctor's rules compare a run's tensors with
them, and a test checks docs/algorithms.md against them. The training code doesn't use them, so each comparison is
between two independent implementations.

{name} is the number at this position: a tensor of the trace (nanorlhf/training/trace.py), the result of another
formula, or a constant of the response or the run. {name+1} is the number at the next position. A formula with several
strings is a piecewise definition, and CASE gives the index of the piece that applies. {old} is the log-probability in
the denominator of the ratio; {below} and {above} are the two numbers of the clip range.
"""

import re
from collections.abc import Mapping
from functools import cache
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Numbers = Mapping[str, Tensor | float]
"""(n, T), (n, 1) for a constant of each response, or a constant"""
Formulas = dict[str, tuple[str, ...]]

# ----------------------------------------------------------------------------------------------------- 1. the formulas
ACTION_MASK = "{t} <= {eos_index}"
KL = "{logprobs} - {ref_logprobs}"  # k1 of Schulman 2020, Approximating KL divergence
K3 = "exp(-{kl}) - 1 + {kl}"  # ibid.
IS_LAST = "{t} == {last_state}"
CASE = {"rewards": "({t} == {score_index}) * (2 - {actions})", "delta": IS_LAST, "carried": IS_LAST, "push": "{clip}"}

GAE = {  # Schulman et al. 2016, equation 16; V and A are 0 after the last state
    "delta": ("{rewards} + {gamma} * {values+1} - {values}", "{rewards} + {gamma} * 0 - {values}"),
    "carried": ("{gamma} * {lam} * {raw_advantages+1}", "{gamma} * {lam} * 0"),
    "raw_advantages": ("{delta} + {carried}",),
    "returns": ("{raw_advantages} + {values}",),
}
DISCOUNTED = {  # GAE with V = 0 and lambda = 1
    "carried": ("{gamma} * {returns+1}", "{gamma} * 0"),
    "returns": ("{rewards} + {carried}",),
}

NORMALISED = "({score} - {group_mean}) / sqrt({group_var} + 1e-8)"
ADVANTAGES = {
    "ppo": "({raw_advantages} - {advantage_mean}) / sqrt({advantage_var} + 1e-8)",  # [N+ 25]
    "reinforce++": "({returns} - {return_mean}) / sqrt({return_var} + 1e-8)",
    "grpo": NORMALISED,  # [GRPO section 4.1.2]
    "gspo": NORMALISED,
    "cispo": NORMALISED,
    "dapo": "({score} + {length_penalty} - {group_mean}) / sqrt({group_var} + 1e-8)",  # [DAPO equations 9 and 13]
    "dr_grpo": "({score} - {group_mean})",  # [Dr. GRPO section 3.2]
    "maxrl": "({score} - {group_mean}) / ({group_mean} + 1e-8)",  # [MaxRL]
    "online_dpo": "{side} * {k} * {kl_coef} / (1 + exp({margin}))",  # [Online DPO, equation 1]
    "rloo": "({score} - {kl_coef} * {response_kl} - {group_mean}) * {k} / ({k} - 1)",  # [RLOO section 3]
}
WITH_GROUPS = ADVANTAGES.keys() - {"ppo", "reinforce++"}
WITH_KL_LOSS = ("grpo", "dr_grpo", "gspo")
WEIGHT = "exp({logprobs} - {sampled_logprobs})"
WEIGHTS = {  # `importance_weights`, and its paper
    "tis": f"min({WEIGHT}, {{most_weight}})",  # Yao et al. 2025
    "icepop": f"{WEIGHT} * ({WEIGHT} >= {{least_weight}}) * ({WEIGHT} <= {{most_weight}})",  # Ling Team 2025
    "sequence_tis": "min(exp({sum_log_weight}), {most_weight})",  # Liu et al. 2025
    "sequence_mis": "exp({sum_log_weight}) * (exp({sum_log_weight}) <= {most_weight})",
}

RATIO = "exp({new_logprobs} - {old})"
RESPONSE_RATIO = "exp({mean_log_ratio})"  # [GSPO equation 7]
CLIPPED_RATIO = "clip({ratio}, 1 - {below}, 1 + {above})"
UNCLIPPED, CLIPPED = "-{advantages} * {ratio}", f"-{{advantages}} * {CLIPPED_RATIO}"
IS_CLIPPED = f"{CLIPPED} > {UNCLIPPED}"
K3_SLOPE = "{kl_coef} * (1 - exp({ref_logprobs} - {new_logprobs}))"
ERROR, CLIPPED_ERROR = "({new_values} - {returns})**2", "({clipped_values} - {returns})**2"


def state_mask(settings: Mapping[str, Any]) -> str:
    """Return the mask of states: up to EOS, or one later if the state of the finished response gets the score."""
    return "{t} <= {eos_index} + 1" if settings.get("score_at") == "after_eos" else ACTION_MASK


def reward(settings: Mapping[str, Any], has_token_rewards: bool) -> tuple[str, ...]:
    """Return the rewards of a token, of a token with the score, and of the state after EOS, which has no token. [N+ 24]

    With `whiten_rewards`, each is whitened and keeps the mean.
    """
    penalty = "{token_rewards} - {kl_coef} * {kl}" if has_token_rewards else "-{kl_coef} * {kl}"
    texts = (penalty, penalty + " + {score}", "{score}")
    if not settings.get("whiten_rewards"):
        return texts
    return tuple(f"({text} - {{reward_mean}}) / sqrt({{reward_var}} + 1e-8) + {{reward_mean}}" for text in texts)


def advantage(algorithm: str, settings: Mapping[str, Any]) -> str:
    """Return the advantage used in the loss."""
    is_whitened = algorithm != "ppo" or settings.get("whiten_advantages", True)
    text = ADVANTAGES[algorithm] if is_whitened else "{raw_advantages}"
    correction = settings.get("sampler.correction")
    return f"{text} * {WEIGHTS[correction]}" if correction in WEIGHTS else text


def policy_update(algorithm: str) -> Formulas:
    """Return ratio, clip indicator, loss, and `push`: minus the derivative of the loss in the log-probability."""
    if algorithm == "cispo":  # [CISPO equations 4 and 5]
        return {
            "ratio": (RATIO,),
            "clip": (f"{CLIPPED_RATIO} != {{ratio}}",),
            "policy_loss": (f"{CLIPPED} * {{new_logprobs}}",),
            "push": (f"{{advantages}} * {CLIPPED_RATIO}",),
        }
    slope = f" - {K3_SLOPE}" if algorithm in WITH_KL_LOSS else ""
    return {
        "ratio": (RESPONSE_RATIO if algorithm == "gspo" else RATIO,),
        "clip": (IS_CLIPPED,),
        "policy_loss": (f"max({UNCLIPPED}, {CLIPPED})",),  # Schulman et al. 2017, equation 7
        "push": ("{advantages} * {ratio}" + slope, "{advantages} * 0" + slope),
    }


def value_update(settings: Mapping[str, Any]) -> Formulas:
    """Return the clipped value, the indicator that its error is the larger one, and the loss."""
    if settings.get("value_clip_range") is None:
        return {"value_loss": (f"0.5 * {ERROR}",)}
    around = "{values} - {value_clip_range}, {values} + {value_clip_range}"
    return {
        "clipped_values": (f"clip({{new_values}}, {around})",),
        "value_clip": (f"{CLIPPED_ERROR} > {ERROR}",),
        "value_loss": (f"0.5 * max({ERROR}, {CLIPPED_ERROR})",),
    }


def make_formulas(algorithm: str, settings: Mapping[str, Any], has_token_rewards: bool = False) -> Formulas:
    """Return all formulas of a run. `settings` is flat, with the names of the flags."""
    found: Formulas = {"actions": (ACTION_MASK,), "states": (state_mask(settings),), "kl": (KL,)}
    if algorithm == "ppo":
        found |= {"rewards": reward(settings, has_token_rewards)} | GAE | value_update(settings)
    elif algorithm == "reinforce++":
        found |= {"rewards": reward(settings, has_token_rewards)[:2]} | DISCOUNTED
    return found | {"advantages": (advantage(algorithm, settings),)} | policy_update(algorithm)


# -------------------------------------------------------------------------------------------------------- 2. evaluation
FUNCTIONS = {"exp": torch.exp, "sqrt": torch.sqrt, "max": torch.maximum, "min": torch.minimum, "clip": torch.clamp}


@cache
def compiled(text: str) -> CodeType:
    return compile(re.sub(r"\{([^}]+)\}", r"number('\1')", text), text, "eval")


def evaluate(text: str, numbers: Numbers) -> Tensor:
    """Evaluate a formula: float64, or bool for a comparison. {name+1} is 0 after the last position."""

    def number(name: str) -> Tensor:
        x = torch.as_tensor(numbers[name.removesuffix("+1")], dtype=torch.float64)
        return F.pad(x[..., 1:], (0, 1)) if name.endswith("+1") else x

    return eval(compiled(text), FUNCTIONS | {"__builtins__": {}, "number": number})


def from_the_right(name: str, formulas: Formulas, numbers: Numbers) -> Tensor:
    """Evaluate `name` = ... + `carried` from the last position to the first. Masked numbers must be 0."""
    result = torch.zeros_like(torch.as_tensor(numbers["rewards"]))  # (n, T)
    for t in reversed(range(result.size(1))):
        carried = evaluate(formulas["carried"][0], {**numbers, name: result})
        result[:, t] = evaluate(formulas[name][0], {**numbers, "carried": carried})[:, t]
    return result


def group_numbers(
    algorithm: str, tensors: Mapping[str, Tensor], response_kl: Tensor, k: int, kl_coef: float
) -> dict[str, Tensor]:
    """Return the numbers (n,) that formulas need from groups: responses to one query, with the same index // k.

    tensors: from a trace, floats in float64; response_kl (n,). `side` is 1 for the best response to a query and -1 for
    the worst; `margin` is the difference of their KLs in nats, times beta.
    """
    scores, query = tensors["scores"], tensors["index"] // k
    numbers = {"k": torch.full_like(query, k), "response_kl": response_kl}
    rewards = scores
    if algorithm == "rloo":
        rewards = scores - kl_coef * response_kl
    elif algorithm == "dapo":  # 0 up to four fifths of the maximum length, then linearly down to -1
        length = tensors["eos_index"] + 1
        numbers["length_penalty"] = (4 - 5 * length / tensors["actions"].size(1)).clamp(max=0)
        rewards = scores + numbers["length_penalty"]
    same = query[:, None] == query  # (n, n)
    size = same.sum(1)
    mean = torch.where(same, rewards, 0.0).sum(1) / size
    square = (rewards - mean[:, None]) ** 2
    numbers |= {"response_reward": rewards, "group_mean": mean}
    numbers["group_var"] = torch.where(same, square, 0.0).sum(1) / size
    if algorithm == "online_dpo":
        best, worst = torch.where(same, scores, -torch.inf).argmax(1), torch.where(same, scores, torch.inf).argmin(1)
        position = torch.arange(len(scores))
        numbers["side"] = (position == best).long() - (position == worst).long()
        numbers["margin"] = kl_coef * (response_kl[best] - response_kl[worst])
    return numbers
