"""One HTML page that shows every number of a few responses of PPO or GRPO, token by token: docs/microscope.md.

    python train_ppo.py --trace 4 --out runs/tiny/ppo
    python -m nanorlhf.report.microscope --run runs/tiny/ppo

The numbers are the tensors that the run kept in RUN/trace. Computed here is only what a formula on the page derives
from them: kl, delta, the terms of GAE's recursion, ratios, losses and their slopes. A number that was not used, as
of a token that is dropped from the loss, has an empty cell; those of a run that diverged are shown as inf or nan.
Out: RUN/microscope.html.
"""

import json
import math
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
from nanorlhf.grpo import ALGORITHMS, overlong_penalty, policy_loss_of
from nanorlhf.ppo import ClipRange, cispo_loss, ratio_bounds, response_mean
from nanorlhf.training.run_directory import flat_settings
from nanorlhf.training.sampler import TIS_CLIP
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
    """directory of a run of train_ppo.py or train_grpo.py with --trace, or a page that is made anew from its data"""
    out: Path | None = None
    """the page; None: microscope.html in the run's directory, or the page itself"""


# ------------------------------------------------------------------------------------------------------ 1. the formulas
@dataclass(frozen=True)
class Line:
    """One line of the table of tokens.

    formulas: {name} is the number of that line at this token, {name+1} at the next one, or a constant of the response.
    A cell says which of the formulas is its own. Without formulas the number is what a model said.
    """

    key: str
    label: str
    section: str
    about: str
    file: str
    expression: str  # the source code that computes it, as it stands in `file`
    formulas: tuple[str, ...] = ()
    kind: str = "number"  # or mask, words


def lines_of(algorithm: str, settings: dict[str, Any], num_epochs: int, has_token_rewards: bool = False) -> list[Line]:
    """The table's lines for a run, from top to bottom; settings have the names of flags."""
    has_values = algorithm == "ppo"
    script = "train_ppo.py" if has_values else "train_grpo.py"
    logprobs, generate, ppo = "nanorlhf/logprobs.py", "nanorlhf/generate.py", "nanorlhf/ppo.py"
    forward, masks = "1. What the models say", "2. What counts"
    after = has_values and settings["score_at"] == "after_eos"
    lines = [
        Line(
            "logprobs", "policy", forward, "log-probability of the token by the policy before this update, nats",
            logprobs, "logprobs, _ = linear_logprobs(hidden, head, labels, bias, temperature, cap)",
        ),
        Line(
            "ref_logprobs", "reference", forward, "log-probability of the token by the reference policy, nats",
            logprobs, "ref_logprobs, _ = linear_logprobs(ref_hidden, ref_head, labels, ref_bias, temperature, ref_cap)",
        ),
        Line(
            "sampled_logprobs", "sampler", forward, "log-probability of the token by what sampled it, nats",
            generate, "live.logprobs.index_copy_(1, live.t, logprob.masked_fill(live.ended, 0.0))",
        ),
        Line(
            "kl", "KL", forward, "k1, the estimate of the KL from one sample: nats by which the token is likelier than "
            "under the reference", script, "kl = torch.where(batch.actions, batch.logprobs - batch.ref_logprobs, 0.0)",
            ("{logprobs} - {ref_logprobs}",),
        ),
        Line(
            "actions", "actions", masks, "the policy chose a token here: KL and policy loss",
            ppo, "index <= eos_index[:, None], index", ("{t} <= {eos_index}",), "mask",
        ),
        Line(
            "states", "states", masks, "there is a state here, also after EOS: value loss"
            if after else "there is a state here",
            "nanorlhf/batch.py", 'states=states if score_at == "after_eos" else actions',
            ("{t} <= {eos_index} + 1",) if after else ("{t} <= {eos_index}",), "mask",
        ),
    ]  # fmt: skip
    if has_values:
        lines += ppo_lines(settings, has_token_rewards)
    elif algorithm == "reinforce++":
        lines += reinforce_lines(settings, has_token_rewards)
    else:
        lines.append(group_line(algorithm, settings))
    for epoch in range(num_epochs):
        lines += epoch_lines(epoch, algorithm, settings, script, has_values)
    return lines


