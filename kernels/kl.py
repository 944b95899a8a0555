"""KL(policy || reference): exact over the vocabulary, and three estimators from one sampled token.

With log p = l - Z and log q = r - Z' from the logits l of the policy and r of the reference:

    KL = sum_v p_v (log p_v - log q_v)              d KL / d l = p * (log p - log q - KL)

The reference gets no gradient. The estimators (Schulman 2020), with x = log p - log q at a token
sampled from p:

    k1 = x                  unbiased, may be negative
    k2 = x^2 / 2            biased, never negative; its gradient is an unbiased estimate of the KL's
    k3 = exp(-x) - 1 + x    unbiased, never negative
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels.linear import cast, wide_linear
from kernels.logprobs import runs_triton

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:  # PyTorch's CPU wheels don't include Triton
    triton = None

CHUNK = 2**23  # logits per model and chunk of linear_kl_divergence


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    return 0.5 * (logprobs - ref_logprobs) ** 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    x = logprobs - ref_logprobs
    return torch.expm1(-x) + x


def kl_divergence(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Return the KL (...) in nats from logits, ref_logits (..., V): float32, float64 from float64.

    An id that the policy can't emit adds 0; an id that only the reference can't emit makes the KL
    infinite.
    """
    needs_gradient = torch.is_grad_enabled() and logits.requires_grad
    if runs_triton(logits) and not needs_gradient:
        return kl_triton(logits, ref_logits)
    return stored_kl_divergence(logits, ref_logits)


def linear_kl_divergence(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    bias: Tensor | None = None,
    ref_bias: Tensor | None = None,
    temperature: float = 1.0,
    cap: float | None = None,
    ref_cap: float | None = None,
) -> Tensor:
    """`kl_divergence` from hidden states; the backward pass recomputes the logits, chunk by chunk.

    hidden (N, C), weight (V, C), bias (V,); the reference may have another width -> KL (N,). See
    `linear_logprobs` for the caps. Autocast rounds the inputs of the matmuls, not the logits.
    """
    hidden, weight, ref_hidden, ref_weight = cast(hidden, weight, ref_hidden.detach(), ref_weight)

    def chunk(h: Tensor, r: Tensor) -> Tensor:
        logits = wide_linear(h, weight, bias, cap)
        ref_logits = wide_linear(r, ref_weight, ref_bias, ref_cap)
        return kl_divergence(logits / temperature, ref_logits / temperature)

    rows = max(1, CHUNK // len(weight))
    pieces = zip(hidden.split(rows), ref_hidden.split(rows), strict=True)
    with torch.autocast(hidden.device.type, enabled=False):
        return torch.cat([checkpoint(chunk, h, r, use_reentrant=False) for h, r in pieces])


def stored_kl_divergence(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Reference implementation: sum_v p_v (log p_v - log q_v)."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_p, log_q = logits.to(wide).log_softmax(-1), ref_logits.detach().to(wide).log_softmax(-1)
    possible = log_p > -torch.inf
    # torch.where before the multiplication: the gradient of 0 * inf would be NaN
    ratio = torch.where(possible, log_p, 0.0) - torch.where(possible, log_q, 0.0)
    p = log_p.exp().clamp(min=torch.finfo(wide).tiny)  # p > 0 even if it underflows
    return (p * ratio).sum(-1)


# ------------------------------------------------------------------------------------------- Triton
def kl_triton(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """GPU version without a gradient: one pass over both logits, one program per row."""
    kl = torch.empty(logits.shape[:-1], device=logits.device)
    if kl.numel():
        kl_kernel[(kl.numel(),)](logits.contiguous(), ref_logits.contiguous(), kl, logits.size(-1))
    return kl


if triton is not None:
    if triton.knobs.runtime.interpret:  # the interpreter can't time settings
        ROWS = [triton.Config({"BLOCK_V": 64})]
    else:
        ROWS = [
            triton.Config({"BLOCK_V": v}, num_warps=warps)
            for v, warps in ((1024, 4), (4096, 8), (8192, 8), (8192, 16))
        ]

    @triton.autotune(ROWS, key=["V"])
    @triton.jit
    def kl_kernel(
        logits,  # (N, V)
        ref_logits,  # (N, V)
        kl,  # (N,) out
        V,
        BLOCK_V: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        # 1. two online softmaxes in parallel, each with BLOCK_V running maxima and totals
        top_p = tl.full((BLOCK_V,), -1e30, tl.float32)
        top_q = tl.full((BLOCK_V,), -1e30, tl.float32)
        total_p = tl.zeros((BLOCK_V,), tl.float32)
        total_q = tl.zeros((BLOCK_V,), tl.float32)
        moment = tl.zeros((BLOCK_V,), tl.float32)  # sum of exp(l - top_p) * (l - r)
        for start in range(0, V, BLOCK_V):
            ids = start + tl.arange(0, BLOCK_V)
            at, inside = row * V + ids, ids < V
            logit = tl.load(logits + at, mask=inside, other=-float("inf")).to(tl.float32)
            ref = tl.load(ref_logits + at, mask=inside, other=-float("inf")).to(tl.float32)
            new_p, new_q = tl.maximum(top_p, logit), tl.maximum(top_q, ref)
            # at least exp(-85), which float32 can represent: a possible id must not become 0
            scale = tl.exp(tl.maximum(top_p - new_p, -85.0))
            p = tl.where(logit > -1e30, tl.exp(tl.maximum(logit - new_p, -85.0)), 0.0)
            total_p = total_p * scale + p
            moment = moment * scale + tl.where(p > 0, p * (logit - ref), 0.0)
            total_q = total_q * tl.exp(top_q - new_q) + tl.exp(ref - new_q)
            top_p, top_q = new_p, new_q
        # 2. combine the BLOCK_V partial results
        best_p, best_q = tl.max(top_p, 0), tl.max(top_q, 0)
        scale = tl.exp(tl.maximum(top_p - best_p, -85.0))
        sum_p = tl.sum(total_p * scale, 0)
        z_p = best_p + tl.log(sum_p)
        z_q = best_q + tl.log(tl.sum(total_q * tl.exp(top_q - best_q), 0))
        tl.store(kl + row, tl.sum(moment * scale, 0) / sum_p - z_p + z_q)
