"""The runs that the doctor looks at: settings of the scripts in its small world, each run made once."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanorlhf.checkpoint import load_gpt, load_scalar
from nanorlhf.doctor.watch import Watched, replaced, script, watch
from nanorlhf.doctor.world import T, World
from nanorlhf.model import GPT, ScalarModel

B = 16
"""responses per update"""


class CannotCheckError(Exception):
    """A check does not apply to the code that is examined; says why."""


@dataclass
class Cases:
    """The world, and the runs in it by their settings."""

    world: World
    runs: dict[str, Watched] = field(default_factory=dict)

    def run(
        self,
        name: str,
        stop_at: int | None = None,
        patches: Callable[[], AbstractContextManager] = nullcontext,
        **changes: Any,
    ) -> Watched:
        """What was seen of a script with `changes` of its settings here; made once, but for a run with patches."""
        key = f"{name} {stop_at} {sorted(changes.items())}"
        if patches is not nullcontext or key not in self.runs:
            out = self.world.root / "runs" / f"{name}-{len(self.runs)}"
            self.runs[key] = watch(name, self.settings(name, **({"out": out} | changes)), stop_at, patches)
        return self.runs[key]

    def settings(self, name: str, **changes: Any) -> Any:
        """The settings of a script in this world."""
        root = self.world.root
        common: dict[str, Any] = {"data": self.world.data, "device": "cpu", "max_query_length": 40, "seed": 1}
        sft, rollout = {"sft": str(root / "sft")}, {"response_length": T, "total_episodes": B, "batch_size": B}
        update = {"micro_batch_size": B, "lr": 1e-2, "temperature": 0.7, "gold": None, "trace": B}
        pairs = {"batch_size": 8, "micro_batch_size": 8, "max_response_length": 16, "warmup_steps": 0}
        of_script: dict[str, dict[str, Any]] = {
            "train_ppo": sft | rollout | update | {"reward_model": str(root / "rm"), "num_ppo_epochs": 2},
            "train_grpo": sft | rollout | update | {"reward_model": str(root / "rm"), "samples_per_query": 4},
            "train_rlcf": sft | rollout | {"discriminator": None, "micro_batch_size": B},
            "train_sft": pairs | {"model": str(root / "sft"), "num_samples": 2},
            "train_rm": pairs | sft | {"num_normalisation": None},
            "train_dpo": pairs | sft,
        }
        recipe = next(iter(script(name).RECIPES.values()))[1]
        settings = common | of_script[name] | changes
        if unknown := settings.keys() - vars(recipe).keys():
            raise CannotCheckError(f"{name}.py has no setting {sorted(unknown)[0]}")
        return replace(recipe, **settings)

    def policy(self) -> GPT:
        """The policy from which the scripts start, and their reference."""
        policy = load_gpt(str(self.world.root / "sft"))
        return policy.forbid(self.world.tokenizer.pad_id, self.world.tokenizer.vocab_size)

    def reward_model(self) -> ScalarModel:
        return load_scalar(str(self.world.root / "rm"))


def rereading(
    name: str, change: Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]
) -> Callable[[], AbstractContextManager]:
    """For `run`: what the script reads of its rollouts is change(batch, logprobs, ref_logprobs), (B, T) each."""

    def changed(read: Callable) -> Callable:
        def reread(policy: Any, ref_policy: Any, batch: Any, *others: Any, **named: Any) -> Any:
            logprobs, ref_logprobs, *rest = read(policy, ref_policy, batch, *others, **named)
            return *change(batch, logprobs, ref_logprobs), *rest

        return reread

    if not hasattr(script(name), "read_logprobs"):
        raise CannotCheckError(f"{name}.py does not read the rollout by `read_logprobs`")
    return partial(replaced, script(name), "read_logprobs", changed)


@torch.no_grad()
def distributions_alone(policy: GPT, ids: list[int], temperature: float) -> Tensor:
    """Log-probabilities (L, V) of what follows each token of one text, without padding or other rows, in float64."""
    hidden = policy(torch.tensor([ids]))[0].double()
    logits = hidden @ policy.lm_head.weight.double().T / temperature
    if policy.forbidden is not None:
        logits = logits.masked_fill(policy.forbidden, -torch.inf)
    return logits.log_softmax(-1)


def logprobs_alone(policy: GPT, query: list[int], response: list[int], temperature: float) -> Tensor:
    """Log-probabilities (t,) of the tokens of one response, in float64."""
    logprobs = distributions_alone(policy, query + response, temperature)[len(query) - 1 : -1]
    return logprobs[torch.arange(len(response)), torch.tensor(response)]


@torch.no_grad()
def outputs_alone(model: ScalarModel, ids: list[int]) -> Tensor:
    """What a scalar model says at each token (L,) of one text, read alone."""
    return model(torch.tensor([ids]))[0].double()


def unpadded(tensors: dict[str, Tensor], pad_id: int) -> list[tuple[list[int], list[int]]]:
    """Query and response of each row of a trace, without [PAD]; the response ends as its EOS or [PAD] says."""
    rows = []
    for query, response in zip(tensors["query"].tolist(), tensors["response"].tolist(), strict=True):
        end = response.index(pad_id) if pad_id in response else len(response)
        rows.append(([i for i in query if i != pad_id], response[:end]))
    return rows


def far(a: Tensor, b: Tensor, tolerance: float = 1e-3) -> bool:
    """Whether two tensors differ by more than float32's rounding, relative to the larger."""
    if a.shape != b.shape or not (a.isfinite().all() and b.isfinite().all()):
        return True
    if a.numel() == 0:
        return False
    return bool((a - b).abs().max() > tolerance * max(a.abs().max().item(), b.abs().max().item(), 1e-4))
