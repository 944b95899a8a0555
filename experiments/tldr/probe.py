"""Measure what eval.py doesn't: a reward model's logits before EOS, and how well log-probabilities rank.

    python -m experiments.tldr.probe --data runs/tiny/data --sft runs/tiny/sft --reward-model runs/tiny/rm \\
        --policy runs/tiny/dpo --out runs/tiny/probe.json

Out, a JSON object:

    before, end       the reward model's logits at the references' tokens before EOS, and at EOS
    compared          its scores of the compared responses, chosen and rejected
    bias              what normalisation subtracted from all of these [N+ 15]
    pairs             chosen minus rejected response of the validation pairs: the reward model's score (rm), and the
                      log-probability under the DPO policy (policy) and under the initial one (sft), in nats
    false             the same for pairs of a post's true summary and one with a false fact; null for real posts
    invented          for each of the pairs, if the rejected response invents more than the chosen one; null as above
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from data import tiny
from nanorlhf import launch
from nanorlhf.checkpoint import load_gpt, load_scalar
from nanorlhf.cli import PositiveInt, check_ranges, run_module
from nanorlhf.dataset import Comparison, Demonstration, load_comparisons, load_demonstrations
from nanorlhf.dpo import pair_logprobs
from nanorlhf.files import check_out
from nanorlhf.model import ScalarModel
from nanorlhf.padding import micro_batches, right_pad
from nanorlhf.reward_model import pair_scores
from nanorlhf.tokenizer import Tokenizer, load_tokenizer
from nanorlhf.training.run import write_json


@dataclass(frozen=True, kw_only=True)
class Args:
    data: Path
    """directory of sft.validation.jsonl and comparisons.validation.jsonl"""
    sft: str
    """initial policy: checkpoint directory"""
    reward_model: str
    """checkpoint directory"""
    policy: str
    """policy trained by DPO: checkpoint directory"""
    out: Path
    """JSON file"""
    max_query_length: PositiveInt = 512
    """longest query in tokens"""
    max_response_length: PositiveInt = 169
    """longest response in tokens, EOS included"""
    batch_size: PositiveInt = 64
    """rows per forward pass"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""


def logits(model: ScalarModel, rows: list[Demonstration], pad_id: int) -> tuple[list[float], list[float]]:
    """Return the logits at the responses' tokens before EOS, of all rows together, and at EOS."""
    ids = right_pad([row.query + row.response for row in rows], pad_id).to(model.score.weight.device)  # (B, L)
    scores = model(ids, ids != pad_id).tolist()
    before, end = [], []
    for row, row_scores in zip(rows, scores, strict=True):
        *prefix, last = row_scores[len(row.query) : len(row.query) + len(row.response)]
        before += prefix
        end.append(last)
    return before, end


def with_false_facts(rows: list[Demonstration], tokenizer: Tokenizer) -> list[Comparison]:
    """Return, for each post and each of its facts, its true summary and the same with another post's value."""
    rng = random.Random(1)
    pairs = []
    for row in rows:
        facts = [row.record["meta"][slot] for slot in tiny.SLOTS]
        for i, values in enumerate(tiny.SLOTS.values()):
            other = rng.choice([value for value in values if value != facts[i]])
            changed = [*facts[:i], other, *facts[i + 1 :]]
            texts = (tiny.frame(*facts), tiny.frame(*changed))
            true, false = ([*tokenizer.encode(" " + " ".join(text)), tokenizer.eos_id] for text in texts)
            pairs.append(Comparison(row.query, true, false, {}))
    return pairs


def num_inventions(query: str, response: str) -> int:
    return len(tiny.facts_in(tiny.split_words(response))[0] - tiny.facts_in(tiny.split_words(query))[0])


@torch.no_grad()
def main(args: Args) -> None:
    check_ranges(args)
    check_out(args.out.parent)
    device = launch.setup(args.device)
    tokenizer = load_tokenizer(args.sft)
    pad_id, Q, T = tokenizer.pad_id, args.max_query_length, args.max_response_length
    references = list(load_demonstrations(args.data / "sft.validation.jsonl", tokenizer, Q, T))
    pairs = list(load_comparisons(args.data / "comparisons.validation.jsonl", tokenizer, Q, T))
    reward_model = load_scalar(args.reward_model, device)
    policies = {name: load_gpt(path, device) for name, path in (("policy", args.policy), ("sft", args.sft))}
    for policy in policies.values():
        policy.forbid(pad_id, tokenizer.vocab_size)

    def margins(rows: list[Comparison]) -> dict[str, list[float]]:
        def over_rows(rank: Callable[[list[Comparison]], tuple[Tensor, Tensor]]) -> list[float]:
            return torch.cat([torch.sub(*rank(batch)) for batch in micro_batches(rows, args.batch_size)]).tolist()

        by_policy = {
            name: over_rows(partial(pair_logprobs, policy, pad_id=pad_id)) for name, policy in policies.items()
        }
        return {"rm": over_rows(partial(pair_scores, reward_model, pad_id=pad_id)), **by_policy}

    before, end = [], []
    for batch in micro_batches(references, args.batch_size):
        batch_before, batch_end = logits(reward_model, batch, pad_id)
        before += batch_before
        end += batch_end
    scored = [torch.stack(pair_scores(reward_model, batch, pad_id)) for batch in micro_batches(pairs, args.batch_size)]
    is_tiny = "who" in references[0].record.get("meta", {})
    texts = [[pair.record["query"], pair.record["chosen"], pair.record["rejected"]] for pair in pairs]
    write_json(args.out, {
        "before": before,
        "end": end,
        "compared": torch.cat(scored, 1).tolist(),
        "bias": float(reward_model.state_dict()["reward_bias"]),
        "pairs": margins(pairs),
        "false": margins(with_false_facts(references[:256], tokenizer)) if is_tiny else None,
        "invented": [
            num_inventions(query, rejected) > num_inventions(query, chosen) for query, chosen, rejected in texts
        ] if is_tiny else None,
    })  # fmt: skip


if __name__ == "__main__":
    run_module(main, Args)
