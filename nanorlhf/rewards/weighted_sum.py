"""Weighted sum of all rewards of a rollout: --reward, --reward-model and --reward-weights."""

from collections.abc import Sequence
from itertools import count
from typing import Literal, Protocol

import torch
from torch import Tensor

from nanorlhf.batch import Batch
from nanorlhf.dataset import Demonstration
from nanorlhf.errors import InputError
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.reward_model import Ensemble, RewardModel, Scores
from nanorlhf.tokenizer import Tokenizer

Kind = Literal["function", "teacher", "exact_teacher", "judge", "tests", "model"]
Weights = Ensemble | tuple[float, ...] | None
NUM_TRIED = 2  # references to call functions on before training


class Reward(Protocol):
    """One item of --reward."""

    name: str  # for messages
    label: str  # its metric is reward/LABEL

    @property
    def models(self) -> Sequence[GPT | ScalarModel]:
        """The frozen models that it scores with."""

    def score(self, batch: Batch) -> Scores:
        """Score the responses of a rollout."""

    def metrics(self) -> dict[str, float]:
        """Return additional metrics of the last rollout."""


def items(setting: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the items of --reward or the paths of --reward-model: none, one or several."""
    return (setting,) if isinstance(setting, str) else tuple(setting or ())


def is_function(where: str) -> bool:
    """Return True for a setting of the form FILE.py:FUNCTION, or one that was meant to be."""
    return ".py:" in where or where.endswith(".py")


def parse(item: str) -> tuple[Kind, str]:
    """Return the kind of an item of --reward, and its path.

    >>> parse("rule.py:score"), parse("teacher:runs/sft"), parse("runs/rm")
    (('function', 'rule.py:score'), ('teacher', 'runs/sft'), ('model', 'runs/rm'))
    """
    if is_function(item):
        return "function", item
    prefix, _, path = item.partition(":")
    if prefix == "teacher":
        return "teacher", path
    if prefix == "exact_teacher":
        return "exact_teacher", path
    if prefix == "judge":
        return "judge", path
    if prefix == "tests":
        return "tests", path
    return "model", item


def scoring_models(
    reward: str | tuple[str, ...] | None, reward_model: str | tuple[str, ...] | None
) -> list[tuple[str, str, type[GPT | ScalarModel]]]:
    """Return flag, path and class of each scoring model; --reward replaces --reward-model."""
    if reward is None:
        return [("--reward-model", path, ScalarModel) for path in items(reward_model)]
    kinds: dict[Kind, type[GPT | ScalarModel]] = {"model": ScalarModel, "teacher": GPT, "exact_teacher": GPT}
    parsed = map(parse, items(reward))
    return [("--reward", path, kinds[kind]) for kind, path in parsed if kind in kinds]


class Rewards:
    """score = sum_i weight_i * score_i, and the same for rewards per token; a reward that doesn't apply counts as 0.

    whole_only: name of an algorithm that compares whole responses and therefore can't use rewards per token
    """

    def __init__(self, rewards: list[Reward], weights: Sequence[float], whole_only: str | None = None):
        self.rewards, self.weights, self.whole_only = rewards, weights, whole_only
        self.name = ", ".join(reward.name for reward in rewards)
        self.means: dict[str, float] = {}
        taken = {"disagreement"}  # the metric of an ensemble
        for reward in rewards:
            names = (reward.label if number == 1 else f"{reward.label}_{number}" for number in count(1))
            reward.label = next(name for name in names if name not in taken)
            taken.add(reward.label)

    @property
    def models(self) -> list[ScalarModel]:
        """The reward models; PPO's value model is initialized from the first."""
        return [model for model in self.frozen if isinstance(model, ScalarModel)]

    @property
    def frozen(self) -> list[GPT | ScalarModel]:
        """All scoring models."""
        return [model for reward in self.rewards for model in reward.models]

    def score(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return scores (B,) of whole responses, and rewards per token (B, T), 0 without one."""
        scores = torch.zeros(len(batch), device=batch.response.device)
        token_rewards = torch.zeros(batch.response.shape, device=batch.response.device)
        self.means = {}
        for reward, weight in zip(self.rewards, self.weights, strict=True):
            result = reward.score(batch)
            self.check_tokens(reward, bool(result.token_rewards.any()))
            scores += weight * result.scores
            token_rewards += weight * result.token_rewards
            totals = (result.scores + result.token_rewards.sum(1))[result.applies]
            if len(totals):
                self.means[f"reward/{reward.label}"] = totals.mean().item()
        return scores, token_rewards

    def check_tokens(self, reward: Reward, has_token_rewards: bool) -> None:
        if has_token_rewards and self.whole_only is not None:
            raise InputError(
                f"{reward.name} returns rewards per token, but {self.whole_only} compares whole responses: return "
                "their sum, or train with train_ppo.py or --algorithm reinforce++."
            )

    def metrics(self) -> dict[str, float]:
        """Return each reward's mean, before weight and EOS trick, over the responses that it applies to."""
        metrics = dict(self.means)
        for reward in self.rewards:
            metrics |= reward.metrics()
        return metrics


def load_rewards(
    reward: str | tuple[str, ...] | None,
    reward_model: str | tuple[str, ...] | None,
    weights: Weights,
    tokenizer: Tokenizer,
    device: torch.device,
    size: int,
    *,
    temperature: float = 1.0,
    workers: int = 0,
    rows: Sequence[Demonstration] = (),
    whole_only: str | None = None,
    policy: GPT | None = None,
) -> Rewards:
    """Load the rewards of the flags with these names, after `checks.check_reward`.

    size: responses per forward pass or call; rows: the training data, with the fields that functions take; policy: the
    trained one, which exact_teacher compares with the teacher
    """
    paths = items(reward_model)
    if reward is None and not isinstance(weights, tuple):
        return Rewards([RewardModel("--reward-model", paths, tokenizer, device, size, weights or "mean")], [1.0])
    flag, sources = ("--reward-model", paths) if reward is None else ("--reward", items(reward))
    rewards: list[Reward] = []
    rules = []
    for item in sources:
        kind, path = parse(item)
        if kind == "function":
            from nanorlhf.rewards.function_reward import FunctionReward  # imported only if needed

            rules.append(FunctionReward(path, tokenizer, size, (row.record for row in rows), workers))
            rewards.append(rules[-1])
        elif kind in ("teacher", "exact_teacher"):
            from nanorlhf.rewards.teacher import Teacher

            exact = policy if kind == "exact_teacher" else None
            rewards.append(Teacher(path, tokenizer, device, size, temperature, exact))
        elif kind == "judge":
            from nanorlhf.rewards.judge import Judge  # imported only if needed

            rewards.append(Judge(path, tokenizer))
        elif kind == "tests":
            from nanorlhf.rewards.unit_tests import UnitTests

            rewards.append(UnitTests(path, tokenizer, (row.record for row in rows)))
        else:
            rewards.append(RewardModel(flag, (path,), tokenizer, device, size))
    combined = Rewards(rewards, weights if isinstance(weights, tuple) else [1.0] * len(rewards), whole_only)
    if rows:  # report errors in functions before training
        for rule in rules:
            combined.check_tokens(rule, rule.try_out(rows[:NUM_TRIED]))
    return combined