def importance_weight(settings: dict[str, Any]) -> str:
    """What the advantage is multiplied by with --sampler.correction tis."""
    if settings["sampler.correction"] != "tis":
        return ""
    return " * min(exp({logprobs} - {sampled_logprobs}), {tis_clip})"


REWARD = ("-{kl_coef} * {kl}", "-{kl_coef} * {kl} + {score}", "{score}")
"""reward of a token; of the one with the score; of the state after EOS, which has no KL"""


def token_reward_lines(has_token_rewards: bool) -> list[Line]:
    """What the rewards themselves say of each token, where any does."""
    about = "what --reward gives this token: a process reward, or a teacher's log-probability minus the policy's"
    source = "nanorlhf/rewards/combined.py", "token_rewards += weight * found.token_rewards"
    return [Line("token_rewards", "per token", "3. Rewards", about, *source)] if has_token_rewards else []


def reward_formulas(has_token_rewards: bool) -> tuple[str, ...]:
    """As REWARD; after EOS there is no token, and so no reward of its own."""
    if not has_token_rewards:
        return REWARD
    return (*(f"{{token_rewards}} - {formula[1:]}" for formula in REWARD[:2]), REWARD[2])


def ppo_lines(settings: dict[str, Any], has_token_rewards: bool) -> list[Line]:
    """Rewards, values, GAE, whitening."""
    rewards, values, script = "3. Rewards", "4. Values, advantages", "train_ppo.py"
    reward = reward_formulas(has_token_rewards)
    if settings["whiten_rewards"]:
        whitened = "({}) / sqrt({{reward_var}} + 1e-8) + {{reward_mean}}"
        reward = tuple(whitened.format(f"{formula} - {{reward_mean}}") for formula in reward)
    advantage = "{raw_advantages}"
    if settings["whiten_advantages"]:
        advantage = "({raw_advantages} - {advantage_mean}) / sqrt({advantage_var} + 1e-8)"
    recursion = "running = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * running"
    return [
        *token_reward_lines(has_token_rewards),
        Line(
            "rewards", "reward", rewards, "minus beta times KL; the score is added once, at the underlined position",
            script, "rewards[torch.arange(B), batch.score_index] += scores", reward,
        ),
        Line(
            "values", "value V", values, "what the value model expects of the response, before this token",
            "nanorlhf/logprobs.py", "torch.where(states, values[:, :-1], 0.0)",
        ),
        Line(
            "delta", "delta", values, "by how much this step was better than the value model expected",
            "kernels/gae.py", "advantages = rewards + gamma * next_values - values",
            ("{rewards} + {gamma} * {values+1} - {values}", "{rewards} + {gamma} * 0 - {values}"),
        ),
        Line(
            "carried", "from the right", values, "gamma * lam times the advantage of the next position",
            "kernels/gae.py", recursion, ("{gamma} * {lam} * {raw_advantages+1}", "{gamma} * {lam} * 0"),
        ),
        Line(
            "raw_advantages", "advantage", values, "GAE's, before whitening: delta, and what comes from the right",
            "kernels/gae.py", recursion, ("{delta} + {carried}",),
        ),
        Line(
            "advantages", "whitened", values, "the advantage that the loss uses",
            *(("nanorlhf/ppo.py", "whitened = (x - mean) * torch.rsqrt(variance + 1e-8)")
              if settings["whiten_advantages"] else (script, "batch.advantages = advantages * importance_weights")),
            (advantage + importance_weight(settings),),
        ),
        Line(
            "returns", "return", values, "what the value model should have said",
            "kernels/gae.py", "return advantages, advantages + values", ("{raw_advantages} + {values}",),
        ),
    ]  # fmt: skip


