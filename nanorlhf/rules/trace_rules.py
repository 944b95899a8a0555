"""Rules that compare the tensors of a trace with their formulas (nanorlhf/rules/formulas.py) in float64.

The settings are those in the trace. A rule examines one traced update of n responses and T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanorlhf.rules import formulas
from nanorlhf.rules.finding import Finding
from nanorlhf.rules.formulas import evaluate
from nanorlhf.rules.record import Record
from nanorlhf.rules.thresholds import limit
from nanorlhf.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Traced:
    update: int
    kl_coef: float
    algorithm: str
    statistics: dict[str, float]
    """over the whole rollout: advantage_mean, advantage_var, for REINFORCE++ return_mean, return_var; with
    --whiten-rewards also reward_mean, reward_var"""
    tensors: dict[str, Tensor]
    """as nanorlhf/training/trace.py lists them, floats as float64"""
    record: Record
    """the settings; no rows"""
    tokenizer: Tokenizer | None
    """None if the run has not saved one yet"""

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def column(self) -> Tensor:
        """(T,) 0, 1, 2, ..."""
        return torch.arange(self["response"].size(1))

    @property
    def after_end(self) -> Tensor:
        """(n, T) True after EOS."""
        return self.column > self["eos_index"][:, None]

    @property
    def at_score(self) -> Tensor:
        """(n, T) True at the position where the score is added to the rewards."""
        return self.column == self["score_index"][:, None]

    @property
    def kl(self) -> Tensor:
        """(n, T) k1 of actions, 0 elsewhere."""
        return torch.where(self["actions"], evaluate(formulas.KL, self.tensors), 0.0)

    @property
    def numbers(self) -> formulas.Numbers:
        """The numbers for formulas, with masked rewards, values and KL set to 0."""
        tensors = self.tensors | {name: self[name][:, None] for name in ("eos_index", "score_index")}
        for name in ("rewards", "values"):
            if name in tensors:
                tensors[name] = torch.where(self["states"], self[name], 0.0)
        constants = self.statistics | {"kl_coef": self.kl_coef}
        return {**tensors, **constants, "t": self.column, "score": self["scores"][:, None], "kl": self.kl}

    @property
    def has_weights(self) -> bool:
        """True if the stored advantages are multiplied by importance weights."""
        return self.record.settings.get("sampler.correction") in formulas.WEIGHTS

    def differs(self, actual: Tensor, expected: Tensor, mask: Tensor) -> float | None:
        """Return the largest difference within the mask, or None if rounding explains it."""
        actual, expected = actual[mask], expected[mask]
        if not len(actual):
            return None
        difference = (actual - expected).abs().max().item()
        most = limit("rounding") * max(1.0, expected.abs().max().item())
        if not self.record.is_float32:
            most *= 10
        return None if difference <= most else difference


# ----------------------------------------------------------------------------------------------------- 1. the rollout
def text_after_eos(trace: Traced) -> Finding | None:
    after = trace["response"][trace.after_end]
    if not len(after):
        return None
    pad = after[0] if trace.tokenizer is None else trace.tokenizer.pad_id
    count = (trace.after_end & (trace["response"] != pad)).any(1).sum()
    if not count:
        return None
    return Finding(
        name="text-after-eos",
        seen=f"{count} of {len(trace['response'])} traced responses have tokens other than [PAD] after their end.",
        means="The sampler doesn't stop at EOS. Masks end there, but the reward model reads the tokens that follow.",
        where="generate in nanorlhf/generate.py, which must fill finished rows with [PAD]",
    )


def masks(trace: Traced) -> Finding | None:
    """Check the masks: actions end at EOS, which is an action; states end one later if the score is added after EOS."""
    settings, numbers = trace.record.settings, trace.numbers
    texts = {"actions": formulas.ACTION_MASK, "states": formulas.state_mask(settings)}
    expected = {name: evaluate(text, numbers) for name, text in texts.items()}
    problems = [
        f"{name} is True at {trace[name].sum()} positions instead of {mask.sum()}"
        for name, mask in expected.items()
        if (trace[name] != mask).any()
    ]
    if trace.tokenizer is not None:
        is_eos = trace["response"] == trace.tokenizer.eos_id
        first = torch.where(is_eos, trace.column, trace.column[-1:] + 1).amin(1)  # T without EOS
        wrong = trace["has_eos"] & (first != trace["eos_index"])
        problems += [f"eos_index is not the first EOS in {wrong.sum()} responses"] if wrong.any() else []
    due = (trace["eos_index"] + (settings.get("score_at") == "after_eos")).clamp(max=len(trace.column) - 1)
    if (trace["score_index"] != due).any():
        problems += [f"score_index is {trace['score_index'].tolist()} instead of {due.tolist()}"]
    if not problems:
        return None
    return Finding(
        name="masks",
        seen=f"In {len(trace['response'])} traced responses {'; '.join(problems)}.",
        means="EOS is the last action: if it is masked, the policy doesn't learn when to stop. After it there is only "
        "[PAD], which must not be part of any loss.",
        where="eos_masks in nanorlhf/ppo.py, and Batch.of in nanorlhf/batch.py",
    )


def first_epoch(trace: Traced) -> Finding | None:
    """Check that ratios are 1 in the first epoch, which with one minibatch uses the weights of the rollout."""
    if trace.record.number("num_minibatches", 1) > 1 or trace.record.ratio_is_to_the_sampler:
        return None
    new = trace["new_logprobs"][:1]
    ratio = evaluate(formulas.RATIO, {"new_logprobs": new, "old": trace["logprobs"]})
    error = torch.where(trace["actions"] & ~new.isnan(), ratio - 1, 0.0).abs().max().item() if new.numel() else 0.0
    if error <= limit("first_ratio" if trace.record.is_float32 else "first_ratio_bfloat16"):
        return None
    return Finding(
        name="first-ratio",
        seen=f"In the first epoch, before any step, the ratio of a traced token is off 1 by {error:.2g}.",
        means="The update computes other log-probabilities than the rollout for the same tokens and weights: another "
        "temperature, mask or position, or dropout.",
        where="response_logprobs in nanorlhf/logprobs.py and its two callers, read_logprobs and the training script",
    )


def first_reference(trace: Traced) -> Finding | None:
    if trace.update != 0:
        return None
    kl = trace.kl.abs()[trace["actions"]]
    name = "first_kl" if trace.record.is_float32 else "first_kl_bfloat16"
    if not len(kl) or not kl.mean() > limit(name):
        return None
    return Finding(
        name="first-kl",
        seen=f"Before any step policy and reference differ by {kl.mean():.2g} nats per traced token.",
        means="They are still the same model, so they are evaluated differently: another temperature, mask or "
        "position, or another checkpoint.",
        where="read_logprobs in nanorlhf/logprobs.py, and reference in nanorlhf/peft.py",
    )


# ------------------------------------------------------------------------------------------------ 2. scores and rewards
def missing_eos(trace: Traced) -> Finding | None:
    score = trace.record.settings.get("missing_eos_score")
    cut = ~trace["has_eos"]
    if not isinstance(score, int | float) or trace.differs(trace["scores"], 0 * trace["scores"] + score, cut) is None:
        return None
    return Finding(
        name="missing-eos-score",
        seen=f"The scores of traced responses without EOS are "
        f"{', '.join(f'{x:.4g}' for x in trace['scores'][cut].tolist())}, but --missing-eos-score is {score:g}.",
        means="The reward model was not trained on unfinished responses, so its score is meaningless: it must be "
        "replaced, not lowered.",
        where="the EOS trick in the training script",
    )


def score_at_the_end(trace: Traced) -> Finding | None:
    """Check that in update 0 PPO's value at the score's position is the score: both models are still the same."""
    settings = trace.record.settings
    reward_model, value_model = settings.get("reward_model"), settings.get("value_model")
    if settings.get("reward") is not None or settings.get("reward_weights") is not None:
        return None
    is_single_model = isinstance(reward_model, str) or isinstance(reward_model, list) and len(reward_model) == 1
    if trace.update != 0 or trace.algorithm != "ppo" or value_model is not None or not is_single_model:
        return None
    # the state after EOS has read the whole response, as the reward model has
    reads_eos = trace["has_eos"] & (trace["score_index"] == trace["eos_index"] + 1)
    value = torch.where(trace.at_score, trace["values"], 0.0).sum(1)
    if (difference := trace.differs(value, trace["scores"], reads_eos)) is None:
        return None
    return Finding(
        name="score-at-the-end",
        seen=f"Before any step the score of a finished response and its value after EOS differ by {difference:.2g}.",
        means="The value model is still a copy of the reward model, so both must be the same output at the same token. "
        "One of them is read elsewhere: in the query, before EOS, over all tokens, or one position off.",
        where="end_scores and end_index in nanorlhf/reward_model.py, response_values in nanorlhf/logprobs.py",
    )


def expected_rewards(trace: Traced) -> Tensor:
    """Return the rewards (n, T): -beta times the KL, plus the token's own reward, plus the score at one position."""
    penalty, scored, _ = formulas.reward(trace.record.settings, has_token_rewards=True)
    return torch.where(trace.at_score, evaluate(scored, trace.numbers), evaluate(penalty, trace.numbers))


