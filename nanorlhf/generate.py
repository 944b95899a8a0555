"""Sample responses with a KV cache, one token per row and step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.cuda_graph import CAPTURE_PAYS, Replay
from kernels.linear import Packed, PackedWeight, cast_head, is_worth_packing, matmul_dtype
from kernels.processor import widest_dtype
from nanorlhf.cache import KVCache
from nanorlhf.checkpoint import cast_linear_weights
from nanorlhf.errors import InputError
from nanorlhf.layers import Linear
from nanorlhf.model import GPT
from nanorlhf.padding import left_pad
from nanorlhf.peft import merge, share
from nanorlhf.progress import Progress
from nanorlhf.shared_queries import Groups, find_groups
from nanorlhf.tokenizer import Tokenizer


# ----------------------------------------------------------------------- 1. draw one token per row
def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Sample by inverse CDF: probabilities (B, V), uniforms (B, 1) in [0, 1) -> ids (B, 1).

    Returns the first id at which the cumulative probability, in float64 (float32 on mps), exceeds
    uniform * sum; the sum need not be 1. Never returns an id with probability 0 if the row has a
    positive one. If a probability is NaN, the id is arbitrary.
    """
    dtype = widest_dtype(probabilities.device)
    cumulative = probabilities.cumsum(-1, dtype=dtype)  # (B, V)
    token = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    token = token.clamp(max=probabilities.size(-1) - 1)  # V if the product rounds up to the sum
    # A GPU doesn't add from left to right, so the sum's last bit may change at an id of probability
    # 0, and the search may return it.
    best = probabilities.argmax(-1, keepdim=True)
    return torch.where(probabilities.gather(1, token) > 0, token, best)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k highest logits and all ties with the k-th; the others become -inf.

    If k is 0 or at least V, the logits are returned unchanged.
    """
    if k <= 0 or k >= logits.size(-1):
        return logits
    threshold = logits.topk(k, dim=-1).values[:, -1:]
    return logits.masked_fill(logits < threshold, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of most probable ids whose total probability reaches p.

    The others become -inf. p = 1 returns the logits unchanged, p = 0 keeps one id.
    """
    if p >= 1.0:
        return logits
    sorted_logits, order = logits.sort(descending=True, stable=True)
    probabilities = sorted_logits.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # total probability of more probable ids
    dropped = before >= p
    dropped[:, :1].fill_(False)  # unlike indexed assignment, copies nothing from the host
    return logits.masked_fill(dropped.scatter(1, order, dropped), -torch.inf)


def ban_repeated_ngrams(logits: Tensor, context: Tensor, n: int) -> Tensor:
    """Set the logit of each id that would repeat an n-gram of query and response to -inf.

    logits (B, V), context (B, L) ids so far. N-grams with -1 (padding) or an id outside the
    vocabulary are ignored. A row keeps its logits if every id would be banned or L < n.
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


# -------------------------------------------------------------------- 2. sample a token in each row
@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings for drawing a token, and the ids that end a response."""

    temperature: float
    top_k: int
    top_p: float
    no_repeat_ngram_size: int
    filtered_logprobs: bool
    ends: Tensor  # (E,)
    pad_id: int


@dataclass(kw_only=True)
class LiveRows:
    """The rows that have not ended. A decode step reads and writes them at fixed addresses."""

    index: Tensor  # (b,) row in the batch
    query: Tensor  # (b, Q) -1 at padding
    uniforms: Tensor  # (b, T)
    response: Tensor  # (b, T)
    logprobs: Tensor  # (b, T)
    token: Tensor  # (b, 1) the latest
    ended: Tensor  # (b, 1) bool
    t: Tensor  # (1,) index of the next token
    cache: KVCache
    all_responses: Tensor  # (B, T) of the batch, without the live rows' until they are stored
    all_logprobs: Tensor  # (B, T)

    def store(self) -> None:
        """Write the live rows to the batch."""
        self.all_responses[self.index] = self.response
        self.all_logprobs[self.index] = self.logprobs

    def drop_ended(self) -> None:
        """Keep only the rows that have not ended."""
        self.store()
        rows = (~self.ended).squeeze(1).nonzero().squeeze(1)  # syncs with a GPU once
        for name in ("index", "query", "uniforms", "response", "logprobs", "token", "ended"):
            setattr(self, name, getattr(self, name)[rows])
        self.cache.keep(rows)


