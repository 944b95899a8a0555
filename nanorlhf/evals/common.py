"""What the seven evaluations share: settings, loading, scores, differences, and what is written."""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from nanorlhf import distributed, launch
from nanorlhf.checkpoint import load_gpt, read_config
from nanorlhf.cli import NonNegativeInt, PositiveInt, Seed, check_ranges, named_pairs
from nanorlhf.dataset import Comparison, Demonstration, write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.files import atomic, check_out
from nanorlhf.generate import sample_answers
from nanorlhf.metrics import compare
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.padding import micro_batches
from nanorlhf.ppo import eos_masks
from nanorlhf.report.page import Page, text, write_page
from nanorlhf.report.run_curves import stage_of
from nanorlhf.reward import end_scores, response_scores
from nanorlhf.rewards.gold import Gold
from nanorlhf.rewards.weighted_sum import is_function
from nanorlhf.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from nanorlhf.training.run import write_json
from nanorlhf.training.run_directory import read_metrics, read_settings
from nanorlhf.training.supervised import autocast

M = TypeVar("M", GPT, ScalarModel)


# --------------------------------------------------------------------------------------------------------- 1. settings
@dataclass(frozen=True, kw_only=True)
class EvalArgs:
    """Of every evaluation."""

    data: Path
    """directory of the JSON Lines files"""
    out: Path
    """directory of eval.json, report.html and, where texts are sampled, samples.jsonl"""
    tokenizer: str | None = None
    """directory, file or Hub id; None: the first model's"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """bfloat16: forward passes under autocast, whose products' weights are stored in it; auto: the faster, by
    what the processor or GPU has"""
    batch_size: PositiveInt = 64
    """rows per forward pass; changes memory, not the result"""
    max_query_length: PositiveInt = 512
    """longest query in tokens"""
    offload: bool = False
    """keep the models in CPU memory, and only the one that computes on the device"""
    overwrite: bool = False
    """replace an evaluation that --out already holds"""


@dataclass(frozen=True, kw_only=True)
class PolicyArgs(EvalArgs):
    """Of every evaluation that samples from policies."""

    policies: tuple[str, ...]
    """pairs of a name and its checkpoint directory or Hub id"""
    seed: Seed = 1
    """fixes the samples and the bootstrap resamples"""
    num_queries: PositiveInt | None = None
    """queries that each policy answers, from the top of the file; None: all"""
    response_length: PositiveInt
    """maximum number of sampled tokens, EOS included"""
    num_report_samples: NonNegativeInt = 24
    """queries whose responses are shown in report.html; samples.jsonl has all"""


def begin(args: EvalArgs, writes: bool = True) -> torch.device:
    """Check the settings; returns the device. Raises InputError, before anything is written."""
    check_ranges(args)
    if writes and (args.out / "eval.json").exists() and not args.overwrite:
        raise InputError(f"--out {args.out} holds an evaluation: choose another directory, or pass --overwrite.")
    if writes:
        check_out(args.out)
    return launch.setup(args.device)


def named_policies(words: tuple[str, ...]) -> dict[str, str]:
    """("sft", DIR, "ppo", DIR) -> {"sft": DIR, "ppo": DIR}"""
    policies = dict(named_pairs("--policies", words))
    if 2 * len(policies) != len(words) or "reference" in policies:
        raise InputError(
            f"--policies {' '.join(words)}: names must differ, and `reference` is taken by the data's references."
        )
    return policies


def best_of(place: str) -> tuple[int, str]:
    """best-of-16:DIR -> 16, DIR: the one of 16 responses that the reward model likes best; other places -> 1, place"""
    match = re.fullmatch(r"best-of-(\d+):(.+)", place)
    if match and not 2 <= int(match[1][:9]) <= 10**6:
        raise InputError(f"--policies {place}: N of best-of-N must be from 2 to 1,000,000.")
    return (int(match[1]), match[2]) if match else (1, place)


# ----------------------------------------------------------------------------------------------------------- 2. models
def common_tokenizer(named: str | None, places: Iterable[str | None], gold: str | None = None) -> Tokenizer:
    """The named tokenizer, or the first model's, which all other models must share; None is no model."""
    models = [place for place in places if place]
    if gold and not is_function(gold):
        models.append(gold)
    for place in models:  # the report shows them: better refused now than after hours
        stage_of(place, read_metrics(place)), read_settings(place)
    tokenizer = load_tokenizer(named or models[0])
    for place in models:
        if named is None and load_tokenizer(place).backend.get_vocab() != tokenizer.backend.get_vocab():
            raise InputError(f"the tokenizer of {place} differs from {models[0]}'s: compare models that share one.")
    return tokenizer


def check_reward_model(place: str | None) -> None:
    """Refuse a path or Hub id that is not there; None is no model."""
    if place is None or Path(place).exists():
        return
    try:
        load_tokenizer(place)
    except InputError as error:
        sentence = str(error).rstrip(".")
        raise InputError(f"--reward-model {sentence}: without one, pass --reward-model None.") from error


def check_model(flag: str, place: str | None, tokenizer: Tokenizer, longest: dict[str, int]) -> None:
    """Refuse a model whose vocabulary or context is too small, before any weights are read.

    place may also be None or a function, FILE.py:FUNCTION. longest: file or flag -> tokens of the longest text.
    """
    if place is None or is_function(place):
        return
    config = read_config(place)
    check_vocabulary(tokenizer, config.vocab_size, place)
    for source, length in longest.items():
        if length > config.n_ctx:
            raise InputError(
                f"{source}: the longest query and response have {length} tokens, more than the {config.n_ctx} "
                f"positions of {flag} {place}: shorten them, or lower --response-length."
            )


