"""The runs that the doctor examines: scripts with settings for its small world, each run once."""

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
RESERVED_FLAGS = ("--data", "--out", "--sft", "--model", "--device", "--resume", "--overwrite", "--trace")
"""flags that the doctor sets itself"""


class CannotCheckError(Exception):
    """A check doesn't apply to the examined code; the message gives the reason."""


@dataclass
class Cases:
    """The world, and its runs by their settings."""

    world: World
    runs: dict[str, Watched] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    """command-line words, passed to the training scripts that have these flags"""
    words: dict[str, list[str]] = field(default_factory=dict)
    """script -> the words of the flags that it accepts"""

    def run(
        self,
        name: str,
        stop_at: int | None = None,
        patches: Callable[[], AbstractContextManager] = nullcontext,
        **changes: Any,
    ) -> Watched:
        """Run a script with `changes` to its settings, and return its record; runs without patches are cached."""
        key = f"{name} {stop_at} {sorted(changes.items())}"
        if patches is not nullcontext or key not in self.runs:
            out = self.world.root / "runs" / f"{name}-{len(self.runs)}"
            self.runs[key] = watch(name, self.settings(name, **({"out": out} | changes)), stop_at, patches)
        return self.runs[key]

    def settings(self, name: str, **changes: Any) -> Any:
        """Return the settings of a script in this world, overridden by the user's flags and then by `changes`."""
        root = self.world.root
        common: dict[str, Any] = {"data": self.world.data, "device": "cpu", "max_query_length": 40, "seed": 1}
        sft, rollout = {"sft": str(root / "sft")}, {"response_length": T, "total_episodes": B, "batch_size": B}
        update = {"micro_batch_size": B, "lr": 1e-2, "temperature": 0.7, "gold": None, "trace": B}
        pairs = {"batch_size": 8, "micro_batch_size": 8, "max_response_length": 16, "warmup_steps": 0}
        script_settings: dict[str, dict[str, Any]] = {
            "train_ppo": sft | rollout | update | {"reward_model": str(root / "rm"), "num_ppo_epochs": 2},
            "train_grpo": sft | rollout | update | {"reward_model": str(root / "rm"), "samples_per_query": 4},
            "train_rlcf": sft | rollout | {"discriminator": None, "micro_batch_size": B},
            "train_sft": pairs | {"model": str(root / "sft"), "num_samples": 2},
            "train_rm": pairs | sft | {"num_normalisation": None},
            "train_dpo": pairs | sft,
        }
        recipe = first_recipe(name)
        settings = common | script_settings[name]
        if unknown := (settings | changes).keys() - vars(recipe).keys():
            raise CannotCheckError(f"{name}.py has no setting {sorted(unknown)[0]}")
        return replace(self.with_flags(name, replace(recipe, **settings)), **changes)

    def accepted_words(self, name: str) -> list[str]:
        """Return the words of the flags that a script accepts."""
        if name not in self.words:
            groups = split_flags(self.flags)
            self.words[name] = [word for _, words in groups if refusal(name, words) is None for word in words]
        return self.words[name]

    def with_flags(self, name: str, settings: Any) -> Any:
        words = self.accepted_words(name)
        return parse_flags(type(settings), words, f"{name}.py", settings) if words else settings

    def check_flags(self) -> None:
        """Raise InputError for flags that no training script accepts, and for flags that the doctor sets itself."""
        for flag, words in split_flags(self.flags):
            if flag in RESERVED_FLAGS:
                raise InputError(f"nanorlhf.doctor code: unsupported flag {flag}: the doctor sets it itself.")
            scripts = [name for name in SCRIPTS if flag in flag_names(first_recipe(name))]
            if not scripts:
                raise InputError(f"nanorlhf.doctor code: no training script has the flag {flag}.")
            refusals = [refusal(name, words) for name in scripts]
            if None not in refusals:
                raise InputError(str(refusals[0]))

    def policy(self) -> GPT:
        """Return the initial policy of the scripts, which is also their reference."""
        policy = load_gpt(str(self.world.root / "sft"))
        return policy.forbid(self.world.tokenizer.pad_id, self.world.tokenizer.vocab_size)

    def reward_model(self) -> ScalarModel:
        return load_scalar(str(self.world.root / "rm"))


