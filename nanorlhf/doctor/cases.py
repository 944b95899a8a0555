"""The runs that the doctor looks at: settings of the scripts in its small world, each run made once."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanorlhf.checkpoint import load_gpt, load_scalar
from nanorlhf.cli import check_ranges, parse_flags
from nanorlhf.doctor.watch import Watched, replaced, script, watch
from nanorlhf.doctor.world import T, World
from nanorlhf.errors import InputError
from nanorlhf.model import GPT, ScalarModel

B = 16
"""responses per update"""
SCRIPTS = ("train_sft", "train_rm", "train_dpo", "train_ppo", "train_grpo", "train_rlcf")
OF_THE_WORLD = ("--data", "--out", "--sft", "--model", "--device", "--resume", "--overwrite", "--trace")
"""flags that no user sets, because the world has its own"""


class CannotCheckError(Exception):
    """A check does not apply to the code that is examined; says why."""


@dataclass
class Cases:
    """The world, and the runs in it by their settings."""

    world: World
    runs: dict[str, Watched] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    """words of the command line that the training scripts get, as far as they have such a flag"""
    words: dict[str, list[str]] = field(default_factory=dict)
    """script -> those of the flags that it takes"""

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
        """The settings of a script in this world, then the user's flags, then `changes`."""
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
        recipe = recipe_of(name)
        settings = common | of_script[name]
        if unknown := (settings | changes).keys() - vars(recipe).keys():
            raise CannotCheckError(f"{name}.py has no setting {sorted(unknown)[0]}")
        return replace(self.with_flags(name, replace(recipe, **settings)), **changes)

    def flags_of(self, name: str) -> list[str]:
        """The words of those flags that a script takes."""
        if name not in self.words:
            groups = grouped(self.flags)
            self.words[name] = [word for _, words in groups if refusal(name, words) is None for word in words]
        return self.words[name]

    def with_flags(self, name: str, settings: Any) -> Any:
        words = self.flags_of(name)
        return parse_flags(type(settings), words, f"{name}.py", settings) if words else settings

    def check_flags(self) -> None:
        """Raise InputError for a flag that no training script takes, and for one that the doctor sets itself."""
        for flag, words in grouped(self.flags):
            if flag in OF_THE_WORLD:
                raise InputError(f"nanorlhf.doctor code: {flag} is not examined: the doctor sets it itself.")
            having = [name for name in SCRIPTS if flag in flag_names(recipe_of(name))]
            if not having:
                raise InputError(f"nanorlhf.doctor code: no training script has the flag {flag}.")
            refusals = [refusal(name, words) for name in having]
            if None not in refusals:
                raise InputError(str(refusals[0]))

    def policy(self) -> GPT:
        """The policy from which the scripts start, and their reference."""
        policy = load_gpt(str(self.world.root / "sft"))
        return policy.forbid(self.world.tokenizer.pad_id, self.world.tokenizer.vocab_size)

    def reward_model(self) -> ScalarModel:
        return load_scalar(str(self.world.root / "rm"))


def recipe_of(name: str) -> Any:
    """The settings of a script's first recipe."""
    return next(iter(script(name).RECIPES.values()))[1]


def flag_names(settings: Any, prefix: str = "--") -> set[str]:
    """The flags of a dataclass, those of its groups such as --sampler.top-p, and --no-x."""
    found = set()
    for name, value in vars(settings).items():
        flag = f"{prefix}{name.replace('_', '-')}"
        found |= {flag, f"{prefix}no-{name.replace('_', '-')}"}
        if is_dataclass(value):
            found |= flag_names(value, f"{flag}.")
    return found


def refusal(name: str, words: list[str]) -> str | None:
    """Why a script does not take a flag and its value; None if it does."""
    try:
        check_ranges(parse_flags(type(recipe_of(name)), words, f"{name}.py", recipe_of(name)))
    except InputError as error:
        return str(error)
    return None


def grouped(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each flag, without `=value` and with dashes, and its words. Raises InputError for a word before the first."""
    groups: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            groups.append((word.partition("=")[0].replace("_", "-"), [word]))
        elif groups:
            groups[-1][1].append(word)
        else:
            raise InputError(f"nanorlhf.doctor code: {word!r:.80} is no flag: begin with -- --flag.")
    return groups


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