def longest_text(rows: list[Demonstration], response_length: int) -> int:
    """Tokens of the longest query with its response or a sampled one."""
    return max(len(row.query) + max(len(row.response), response_length) for row in rows)


def longest_pair(rows: list[Comparison]) -> int:
    return max((len(row.query) + max(len(row.chosen), len(row.rejected)) for row in rows), default=0)


def load_policy(
    place: str, rows: list[Demonstration], tokenizer: Tokenizer, args: PolicyArgs, device: torch.device
) -> GPT:
    """A policy whose context is long enough to answer `rows`."""
    needed = max(len(row.query) for row in rows) + args.response_length
    check_model("--policies", place, tokenizer, {"--response-length": needed})
    return load_model(load_gpt, place, args, device).forbid(tokenizer.pad_id, tokenizer.vocab_size)


def load_model(load: Callable[..., M], place: str, args: EvalArgs, device: torch.device) -> M:
    """A model that `check_model` has let pass, by load_gpt or load_scalar; with --offload it waits in CPU memory."""
    model = load(place, *device_and_dtype(args, device))
    model.requires_grad_(False)
    if args.offload:
        distributed.offload(model, device)
    return model


def load_gold(gold: str | None, args: EvalArgs, tokenizer: Tokenizer, device: torch.device) -> Gold | None:
    """--gold: FILE.py:FUNCTION, or a larger reward model's directory or Hub id."""
    if not gold:
        return None
    found = Gold(gold, tokenizer, *device_and_dtype(args, device), batch_size=args.batch_size)
    if found.model is not None and args.offload:
        distributed.offload(found.model, device)
    return found


def device_and_dtype(args: EvalArgs, device: torch.device) -> tuple[torch.device, torch.dtype]:
    """Where a model is loaded, and the dtype of the weights that its matrix products read."""
    return torch.device("cpu") if args.offload else device, getattr(torch, args.dtype)


# ------------------------------------------------------------------------------------------- 3. responses and scores
def sample(
    policy: GPT, rows: list[Demonstration], tokenizer: Tokenizer, args: PolicyArgs, num_samples: int, **decoding: Any
) -> tuple[Tensor, Tensor]:
    """`sample_answers` to the queries of `rows`; decoding: the temperature and what else it takes."""
    queries = [row.query for row in rows]
    with distributed.on_device(policy), autocast(args.dtype, policy.lm_head.weight.device):
        return sample_answers(
            policy, queries, tokenizer, num_samples, args.response_length, args.batch_size, args.seed, **decoding
        )


@torch.no_grad()
def rm_scores(model: ScalarModel, query: Tensor, response: Tensor, pad_id: int, batch_size: int) -> list[float]:
    """The reward model at the last token of each response, query (B, Q) and response (B, T) -> B scores.

    Without the EOS trick, which is PPO's and not the model's.
    """
    query_response = torch.cat((query, response), dim=1)  # (B, Q + T)
    pieces = micro_batches(query_response, batch_size)
    with distributed.on_device(model):
        return torch.cat([end_scores(model, piece, query.size(1), pad_id) for piece in pieces]).tolist()


@torch.no_grad()
def row_scores(
    model: ScalarModel, rows: list[Demonstration], pad_id: int, batch_size: int, side: Literal["left", "right"]
) -> Tensor:
    """The reward model's scores of the data's own responses, (rows,); for `side` see `response_scores`."""
    with distributed.on_device(model):
        return torch.cat([response_scores(model, batch, pad_id, side) for batch in micro_batches(rows, batch_size)])


def gold_margins(gold: Gold, rows: list[Comparison]) -> list[float]:
    """The gold score of each chosen response minus the rejected one's."""
    return np.subtract(gold.of_rows(rows, "chosen"), gold.of_rows(rows, "rejected")).tolist()


def endings(response: Tensor, tokenizer: Tokenizer) -> dict[str, float]:
    """How responses (B, T) end: share with an EOS, and mean length in tokens, EOS included."""
    eos_index, _, _ = eos_masks(response, tokenizer.eos_id, tokenizer.pad_id)
    return {
        "eos_rate": (response == tokenizer.eos_id).any(1).float().mean().item(),
        "response_length": (eos_index + 1).float().mean().item(),
    }


def differences(measured: dict[str, dict[str, np.ndarray]], seed: int, num_resamples: int) -> list[dict]:
    """Each policy against each one before it, metric by metric. measured: policy -> metric -> (questions, n)."""
    return [
        {"ours": ours, "theirs": theirs, "metric": metric}
        | compare(measured[ours][metric], measured[theirs][metric], seed, num_resamples)
        for theirs, ours in itertools.combinations(measured, 2)
        for metric in measured[ours]
    ]


# ----------------------------------------------------------------------------------------------------------- 4. output
def settings_of(args: EvalArgs) -> dict[str, Any]:
    """As they are written to eval.json."""
    return json.loads(json.dumps(asdict(args), default=str))


def write_evaluation(
    args: EvalArgs, result: dict, page: Page, files: Mapping[str, Iterable[dict]] | None = None
) -> dict:
    """Write `files` (name -> rows), report.html and eval.json, and print the page's tables; returns the result.

    eval.json comes last: where it exists, the evaluation is complete.
    """
    files = files or {}
    args.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        new = {name: stack.enter_context(atomic(args.out / name)) for name in ("report.html", *files)}
        write_page(new["report.html"], str(args.out), page)
        for name, rows in files.items():
            write_jsonl(new[name], rows)
        (args.out / "eval.json").unlink(missing_ok=True)  # of the evaluation that this one replaces
    write_json(args.out / "eval.json", result)
    written = ", ".join([str(args.out / "eval.json"), *files])
    print(f"{text(page)}\n\nwritten: {written}, and to look at: {args.out / 'report.html'}")
    return result
