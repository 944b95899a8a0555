"""Sampling with a KV cache: one prefill, then one token at a time for the rows that have not ended."""

import torch
from torch import Tensor

from nanorlhf.errors import InputError
from nanorlhf.model import GPT, KVCache


@torch.no_grad()
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
    uniforms = uniforms.to(device)
    dtype = (
        torch.get_autocast_dtype(device.type)
        if torch.is_autocast_enabled(device.type)
        else next(model.parameters()).dtype
    )
    cache = KVCache(model.config, B, Q + max_new_tokens, device, dtype)
    response = torch.full((B, max_new_tokens), pad_id, device=device)  # (B, T)
    logprobs = torch.zeros((B, max_new_tokens), device=device)  # (B, T)
    rows = torch.arange(B, device=device)  # (b,) which row of the batch each held row is
    ended = torch.zeros(B, dtype=torch.bool, device=device)  # (b,)
    mask = torch.cat((query_mask, query_mask.new_ones((B, max_new_tokens))), dim=1)  # (b, Q + T)
    hidden = model(query, query_mask, cache)[:, -1]  # (b, C)

    for t in range(max_new_tokens):
        logits = model.logits(hidden).float()  # (b, V)
        tempered = logits / (temperature or 1.0)
        filtered = tempered
        if no_repeat_ngram_size:
            context = torch.cat((query[rows].masked_fill(~query_mask[rows], -1), response[rows, :t]), dim=1)
            filtered = ban_repeated_ngrams(filtered, context, no_repeat_ngram_size)
        if temperature == 0:
            token = filtered.argmax(-1)
        else:
            filtered = keep_top_p(keep_top_k(filtered, top_k), top_p)
            token = draw(filtered.softmax(-1), uniforms[rows, t])  # (b,)
        logprob = tempered.gather(1, token[:, None]).squeeze(1) - tempered.logsumexp(-1)
        live = rows[~ended]
        response[live, t] = token[~ended]
        logprobs[live, t] = logprob[~ended]
        if eos_id is not None:
            ended = ended | (token == eos_id)
        if t + 1 == max_new_tokens or ended.all():
            break
        if 4 * int(ended.sum()) >= len(rows):  # a quarter has ended: go on without them, the copy pays for itself
            kept = ~ended
            rows, token, mask, ended = rows[kept], token[kept], mask[kept], ended[kept]
            cache.keep(kept)
        hidden = model(token[:, None], mask[:, : Q + t + 1], cache)[:, -1]
    if not logprobs.isfinite().all():
        raise InputError("the language model's logits are not finite: its weights are damaged, or --lr was too high.")
    return response, logprobs


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse of the cumulative distribution: probabilities (B, V), uniforms (B,) in [0, 1) -> ids (B,).

    In float64, and strictly beyond the number, so that an id of probability 0 is never drawn.
    """
    cumulative = probabilities.double().cumsum(-1)  # (B, V)
    threshold = uniforms[:, None] * cumulative[:, -1:]  # (B, 1)
    token = torch.searchsorted(cumulative, threshold, right=True).squeeze(1)
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

    context (B, L) ids so far, -1 at padding, which belongs to no n-gram. A row in which every id would be banned
    keeps its logits: something has to come next.
    """
    if context.size(1) < n:
        return logits
    ngrams = context.unfold(1, n, 1)  # (B, L - n + 1, n)
    tail = context[:, context.size(1) - (n - 1) :]  # (B, n - 1) the beginning of the n-gram that comes now
    repeated = (ngrams[..., :-1] == tail[:, None, :]).all(-1) & (ngrams >= 0).all(-1)  # (B, L - n + 1)
    last = ngrams[..., -1].clamp(min=0)
    banned = torch.zeros(logits.shape, dtype=torch.int8, device=logits.device)
    banned = banned.scatter_reduce(1, last, repeated.to(torch.int8), reduce="amax").bool()  # (B, V)
    result = logits.masked_fill(banned, -torch.inf)
    exhausted = (result == -torch.inf).all(-1, keepdim=True)
    return torch.where(exhausted, logits, result)
