"""Sampling with a KV cache: one prefill, then one token per step for the rows that have not ended.

`for_sampling` makes a model that only samples, its weights rounded or rearranged once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.int8 import Int8Weight
from kernels.linear import PackedWeight, is_worth_packing, product_dtype
from nanorlhf.checkpoint import round_products
from nanorlhf.errors import InputError
from nanorlhf.model import GPT, KVCache, Linear
from nanorlhf.peft import merge

CAPTURE_PAYS = 16  # decode steps left above which a GPU captures one anew: an estimate, not measured


@torch.inference_mode()
def generate(
    model: GPT,
    query: Tensor,
    query_mask: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    no_repeat_ngram_size: int = 0,
    eos_id: int | None = None,
    pad_id: int = 0,
    generator: torch.Generator | None = None,
    uniforms: Tensor | None = None,
    filtered_logprobs: bool = False,
) -> tuple[Tensor, Tensor]:
    """Sample one response per query. Temperature 0 is greedy; the other filters are off at their defaults.

    query (B, Q) left-padded, query_mask (B, Q) True = real -> response (B, T), logprobs (B, T), T = max_new_tokens.
    After its EOS a response holds pad_id and logprob 0. logprobs are those of log_softmax(logits / temperature)
    (greedy: of the plain softmax), before top-k, top-p and the n-gram ban; with filtered_logprobs those of the
    distribution that was sampled from, after them.

    Reproducibility: row b uses its own T random numbers, uniforms[b], of (B, T) in [0, 1), drawn from the generator at
    once if not given. So a response depends only on its query and its numbers, not on the other rows, its padding or
    when its neighbours end (to rounding: about once in 10^6 tokens a float falls on the other side of a cumulative
    probability and another token results). Whoever splits a batch splits `uniforms`.

    Raises InputError if the model's logits are not finite.
    """
    B, Q = query.shape
    device = query.device
    if uniforms is None:
        uniforms = torch.rand(
            (B, max_new_tokens),
            generator=generator,
            dtype=torch.float64,
            device=generator.device if generator else "cpu",
        )
    dtype = product_dtype(model.transformer.embedding.weight)
    head = model.rounded_head()  # (V, C)
    response = torch.full((B, max_new_tokens), pad_id, device=device)  # (B, T)
    logprobs = torch.zeros((B, max_new_tokens), device=device)  # (B, T)
    live = LiveRows(
        index=torch.arange(B, device=device),
        query=query.masked_fill(~query_mask, -1),
        uniforms=uniforms.to(device),
        response=response.clone(),
        logprobs=logprobs.clone(),
        token=query[:, -1:].clone(),
        ended=torch.zeros((B, 1), dtype=torch.bool, device=device),
        t=torch.zeros(1, dtype=torch.long, device=device),
        cache=model.transformer.cache(query_mask, max_new_tokens, dtype, whole=replays(device)),
    )

    def sample(hidden: Tensor) -> None:
        """hidden (b, C) -> the next token of each row, written in place."""
        tempered = model.logits(hidden, head).float().div_(temperature or 1.0)  # (b, V)
        normaliser = tempered.logsumexp(-1, keepdim=True)  # (b, 1)
        filtered = tempered
        if no_repeat_ngram_size:
            num_written = live.cache.length - live.cache.prefill
            context = torch.cat((live.query, live.response[:, :num_written]), dim=1)
            filtered = ban_repeated_ngrams(filtered, context, no_repeat_ngram_size)
        if temperature == 0:
            live.token.copy_(filtered.argmax(-1, keepdim=True))
        else:
            filtered = keep_top_p(keep_top_k(filtered, top_k), top_p)
            live.token.copy_(draw((filtered - normaliser).exp_(), live.uniforms.index_select(1, live.t)))
        if filtered_logprobs and filtered is not tempered:
            tempered, normaliser = filtered, filtered.logsumexp(-1, keepdim=True)
        logprob = tempered.gather(1, live.token) - normaliser  # (b, 1)
        live.response.index_copy_(1, live.t, live.token.masked_fill(live.ended, pad_id))
        live.logprobs.index_copy_(1, live.t, logprob.masked_fill(live.ended, 0.0))
        if eos_id is not None:
            live.ended |= live.token == eos_id
        live.t += 1

    def step() -> None:
        """One more token. It neither waits for the GPU nor keeps what it allocates there, so it can be captured."""
        sample(model(live.token, cache=live.cache)[:, -1])

    sample(model(query, query_mask, live.cache, last=1)[:, -1])
    # a GPU checks rarely whether rows have ended and shrinks its batch rarely: both interrupt the graph's replay, and a
    # capture, which empties the allocator's cache, has to pay for itself in the steps that are left
    on_gpu = replays(device)
    ask_every, drop_at = (8, 3 / 4) if on_gpu else (1, 1 / 4)
    graph, num_eager = None, 0
    for t in range(1, max_new_tokens):
        worth_it = not on_gpu or max_new_tokens - t > CAPTURE_PAYS
        if eos_id is not None and t % ask_every == 0:
            num_ended = int(live.ended.sum())
            if num_ended == len(live.index):
                break
            if num_ended >= drop_at * len(live.index) and worth_it:  # drop them: the copy pays for itself
                response[live.index], logprobs[live.index] = live.response, live.logprobs
                live.keep(~live.ended.squeeze(1))
                graph, num_eager = None, 0
        if graph is not None:
            graph.replay()
        elif on_gpu and worth_it and num_eager >= 3 and not no_repeat_ngram_size:  # the libraries are warmed up
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # records one step without running it
                step()
            graph.replay()
        else:
            step()
            num_eager += 1
    response[live.index], logprobs[live.index] = live.response, live.logprobs
    if not logprobs.isfinite().all():
        raise InputError("the language model's logits are not finite: its weights are damaged, or --lr was too high.")
    with torch.inference_mode(False):  # copies that a backward pass may keep
        return response.clone(), logprobs.clone()


def replays(device: torch.device) -> bool:
    """Whether a decode step is captured once and replayed: on a GPU, where starting its kernels takes longer."""
    return device.type == "cuda"


def for_sampling(model: GPT, dtype: str) -> GPT:
    """The model with the weights of its products prepared once: a copy for sampling, which shares all other tensors.

    dtype same: large ones in the order in which a CPU's product reads them, else the model itself. bfloat16, to be run
    under autocast: the products of the blocks; the head is rounded at each call of `generate`. int8, float32 between
    the products: those of the blocks and the head, each row of weights and of activations with a scale of its own
    (kernels/int8.py). LoRA's updates are merged first.
    """
    if dtype == "same" and not any(is_worth_packing(layer.weight) for layer in multiplied(model)):
        return model
    model = merge(model)
    if dtype == "bfloat16":
        round_products(model, torch.bfloat16)
        return model
    for layer in multiplied(model):
        weight = layer.weight
        if dtype == "int8" or is_worth_packing(weight):
            del layer.weight  # a parameter's name can't be given to anything else
            layer.__dict__["weight"] = Int8Weight(weight) if dtype == "int8" else PackedWeight(weight)
    return model


def multiplied(model: GPT) -> list[torch.nn.Linear]:
    """The layers of the blocks, and the head."""
    return [*(module for module in model.modules() if isinstance(module, Linear)), model.lm_head]


@dataclass
class LiveRows:
    """The rows that have not ended: all that a decode step reads and writes, at fixed addresses."""

    index: Tensor  # (b,) row in the batch
    query: Tensor  # (b, Q) -1 at padding
    uniforms: Tensor  # (b, T)
    response: Tensor  # (b, T)
    logprobs: Tensor  # (b, T)
    token: Tensor  # (b, 1) the last one
    ended: Tensor  # (b, 1) bool
    t: Tensor  # (1,) index of the next token
    cache: KVCache

    def keep(self, kept: Tensor) -> None:
        """Keep only the rows where `kept` (b,) is True."""
        for name in ("index", "query", "uniforms", "response", "logprobs", "token", "ended"):
            setattr(self, name, getattr(self, name)[kept])
        self.cache.keep(kept)


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF sampling: probabilities (B, V), not necessarily normalised, uniforms (B, 1) in [0, 1) -> ids (B, 1).

    In float64; takes the first id whose cumulative probability exceeds the number, so never one of probability 0.
    """
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)  # (B, V)
    token = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    return token.clamp(max=probabilities.size(-1) - 1)  # out of range only if a probability is NaN: `generate` raises


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k highest logits and all ties with the k-th; the others become -inf. k = 0 keeps all."""
    if k <= 0 or k >= logits.size(-1):
        return logits
    threshold = logits.topk(k, dim=-1).values[:, -1:]
    return logits.masked_fill(logits < threshold, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of most probable ids whose total probability reaches p; the others become -inf."""
    if p >= 1.0:
        return logits
    sorted_logits, order = logits.sort(descending=True, stable=True)
    probabilities = sorted_logits.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # total probability of the ids ahead
    dropped = (before >= p).scatter(1, order, before >= p)
    dropped[torch.arange(len(logits), device=logits.device), order[:, 0]] = False  # p = 0 keeps the best
    return logits.masked_fill(dropped, -torch.inf)


def ban_repeated_ngrams(logits: Tensor, context: Tensor, n: int) -> Tensor:
    """-inf for each id that would repeat an n-gram of query and response.

    logits (B, V), context (B, L) ids so far; -1 (padding) and ids outside the vocabulary are part of no n-gram. A row
    in which every id would be banned keeps its logits.
    """
    if context.size(1) < n:
        return logits
    V = logits.size(1)
    ngrams = context.unfold(1, n, 1)  # (B, L - n + 1, n)
    tail = context[:, context.size(1) - (n - 1) :]  # (B, n - 1) the beginning of the next n-gram
    real = ((ngrams >= 0) & (ngrams < V)).all(-1)  # (B, L - n + 1)
    repeated = (ngrams[..., :-1] == tail[:, None, :]).all(-1) & real
    last = ngrams[..., -1].clamp(0, V - 1)
    banned = torch.zeros(logits.shape, dtype=torch.int8, device=logits.device)
    banned = banned.scatter_reduce(1, last, repeated.to(torch.int8), reduce="amax").bool()  # (B, V)
    result = logits.masked_fill(banned, -torch.inf)
    exhausted = (result == -torch.inf).all(-1, keepdim=True)
    return torch.where(exhausted, logits, result)