def reinforce_lines(settings: dict[str, Any], has_token_rewards: bool) -> list[Line]:
    """REINFORCE++: rewards, returns, whitening."""
    rewards, advantages, script, kernel = "3. Rewards", "4. Advantages", GRPO, "kernels/gae.py"
    recursion = "running = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * running"
    return [
        *token_reward_lines(has_token_rewards),
        Line(
            "rewards", "reward", rewards, "minus beta times KL; the score is added once, at the underlined position",
            script, "rewards[torch.arange(len(x.scores)), x.actions.sum(1) - 1] += x.scores",
            reward_formulas(has_token_rewards)[:2],
        ),
        Line(
            "carried", "from the right", advantages, "gamma times the return of the next position",
            kernel, recursion, ("{gamma} * {returns+1}", "{gamma} * 0"),
        ),
        Line(
            "returns", "return", advantages, "the reward, and what comes from the right: GAE with V = 0 and "
            "lambda = 1", kernel, recursion, ("{rewards} + {carried}",),
        ),
        Line(
            "advantages", "whitened", advantages, "the advantage that the loss uses: the whole rollout is the baseline",
            "nanorlhf/ppo.py", "whitened = (x - mean) * torch.rsqrt(variance + 1e-8)",
            ("({returns} - {return_mean}) / sqrt({return_var} + 1e-8)" + importance_weight(settings),),
        ),
    ]  # fmt: skip


def group_line(algorithm: str, settings: dict[str, Any]) -> Line:
    """The advantage of GRPO and relatives, from the scores of the query's group."""
    normalised = (
        "return (groups * torch.rsqrt(variance + 1e-8)).view(-1, 1).expand_as(x.kl)",
        "({score} - {group_mean}) / sqrt({group_var} + 1e-8)",
    )
    expression, formula = {
        "grpo": normalised,
        "gspo": normalised,
        "cispo": normalised,
        "dapo": (
            "return grpo(replace(x, scores=x.scores + overlong_penalty(x.actions)))",
            "({score} + {length_penalty} - {group_mean}) / sqrt({group_var} + 1e-8)",
        ),
        "dr_grpo": (
            "return centred(x.scores, x.k).view(-1, 1).expand_as(x.kl)",
            "({score} - {group_mean})",
        ),
        "online_dpo": (
            "weights = x.k * x.kl_coef * torch.sigmoid(-margins)",
            "{side} * {k} * {kl_coef} / (1 + exp({margin}))",
        ),
        "rloo": (
            "return (centred(response_rewards, x.k) * (x.k / (x.k - 1))).view(-1, 1).expand_as(x.kl)",
            "({score} - {kl_coef} * {response_kl} - {group_mean}) * {k} / ({k} - 1)",
        ),
    }[algorithm]
    about = "how much better the response is than the others to its query"
    if algorithm == "online_dpo":
        about = "the slope of DPO's loss: above 0 for the best response to its query, below 0 for the worst, else 0"
    formulas = (formula + importance_weight(settings),)
    return Line("advantages", "advantage", "3. Advantages", about, GRPO, expression, formulas)


