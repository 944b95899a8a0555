"""The world in which the doctor runs the scripts: a few queries, and models of a few thousand weights.

The weights are random, and large enough to reveal a wrong mask or position. Positions are learned, because rotary
positions would hide a shift.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from nanorlhf.checkpoint import save, scalar_from_gpt
from nanorlhf.config import GPTConfig
from nanorlhf.dataset import write_jsonl
from nanorlhf.model import GPT
from nanorlhf.tokenizer import Tokenizer, train_tokenizer

Architecture = Literal["gpt2", "gpt_neox"]
WORDS = "sun rain wind snow hail mist cloud storm frost thaw dew heat".split()
T = 8
"""tokens of a response, EOS included"""
RULES = '''"""Scores of responses; `truth` depends on the row of the data as well."""


def score(queries, responses):
    return [len(text) % 5 - 2.0 for text in responses]


def higher(queries, responses):
    return [number + 3.0 for number in score(queries, responses)]


def double(queries, responses):
    return [2 * number for number in higher(queries, responses)]


def constant(queries, responses):
    return [1.5] * len(responses)


def nothing(queries, responses):
    return [0.0] * len(responses)


def per_token(queries, responses, response_ids):
    return [[0.25 * (1 + t) for t in range(len(ids))] for ids in response_ids]


def seldom(queries, responses):
    return [float(len(text) > 6) for text in responses]


def truth(queries, responses, records):
    return [len(text) % 5 + 10.0 * len(row["response"]) for text, row in zip(responses, records)]

'''
PYTHON = {"language": "python", "prefix": "def f(x):\n    return ", "suffix": "\n", "tests": ""}


@dataclass(frozen=True)
class World:
    root: Path
    tokenizer: Tokenizer

    @property
    def data(self) -> Path:
        return self.root / "data"

    def rule(self, name: str) -> str:
        """Return the value of --reward for a rule."""
        return f"{self.root / 'rules.py'}:{name}"


def small_config(vocab_size: int, architecture: Architecture = "gpt2") -> GPTConfig:
    sizes = GPTConfig(vocab_size=vocab_size, n_ctx=64, d_model=16, n_layer=2, n_head=2, d_mlp=32, rotary_dim=4)
    if architecture == "gpt_neox":
        return sizes
    return replace(
        sizes, architecture="gpt2", positions="learned", rotary_dim=0, parallel_residual=False, activation="gelu_new"
    )


def small_policy(config: GPTConfig, eos_id: int) -> GPT:
    """Return a policy that ends a response with a probability of about 1/5 at each token."""
    torch.manual_seed(0)
    policy = GPT(config).eval()
    direction = torch.nn.functional.normalize(torch.randn(config.d_model), dim=0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        policy.get_parameter("transformer.norm.bias").add_(4 * direction)
        policy.lm_head.weight[eos_id] += 0.9 * direction
    return policy


def make_world(root: Path) -> World:
    """Write data, rules, a policy and a reward model into a new directory."""
    root.mkdir(parents=True)
    tokenizer = train_tokenizer([" ".join(WORDS)] * 4, 300)
    (root / "rules.py").write_text(RULES)
    data = root / "data"
    data.mkdir()
    tokenizer.save(data)
    for split, first in (("train", 0), ("validation", 6)):  # the splits have no word in common
        words = WORDS[first : first + 6]
        texts = [f"{'so ' * (i % 4)}{words[i % 6]} and {words[(i // 6 + 1 + i) % 6]} {i}:" for i in range(24)]
        answers = [" ".join(words[(i + j) % 6] for j in range(1 + i % 3)) for i in range(24)]
        rows = [{"query": query, "response": answer} for query, answer in zip(texts, answers, strict=True)]
        write_jsonl(data / f"sft.{split}.jsonl", rows)
        pairs = [
            {"query": query, "chosen": answers[i], "rejected": answers[(i + 1) % 24]} for i, query in enumerate(texts)
        ]
        write_jsonl(data / f"comparisons.{split}.jsonl", pairs)
        votes = [row | {"score": len(row["response"]) % 7 - 3.0} for row in rows]
        write_jsonl(data / f"scored.{split}.jsonl", votes)
        write_jsonl(data / f"code.{split}.jsonl", [row | PYTHON | {"response": "x + 1"} for row in rows])
    # the head has two more rows than ids, which must never be sampled
    policy = small_policy(small_config(tokenizer.vocab_size + 2), tokenizer.eos_id)
    save(policy, root / "sft", tokenizer)
    reward_model = scalar_from_gpt(policy)
    with torch.no_grad():
        reward_model.score.weight += 0.3 * torch.randn_like(reward_model.score.weight)
        reward_model.get_buffer("reward_bias").fill_(0.7)
    save(reward_model, root / "rm", tokenizer)
    return World(root, tokenizer)
