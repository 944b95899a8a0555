"""Write one HTML page with every number that PPO or GRPO computes for a few responses, per token: docs/microscope.md.

    python train_ppo.py --trace 4 --out runs/tiny/ppo
    python -m nanorlhf.report.microscope --run runs/tiny/ppo

The numbers are the tensors that the run saved in RUN/trace. Only kl, delta, the term that GAE carries, ratios, losses
and their slopes are computed here, with the formulas of nanorlhf/rules/formulas.py. Numbers that weren't used, such as
the loss of a dropped token, have empty cells; numbers of diverged runs are shown as inf or nan.
Out: RUN/microscope.html.
"""

import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorlhf.cli import run_module
from nanorlhf.dataset import field
from nanorlhf.errors import InputError
from nanorlhf.files import parse_json, read_text, write_text
from nanorlhf.grpo import ALGORITHMS
from nanorlhf.ppo import ClipRange, ratio_bounds
from nanorlhf.rules.formulas import CASE, CLIPPED_RATIO, K3_SLOPE, KL, Formulas, evaluate, group_numbers, make_formulas
from nanorlhf.training.run_directory import flat_settings
from nanorlhf.training.sampler import MASKED, TIS_CLIP
from nanorlhf.training.trace import Tensors, ratio_to, read_traces

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = Path(__file__).with_name("microscope.html")
LOOK = Path(__file__).with_name("look.css")
# settings
OF_LINES = ("score_at", "whiten_rewards", "whiten_advantages", "value_clip_range", "clip_range", "sampler.correction")
OF_NUMBERS = (*OF_LINES, "gamma", "lam", "samples_per_query", "temperature")
GRPO = "nanorlhf/grpo.py"


@dataclass(frozen=True, kw_only=True)
class Args:
    run: Path = Path("runs/tiny/ppo")
    """run directory of train_ppo.py or train_grpo.py with --trace, or an existing page to regenerate from its data"""
    out: Path | None = None
    """output file; None: microscope.html in the run directory, or the existing page"""


# ------------------------------------------------------------------------------------------------- 1. rows of the table
@dataclass(frozen=True)
class Line:
    """One row of the table of tokens.

    formulas: {name} is that row's number at this token, {name+1} at the next one, or a constant of the response. Each
    cell selects one of the formulas. Without formulas the number is a model's output.
    """

    key: str
    label: str
    section: str
    about: str
    file: str
    expression: str  # the source code in `file` that computes it in a run
    formulas: tuple[str, ...]
    kind: str  # number, mask or words


