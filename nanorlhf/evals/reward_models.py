"""Compare reward models and DPO's implicit rewards: N+ Table 5, Figure 7 and detail 19.

In: comparisons.validation.jsonl, sft.validation.jsonl and, if present, comparisons.cnndm.jsonl and agreement.jsonl.
Out: accuracy by batch, confidence, split and pair of policies; calibration; the references' scores; how often models
and labels prefer the longer response and agree with the gold score and an LLM judge; how well annotators agree with
each other.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanorlhf import distributed
from nanorlhf.checkpoint import is_reward_model, load_gpt, load_scalar
from nanorlhf.cli import PositiveFloat, PositiveInt, Seed, named_pairs
from nanorlhf.dataset import Comparison, Demonstration, load_comparisons, load_demonstrations
from nanorlhf.dpo import implicit_pair_rewards, implicit_rewards
from nanorlhf.evals.judged import JudgeArgs, judge_agreement, judge_comparisons, load_judge
from nanorlhf.evals.model_loading import (
    check_model,
    common_tokenizer,
    load_gold,
    load_model,
    longest_pair,
    longest_text,
)
from nanorlhf.evals.scores import gold_margins
from nanorlhf.evals.settings import EvalArgs, begin
from nanorlhf.evals.writing import json_settings, write_evaluation
from nanorlhf.metrics.agreement import load_labelled_pairs, pair_agreement
from nanorlhf.metrics.pair_accuracy import (
    accuracy_intervals,
    accuracy_table,
    calibration,
    deciders,
    first_shown_share,
    pair_groups,
    score_statistics,
)
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.padding import micro_batches
from nanorlhf.progress import Progress
from nanorlhf.report import reward_model_report
from nanorlhf.reward_model import pair_scores, response_scores
from nanorlhf.tokenizer import Tokenizer
from nanorlhf.training.supervised import autocast

Margins = dict[str, dict[str, np.ndarray]]  # set of pairs -> model -> (seeds, pairs), chosen - rejected


@dataclass(frozen=True, kw_only=True)
class RewardModelArgs(EvalArgs):
    """Settings shared by the evaluations of reward models."""

    reward_models: tuple[str, ...]
    """pairs of a name and a checkpoint directory or Hub id; repeat a name for several seeds of one model; a policy is
    evaluated by its implicit reward"""
    ref_policy: str
    """[N+ 19] initial policy of the DPO training: checkpoint directory or Hub id"""
    dpo_beta: PositiveFloat = 0.05
    """DPO's beta of the implicit rewards, in score units per nat, as in their training"""
    max_response_length: PositiveInt
    """longest response in tokens, EOS included"""


@dataclass(frozen=True, kw_only=True)
class Args(JudgeArgs, RewardModelArgs):
    max_cnndm_query_length: PositiveInt = 1919
    """longest query of comparisons.cnndm.jsonl in tokens"""
    gold: str | None = None
    """FILE.py:FUNCTION or a larger reward model: the gold score that labels and models are compared with; None: no
    gold"""
    seed: Seed = 1
    """random seed of the order of pairs, and within them, in the judge's prompts"""