def first_recipe(name: str) -> Any:
    """Return the settings of a script's first recipe."""
    return next(iter(script(name).RECIPES.values()))[1]


def flag_names(settings: Any, prefix: str = "--") -> set[str]:
    """Return the flags of a dataclass, including nested ones such as --sampler.top-p, and --no-x."""
    names = set()
    for name, value in vars(settings).items():
        flag = f"{prefix}{name.replace('_', '-')}"
        names |= {flag, f"{prefix}no-{name.replace('_', '-')}"}
        if is_dataclass(value):
            names |= flag_names(value, f"{flag}.")
    return names


def refusal(name: str, words: list[str]) -> str | None:
    """Return the reason why a script rejects a flag and its value; None if it accepts them."""
    try:
        check_ranges(parse_flags(type(first_recipe(name)), words, f"{name}.py", first_recipe(name)))
    except InputError as error:
        return str(error)
    return None


def split_flags(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Split a command line into (flag with dashes and without `=value`, its words).

    Raises InputError for a word before the first flag.
    """
    groups: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            groups.append((word.partition("=")[0].replace("_", "-"), [word]))
        elif groups:
            groups[-1][1].append(word)
        else:
            raise InputError(f"nanorlhf.doctor code: expected a flag after --, got {word!r:.80}.")
    return groups


def replaced_logprobs(
    name: str, change: Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]
) -> Callable[[], AbstractContextManager]:
    """Return a patch for `run` that replaces what `read_logprobs` returns by change(batch, logprobs, ref_logprobs).

    All are (B, T). Raises CannotCheckError if the script doesn't use `read_logprobs`.
    """

    def wrapped(read: Callable) -> Callable:
        def reread(policy: Any, ref_policy: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            logprobs, ref_logprobs, *rest = read(policy, ref_policy, batch, *args, **kwargs)
            return *change(batch, logprobs, ref_logprobs), *rest

        return reread

    if not hasattr(script(name), "read_logprobs"):
        raise CannotCheckError(f"{name}.py doesn't use `read_logprobs`")
    return partial(replaced, script(name), "read_logprobs", wrapped)


@torch.no_grad()
def unbatched_distributions(policy: GPT, ids: list[int], temperature: float) -> Tensor:
    """Return next-token log-probabilities (L, V) of a text by itself, without padding or other rows, in float64."""
    hidden = policy(torch.tensor([ids]))[0].double()
    logits = hidden @ policy.lm_head.weight.double().T / temperature
    if policy.forbidden is not None:
        logits = logits.masked_fill(policy.forbidden, -torch.inf)
    return logits.log_softmax(-1)


def unbatched_logprobs(policy: GPT, query: list[int], response: list[int], temperature: float) -> Tensor:
    """Return the log-probabilities (t,) of the tokens of a response, in float64."""
    logprobs = unbatched_distributions(policy, query + response, temperature)[len(query) - 1 : -1]
    return logprobs[torch.arange(len(response)), torch.tensor(response)]


@torch.no_grad()
def unbatched_outputs(model: ScalarModel, ids: list[int]) -> Tensor:
    """Return a scalar model's outputs (L,) at the tokens of a text, processed by itself."""
    return model(torch.tensor([ids]))[0].double()


def unpadded(tensors: dict[str, Tensor], pad_id: int) -> list[tuple[list[int], list[int]]]:
    """Return query and response of each row of a trace without [PAD]; the response includes EOS, if it has one."""
    rows = []
    for query, response in zip(tensors["query"].tolist(), tensors["response"].tolist(), strict=True):
        end = response.index(pad_id) if pad_id in response else len(response)
        rows.append(([i for i in query if i != pad_id], response[:end]))
    return rows


def differ(a: Tensor, b: Tensor, tolerance: float = 1e-3) -> bool:
    """Test if two tensors differ by more than float32 rounding, relative to the larger one."""
    if a.shape != b.shape or not (a.isfinite().all() and b.isfinite().all()):
        return True
    if a.numel() == 0:
        return False
    return bool((a - b).abs().max() > tolerance * max(a.abs().max().item(), b.abs().max().item(), 1e-4))