def epoch_lines(epoch: int, algorithm: str, settings: dict[str, Any], script: str, has_values: bool) -> list[Line]:
    """What one pass over the rollout computes, in the step that reads the response."""
    section, e, ppo = f"Epoch {epoch + 1}", f".{epoch}", "nanorlhf/ppo.py"
    is_cispo, has_response_ratio = algorithm == "cispo", algorithm == "gspo"
    has_kl_loss = algorithm in ALGORITHMS and ALGORITHMS[algorithm].has_kl_loss
    ratio, old = "{ratio" + e + "}", ratio_to(settings["sampler.correction"])
    at_first = "; 1 in the first step" if old == "logprobs" else ", compared with the sampler"
    is_pair = isinstance(settings.get("clip_range"), tuple | list)
    below, above = ("{clip_below}", "{clip_above}") if is_pair else ("{clip_range}", "{clip_range}")
    surrogate = "{advantages} * " + ratio
    clipped_ratio = f"clip({ratio}, 1 - {below}, 1 + {above})"
    clipped = "-{advantages} * " + clipped_ratio
    maximum = "return torch.maximum(unclipped, clipped), clipped > unclipped"
    kl_push = " - {kl_coef} * (1 - exp({ref_logprobs} - {new_logprobs" + e + "}))" if has_kl_loss else ""
    lines = [
        Line(
            f"new_logprobs{e}", "new log-prob", section, "log-probability by the policy as it is now, nats",
            script, "new_logprobs, entropy = response_logprobs(",
        ),
        Line(
            f"ratio{e}", "ratio", section, "exp of the mean log ratio of the response's tokens" + at_first,
            ppo, "new, old = response_mean(new_logprobs, actions), response_mean(logprobs, actions)",
            ("exp({mean_log_ratio" + e + "})",),
        ) if has_response_ratio else Line(
            f"ratio{e}", "ratio", section, "how much likelier the token has become" + at_first,
            ppo, "log_ratio = torch.where(actions, new_logprobs - logprobs, 0.0)",
            ("exp({new_logprobs" + e + "} - {" + old + "})",),
        ),
    ]  # fmt: skip
    step = ": ▲ the step makes the token likelier, ▼ less likely, · leaves it"
    if is_cispo:
        lines += [
            Line(
                f"clip{e}", "clip", section, "where the ratio is; active: the weight is clipped", ppo,
                "return losses, weights != ratio", (f"{clipped_ratio} != {ratio}",), "words",
            ),
            Line(
                f"policy_loss{e}", "policy loss", section, "the clipped ratio weighs the token, without a gradient",
                ppo, "losses = -torch.where(actions, advantages, 0.0) * weights * new_logprobs",
                (clipped + " * {new_logprobs" + e + "}",),
            ),
            Line(
                f"push{e}", "gradient", section, "minus the slope of the token's loss in its log-probability" + step,
                ppo, "weights = ratio.clamp(least, most)", ("{advantages} * " + clipped_ratio,),
            ),
        ]  # fmt: skip
    else:
        unit = "response" if has_response_ratio else "token"
        lines += [
            Line(
                f"clip{e}", "clip", section, f"where the ratio is; active: the clipped loss is the larger one, so the "
                f"{unit} has no policy gradient", ppo, maximum, (clipped + " > -" + surrogate,), "words",
            ),
            Line(
                f"policy_loss{e}", "policy loss", section, "the larger of the unclipped and the clipped loss",
                ppo, maximum, ("max(-" + surrogate + ", " + clipped + ")",),
            ),
            Line(
                f"push{e}", "gradient", section, "minus the slope of the response's losses in the token's "
                "log-probability" + step if has_response_ratio
                else "minus the slope of the token's loss in its log-probability" + step,
                ppo, "unclipped = -advantages * ratio", (surrogate + kl_push, "{advantages} * 0" + kl_push),
            ),
        ]  # fmt: skip
    if not has_values:
        return lines
    lines.append(
        Line(
            f"new_values{e}", "new value", section, "what the value model says now",
            script, "new_values = response_values(value_model, *text, mb.states)",
        )
    )  # fmt: skip
    error = "({new_values" + e + "} - {returns})**2"
    if settings["value_clip_range"] is None:
        loss, expression = "0.5 * " + error, "return 0.5 * error, torch.zeros_like(states)"
    else:
        around = "{values} - {value_clip_range}, {values} + {value_clip_range}"
        clipped_error = "({clipped_values" + e + "} - {returns})**2"
        lines += [
            Line(
                f"clipped_values{e}", "value, clipped", section, "the new value, at most the clip range from the old",
                ppo, "clipped_values = new_values.clamp(values - clip_range, values + clip_range)",
                ("clip({new_values" + e + "}, " + around + ")",),
            ),
            Line(
                f"value_clip{e}", "value clip", section, "active: the clipped error is the larger one, so the value "
                "has no gradient", ppo, "return 0.5 * torch.maximum(error, clipped_error), clipped_error > error",
                (clipped_error + " > " + error,), "words",
            ),
        ]  # fmt: skip
        loss = "0.5 * max(" + error + ", " + clipped_error + ")"
        expression = "return 0.5 * torch.maximum(error, clipped_error), clipped_error > error"
    about = "half the squared error to the return"
    return [*lines, Line(f"value_loss{e}", "value loss", section, about, ppo, expression, (loss,))]


