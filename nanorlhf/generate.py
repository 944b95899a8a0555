"""Sampling with a KV cache: one prefill, then one token at a time for the rows that have not ended."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanorlhf.errors import InputError
from nanorlhf.model import GPT, KVCache


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
) -> tuple[Tensor, Tensor]:
    """Sample a response to each query. Temperature 0 is greedy; the other filters are off at their defaults.

    query (B, Q) left-padded, query_mask (B, Q) True = real -> response (B, T), logprobs (B, T), T = max_new_tokens.
    After its EOS a response holds pad_id and logprob 0. logprobs are those of log_softmax(logits / temperature)
    (greedy: of the plain softmax), before top-k, top-p and the n-gram ban.

    What is reproducible: row b takes T numbers of its own, uniforms[b] (B, T) in [0, 1), which the generator draws in
    one go where they are not given. So a row's response depends on its query and its numbers alone: not on the other
    rows, on its padding or on when its neighbours end (to rounding: a float that falls on the other side of a
    cumulative probability, about once in 10^6 tokens, is another token). Whoever splits a batch splits `uniforms`.
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
    dtype = (
        torch.get_autocast_dtype(device.type)
        if torch.is_autocast_enabled(device.type)
        else next(model.parameters()).dtype
    )
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
        cache=KVCache(model.config, query_mask, max_new_tokens, dtype),
    )

    def sample(hidden: Tensor) -> None:
        """hidden (b, C) -> the next token of each row, written in place."""
        tempered = model.logits(hidden).float().div_(temperature or 1.0)  # (b, V)
        normaliser = tempered.logsumexp(-1, keepdim=True)  # (b, 1)
        filtered = tempered
        if no_repeat_ngram_size:
            num_written = live.cache.length - live.query.size(1)
            context = torch.cat((live.query, live.response[:, :num_written]), dim=1)
            filtered = ban_repeated_ngrams(filtered, context, no_repeat_ngram_size)
        if temperature == 0:
            live.token.copy_(filtered.argmax(-1, keepdim=True))
        else:
            filtered = keep_top_p(keep_top_k(filtered, top_k), top_p)
            live.token.copy_(draw((filtered - normaliser).exp_(), live.uniforms.index_select(1, live.t)))
        logprob = tempered.gather(1, live.token) - normaliser  # (b, 1)
        live.response.index_copy_(1, live.t, live.token.masked_fill(live.ended, pad_id))
        live.logprobs.index_copy_(1, live.t, logprob.masked_fill(live.ended, 0.0))
        if eos_id is not None:
            live.ended |= live.token == eos_id
        live.t += 1

    def step() -> None:
        """One token more. Nothing in it waits for the GPU or allocates there what outlives it: it can be captured."""
        sample(model(live.token, cache=live.cache)[:, -1])

    sample(model(query, query_mask, live.cache, last=1)[:, -1])
    # a GPU is asked seldom whether rows have ended, and shrinks its batch seldom: both break the replay
    ask_every, drop_at = (8, 1 / 2) if device.type == "cuda" else (1, 1 / 4)
    graph, num_eager = None, 0
    for t in range(1, max_new_tokens):
        if eos_id is not None and t % ask_every == 0:
            num_ended = int(live.ended.sum())
            if num_ended == len(live.index):
                break
            if num_ended >= drop_at * len(live.index):  # go on without them: the copy pays for itself
                response[live.index], logprobs[live.index] = live.response, live.logprobs
                live.keep(~live.ended.squeeze(1))
                graph, num_eager = None, 0
        if graph is not None:
            graph.replay()
        elif device.type == "cuda" and num_eager == 3 and not no_repeat_ngram_size:  # the libraries are warm
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # writes down one step, does not run it
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


@dataclass
class LiveRows:
    """The rows that are still being written: all that a decode step reads and writes, at fixed places in memory."""

    index: Tensor  # (b,) which row of the batch each is
    query: Tensor  # (b, Q) -1 at padding
    uniforms: Tensor  # (b, T)
    response: Tensor  # (b, T)
    logprobs: Tensor  # (b, T)
    token: Tensor  # (b, 1) the last one
    ended: Tensor  # (b, 1) bool
    t: Tensor  # (1,) index of the next token
    cache: KVCache

    def keep(self, kept: Tensor) -> None:
        """Go on with these rows, (b,) bool, only."""
        for name in ("index", "query", "uniforms", "response", "logprobs", "token", "ended"):
            setattr(self, name, getattr(self, name)[kept])
        self.cache.keep(kept)


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse of the cumulative distribution: probabilities (B, V) of any sum, uniforms (B, 1) in [0, 1) -> ids (B, 1).

    In float64, and strictly beyond the number, so that an id of probability 0 is never drawn.
    """
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)  # (B, V)
    token = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    return token.clamp(max=probabilities.size(-1) - 1)  # beyond it only where a probability is NaN: `generate` says so


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """The k highest logits stay (all that tie with the k-th), the others become -inf; k = 0 keeps all."""
    if k <= 0 or k >= logits.size(-1):
        return logits
    threshold = logits.topk(k, dim=-1).values[:, -1:]
    return logits.masked_fill(logits < threshold, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """The smallest set of most probable ids whose probability reaches p, the one that crosses p included."""
    if p >= 1.0:
        return logits
    sorted_logits, order = logits.sort(descending=True, stable=True)
    probabilities = sorted_logits.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # what stands ahead of each id
    dropped = (before >= p).scatter(1, order, before >= p)
    dropped[torch.arange(len(logits), device=logits.device), order[:, 0]] = False  # p = 0 keeps the best
    return logits.masked_fill(dropped, -torch.inf)


def ban_repeated_ngrams(logits: Tensor, context: Tensor, n: int) -> Tensor:
    """No n-gram of query and response together may come twice: -inf to each id that would complete one.

    context (B, L) ids so far; -1 at padding and [PAD] beyond the vocabulary belong to no n-gram. A row in which every
    id would be banned keeps its logits: something has to come next.
    """
    if context.size(1) < n:
        return logits
    V = logits.size(1)
    ngrams = context.unfold(1, n, 1)  # (B, L - n + 1, n)
    tail = context[:, context.size(1) - (n - 1) :]  # (B, n - 1) the beginning of the n-gram that comes now
    real = ((ngrams >= 0) & (ngrams < V)).all(-1)  # (B, L - n + 1)
    repeated = (ngrams[..., :-1] == tail[:, None, :]).all(-1) & real
    last = ngrams[..., -1].clamp(0, V - 1)
    banned = torch.zeros(logits.shape, dtype=torch.int8, device=logits.device)
    banned = banned.scatter_reduce(1, last, repeated.to(torch.int8), reduce="amax").bool()  # (B, V)
    result = logits.masked_fill(banned, -torch.inf)
    exhausted = (result == -torch.inf).all(-1, keepdim=True)
    return torch.where(exhausted, logits, result)