def sample(logits: Tensor, live: LiveRows, how: Sampling) -> None:
    """Sample the next token of each row from logits (b, V), and write it to `live`."""
    logits.div_(how.temperature or 1.0)
    normaliser = logits.logsumexp(-1, keepdim=True)  # (b, 1)
    filtered, allowed = logits, normaliser
    if how.no_repeat_ngram_size:
        num_written = live.cache.length - live.cache.prefill
        context = torch.cat((live.query, live.response[:, :num_written]), dim=1)
        filtered = ban_repeated_ngrams(filtered, context, how.no_repeat_ngram_size)
        # renormalised: the ids that aren't banned may be too improbable for float32
        allowed = filtered.logsumexp(-1, keepdim=True)  # (b, 1)
    if how.temperature == 0:
        token = filtered.argmax(-1, keepdim=True)
    else:
        filtered = keep_top_p(keep_top_k(filtered, how.top_k), how.top_p)
        uniforms_now = live.uniforms.index_select(1, live.t)  # (b, 1)
        token = draw((filtered - allowed).exp_(), uniforms_now)
    if how.filtered_logprobs and filtered is not logits:
        logits = filtered
        normaliser = logits.logsumexp(-1, keepdim=True)
    logprob = logits.gather(1, token) - normaliser
    live.token.copy_(token)
    live.response.index_copy_(1, live.t, live.token.masked_fill(live.ended, how.pad_id))
    live.logprobs.index_copy_(1, live.t, logprob.masked_fill(live.ended, 0.0))
    if len(how.ends):
        live.ended |= (live.token == how.ends).any(1, keepdim=True)
    live.t += 1


# -------------------------------------------------------------------------- 3. prefill, then decode
def prefill(
    model: GPT,
    head: Tensor | Packed,
    query: Tensor,
    mask: Tensor,
    groups: Groups,
    live: LiveRows,
    how: Sampling,
) -> None:
    """Fill the cache with the queries (B, Q) and draw the first token of each response.

    groups: rows with the same query, which share its prefill; the cache has a row per group.
    """
    first = groups.first
    hidden = model(query[first], mask[first], cache=live.cache, last=1)[:, -1]  # (G, C)
    if len(first) < len(query):
        live.cache.keep(groups.group)
        hidden = hidden[groups.group]  # (B, C)
    sample(model.logits(hidden, head).float(), live, how)


def decode_step(model: GPT, head: Tensor | Packed, live: LiveRows, how: Sampling) -> None:
    """Draw one more token per row; a GPU replays this step."""
    hidden = model(live.token, cache=live.cache)[:, -1]  # (b, C)
    sample(model.logits(hidden, head).float(), live, how)