# ------------------------------------------------------------------------------------------------------- 2. the numbers
@dataclass
class Cells:
    """The lines' cells (n, T): numbers in float64, the masks of those that exist, and which formula each cell has."""

    numbers: dict[str, Tensor]
    masks: dict[str, Tensor]
    which: dict[str, Tensor]
    words: dict[str, list[list[str]]]


def cells_of(
    tensors: Tensors, constants: dict[str, Any], algorithm: str, clip_range: ClipRange, correction: str
) -> Cells:
    """All cells of the traced responses; constants: of the update."""
    doubles = {name: x.double() for name, x in tensors.items() if x.is_floating_point()}
    actions, states = tensors["actions"], tensors["states"]
    t = torch.arange(actions.size(1))  # (T,)
    cells = Cells({}, {}, {}, {})

    def put(key: str, x: Tensor, mask: Tensor) -> Tensor:
        cells.numbers[key], cells.masks[key] = x, mask
        return x

    for name in ("actions", "states"):
        put(name, tensors[name].double(), torch.ones_like(actions))

    logprobs, ref_logprobs, old = doubles["logprobs"], doubles["ref_logprobs"], doubles[ratio_to(correction)]
    for name in ("logprobs", "ref_logprobs", "sampled_logprobs", "token_rewards", "advantages"):
        put(name, doubles[name], actions)
    put("kl", logprobs - ref_logprobs, actions)
    is_last = t == states.sum(1, keepdim=True) - 1  # (n, T)
    cells.which["delta"] = cells.which["carried"] = is_last.long()
    values = doubles.get("values", torch.zeros_like(logprobs))  # REINFORCE++: V = 0
    is_scored = t == tensors["score_index"][:, None]
    cells.which["rewards"] = torch.where(is_scored, torch.where(actions, 1, 2), 0)
    if "returns" in tensors:
        rewards, returns = (put(name, doubles[name], states) for name in ("rewards", "returns"))
        raw_advantages = doubles.get("raw_advantages", returns)  # A = R - V
        gamma, lam = constants["gamma"], constants.get("lam", 1.0)
        delta, carried = gae_terms(rewards, values, raw_advantages, states, gamma, lam)
        put("carried", carried, states)
    if "values" in tensors:
        put("values", values, states)
        put("raw_advantages", raw_advantages, states)
        put("delta", delta, states)

    policy_loss = policy_loss_of(algorithm)
    least, most = ratio_bounds(clip_range)
    has_kl_loss = algorithm in ALGORITHMS and ALGORITHMS[algorithm].has_kl_loss
    advantages = doubles["advantages"]
    loss_actions, loss_states = actions & tensors["in_loss"], states & tensors["in_loss"]
    for epoch, new_logprobs in enumerate(doubles["new_logprobs"]):
        # no step of the epoch read a response that is all NaN and that the loss leaves out
        read = tensors["in_loss"].any(1, keepdim=True) | ~new_logprobs.isnan().all(1, keepdim=True)  # (n, 1)
        put(f"new_logprobs.{epoch}", new_logprobs, actions & read)
        log_ratio, of_ratio = new_logprobs - old, actions & read
        if algorithm == "gspo":
            log_ratio, of_ratio = response_mean(log_ratio, loss_actions), loss_actions
        ratio = put(f"ratio.{epoch}", log_ratio.exp(), of_ratio)
        losses, is_active = policy_loss(new_logprobs, old, advantages, loss_actions, clip_range)
        put(f"policy_loss.{epoch}", losses, loss_actions)
        kl_push = constants["kl_coef"] * (1 - (ref_logprobs - new_logprobs).exp()) if has_kl_loss else 0.0
        if policy_loss is cispo_loss:
            push = advantages * ratio.clamp(least, most)
        else:
            push = policy_push(advantages, ratio, clip_range)
            cells.which[f"push.{epoch}"] = is_active.long()
        put(f"push.{epoch}", push - kl_push, loss_actions)
        side = torch.where(ratio > most, 1, torch.where(ratio < least, 2, 0))
        cells.words[f"clip.{epoch}"] = in_words(side, is_active, loss_actions & ~ratio.isnan())  # NaN is nowhere
        if "values" not in tensors:
            continue
        new_values = put(f"new_values.{epoch}", doubles["new_values"][epoch], states & read)
        error = (new_values - doubles["returns"]) ** 2
        if (value_eps := constants.get("value_clip_range")) is not None:
            lowest, highest = values - value_eps, values + value_eps
            clipped_values = put(f"clipped_values.{epoch}", new_values.clamp(lowest, highest), states & read)
            clipped_error = (clipped_values - doubles["returns"]) ** 2
            side = torch.where(new_values > highest, 1, torch.where(new_values < lowest, 2, 0))
            is_active = clipped_error > error
            cells.words[f"value_clip.{epoch}"] = in_words(side, is_active, loss_states & ~error.isnan())
            error = torch.maximum(error, clipped_error)
        put(f"value_loss.{epoch}", 0.5 * error, loss_states)
    return cells