def reward_sum(trace: Traced) -> Finding | None:
    """Check that rewards sum to the score, added once at an unmasked position, minus beta times the KL.

    Rewards per token are part of the sum.
    """
    if trace.algorithm != "ppo":
        return None
    states = trace["states"]
    # the expected sum includes the score even if its position is masked
    expected = torch.where(states | trace.at_score, expected_rewards(trace), 0.0).sum(1)
    actual = torch.where(states, trace["rewards"], 0.0).sum(1)
    if (difference := trace.differs(actual, expected, torch.ones(len(actual), dtype=torch.bool))) is None:
        return None
    return Finding(
        name="reward-sum",
        seen=f"The rewards of a traced response sum to {difference:.3g} more or less than its score minus beta "
        f"({trace.kl_coef:.3g}) times its KL, plus its rewards per token.",
        means="The KL has the wrong sign, a token's KL or the score is added twice or never, or the score is at a "
        "masked position. Put a script's own rewards into batch.token_rewards, which the trace stores.",
        where="the rewards in train_ppo.py, and score_index in nanorlhf/batch.py",
    )


def reward_positions(trace: Traced) -> Finding | None:
    """Check that rewards per token are added at their own tokens."""
    if trace.algorithm != "ppo" or not trace["token_rewards"].any() or reward_sum(trace) is not None:
        return None
    if (difference := trace.differs(trace["rewards"], expected_rewards(trace), trace["states"])) is None:
        return None
    return Finding(
        name="token-rewards",
        seen="The rewards of each traced response have the right sum, but single tokens are up to "
        f"{difference:.3g} off their KL penalty plus their own reward.",
        means="The reward of a token is added at another token, such as the next one.",
        where="the rewards in train_ppo.py, and as_scores in nanorlhf/rewards/function_reward.py",
    )


