"""Command-line arguments, model shapes, and random models and data for a shape."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from nanorlhf.checkpoint import save, scalar_from_gpt
from nanorlhf.config import GPTConfig
from nanorlhf.dataset import write_jsonl
from nanorlhf.model import GPT
from nanorlhf.tokenizer import load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Args:
    shape: Literal["tiny", "small", "124m", "1b", "6.9b"] = "tiny"
    """model and episode sizes, see SHAPES"""
    parts: tuple[
        Literal[
            "generate", "decode", "logprobs", "gae", "fused", "micro_batch", "supervised", "ppo", "grpo", "compile"
        ],
        ...,
    ] = ("generate", "decode", "logprobs", "gae", "supervised", "ppo", "grpo", "compile")
    """what to measure; without a JDK, compile is skipped unless requested; fused: the GPU's kernels except the head's;
    micro_batch: a policy's pass, with a profile of it and of generation"""
    rounds: int = 5
    """number of timed rounds; the median is reported"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype for our code (bfloat16: autocast); on a CPU the peers stay in float32"""
    peers: bool = False
    """also measure transformers' generate and TRL's trainers"""
    quick: bool = False
    """two minutes: shape tiny, and generation of 16 tokens on small, one round each"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """device to measure on; auto: CUDA if available"""
    json: Path | None = None
    """also write the rows to this file"""


@dataclass(frozen=True)
class Shape:
    n_layer: int
    d_model: int
    n_head: int
    vocab_size: int
    query_length: int
    response_length: int
    episodes: int
    gpt2: bool = False
    """GPT-2 (learned positions, tied head) instead of an untied GPT-NeoX"""

    @property
    def query_lengths(self) -> list[int]:
        """Lengths drawn uniformly between half the maximum and the maximum."""
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(self.query_length // 2, self.query_length + 1, (self.episodes,), generator=generator)
        return [self.query_length, *lengths[1:].tolist()]

    @property
    def config(self) -> GPTConfig:
        family = (
            dict(
                architecture="gpt2", positions="learned", parallel_residual=False, activation="gelu_new", tied_head=True
            )
            if self.gpt2
            else dict(rotary_dim=self.d_model // self.n_head // 4 // 2 * 2)
        )
        return GPTConfig(
            vocab_size=self.vocab_size, n_ctx=max(512, self.query_length + self.response_length), d_model=self.d_model,
            n_layer=self.n_layer, n_head=self.n_head, d_mlp=4 * self.d_model, **family,
        )  # fmt: skip


SHAPES = {
    "tiny": Shape(4, 128, 4, 1024, 64, 53, 64),
    "small": Shape(12, 768, 12, 50304, 128, 53, 8),
    "124m": Shape(12, 768, 12, 50257, 512, 53, 8, gpt2=True),
    "1b": Shape(16, 2048, 8, 50304, 512, 53, 64),
    "6.9b": Shape(32, 4096, 32, 50432, 512, 53, 64),
}

NUM_EPOCHS = 4  # per PPO or GRPO iteration, over one minibatch
SAMPLES_PER_QUERY = 8  # of GRPO
MICRO_BATCH_SIZE = {"cpu": 32, "cuda": 16}  # on CUDA also of plain PyTorch and TRL: 1b would not fit otherwise


def random_texts(shape: Shape, lengths: list[int]) -> list[list[int]]:
    """Draw random word ids, without EOS and [PAD]."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, shape.vocab_size - 1, (length,), generator=generator).tolist() for length in lengths]


def random_queries(shape: Shape) -> list[list[int]]:
    return random_texts(shape, shape.query_lengths)


def make_tokenizer(shape: Shape, directory: Path):
    """Build a tokenizer of words `w1 w2 ...`, with EOS first and [PAD] last: a query of n words has n ids."""
    import tokenizers

    words = {"<|endoftext|>": 0, **{f"w{i}": i for i in range(1, shape.vocab_size - 1)}, "[PAD]": shape.vocab_size - 1}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    file = directory / "words.json"
    backend.save(str(file))
    return load_tokenizer(file)


def make_run(shape: Shape, directory: Path, device: torch.device) -> None:
    """Write queries, full-length responses, and a policy and a reward model with random weights."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(shape, directory)
    queries, (chosen, rejected) = random_queries(shape), random_texts(shape, [shape.response_length - 1] * 2)

    def words(ids: list[int]) -> str:
        return " ".join(f"w{i}" for i in ids)

    pair = {"chosen": f" {words(chosen)}", "rejected": f" {words(rejected)}", "meta": {}}
    comparisons = [{"query": words(ids)} | pair for ids in queries]
    rows = [{"query": words(ids), "response": pair["chosen"], "meta": {}} for ids in queries]
    for name, written in (("sft", rows), ("comparisons", comparisons)):
        write_jsonl(directory / f"{name}.train.jsonl", written)
        write_jsonl(directory / f"{name}.validation.jsonl", written[:1])
    with device:
        policy = GPT(shape.config)
    save(policy, directory / "sft", tokenizer)
    save(scalar_from_gpt(policy), directory / "rm", tokenizer)
    del policy
    if device.type == "cuda":
        torch.cuda.empty_cache()  # each implementation runs in its own process