def gae_terms(
    rewards: Tensor, values: Tensor, advantages: Tensor, states: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """The two terms of each advantage of GAE, before whitening: delta, and what comes from the right; all (n, T).

        A_t = delta_t + carried_t,  delta_t = r_t + gamma V_{t+1} - V_t,  carried_t = gamma lam A_{t+1}

    V and A are 0 after a response's last state, whatever the tensors hold there.
    """
    has_next = F.pad(states[:, 1:], (0, 1))
    next_values = torch.where(has_next, F.pad(values[:, 1:], (0, 1)), 0.0)
    next_advantages = torch.where(has_next, F.pad(advantages[:, 1:], (0, 1)), 0.0)
    return rewards + gamma * next_values - values, gamma * lam * next_advantages


def policy_push(advantages: Tensor, ratio: Tensor, clip_range: ClipRange) -> Tensor:
    """Minus the slope of each token's clipped loss in its new log-probability; all (n, T).

    Above 0 a step makes the token likelier. A token that is likelier than the clip range allows, and better than
    expected, is not pushed further; nor is one that is less likely, and worse.
    """
    least, most = ratio_bounds(clip_range)
    is_clipped = torch.where(advantages > 0, ratio > most, ratio < least)
    return torch.where(is_clipped, 0.0, advantages * ratio)


def in_words(side: Tensor, is_active: Tensor, mask: Tensor) -> list[list[str]]:
    """side (n, T): 0 inside the clip range, 1 above, 2 below; empty where the mask is False."""
    words = [("inside", "above", "below")[i] for i in side.flatten().tolist()]
    flags = zip(words, is_active.flatten().tolist(), mask.flatten().tolist(), strict=True)
    cells = [(word + ", active" * active) * counts for word, active, counts in flags]
    T = side.size(1)
    return [cells[i : i + T] for i in range(0, len(cells), T)]


def short(x: float) -> float | str:
    """Nine digits, which tell any two float32 apart; JavaScript's name of what JSON has no number for."""
    return float(f"{x:.9g}") if math.isfinite(x) else json.dumps(x)


def response_constants(
    tensors: Tensors, response_kl: Tensor, algorithm: str, kl_coef: float, k: int, correction: str
) -> list[dict[str, Any]]:
    """Of each response: its score, where it ends, and the statistics of its query's group; response_kl: (n,)."""
    found = []
    doubles = tensors["scores"].double()
    response_rewards = doubles
    if algorithm == "rloo":
        response_rewards = doubles - kl_coef * response_kl
    elif algorithm == "dapo":
        response_rewards = doubles + overlong_penalty(tensors["actions"])
    loss_actions = tensors["actions"] & tensors["in_loss"]
    old = tensors[ratio_to(correction)]
    log_ratios = [(new - old).double() for new in tensors["new_logprobs"]]  # (n, T) of each epoch
    for i, group in enumerate((tensors["index"] // k).tolist()):
        of_response = {"score": short(doubles[i].item()), "eos_index": int(tensors["eos_index"][i])}
        if algorithm != "ppo":
            members = response_rewards[tensors["index"] // k == group]
            of_response |= {
                "k": k,
                "group_mean": short(members.mean().item()),
                "group_var": short(members.var(correction=0).item()),
                "response_reward": short(response_rewards[i].item()),
                "response_kl": short(response_kl[i].item()),
            }
        if algorithm == "dapo":
            of_response["length_penalty"] = short((response_rewards[i] - doubles[i]).item())
        if algorithm == "gspo":
            for epoch, log_ratio in enumerate(log_ratios):
                of_response[f"mean_log_ratio.{epoch}"] = short(log_ratio[i][loss_actions[i]].mean().item())
        if algorithm == "online_dpo":
            of_response |= pair_constants(doubles, response_kl, tensors["index"] // k == group, i, kl_coef)
        found.append(of_response)
    return found


def pair_constants(scores: Tensor, kl: Tensor, members: Tensor, row: int, kl_coef: float) -> dict[str, Any]:
    """Online DPO: a response's side, 1 for the best of its group, -1 for the worst, and the pair's margin in nats.

    scores, kl and members (n,): True for the responses of the row's group.
    """
    rows = members.nonzero().flatten()
    best, worst = (int(rows[scores[rows].argmax()]), int(rows[scores[rows].argmin()]))
    margin = kl_coef * (kl[best] - kl[worst])
    return {"side": (row == best) - (row == worst), "margin": short(margin.item())}


# ---------------------------------------------------------------------------------------------------------- 3. the page
def update_of(tensors: Tensors, about: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """What the page shows of one traced update."""
    algorithm = about["algorithm"]
    clip_range = settings["clip_range"]
    names = ("gamma", "lam", "clip_range", "value_clip_range")
    constants: dict[str, Any] = {name: settings[name] for name in names if name in settings}
    if isinstance(clip_range, tuple | list):
        constants["clip_below"], constants["clip_above"] = constants.pop("clip_range")
    statistics = [f"{name}_{statistic}" for name in ("advantage", "return", "reward") for statistic in ("mean", "var")]
    constants |= {name: about[name] for name in ("kl_coef", *statistics) if name in about}
    constants["tis_clip"], correction = TIS_CLIP, settings["sampler.correction"]
    cells = cells_of(tensors, constants, algorithm, clip_range, correction)
    k = settings.get("samples_per_query", 1)
    response_kl = torch.where(tensors["actions"], cells.numbers["kl"], 0.0).sum(1)  # (n,)
    sizes = torch.where(tensors["actions"], cells.numbers["advantages"].abs(), 0.0).amax(1)  # (n,)
    of_responses = response_constants(tensors, response_kl, algorithm, about["kl_coef"], k, correction)
    num_clipped = [sum("active" in w for key, rows in cells.words.items() if key.startswith("clip.") for w in rows[i])
                   for i in range(len(of_responses))]  # fmt: skip
    responses = []
    for i, of_response in enumerate(of_responses):
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
                "constants": of_response,
                "cells": numbers,
                "which": {key: x[i, :T].tolist() for key, x in cells.which.items()},
            }
        )
    shown = {name: short(x) if isinstance(x, float) else x for name, x in constants.items()}
    return {"update": about["update"], "constants": shown, "responses": responses}


def source_line(file: str, expression: str) -> str:
    """`file:line` of the only or first line that holds the expression; the file alone where none does."""
    for path in (ROOT / file, ROOT / "nanorlhf" / file):  # the latter in an installed copy
        if path.is_file():
            for number, line in enumerate(read_text(path).splitlines(), start=1):
                if expression in line:
                    return f"{file}:{number}"
    return file


def lines_data(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of a page's data, with the line numbers that the code has now."""
    num_epochs = sum(key.startswith("ratio.") for key in data["updates"][0]["responses"][0]["cells"])
    responses = [response for update in data["updates"] for response in update["responses"]]
    has_token_rewards = any(any(response["cells"].get("token_rewards", ())) for response in responses)
    lines = lines_of(data["algorithm"], data["settings"], num_epochs, has_token_rewards)
    return [asdict(line) | {"source": source_line(line.file, line.expression)} for line in lines]


def embedded(page: Path) -> dict[str, Any]:
    """The data of a page written earlier, with the lines of now. Raises InputError for another file."""
    _, found, rest = read_text(page).partition('<script type="application/json" id="data">')
    data = parse_json(rest.partition("</script>")[0].encode(), str(page)) if found else None
    if not isinstance(data, dict) or not {"algorithm", "settings", "updates"} <= data.keys():
        raise InputError(f"{page} is no page of the microscope: name one, or a run's directory.")
    try:
        return data | {"lines": lines_data(data)}
    except (LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{page}: its data are damaged ({error!r:.80}): make it from the run's directory.") from error


def page_data(run: Path) -> dict[str, Any]:
    """All that the page embeds. Raises InputError for a run without a trace, and for a damaged one."""
    if run.is_file():
        return embedded(run)
    traces = read_traces(run)
    where = f"{run}/trace"
    for tensors, said in traces:
        if not tensors["response"].numel():
            raise InputError(f"{where}: update {said['update']} holds no token: train again with --trace.")
    first, about = traces[0]
    settings = flat_settings(about["settings"])
    algorithm = about["algorithm"]
    check_settings(settings, algorithm, where)
    for tensors, said in traces:
        others = flat_settings(said["settings"])
        if said["algorithm"] != algorithm or any(others.get(name) != settings.get(name) for name in OF_NUMBERS):
            raise InputError(f"{where}: update {said['update']} is of a run with other settings: delete its file.")
        if len(tensors["new_logprobs"]) != len(first["new_logprobs"]):
            raise InputError(f"{where}: update {said['update']} has another number of epochs: delete its file.")
        if tensors["fixed_logprobs"].shape != first["fixed_logprobs"].shape:
            raise InputError(f"{where}: update {said['update']} has other fixed responses: delete its file.")
    fixed = []
    for i, (query, texts) in enumerate(zip(about["queries"], about["texts"], strict=True)):
        logprobs = [[short(x) for x in tensors["fixed_logprobs"][i, : len(texts)].tolist()] for tensors, _ in traces]
        answers = [said["answers"][i] for _, said in traces]
        fixed.append({"query": query, "texts": texts, "logprobs": logprobs, "answers": answers})
    data = {
        "run": str(run),
        "algorithm": algorithm,
        "temperature": settings["temperature"],
        "settings": {name: settings[name] for name in OF_LINES if name in settings},
        "updates": [update_of(tensors, said, settings) for tensors, said in traces],
        "fixed": fixed,
    }
    return data | {"lines": lines_data(data)}


def check_settings(settings: dict[str, Any], algorithm: str, where: str) -> None:
    """Raise InputError unless the settings that the page shows or computes with are those of a run."""
    if algorithm not in ("ppo", *ALGORITHMS):
        raise InputError(f"{where}: the algorithm {algorithm!r:.80} is unknown: train again with --trace.")
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
        raise InputError(f"{where}: the field 'samples_per_query' must be at least 1: train again with --trace.")
    clip_range = settings.get("clip_range")
    pair = clip_range if isinstance(clip_range, tuple | list) and len(clip_range) == 2 else (clip_range,)
    if not all(isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in pair):
        raise InputError(f"{where}: the field 'clip_range' must be a number, or two: train again with --trace.")


def page_of(data: dict[str, Any]) -> str:
    """The page's HTML."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    # within <script> only "</" and "<!--" would end the data early
    page = read_text(TEMPLATE).replace("{{ look }}", read_text(LOOK).strip())
    return page.replace("{{ data }}", text.replace("<", "\\u003c"))


def main(args: Args) -> Path:
    """Write the page; returns its path."""
    out = args.out or (args.run if args.run.is_file() else args.run / "microscope.html")
    if out.is_dir():
        raise InputError(f"--out {out} is a directory: name a file.")
    page = page_of(page_data(args.run))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, page)
    print(f"written: {out}")
    return out


if __name__ == "__main__":
    run_module(main, Args)
