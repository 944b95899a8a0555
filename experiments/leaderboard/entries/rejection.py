"""Rejection sampling: fine-tune on the best of 16 responses to each of budget / 16 queries.

The settings are those that the worlds study chose in its tuning worlds, 101 to 105.
"""

from dataclasses import replace

import train_sft
from nanorlhf.dataset import write_jsonl
from nanorlhf.generate import sample_answers

NUM_SAMPLES = 16


def train(world):
    tokenizer, policy = world.tokenizer, world.load(world.sft)
    rows = world.demonstrations[: world.budget // NUM_SAMPLES]
    queries = [row.query for row in rows]
    _, sampled = sample_answers(policy, queries, tokenizer, NUM_SAMPLES, 24, 64, world.seed, temperature=0.7)
    responses = [[token for token in ids if token != tokenizer.pad_id] for ids in sampled.tolist()]
    texts = [row.record["query"] for row in rows for _ in range(NUM_SAMPLES)]
    scores = world.score(texts, responses)
    winners = []
    for i, row in enumerate(rows):
        group = range(i * NUM_SAMPLES, (i + 1) * NUM_SAMPLES)
        ended = [j for j in group if tokenizer.eos_id in responses[j] and tokenizer.decode(responses[j]).strip()]
        if ended:
            best = max(ended, key=scores.__getitem__)
            winners.append({"query": row.record["query"], "response": tokenizer.decode(responses[best])})

    data, out = world.directory / "winners", world.directory / "rejection"
    data.mkdir()
    for split in ("train", "validation"):
        write_jsonl(data / f"sft.{split}.jsonl", winners)
    args = replace(
        train_sft.RECIPES["tiny"][1], data=data, model=str(world.sft), out=out, seed=world.seed, warmup_steps=0,
        lr=1.81e-4, num_epochs=16.0,
    )  # fmt: skip
    train_sft.main(args)
    return world.load(out)
