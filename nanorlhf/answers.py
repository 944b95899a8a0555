"""Sample a policy's responses to a list of queries, for evaluation and for generating data."""

import torch
from torch import Tensor
from tqdm import tqdm

from nanorlhf.generate import for_sampling, generate
from nanorlhf.model import GPT
from nanorlhf.padding import left_pad, micro_batches
from nanorlhf.tokenizer import Tokenizer


@torch.no_grad()
def sample_answers(
    policy: GPT,
    queries: list[list[int]],
    tokenizer: Tokenizer,
    num_samples: int,
    max_new_tokens: int,
    batch_size: int,
    seed: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    no_repeat_ngram_size: int = 0,
) -> tuple[Tensor, Tensor]:
    """Sample num_samples responses per query; the responses to one query are consecutive rows.

    Returns query (B, Q) left-padded and response (B, T), B = len(queries) * num_samples, T = max_new_tokens. A sample
    depends only on the seed, its query and its row, not on the batch size.
    """
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand((len(queries) * num_samples, max_new_tokens), generator=generator, dtype=torch.float64)
    query = left_pad(queries, tokenizer.pad_id).to(policy.lm_head.weight.device)
    query = query.repeat_interleave(num_samples, dim=0)  # (B, Q)
    writer = for_sampling(policy, "same")
    pieces = zip(*(micro_batches(rows, batch_size) for rows in (query, uniforms)), strict=True)
    responses = [
        generate(
            writer, q, q != tokenizer.pad_id, max_new_tokens, temperature, top_k, top_p, no_repeat_ngram_size,
            tokenizer.eos_id, tokenizer.pad_id, uniforms=u,
        )[0]
        for q, u in tqdm(pieces, desc="answers", total=-(-len(query) // batch_size), unit=" batches", leave=False)
    ]  # fmt: skip
    return query, torch.cat(responses)
