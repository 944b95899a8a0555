"""Test which facts a reward model of the embedded world checks: score true summaries and summaries with an error.

    python -m tools.blind_spots --reward-model runs/tiny/rm

For each slot (who, event, place, wish), print the share of posts where the full, true summary scores higher than the
same summary with another post's value in that slot (false: 0.5 is chance), with a value that no post has (outlandish),
and without the slot (missing). Two models with the same accuracy can differ here, and PPO finds what a model doesn't
check.
"""

import random
from dataclasses import dataclass
from statistics import fmean

import torch

from data import tiny
from nanorlhf.checkpoint import load_scalar
from nanorlhf.cli import PositiveInt, Seed, check_ranges, run_module
from nanorlhf.dataset import Demonstration
from nanorlhf.model import ScalarModel
from nanorlhf.padding import micro_batches
from nanorlhf.reward_model import response_scores
from nanorlhf.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Args:
    reward_model: str = "runs/tiny/rm"
    """checkpoint directory"""
    num_posts: PositiveInt = 400
    """number of new posts"""
    seed: Seed = 1
    """seed of the posts"""


def with_errors(post: tiny.Post, slot: int, rng: random.Random) -> dict[str, str]:
    """Return the post's full summary with one error in a slot, by kind of error."""
    name, fact = list(tiny.SLOTS)[slot], post.facts[slot]
    values = {
        "false": rng.choice([value for value in tiny.SLOTS[name] if value != fact]),
        "outlandish": rng.choice(tiny.OUTLANDISH[name]),
        "missing": None,
    }
    return {
        kind: " " + " ".join(tiny.frame(*post.facts[:slot], value, *post.facts[slot + 1 :]))
        for kind, value in values.items()
    }


@torch.no_grad()
def scores(model: ScalarModel, tokenizer: Tokenizer, queries: list[str], responses: list[str]) -> list[float]:
    rows = [
        Demonstration(tokenizer.encode(query), [*tokenizer.encode(response), tokenizer.eos_id], {})
        for query, response in zip(queries, responses, strict=True)
    ]
    pieces = (response_scores(model, list(batch), tokenizer.pad_id, "left") for batch in micro_batches(rows, 100))
    return torch.cat(list(pieces)).tolist()


def main(args: Args) -> None:
    check_ranges(args)
    rng = random.Random(args.seed)
    posts = [tiny.write_post(rng) for _ in range(args.num_posts)]
    queries = [post.query for post in posts]
    model, tokenizer = load_scalar(args.reward_model), load_tokenizer(args.reward_model)
    full = scores(model, tokenizer, queries, [" " + " ".join(tiny.frame(*post.facts)) for post in posts])
    print(f"{args.reward_model}: share of {len(posts)} posts where the true summary scores higher\n")
    print("         false  outlandish  missing")
    for slot, name in enumerate(tiny.SLOTS):
        wrong = [with_errors(post, slot, rng) for post in posts]
        shares = [
            fmean(a > b for a, b in zip(full, scores(model, tokenizer, queries, list(texts)), strict=True))
            for texts in zip(*(texts.values() for texts in wrong), strict=True)
        ]
        print(f"{name:<7} {shares[0]:6.2f} {shares[1]:11.2f} {shares[2]:8.2f}")


if __name__ == "__main__":
    run_module(main, Args)