def main(args: Args) -> dict:
    # ----------------------------------------------------------------------------------------------- 1. data and models
    device = begin(args, writes=not args.judge_dry_run)
    models = named_models(args.reward_models)
    checkpoints = args.reward_models[1::2]
    tokenizer = common_tokenizer(args.tokenizer, [*checkpoints, needed_ref_policy(args)], args.gold)
    Q, T = args.max_query_length, args.max_response_length
    sets = {"validation": list(load_comparisons(args.data / "comparisons.validation.jsonl", tokenizer, Q, T))}
    news = args.data / "comparisons.cnndm.jsonl"
    if news.exists():
        sets["cnndm"] = list(load_comparisons(news, tokenizer, args.max_cnndm_query_length, T))
    references = list(load_demonstrations(args.data / "sft.validation.jsonl", tokenizer, Q, T))
    longest = {f"{args.data}/comparisons.{name}.jsonl": longest_pair(rows) for name, rows in sets.items()}
    longest[f"{args.data}/sft.validation.jsonl"] = longest_text(references, 0)
    check_models(args, tokenizer, longest)
    check_model("--gold", args.gold, tokenizer, longest)
    judge = load_judge(args, args.seed)
    agreement = args.data / "agreement.jsonl"
    labelled = load_labelled_pairs(agreement) if agreement.exists() else None
    verdicts, account = judge_comparisons(judge, sets["validation"], args.seed) if judge else ([], {})
    if args.judge_dry_run:
        return {}
    gold = load_gold(args.gold, args, tokenizer, device)
    ref_policy = load_ref_policy(args, tokenizer, device)

    # ------------------------------------------------------------------------------------------------- 2. measurements
    reference = Path(args.ref_policy).name
    result, margins = measure_rewards(
        models, ref_policy, reference, args.dpo_beta, sets, references, tokenizer, device, args
    )  # fmt: skip
    for name, rows in sets.items():
        lengths = np.array([(len(row.chosen), len(row.rejected)) for row in rows])
        with autocast(args.dtype, device):
            golds = np.array(gold_margins(gold, rows)) if gold else None
        result["sets"][name] |= {
            "deciders": deciders(margins[name], lengths, golds),
            "first_shown": first_shown_share(rows, f"{args.data}/comparisons.{name}.jsonl"),
        }
    result["agreement"] = pair_agreement(labelled) if labelled else None
    files = {}
    if judge:
        groups = pair_groups(sets["validation"], f"{args.data}/comparisons.validation.jsonl")
        result["judge"] = account | {"agreement": judge_agreement(verdicts, groups, margins["validation"])}
        files["verdicts.jsonl"] = [row for row in verdicts if row["preferred"] != "unanswered"]
    result["args"] = json_settings(args)
    return write_evaluation(args, result, reward_model_report.page(result, models), files)


def named_models(words: tuple[str, ...]) -> dict[str, list[str]]:
    """Parse --reward-models: name -> checkpoints, one per seed."""
    models: dict[str, list[str]] = {}
    for name, checkpoint in named_pairs("--reward-models", words):
        models.setdefault(name, []).append(checkpoint)
    return models


def needed_ref_policy(args: RewardModelArgs) -> str | None:
    """Return --ref-policy if a policy is among the models, else None."""
    has_policy = any(not is_reward_model(checkpoint) for checkpoint in args.reward_models[1::2])
    return args.ref_policy if has_policy else None


def check_models(args: RewardModelArgs, tokenizer: Tokenizer, longest: dict[str, int]) -> None:
    """Call `check_model` for all models, and for the reference policy if one is needed."""
    for checkpoint in args.reward_models[1::2]:
        check_model("--reward-models", checkpoint, tokenizer, longest)
    check_model("--ref-policy", needed_ref_policy(args), tokenizer, longest)


def load_ref_policy(args: RewardModelArgs, tokenizer: Tokenizer, device: torch.device) -> GPT | None:
    """Load the reference policy of implicit rewards; None if all models are reward models."""
    checkpoint = needed_ref_policy(args)
    if checkpoint is None:
        return None
    return load_model(load_gpt, checkpoint, args, device).forbid(tokenizer.pad_id, tokenizer.vocab_size)


class Scorer(NamedTuple):
    """Score functions of a reward model, or of a policy's implicit reward [N+ 19]."""

    rank: Callable[[list[Comparison]], tuple[Tensor, Tensor]]  # pairs -> (B,) chosen, (B,) rejected
    score: Callable[[list[Demonstration]], Tensor]  # (B,)