PPO, GAE, LOGPROBS, SCRIPT = "nanorlhf/ppo.py", "kernels/gae.py", "nanorlhf/logprobs.py", "the training script"
WHITEN = "whitened = (x - mean) * torch.rsqrt(variance + 1e-8)"
RECURSION = "running = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * running"
MAXIMUM = "return torch.maximum(unclipped, clipped), clipped > unclipped"
VALUE_MAXIMUM = "return 0.5 * torch.maximum(error, clipped_error), clipped_error > error"
ADD_SCORE = "minus beta times KL; the score is added once, at the underlined position"
AMONG_OTHERS = "how much better the response is than the others to the same query"
SLOPE = "negative derivative of the token's loss with respect to its log-probability"
STEP = ": ▲ the step makes the token more likely, ▼ less likely, · no change"
NORMALISED = (
    "advantage",
    AMONG_OTHERS,
    GRPO,
    "return (groups * torch.rsqrt(variance + 1e-8)).view(-1, 1).expand_as(x.kl)",
)
# label, about, file, expression; for PPO
LINES: dict[str, tuple[str, ...]] = {
    "logprobs": ("policy", "log-probability of the token under the policy before this update, nats",
        LOGPROBS, "logprobs, _ = linear_logprobs(hidden, head, labels, bias, temperature, cap)"),
    "ref_logprobs": ("reference", "log-probability of the token under the reference policy, nats",
        LOGPROBS, "ref_logprobs, _ = linear_logprobs(ref_hidden, ref_head, labels, ref_bias, temperature, ref_cap)"),
    "sampled_logprobs": ("sampler", "log-probability of the token under the sampler, nats", "nanorlhf/generate.py",
        "live.logprobs.index_copy_(1, live.t, logprob.masked_fill(live.ended, 0.0))"),
    "kl": ("KL", "k1, the KL estimate from one sample: log-probability under the policy minus log-probability under "
        "the reference, nats", SCRIPT, "kl = torch.where(batch.actions, batch.logprobs - batch.ref_logprobs, 0.0)"),
    "actions": ("actions", "the policy chose a token here: counts in KL and policy loss",
        PPO, "index <= eos_index[:, None], index"),
    "states": ("states", "this position is a state",
        "nanorlhf/batch.py", 'states=states if score_at == "after_eos" else actions'),
    "token_rewards": ("per token", "the token's reward from --reward: a process reward, or a teacher's log-probability "
        "minus the policy's", "nanorlhf/rewards/weighted_sum.py", "token_rewards += weight * result.token_rewards"),
    "rewards": ("reward", ADD_SCORE, SCRIPT, "rewards[torch.arange(B), batch.score_index] += scores"),
    "values": ("value V", "the value model's prediction, before this token",
        LOGPROBS, "torch.where(states, values[:, :-1], 0.0)"),
    "delta": ("delta", "TD error: how much better this step was than the value model predicted",
        GAE, "advantages = rewards + gamma * next_values - values"),
    "carried": ("from the right", "gamma * lam times the advantage of the next position", GAE, RECURSION),
    "raw_advantages": ("advantage", "GAE before whitening: delta plus the term from the right", GAE, RECURSION),
    "advantages": ("whitened", "the advantage used in the loss", PPO, WHITEN),
    "returns": ("return", "the value model's target", GAE, "return advantages, advantages + values"),
    "new_logprobs": ("new log-prob", "log-probability under the current policy, nats",
        SCRIPT, "new_logprobs, entropy = response_logprobs("),
    "ratio": ("ratio", "probability of the token under the current policy, divided by the old one",
        PPO, "log_ratio = torch.where(actions, new_logprobs - logprobs, 0.0)"),
    "clip": ("clip", "the ratio relative to the clip range; active: the clipped loss is larger, so the token has no "
        "policy gradient", PPO, MAXIMUM),
    "policy_loss": ("policy loss", "the larger of the unclipped and the clipped loss", PPO, MAXIMUM),
    "push": ("gradient", SLOPE + STEP, PPO, "unclipped = -advantages * ratio"),
    "new_values": ("new value", "the current value model's prediction",
        SCRIPT, "new_values = response_values("),
    "clipped_values": ("value, clipped", "the new value, clipped to within the clip range of the old one",
        PPO, "clipped_values = new_values.clamp(values - clip_range, values + clip_range)"),
    "value_clip": ("value clip", "active: the clipped error is larger, so the value has no gradient",
        PPO, VALUE_MAXIMUM),
    "value_loss": ("value loss", "half the squared error to the return", PPO, VALUE_MAXIMUM),
}  # fmt: skip
OF_ALGORITHM: dict[str, dict[str, tuple[str, ...]]] = {
    "reinforce++": {
        "rewards": ("reward", ADD_SCORE, GRPO,
                    "rewards[torch.arange(len(x.scores)), x.actions.sum(1) - 1] += x.scores"),
        "carried": ("from the right", "gamma times the return of the next position", GAE, RECURSION),
        "returns": ("return", "the reward plus the term from the right: GAE with V = 0 and lambda = 1",
            GAE, RECURSION),
        "advantages": ("whitened", "the advantage used in the loss; the baseline is the rollout's mean", PPO, WHITEN),
    },
    "grpo": {"advantages": NORMALISED},
    "gspo": {
        "advantages": NORMALISED,
        "ratio": ("ratio", "exp of the mean log ratio of the response's tokens",
            PPO, "new, old = response_mean(new_logprobs, actions), response_mean(logprobs, actions)"),
        "clip": ("clip", "the ratio relative to the clip range; active: the clipped loss is larger, so the response "
            "has no policy gradient", PPO, MAXIMUM),
        "push": ("gradient",
            "negative derivative of the response's losses with respect to the token's log-probability" + STEP,
            PPO, "unclipped = -advantages * ratio"),
    },
    "cispo": {
        "advantages": NORMALISED,
        "clip": ("clip", "the ratio relative to the clip range; active: the weight is clipped",
            PPO, "return losses, weights != ratio"),
        "policy_loss": ("policy loss", "the token is weighted by the clipped ratio, without a gradient through it",
            PPO, "losses = -torch.where(actions, advantages, 0.0) * weights * new_logprobs"),
        "push": ("gradient", SLOPE + STEP, PPO, "weights = ratio.clamp(least, most)"),
    },
    "dapo": {"advantages": ("advantage", AMONG_OTHERS, GRPO,
        "return grpo(replace(x, scores=x.scores + overlong_penalty(x.actions)))")},
    "dr_grpo": {"advantages": ("advantage", AMONG_OTHERS, GRPO,
        "return centred(x.scores, x.k).view(-1, 1).expand_as(x.kl)")},
    "maxrl": {"advantages": ("advantage", AMONG_OTHERS, GRPO,
        "return (centred(x.scores, x.k) / (means + 1e-8)).view(-1, 1).expand_as(x.kl)")},
    "online_dpo": {"advantages": ("advantage", "the slope of DPO's loss: positive for the best response to the query, "
        "negative for the worst, else 0", GRPO, "weights = x.k * x.kl_coef * torch.sigmoid(-margins)")},
    "rloo": {"advantages": ("advantage", AMONG_OTHERS, GRPO,
        "return (centred(response_rewards, x.k) * (x.k / (x.k - 1))).view(-1, 1).expand_as(x.kl)")},
}  # fmt: skip
SECTIONS = {
    "ppo": {
        "3. Rewards": ("token_rewards", "rewards"),
        "4. Values, advantages": ("values", "delta", "carried", "raw_advantages", "advantages", "returns"),
    },
    "reinforce++": {
        "3. Rewards": ("token_rewards", "rewards"),
        "4. Advantages": ("carried", "returns", "advantages"),
    },
}
OF_EPOCH = (
    *("new_logprobs", "ratio", "clip", "policy_loss", "push"),
    *("new_values", "clipped_values", "value_clip", "value_loss"),
)
KINDS = {"actions": "mask", "states": "mask", "clip": "words", "value_clip": "words"}