def decode(model: GPT, head: Tensor | Packed, live: LiveRows, how: Sampling) -> None:
    """Draw all tokens after the first, until every row has ended or is full."""
    T = live.response.size(1)
    on_gpu = live.cache.fixed_shape
    # A GPU rarely checks for ended rows and rarely drops them: both interrupt its replays.
    ask_every, drop_at = (8, 3 / 4) if on_gpu else (1, 1 / 4)
    replay = Replay(partial(decode_step, model, head, live, how))
    for t in range(1, T):
        capture_pays = T - t > CAPTURE_PAYS
        if len(how.ends) and t % ask_every == 0:
            num_ended = int(live.ended.sum())
            if num_ended == len(live.index):
                break
            # dropping rows copies all others, and a GPU has to capture the step again
            if num_ended >= drop_at * len(live.index) and (capture_pays or not on_gpu):
                live.drop_ended()
                replay.reset()
        # the n-gram ban reads a counter in Python, so it can't be replayed
        replay(may_capture=on_gpu and capture_pays and not how.no_repeat_ngram_size)


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
    stop_ids: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Sample one response per query. Temperature 0 is greedy; by default nothing is filtered.

    query (B, Q) left-padded, query_mask (B, Q) True = real -> response (B, T) and logprobs (B, T),
    T = max_new_tokens. After its EOS, or one of stop_ids, a response is filled with pad_id, and its
    logprobs with 0. Logprobs are log_softmax(logits / temperature) (greedy: at temperature 1),
    before top-k, top-p and the n-gram ban; with filtered_logprobs, after them: log-probabilities
    under the distribution sampled from.

    Reproducibility: row b uses its own T random numbers, uniforms[b]; `uniforms` (B, T) in [0, 1)
    is drawn from the generator at the beginning if it isn't passed. A response therefore depends
    only on its query and its numbers, not on the other rows, its padding or when other rows end
    (except for rounding: about once in 10^6 tokens, a number falls on the other side of a
    cumulative probability and gives another token). To split a batch, split `uniforms`.

    Raises InputError if the model's logits are not finite.
    """
    B = len(query)
    device = query.device
    if uniforms is None:
        uniforms = torch.rand(
            (B, max_new_tokens),
            generator=generator,
            dtype=torch.float64,
            device=generator.device if generator else "cpu",
        )
    how = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        no_repeat_ngram_size=no_repeat_ngram_size,
        filtered_logprobs=filtered_logprobs,
        ends=torch.tensor([*([] if eos_id is None else [eos_id]), *stop_ids], device=device),
        pad_id=pad_id,
    )
    response = torch.full((B, max_new_tokens), pad_id, device=device)  # (B, T)
    logprobs = torch.zeros((B, max_new_tokens), device=device)  # (B, T)
    dtype = matmul_dtype(model.transformer.embedding.weight)
    groups = find_groups(query, query_mask)
    live = LiveRows(
        index=torch.arange(B, device=device),
        query=query.masked_fill(~query_mask, -1),
        uniforms=uniforms.to(device, widest_dtype(device)),
        response=response.clone(),
        logprobs=logprobs.clone(),
        token=query[:, -1:].clone(),
        ended=torch.zeros((B, 1), dtype=torch.bool, device=device),
        t=torch.zeros(1, dtype=torch.long, device=device),
        cache=model.transformer.cache(query_mask[groups.first], max_new_tokens, dtype),
        all_responses=response,
        all_logprobs=logprobs,
    )
    head = cast_head(model.lm_head.weight)  # (V, C)
    prefill(model, head, query, query_mask, groups, live, how)
    decode(model, head, live, how)
    live.store()
    if not logprobs.isfinite().all():
        raise InputError(
            "the language model's logits are not finite: "
            "its weights are damaged, or --lr was too high."
        )
    with torch.inference_mode(False):  # clones, which autograd may save for a backward pass
        return response.clone(), logprobs.clone()


# --------------------------------------------------------------------- 4. a model for sampling only
def for_sampling(model: GPT, dtype: str) -> GPT:
    """Return a copy for sampling with prepared linear weights; all other tensors are shared.

    same      pack large weights in the order that a CPU's matmul reads them; return the model
              itself if it has none. Under autocast, cast as for bfloat16, but keep LoRA's updates
              apart: no bit changes, and otherwise each step would round all weights again
    bfloat16  cast the blocks' weights, to be run under autocast; `generate` casts the head
    int8      quantise the blocks' weights and the head (kernels/int8.py); float32 between matmuls

    Otherwise, LoRA's updates are merged first.
    """
    if dtype == "same" and torch.is_autocast_enabled(model.lm_head.weight.device.type):
        model = share(model)  # merging would round weight and update as one number
        cast_linear_weights(model, torch.bfloat16)
        return model
    if dtype == "same" and not any(is_worth_packing(layer.weight) for layer in all_linear(model)):
        return model
    model = merge(model)
    if dtype == "bfloat16":
        cast_linear_weights(model, torch.bfloat16)
        return model
    prepare: Callable[[Tensor], Packed] = PackedWeight
    if dtype == "int8":  # optional: few runs round their sampler's weights
        from kernels.int8 import Int8Weight

        prepare = Int8Weight
    for layer in all_linear(model):
        weight = layer.weight
        if dtype == "int8" or is_worth_packing(weight):
            del layer.weight  # only a parameter can be assigned to a parameter's name
            layer.__dict__["weight"] = prepare(weight)
    return model


def all_linear(model: GPT) -> list[torch.nn.Linear]:
    """Return the linear layers of the blocks, and the head."""
    return [*(module for module in model.modules() if isinstance(module, Linear)), model.lm_head]


# ------------------------------------------------------------------- 5. several responses per query
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

    Returns query (B, Q) left-padded and response (B, T), B = len(queries) * num_samples, T =
    max_new_tokens. A response depends only on the seed, its query and its row, not on batch_size.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (len(queries) * num_samples, max_new_tokens)
    uniforms = torch.rand(shape, generator=generator, dtype=torch.float64)
    query = left_pad(queries, tokenizer.pad_id).to(policy.lm_head.weight.device)
    query = query.repeat_interleave(num_samples, dim=0)  # (B, Q)
    sampler = for_sampling(policy, "same")
    starts = range(0, len(query), batch_size)
    responses = []
    for start in Progress(starts, desc="answers", unit=" batches", leave=False):
        rows = slice(start, start + batch_size)
        response, _ = generate(
            sampler,
            query[rows],
            query[rows] != tokenizer.pad_id,
            max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            no_repeat_ngram_size=no_repeat_ngram_size,
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
            uniforms=uniforms[rows],
            stop_ids=tokenizer.stop_ids,
        )
        responses.append(response)
    return query, torch.cat(responses)