# -------------------------------------------------------------------------------------------------------- 3. advantages
def gae_recursion(trace: Traced) -> Finding | None:
    """Check GAE: A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t; 0 after the last state."""
    if trace.algorithm != "ppo":
        return None
    gamma, lam = trace.record.number("gamma", 1.0), trace.record.number("lam", 1.0)
    numbers = {**trace.numbers, "gamma": gamma, "lam": lam}
    numbers["delta"] = evaluate(formulas.GAE["delta"][0], numbers)
    expected = formulas.from_the_right("raw_advantages", formulas.GAE, numbers)
    if (difference := trace.differs(trace["raw_advantages"], expected, trace["states"])) is None:
        return None
    return Finding(
        name="gae",
        seen=f"Advantages are up to {difference:.2g} off GAE of the traced rewards and values at gamma {gamma:g} and "
        f"lambda {lam:g}.",
        means="The sum includes positions after the end, a discount is missing, or the next value is at the wrong "
        "position.",
        where="gae in kernels/gae.py",
    )


def returns(trace: Traced) -> Finding | None:
    if trace.algorithm != "ppo":
        return None
    expected = evaluate(formulas.GAE["returns"][0], trace.tensors)
    if (difference := trace.differs(trace["returns"], expected, trace["states"])) is None:
        return None
    return Finding(
        name="returns",
        seen=f"The value model's targets are up to {difference:.2g} off advantage plus value.",
        means="It learns something other than returns: rewards, whitened advantages, or another position.",
        where="gae in kernels/gae.py, and the use of its two results in the training script",
    )