def lines_of(algorithm: str, settings: dict[str, Any], num_epochs: int, has_token_rewards: bool = False) -> list[Line]:
    """Return the table's rows for a run, from top to bottom; settings are named like flags."""
    formulas = make_formulas(algorithm, settings, has_token_rewards)
    lines = LINES | OF_ALGORITHM.get(algorithm, {})
    label, about, *source = lines["ratio"]
    is_first = ratio_to(settings["sampler.correction"]) == "logprobs"
    lines["ratio"] = label, about + ("; 1 in the first step" if is_first else "; the old one is the sampler's"), *source
    without_formulas = {"logprobs", "ref_logprobs", "sampled_logprobs", "new_logprobs"}
    without_formulas |= {"token_rewards"} if has_token_rewards else set()
    if algorithm == "ppo":
        without_formulas |= {"values", "new_values"}
        if settings["score_at"] == "after_eos":
            label, about, *source = lines["states"]
            lines["states"] = label, about + ", also after EOS: counts in the value loss", *source
        if not settings["whiten_advantages"]:
            lines["advantages"] = *lines["advantages"][:2], SCRIPT, "batch.advantages = advantages * importance_weights"
        if settings["value_clip_range"] is None:
            lines["value_loss"] = *lines["value_loss"][:3], "return 0.5 * error, torch.zeros_like(states)"
    sections = {
        "1. Model outputs": ("logprobs", "ref_logprobs", "sampled_logprobs", "kl"),
        "2. Masks": ("actions", "states"),
        **SECTIONS.get(algorithm, {"3. Advantages": ("advantages",)}),
    }
    keys = [(section, name, "") for section, names in sections.items() for name in names]
    keys += [(f"Epoch {epoch + 1}", name, f".{epoch}") for epoch in range(num_epochs) for name in OF_EPOCH]
    rows = []
    for section, name, epoch in keys:
        if name in formulas or name in without_formulas:
            label, about, file, expression = lines[name]
            file = ("train_ppo.py" if algorithm == "ppo" else "train_grpo.py") if file == SCRIPT else file
            texts = shown(formulas.get(name, ()), epoch, settings)
            kind = KINDS.get(name, "number")
            rows.append(Line(name + epoch, label, section, about, file, expression, texts, kind))
    return rows