@contextmanager
def scorer(
    checkpoint: str,
    ref_policy: GPT | None,
    dpo_beta: float,
    tokenizer: Tokenizer,
    device: torch.device,
    args: EvalArgs,
    reward_model: ScalarModel | None = None,
) -> Iterator[Scorer]:
    """Load a checkpoint for the duration of the block, or use the `reward_model` already in memory."""
    pad_id = tokenizer.pad_id
    if is_reward_model(checkpoint):
        reward_model = reward_model or load_model(load_scalar, checkpoint, args, device)
        result = Scorer(
            partial(pair_scores, reward_model, pad_id=pad_id),
            partial(response_scores, reward_model, pad_id=pad_id, side="left"),
        )
    else:
        assert ref_policy is not None  # an implicit reward is relative to it
        policy = load_model(load_gpt, checkpoint, args, device).forbid(pad_id, tokenizer.vocab_size)
        result = Scorer(
            partial(implicit_pair_rewards, policy, ref_policy, pad_id=pad_id, beta=dpo_beta),
            partial(implicit_rewards, policy, ref_policy, pad_id=pad_id, beta=dpo_beta),
        )
    # with --offload, implicit_rewards moves the policy and its reference to the device one after the other
    with torch.no_grad(), autocast(args.dtype, device), distributed.on_device(reward_model):
        yield result


def measure_rewards(
    models: dict[str, list[str]],
    ref_policy: GPT | None,
    reference: str,
    dpo_beta: float,
    sets: dict[str, list[Comparison]],
    references: list[Demonstration],
    tokenizer: Tokenizer,
    device: torch.device,
    args: EvalArgs,
    loaded: Mapping[str, ScalarModel] | None = None,
) -> tuple[dict, Margins]:
    """[N+ 16, 18] Return Table 5, calibration and the references' scores; and the margins that the first two come from.

    models: name -> checkpoints, one per seed. Policies among them rank by beta * log(policy / ref_policy) [N+ 19].
    `reference` is the name of ref_policy; `loaded`: checkpoint -> reward model already in memory.
    """
    groups = {name: pair_groups(rows, f"{args.data}/comparisons.{name}.jsonl") for name, rows in sets.items()}
    margins: Margins = {name: {} for name in sets}
    scores: dict[str, np.ndarray] = {}  # model -> (seeds, references)
    implicit: list[str] = []

    def measure(checkpoint: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return margins per set and the references' scores, and free the model before the next one is loaded."""
        with scorer(checkpoint, ref_policy, dpo_beta, tokenizer, device, args, (loaded or {}).get(checkpoint)) as (
            rank,
            score,
        ):
            pair_margins = {
                set_name: torch.cat([torch.sub(*rank(batch)) for batch in micro_batches(rows, args.batch_size)])
                for set_name, rows in sets.items()
            }
            reference_scores = torch.cat([score(batch) for batch in micro_batches(references, args.batch_size)])
        arrays = {name: x.double().cpu().numpy() for name, x in pair_margins.items()}
        return arrays, reference_scores.double().cpu().numpy()

    for name, checkpoints in models.items():
        seed_margins, seed_scores = defaultdict(list), []  # one array per seed
        for checkpoint in Progress(checkpoints, desc=name, leave=False):
            if not is_reward_model(checkpoint):
                implicit += [name] if name not in implicit else []
            pair_margins, reference_scores = measure(checkpoint)
            for set_name, values in pair_margins.items():
                seed_margins[set_name].append(values)
            seed_scores.append(reference_scores)
        for set_name, column in seed_margins.items():
            margins[set_name][name] = np.stack(column)
        scores[name] = np.stack(seed_scores)
    return {
        "sets": {
            set_name: {
                "accuracy": accuracy_table(groups[set_name], columns),
                "intervals": accuracy_intervals(columns),
                "calibration": {name: calibration(column) for name, column in columns.items()},
            }
            for set_name, columns in margins.items()
        },
        "references": {name: score_statistics(column) for name, column in scores.items()},
        "num_references": len(references),
        "num_seeds": {name: len(checkpoints) for name, checkpoints in models.items()},
        "implicit": implicit,
        "reference": reference,
        "dpo_beta": dpo_beta,
    }, margins