def whitened_advantages(trace: Traced) -> Finding | None:
    """Check (A - mean) / sqrt(variance + 1e-8) over the actions of the whole rollout; REINFORCE++ whitens returns."""
    if trace.algorithm not in ("ppo", "reinforce++") or trace.has_weights:
        return None
    expected = evaluate(formulas.advantage(trace.algorithm, trace.record.settings), trace.numbers)
    if (difference := trace.differs(trace["advantages"], expected, trace["actions"])) is None:
        return None
    return Finding(
        name="whitening",
        seen=f"The advantages in the loss are up to {difference:.2g} off advantages whitened over the rollout's "
        "actions.",
        means="The statistics include padding, cover only a minibatch or a rank, or --whiten-advantages is ignored.",
        where="whiten in nanorlhf/ppo.py, and its mask in the training script",
    )


def group_scores(trace: Traced) -> Tensor | None:
    """Return the scores (G, k) of the traced groups; None if groups are incomplete or the algorithm has none."""
    k = int(trace.record.number("samples_per_query", 1))
    index = trace["index"]
    if k < 2 or len(index) % k or (index // k != index[::k].repeat_interleave(k) // k).any():
        return None
    return trace["scores"].view(-1, k)


def group_advantages(trace: Traced) -> Finding | None:
    """Check advantages within the responses to a query against the papers' formulas; REINFORCE++ has no groups."""
    if group_scores(trace) is None or trace.has_weights or trace.algorithm not in formulas.WITH_GROUPS:
        return None
    k = int(trace.record.number("samples_per_query", 1))
    group = formulas.group_numbers(trace.algorithm, trace.tensors, trace.kl.sum(1), k, trace.kl_coef)
    numbers = {**trace.numbers, **{name: x[:, None] for name, x in group.items()}}
    expected = evaluate(formulas.advantage(trace.algorithm, trace.record.settings), numbers)
    expected = expected.expand_as(trace["advantages"])
    if (difference := trace.differs(trace["advantages"], expected, trace["actions"])) is None:
        return None
    return Finding(
        name="group-advantages",
        seen=f"Advantages are up to {difference:.2g} off {trace.algorithm}'s formula for the traced groups.",
        means="Groups are not the k responses to one query, or mean, deviation or KL follow another algorithm.",
        where="the advantages in nanorlhf/grpo.py",
    )


RULES = (
    *(text_after_eos, masks, first_epoch, first_reference, missing_eos, score_at_the_end),
    *(reward_sum, reward_positions, gae_recursion, returns, whitened_advantages, group_advantages),
)


def groups_alike(traces: Sequence[Traced]) -> Finding | None:
    groups = [row for trace in traces if (scores := group_scores(trace)) is not None for row in scores]
    alike = sum((group == group[0]).all().item() for group in groups)
    if len(groups) < 5 or not alike > limit("groups_alike") * len(groups):
        return None
    return Finding(
        name="groups-alike",
        seen=f"In {alike} of {len(groups)} traced groups all responses have the same score.",
        means="The advantages of such a group are 0, so nothing is learned from it: the reward is 0 or 1 for all "
        "responses, the temperature is too low, or the responses to a query are copies.",
        where="--temperature and --samples-per-query, and the sampler's uniform random numbers",
    )


def examine_traces(traces: Sequence[Traced]) -> list[Finding]:
    """Return the first finding of each rule, with the number of its update. Traces without tokens are skipped."""
    traces = [trace for trace in traces if trace["response"].numel()]
    findings = []
    for rule in RULES:
        matches = [(trace.update, finding) for trace in traces if (finding := rule(trace)) is not None]
        if matches:
            update, finding = matches[0]
            seen = f"Update {update} (the first of {len(matches)} of {len(traces)} traced): {finding.seen}"
            findings.append(replace(finding, seen=seen))
    alike = groups_alike(traces)
    return findings if alike is None else [*findings, alike]


def traced(tensors: dict[str, Tensor], about: dict, record: Record, tokenizer: Tokenizer | None) -> Traced:
    """Build a `Traced` from the results of `read_trace`."""
    return Traced(
        update=about["update"],
        kl_coef=about["kl_coef"],
        algorithm=about["algorithm"],
        statistics={name: x for name, x in about.items() if name.endswith(("_mean", "_var"))},
        tensors={name: x.double() if x.is_floating_point() else x for name, x in tensors.items()},
        record=record,
        tokenizer=tokenizer,
    )