def shown(texts: tuple[str, ...], epoch: str, settings: dict[str, Any]) -> tuple[str, ...]:
    """Replace the names in formulas by the page's names, which depend on the epoch and the run's settings."""
    is_pair = isinstance(settings.get("clip_range"), tuple | list)
    names = {
        "old": ratio_to(settings["sampler.correction"]),
        "below": "clip_below" if is_pair else "clip_range",
        "above": "clip_above" if is_pair else "clip_range",
    } | {name: name + epoch for name in (*OF_EPOCH, "mean_log_ratio")}
    return tuple(re.sub(r"(?<=\{)\w+", lambda word: names.get(word[0], word[0]), text) for text in texts)


# ------------------------------------------------------------------------------------------------------- 2. the numbers
@dataclass
class Cells:
    """Cells of all rows, (n, T) each: float64 numbers, masks of existing numbers, and each cell's formula index."""

    numbers: dict[str, Tensor]
    masks: dict[str, Tensor]
    which: dict[str, Tensor]
    words: dict[str, list[list[str]]]


def cells_of(
    tensors: Tensors, formulas: Formulas, constants: dict[str, Any], clip_range: ClipRange, correction: str
) -> Cells:
    """Compute all cells of the traced responses; constants of an update are numbers, of a response (n, 1)."""
    doubles = {name: x.double() for name, x in tensors.items() if x.is_floating_point()}
    actions, states = tensors["actions"], tensors["states"]
    numbers = {
        **{"actions": actions.double(), "states": states.double(), "t": torch.arange(actions.size(1))},
        **{"score_index": tensors["score_index"][:, None], "last_state": states.sum(1, keepdim=True) - 1},
        **{name: x for name, x in doubles.items() if not name.startswith("new_")},
        **constants,
    }
    if "returns" in tensors:  # REINFORCE++: V = 0 and lambda = 1
        values = doubles.get("values", torch.zeros_like(doubles["returns"]))
        raw_advantages, lam = doubles.get("raw_advantages", doubles["returns"]), constants.get("lam", 1.0)
        terms = gae_terms(doubles["rewards"], values, raw_advantages, states, constants["gamma"], lam)
        numbers["delta"], numbers["carried"] = terms
    cells = Cells({}, {}, {}, {})

    def put(name: str, mask: Tensor, epoch: str = "") -> None:
        """Store the run's tensor if there is one, else evaluate the formula."""
        texts = formulas.get(name, ())
        if len(texts) > 1:
            cells.which[name + epoch] = evaluate(CASE[name], numbers).long()
        if name not in numbers:
            numbers[name] = evaluate(texts[0], numbers).expand_as(mask)
        cells.numbers[name + epoch], cells.masks[name + epoch] = numbers[name], mask

    def put_words(name: str, x: Tensor, clipped: Tensor, mask: Tensor, epoch: str) -> None:
        """Store if x is inside, above or below the clip range; NaN has an empty cell."""
        side = torch.where(x > clipped, 1, torch.where(x < clipped, 2, 0))
        numbers[name] = evaluate(formulas[name][0], numbers)
        cells.words[name + epoch] = in_words(side, numbers[name], mask & ~x.isnan())

    for name in ("actions", "states"):
        put(name, torch.ones_like(actions))
    for name in ("logprobs", "ref_logprobs", "sampled_logprobs", "token_rewards", "advantages", "kl"):
        put(name, actions)
    for name in ("rewards", "returns", "carried", "values", "raw_advantages", "delta"):
        if name in formulas or name in tensors:
            put(name, states)

    has_response_ratio = "mean_log_ratio.0" in constants
    loss_actions, loss_states = actions & tensors["in_loss"], states & tensors["in_loss"]
    of_rollout = numbers
    for number, new_logprobs in enumerate(doubles["new_logprobs"]):
        e = f".{number}"
        numbers = of_rollout | {"new_logprobs": new_logprobs, "old": doubles[ratio_to(correction)]}
        # a response that is all NaN and not in the loss wasn't read by any step of the epoch
        read = tensors["in_loss"].any(1, keepdim=True) | ~new_logprobs.isnan().all(1, keepdim=True)  # (n, 1)
        put("new_logprobs", actions & read, e)
        if has_response_ratio:
            numbers["mean_log_ratio"] = constants[f"mean_log_ratio{e}"]
        put("ratio", loss_actions if has_response_ratio else actions & read, e)
        put_words("clip", numbers["ratio"], evaluate(CLIPPED_RATIO, numbers), loss_actions, e)
        put("policy_loss", loss_actions, e)
        if len(formulas["push"]) == 2:  # no slope if the ratio is clipped
            kl_push = evaluate(K3_SLOPE, numbers) if K3_SLOPE in formulas["push"][0] else 0.0
            numbers["push"] = policy_push(numbers["advantages"], numbers["ratio"], clip_range) - kl_push
        put("push", loss_actions, e)
        if "values" not in tensors:
            continue
        numbers["new_values"] = doubles["new_values"][number]
        put("new_values", states & read, e)
        if "clipped_values" in formulas:
            put("clipped_values", states & read, e)
            counted = loss_states & ~doubles["returns"].isnan()
            put_words("value_clip", numbers["new_values"], numbers["clipped_values"], counted, e)
        put("value_loss", loss_states, e)
    return cells


def gae_terms(
    rewards: Tensor, values: Tensor, advantages: Tensor, states: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return the two terms of GAE's advantage before whitening: delta, and the term from the right; all (n, T).

        A_t = delta_t + carried_t,  delta_t = r_t + gamma V_{t+1} - V_t,  carried_t = gamma lam A_{t+1}

    V and A are taken as 0 after a response's last state.
    """
    has_next = F.pad(states[:, 1:], (0, 1))
    next_values = torch.where(has_next, F.pad(values[:, 1:], (0, 1)), 0.0)
    next_advantages = torch.where(has_next, F.pad(advantages[:, 1:], (0, 1)), 0.0)
    return rewards + gamma * next_values - values, gamma * lam * next_advantages


def policy_push(advantages: Tensor, ratio: Tensor, clip_range: ClipRange) -> Tensor:
    """Return the negative derivative of each token's clipped loss with respect to its new logprob; all (n, T).

    If positive, a step makes the token more likely. It is 0 for tokens above the clip range with a positive advantage,
    and below it with a negative one.
    """
    least, most = ratio_bounds(clip_range)
    is_clipped = torch.where(advantages > 0, ratio > most, ratio < least)
    return torch.where(is_clipped, 0.0, advantages * ratio)


def in_words(side: Tensor, is_active: Tensor, mask: Tensor) -> list[list[str]]:
    """Format side (n, T), 0 inside the clip range, 1 above, 2 below, as words; empty where the mask is False."""
    words = [("inside", "above", "below")[i] for i in side.flatten().tolist()]
    flags = zip(words, is_active.flatten().tolist(), mask.flatten().tolist(), strict=True)
    cells = [(word + ", active" * active) * counts for word, active, counts in flags]
    T = side.size(1)
    return [cells[i : i + T] for i in range(0, len(cells), T)]


def short(x: float) -> float | str:
    """Round to nine digits, enough to distinguish any two float32; name NaN and infinities as JavaScript does."""
    return x if isinstance(x, int) else float(f"{x:.9g}") if math.isfinite(x) else json.dumps(x)


def response_constants(tensors: Tensors, algorithm: str, kl_coef: float, k: int, correction: str) -> dict[str, Tensor]:
    """Return each response's score, position of its end, and statistics of its query's group, (n,) each."""
    doubles = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
    constants = {"score": doubles["scores"], "eos_index": tensors["eos_index"]}
    if algorithm != "ppo":
        response_kl = torch.where(tensors["actions"], evaluate(KL, doubles), 0.0).sum(1)
        constants |= group_numbers(algorithm, doubles, response_kl, k, kl_coef)
    if algorithm == "gspo":
        counted = tensors["actions"] & tensors["in_loss"]
        log_ratios = torch.where(counted, doubles["new_logprobs"] - doubles[ratio_to(correction)], 0.0)  # (E, n, T)
        means = log_ratios.sum(2) / counted.sum(1)
        constants |= {f"mean_log_ratio.{epoch}": mean for epoch, mean in enumerate(means)}
    if correction.startswith("sequence"):
        log_weights = torch.where(tensors["actions"], doubles["logprobs"] - doubles["sampled_logprobs"], 0.0)
        constants["sum_log_weight"] = log_weights.sum(1)
    return constants


# ---------------------------------------------------------------------------------------------------------- 3. the page
def update_of(tensors: Tensors, about: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the page's data of one traced update."""
    algorithm = about["algorithm"]
    clip_range = settings["clip_range"]
    names = ("gamma", "lam", "clip_range", "value_clip_range")
    constants: dict[str, Any] = {name: settings[name] for name in names if name in settings}
    if isinstance(clip_range, tuple | list):
        constants["clip_below"], constants["clip_above"] = constants.pop("clip_range")
    statistics = [f"{name}_{statistic}" for name in ("advantage", "return", "reward") for statistic in ("mean", "var")]
    constants |= {name: about[name] for name in ("kl_coef", *statistics) if name in about}
    correction = settings["sampler.correction"]
    constants["least_weight"], constants["most_weight"] = MASKED.get(correction, (0.0, TIS_CLIP))
    k = settings.get("samples_per_query", 1)
    of_response = response_constants(tensors, algorithm, about["kl_coef"], k, correction)
    below, above = clip_range if isinstance(clip_range, tuple | list) else (clip_range, clip_range)
    columns = {name: x[:, None] for name, x in of_response.items()}
    formulas = make_formulas(algorithm, settings)
    cells = cells_of(tensors, formulas, constants | columns | {"below": below, "above": above}, clip_range, correction)
    response_kl = torch.where(tensors["actions"], cells.numbers["kl"], 0.0).sum(1)  # (n,)
    sizes = torch.where(tensors["actions"], cells.numbers["advantages"].abs(), 0.0).amax(1)  # (n,)
    num_clipped = [sum("active" in w for key, rows in cells.words.items() if key.startswith("clip.") for w in rows[i])
                   for i in range(len(sizes))]  # fmt: skip
    responses = []
    for i in range(len(sizes)):
        T = int(tensors["states"][i].sum())
        numbers: dict[str, list] = {}
        for key, x in cells.numbers.items():
            pairs = zip(x[i, :T].tolist(), cells.masks[key][i, :T].tolist(), strict=True)
            numbers[key] = [short(number) if exists else None for number, exists in pairs]
        numbers |= {key: rows[i][:T] for key, rows in cells.words.items()}
        responses.append(
            {
                "index": int(tensors["index"][i]),
                "group": int(tensors["index"][i]) // k,
                "query": about["queries"][i],
                "texts": about["texts"][i],
                "score_index": int(tensors["score_index"][i]),
                "has_eos": bool(tensors["has_eos"][i]),
                "kl": short(response_kl[i].item()),
                "advantage": short(sizes[i].item()),
                "clipped": num_clipped[i],
                "constants": {name: short(x[i].item()) for name, x in of_response.items()},
                "cells": numbers,
                "which": {key: x[i, :T].tolist() for key, x in cells.which.items()},
            }
        )
    shown = {name: short(x) if isinstance(x, float) else x for name, x in constants.items()}
    return {"update": about["update"], "constants": shown, "responses": responses}


def source_line(file: str, expression: str) -> str:
    """Return `file:line` of the first line with the expression; only the file if none has it."""
    for path in (ROOT / file, ROOT / "nanorlhf" / file):  # the latter in an installed copy
        if path.is_file():
            for number, line in enumerate(read_text(path).splitlines(), start=1):
                if expression in line:
                    return f"{file}:{number}"
    return file


def lines_data(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the table's rows for a page's data, with line numbers of the current code."""
    num_epochs = sum(key.startswith("ratio.") for key in data["updates"][0]["responses"][0]["cells"])
    responses = [response for update in data["updates"] for response in update["responses"]]
    has_token_rewards = any(any(response["cells"].get("token_rewards", ())) for response in responses)
    lines = lines_of(data["algorithm"], data["settings"], num_epochs, has_token_rewards)
    return [asdict(line) | {"source": source_line(line.file, line.expression)} for line in lines]


def embedded(page: Path) -> dict[str, Any]:
    """Return the data of an existing page, with current rows. Raises InputError for other files."""
    _, found, rest = read_text(page).partition('<script type="application/json" id="data">')
    data = parse_json(rest.partition("</script>")[0].encode(), str(page)) if found else None
    if not isinstance(data, dict) or not {"algorithm", "settings", "updates"} <= data.keys():
        raise InputError(f"{page} isn't a microscope page; pass one, or a run directory.")
    try:
        return data | {"lines": lines_data(data)}
    except (LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{page}: damaged data ({error!r:.80}); regenerate it from the run directory.") from error


def page_data(run: Path) -> dict[str, Any]:
    """Return the data that the page embeds. Raises InputError for a missing or damaged trace."""
    if run.is_file():
        return embedded(run)
    traces = read_traces(run)
    where = f"{run}/trace"
    for tensors, info in traces:
        if not tensors["response"].numel():
            raise InputError(f"{where}: update {info['update']} has no tokens; train again with --trace.")
    first, about = traces[0]
    settings = flat_settings(about["settings"])
    algorithm = about["algorithm"]
    check_settings(settings, algorithm, where)
    for tensors, info in traces:
        other_settings = flat_settings(info["settings"])
        if info["algorithm"] != algorithm or any(other_settings.get(name) != settings.get(name) for name in OF_NUMBERS):
            raise InputError(f"{where}: update {info['update']} is from a run with other settings; delete its file.")
        if len(tensors["new_logprobs"]) != len(first["new_logprobs"]):
            raise InputError(f"{where}: update {info['update']} has another number of epochs; delete its file.")
        if tensors["fixed_logprobs"].shape != first["fixed_logprobs"].shape:
            raise InputError(f"{where}: update {info['update']} has other fixed responses; delete its file.")
    fixed = []
    for i, (query, texts) in enumerate(zip(about["queries"], about["texts"], strict=True)):
        logprobs = [[short(x) for x in tensors["fixed_logprobs"][i, : len(texts)].tolist()] for tensors, _ in traces]
        answers = [info["answers"][i] for _, info in traces]
        fixed.append({"query": query, "texts": texts, "logprobs": logprobs, "answers": answers})
    data = {
        "run": str(run),
        "algorithm": algorithm,
        "temperature": settings["temperature"],
        "settings": {name: settings[name] for name in OF_LINES if name in settings},
        "updates": [update_of(tensors, info, settings) for tensors, info in traces],
        "fixed": fixed,
    }
    return data | {"lines": lines_data(data)}


def check_settings(settings: dict[str, Any], algorithm: str, where: str) -> None:
    """Raise InputError unless the settings used by the page are valid."""
    if algorithm not in ("ppo", *ALGORITHMS):
        raise InputError(f"{where}: unknown algorithm {algorithm!r:.80}; train again with --trace.")
    kinds: dict[str, type] = {"temperature": float, "sampler.correction": str}
    if algorithm == "ppo":
        kinds |= {"score_at": str, "gamma": float, "lam": float, "whiten_rewards": bool, "whiten_advantages": bool}
        if settings.get("value_clip_range") is not None:
            kinds["value_clip_range"] = float
    else:
        kinds |= {"samples_per_query": int} | ({"gamma": float} if algorithm == "reinforce++" else {})
    for name, kind in kinds.items():
        field(settings, name, kind, where)
    if settings.get("samples_per_query", 1) < 1:
        raise InputError(f"{where}: the field 'samples_per_query' must be at least 1; train again with --trace.")
    clip_range = settings.get("clip_range")
    pair = clip_range if isinstance(clip_range, tuple | list) and len(clip_range) == 2 else (clip_range,)
    if not all(isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in pair):
        raise InputError(f"{where}: the field 'clip_range' must be a number, or two; train again with --trace.")


def page_of(data: dict[str, Any]) -> str:
    """Return the page's HTML."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    # inside <script> only "</" and "<!--" would end the data early
    page = read_text(TEMPLATE).replace("{{ look }}", read_text(LOOK).strip())
    return page.replace("{{ data }}", text.replace("<", "\\u003c"))


def main(args: Args) -> Path:
    """Write the page and return its path."""
    out = args.out or (args.run if args.run.is_file() else args.run / "microscope.html")
    if out.is_dir():
        raise InputError(f"--out must be a file; {out} is a directory.")
    page = page_of(page_data(args.run))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, page)
    print(f"written: {out}")
    return out


if __name__ == "__main__":
    run_module(main, Args)
