"""Log-probabilities of tokens and the entropy of their distribution.

For a row of logits l with normaliser Z = logsumexp(l) and p = exp(l - Z):

    logprob = l[label] - Z                 d logprob / d l = onehot(label) - p
    entropy = Z - sum_v p_v l_v            d entropy / d l = -p * (log p + entropy)

The logits of a batch, (N, V), and their gradient are the largest tensors of a training step.
`linear_logprobs` starts from hidden states, processes the vocabulary in blocks and keeps three
numbers per row. The backward pass recomputes each block's logits: four matmuls instead of three.
Without Triton, the first blocks are kept instead, up to 2^26 logits.

Block b has normaliser Z_b and entropy H_b over its own ids. Its share of the probability is
w_b = exp(Z_b - Z), and by the chain rule of entropy

    Z = logsumexp_b Z_b                    H = sum_b w_b (H_b - log w_b)

With the largest logit m of a block, H_b = Z_b - m - sum_v p_v (l_v - m). Sums of l itself would
lose precision for large logits.

With a cap c (Gemma 2), z = hidden @ weight.T becomes c * tanh(z / c), and the gradient above is
multiplied by 1 - tanh(z / c)^2.
"""

import torch
from torch import Tensor

from kernels import processor
from kernels.linear import cast, matmul_into, wide_linear

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:  # PyTorch's CPU wheels don't include Triton
    triton = None

GPU_BLOCK = 2**25  # gradients of logits per block on a GPU: 64 MB in bf16
LOWEST = -1e30  # instead of -inf: 0 * -inf is NaN


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies in nats.

    logits = (hidden @ weight.T + bias) / temperature, or with a cap
    (cap * tanh(hidden @ weight.T / cap) + bias) / temperature; then bias gets no gradient.

    hidden (N, C), weight (V, C), labels (N,), bias (V,) or None -> logprobs (N,), entropy (N,),
    both float32 (float64 from float64). An id with logit -inf can't be emitted: p = 0. A label
    outside 0 ... V - 1, such as -100, is ignored: logprob 0, no gradient. Under autocast the
    matmuls use its dtype; everything else is float32.
    """
    hidden, weight = cast(hidden, weight)
    with torch.autocast(hidden.device.type, enabled=False):
        return LinearLogprobs.apply(hidden, weight, labels, bias, temperature, cap)


# -------------------------------------------------------------------------------- the specification
def stored_logprobs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Reference: log-softmax, gather and entropy from logits (..., V) and labels (...)."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    normaliser = logits.logsumexp(-1)
    counts = (labels >= 0) & (labels < logits.size(-1))
    chosen = logits.gather(-1, labels.where(counts, 0).unsqueeze(-1)).squeeze(-1)
    logprobs = torch.where(counts, chosen - normaliser, 0.0)
    finite = logits.masked_fill(logits == -torch.inf, 0.0)  # 0 * -inf is NaN
    entropy = normaliser - (logits.softmax(-1) * finite).sum(-1)
    return logprobs, entropy


# --------------------------------------------------------------- the blocked form, and its gradient
class LinearLogprobs(torch.autograd.Function):
    """All rows at once, the vocabulary in blocks: BLAS matmuls, or tiles on a GPU in 16 bits."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, bias, temperature, cap):
        ctx.kept = {} if any(ctx.needs_input_grad) else None
        forward = linear_forward_triton if runs_triton(hidden) else linear_forward_blas
        normaliser, entropy, chosen = forward(
            hidden, weight, labels, bias, temperature, cap, ctx.kept
        )
        ctx.save_for_backward(hidden, weight, labels, bias, normaliser, entropy)
        ctx.temperature, ctx.cap = temperature, cap
        ctx.set_materialize_grads(False)  # None if the entropy is only logged
        return torch.where(is_label(labels, len(weight)), chosen - normaliser, 0.0), entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, labels, bias, normaliser, entropy = ctx.saved_tensors
        for_hidden, for_weight, _, for_bias, _, _ = ctx.needs_input_grad
        assert ctx.cap is None or not for_bias
        V = len(weight)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(normaliser)
        grad_logprobs = torch.where(is_label(labels, V), grad_logprobs, 0.0)
        grad_logprobs = grad_logprobs / ctx.temperature
        if grad_entropy is not None:
            grad_entropy = grad_entropy / ctx.temperature
        grads = grad_logprobs, grad_entropy
        grad_hidden = torch.zeros_like(hidden, dtype=normaliser.dtype) if for_hidden else None
        grad_weight = torch.empty_like(weight) if for_weight else None
        grad_bias = torch.empty_like(bias) if for_bias else None
        backward = linear_backward_triton if runs_triton(hidden) else linear_backward_blas
        for ids in vocabulary_blocks(hidden, V):
            grad = backward(
                hidden, weight, labels, bias, ctx.temperature, ctx.cap, normaliser, entropy, grads,
                ids, ctx.kept,
            )  # fmt: skip
            if for_bias:
                grad_bias[ids] = grad.sum(0)
            grad = grad.to(hidden.dtype)
            if for_hidden:
                matmul_into(grad_hidden, grad, weight[ids].T, add=True)
            if for_weight:
                matmul_into(grad_weight[ids], grad.T, hidden.T)
        if for_hidden:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, None, grad_bias, None, None


def runs_triton(x: Tensor) -> bool:
    """Return whether x is 16-bit on a GPU. Wider dtypes use no tensor cores: BLAS is faster."""
    return x.is_cuda and x.element_size() == 2


def is_label(labels: Tensor, V: int) -> Tensor:
    return (labels >= 0) & (labels < V)


def vocabulary_blocks(hidden: Tensor, V: int) -> list[slice]:
    on_gpu = hidden.is_cuda or runs_triton(hidden)
    block = GPU_BLOCK if on_gpu else processor.chosen.block
    size = max(1, block // max(len(hidden), 1))
    if on_gpu and size > 16:
        size -= size % 16  # align the gradient's rows for vector stores and tensor cores
    return [slice(start, min(start + size, V)) for start in range(0, V, size)]


def labels_in(ids: slice, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether each label (N,) is in the block, (N, 1), and its index there or 0, (N, 1)."""
    here = (labels >= ids.start) & (labels < ids.stop)
    return here[:, None], torch.where(here, labels - ids.start, 0)[:, None]


# ------------------------------------------------------------- CPU, and wider than 16 bits on a GPU
def block_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
    cap: float | None,
    ids: slice,
) -> Tensor:
    """Compute the logits (N, v) of a block of ids in float32 (float64 from float64)."""
    return scaled(wide_linear(hidden, weight[ids], cap=cap), bias, temperature, ids)


def scaled(logits: Tensor, bias: Tensor | None, temperature: float, ids: slice) -> Tensor:
    """Turn a block's capped matmul (N, v) into logits in place: add bias, divide by temperature."""
    if bias is not None:
        logits = logits.add_(bias[ids])
    if temperature != 1:
        logits = logits.div_(temperature)
    return logits if bias is None else logits.clamp_(min=LOWEST)


def linear_forward_blas(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    temperature: float,
    cap: float | None,
    kept: dict | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normaliser, entropy and label's logit of each row, (N,) each.

    Stores in `kept`, by a block's first id: p over the block's ids, (N, v), or None beyond the
    limit or with a cap, and the block's normaliser, (N,).
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    largest = torch.full((len(hidden),), LOWEST, device=hidden.device, dtype=wide)
    log_total, entropy, chosen = (torch.zeros_like(largest) for _ in range(3))
    for ids in vocabulary_blocks(hidden, len(weight)):
        logits = block_logits(hidden, weight, bias, temperature, cap, ids)  # (N, v)
        here, index = labels_in(ids, labels)
        chosen = torch.where(here, logits.gather(1, index), chosen[:, None]).squeeze(1)
        block_largest = logits.amax(1)
        p = logits.softmax(1)  # takes a quarter of the time of a difference, exp and sum
        block_total = -p.amax(1).log()  # p = exp(l - m) / total is largest at l = m
        block_entropy = block_total - logits.sub_(block_largest[:, None]).mul_(p).sum(1)
        if kept is not None:
            # the cap's slope needs the matmul, which can't be recovered from a p that underflows
            is_kept = cap is None and len(hidden) * ids.stop <= processor.chosen.kept
            kept[ids.start] = p if is_kept else None, block_largest + block_total
        new_largest = torch.maximum(largest, block_largest)
        before = log_total + (largest - new_largest)
        block_log_total = block_total + (block_largest - new_largest)
        largest, log_total = new_largest, torch.logaddexp(before, block_log_total)
        entropy = entropy_share(entropy, before - log_total)
        entropy = entropy + entropy_share(block_entropy, block_log_total - log_total)
    return largest + log_total, entropy, chosen


def entropy_share(entropy: Tensor, log_weight: Tensor) -> Tensor:
    """Return w (H - log w), the entropy contribution of ids with total p of w and entropy H."""
    return log_weight.exp() * (entropy - log_weight)


def linear_backward_blas(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, temperature: float,
    cap: float | None, normaliser: Tensor, entropy: Tensor, grads: tuple[Tensor, Tensor | None],
    ids: slice, kept: dict,
) -> Tensor:  # fmt: skip
    """Compute d loss / d (hidden @ weight.T), (N, v), for a block of ids, in the memory of its p.

    g_l * (onehot - p) - g_e * p * (log p + entropy), times the cap's slope
    """
    p, block_normaliser = kept[ids.start]
    kept[ids.start] = (
        None,
        block_normaliser,
    )  # p is overwritten: a second backward pass recomputes it
    slope = None
    if p is None:
        logits = wide_linear(hidden, weight[ids], cap=cap)
        slope = None if cap is None else 1 - (logits / cap).square()
        p = scaled(logits, bias, temperature, ids).softmax(1)
    to_probability = (block_normaliser - normaliser).exp()[:, None]
    grad_logprobs, grad_entropy = grads[0][:, None], grads[1]
    here, index = labels_in(ids, labels)
    at_label = torch.where(here, grad_logprobs, 0.0)
    if grad_entropy is None:
        grad = p.mul_(-grad_logprobs * to_probability)
    else:
        p.mul_(to_probability)
        log_p = p.log().clamp_(min=LOWEST)  # 0 * -inf is NaN
        entropy_grad = (log_p + entropy[:, None]).mul_(grad_entropy[:, None])
        grad = p.mul_(-entropy_grad.add_(grad_logprobs))
    grad = grad.scatter_add_(1, index, at_label)
    return grad if slope is None else grad.mul_(slope)


# ------------------------------------------------------------------------------------------- Triton
def linear_forward_triton(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    temperature: float,
    cap: float | None,
    kept: dict | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`linear_forward_blas` in Triton; ignores `kept`.

    Each program handles BLOCK_N rows and SPLIT ids; the splits are merged here.
    """
    (N, C), V = hidden.shape, len(weight)
    num_splits = triton.cdiv(V, SPLIT)
    # (splits, N) each: normaliser and entropy within the split, the label's logit or 0
    normalisers, entropies, chosen = (
        torch.empty(num_splits, N, device=hidden.device) for _ in range(3)
    )
    if N:
        linear_forward_kernel[lambda meta: (triton.cdiv(N, meta["BLOCK_N"]), num_splits)](
            hidden.contiguous(), weight.contiguous(), labels, weight if bias is None else bias,
            normalisers, entropies, chosen, N, V, C, rows_per_group(hidden), 1 / temperature,
            cap or 0.0, HAS_BIAS=bias is not None, HAS_CAP=cap is not None,
            EVEN_C=C % BLOCK_C == 0, SPLIT=SPLIT,
        )  # fmt: skip
    normaliser = normalisers.logsumexp(0)
    entropy = entropy_share(entropies, normalisers - normaliser).sum(0)
    return normaliser, entropy, chosen.sum(0)


def linear_backward_triton(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, temperature: float,
    cap: float | None, normaliser: Tensor, entropy: Tensor, grads: tuple[Tensor, Tensor | None],
    ids: slice, kept: dict,
) -> Tensor:  # fmt: skip
    """`linear_backward_blas` in Triton, in hidden's dtype: tiles of logits become gradients."""
    (N, C), v = hidden.shape, ids.stop - ids.start
    grad = torch.empty((N, v), device=hidden.device, dtype=hidden.dtype)
    g_l, g_e = (torch.zeros_like(normaliser) if g is None else g.contiguous() for g in grads)

    def grid(meta: dict) -> tuple[int, int]:
        return triton.cdiv(N, meta["BLOCK_N"]), triton.cdiv(v, meta["BLOCK_V"])

    if N:
        linear_backward_kernel[grid](
            hidden.contiguous(), weight.contiguous(), labels, weight if bias is None else bias,
            normaliser, entropy, g_l, g_e, grad, ids.start, N, v, C, rows_per_group(hidden),
            1 / temperature, cap or 0.0,
            HAS_BIAS=bias is not None, HAS_CAP=cap is not None, EVEN_C=C % BLOCK_C == 0,
        )  # fmt: skip
    return grad


def rows_per_group(hidden: Tensor) -> int:
    return max(1, GROUP // (hidden.size(1) * hidden.element_size()))


SPLIT = 1024  # ids per program of the forward pass; small enough to keep all SMs busy
BLOCK_C = 64  # columns that a program multiplies at once
# bytes of hidden states that stay in a GPU's L2 cache while all weights are read once: an A100 has
# two halves of 20 MB, and each may cache its own copy
GROUP = 2**24

if triton is not None:
    # Only the last spills registers (kernels/compiled.csv), and it is still the fastest on an H200.
    # The interpreter can't time settings, so it gets one, with tiles so small that small tests have
    # several.
    INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
    if INTERPRETED:
        BLOCK_C = 16
        TILES = [triton.Config({"BLOCK_N": 16, "BLOCK_V": 32, "BLOCK_C": BLOCK_C})]
    else:
        TILES = [
            triton.Config(
                {"BLOCK_N": n, "BLOCK_V": v, "BLOCK_C": BLOCK_C}, num_warps=warps, num_stages=stages
            )
            for n, v, warps, stages in (
                (64, 128, 4, 3),
                (128, 128, 8, 3),
                (128, 128, 8, 4),
                (128, 256, 8, 3),
            )
        ]

    @triton.jit
    def in_groups(group, BLOCK_N: tl.constexpr):
        """Return this program's block of rows and block of ids: all rows of a group, then ids."""
        num_rows, num_ids = tl.num_programs(0), tl.num_programs(1)
        program = tl.program_id(1) * num_rows + tl.program_id(0)
        size = tl.maximum(group // BLOCK_N, 1)
        return tl.swizzle2d(program // num_ids, program % num_ids, num_rows, num_ids, size)

    @triton.jit
    def tile_of_logits(
        hidden,  # (N, C)
        weight,  # (V, C)
        bias,  # (V,)
        rows,  # (BLOCK_N,)
        ids,  # (BLOCK_V,)
        N,
        stop,  # ids from here on are masked
        C,
        inverse_temperature,
        cap,  # bounds hidden @ weight.T, if HAS_CAP
        HAS_BIAS: tl.constexpr,
        HAS_CAP: tl.constexpr,
        EVEN_C: tl.constexpr,  # BLOCK_C divides C
        BLOCK_N: tl.constexpr,
        BLOCK_V: tl.constexpr,
        BLOCK_C: tl.constexpr,
    ):
        """Compute logits, -1e30 for -inf, and the cap's slope, (BLOCK_N, BLOCK_V) float32 each.

        The result is float32 for any input dtype.
        """
        tile = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
        # rows and ids beyond the last read the last one: the caller masks the results, and the loop
        # needs no mask if BLOCK_C divides C
        c = tl.arange(0, BLOCK_C)
        row, id = tl.minimum(rows, N - 1).to(tl.int64), tl.minimum(ids, stop - 1).to(tl.int64)
        from_hidden = hidden + row[:, None] * C + c[None, :]
        from_weight = weight + id[None, :] * C + c[:, None]
        for start in range(0, C, BLOCK_C):
            if EVEN_C:
                h, w = tl.load(from_hidden + start), tl.load(from_weight + start)
            else:
                inside = start + c < C
                h = tl.load(from_hidden + start, mask=inside[None, :], other=0.0)
                w = tl.load(from_weight + start, mask=inside[:, None], other=0.0)
            if INTERPRETED:  # the interpreter treats bfloat16 as an integer
                h, w = h.to(tl.float32), w.to(tl.float32)
            tile = tl.dot(h, w, tile)
        slope = tl.full((BLOCK_N, BLOCK_V), 1.0, tl.float32)
        if HAS_CAP:
            tanh = 2 * tl.sigmoid(2 * tile / cap) - 1
            tile, slope = cap * tanh, 1 - tanh * tanh
        if HAS_BIAS:
            tile += tl.load(bias + ids, mask=ids < stop, other=0.0).to(tl.float32)[None, :]
        return tl.maximum(tile * inverse_temperature, -1e30), slope

    @triton.autotune(TILES, key=["V", "C"])
    @triton.jit
    def linear_forward_kernel(
        hidden,  # (N, C)
        weight,  # (V, C)
        labels,  # (N,)
        bias,  # (V,)
        normalisers,  # (splits, N) out
        entropies,  # (splits, N) out
        chosen,  # (splits, N) out
        N,
        V,
        C,
        group,  # rows whose programs run before those of the next rows
        inverse_temperature,
        cap,  # bounds hidden @ weight.T, if HAS_CAP
        HAS_BIAS: tl.constexpr,
        HAS_CAP: tl.constexpr,
        EVEN_C: tl.constexpr,  # BLOCK_C divides C
        SPLIT: tl.constexpr,
        BLOCK_N: tl.constexpr,
        BLOCK_V: tl.constexpr,
        BLOCK_C: tl.constexpr,
    ):
        row_block, split = in_groups(group, BLOCK_N)
        rows = row_block * BLOCK_N + tl.arange(0, BLOCK_N)
        first = split * SPLIT
        stop = tl.minimum(first + SPLIT, V)
        label = tl.load(labels + rows, mask=rows < N, other=-1).to(tl.int32)
        maximum = tl.full((BLOCK_N,), -1e30, tl.float32)
        total = tl.zeros((BLOCK_N,), tl.float32)
        moment = tl.zeros((BLOCK_N,), tl.float32)  # sum of exp(l - maximum) * (l - maximum)
        label_logit = tl.zeros((BLOCK_N,), tl.float32)
        # online softmax over tiles of the split
        for start in range(first, stop, BLOCK_V):
            ids = start + tl.arange(0, BLOCK_V)
            tile, _ = tile_of_logits(
                hidden, weight, bias, rows, ids, N, stop, C, inverse_temperature, cap, HAS_BIAS,
                HAS_CAP, EVEN_C, BLOCK_N, BLOCK_V, BLOCK_C,
            )  # fmt: skip
            tile = tl.where(ids[None, :] < stop, tile, -1e30)
            new_maximum = tl.maximum(maximum, tl.max(tile, 1))
            scale = tl.exp(maximum - new_maximum)
            is_label = (ids[None, :] == label[:, None]) & (ids[None, :] < stop)
            label_logit += tl.sum(tl.where(is_label, tile, 0.0), 1)
            # p = 0 for forbidden ids, even if all are; a mask would spill registers
            tile -= tl.where(new_maximum > -1e30, new_maximum, 0.0)[:, None]
            p = tl.exp(tile)
            moment = (moment + total * (maximum - new_maximum)) * scale + tl.sum(p * tile, 1)
            total = total * scale + tl.sum(p, 1)
            maximum = new_maximum
        # a split without a possible id has total 0: normaliser -1e30, entropy 0
        out = split.to(tl.int64) * N + rows
        safe_total = tl.where(total > 0, total, 1.0)
        tl.store(normalisers + out, maximum + tl.log(safe_total), mask=rows < N)
        tl.store(entropies + out, tl.log(safe_total) - moment / safe_total, mask=rows < N)
        tl.store(chosen + out, label_logit, mask=rows < N)

    # not tuned by V, which is the block size here and changes with N
    @triton.autotune(TILES, key=["C"])
    @triton.jit
    def linear_backward_kernel(
        hidden,  # (N, C)
        weight,  # (all ids, C)
        labels,  # (N,)
        bias,  # (all ids,)
        normalisers,  # (N,)
        entropies,  # (N,)
        g_logprobs,  # (N,) divided by the temperature, 0 where the label is ignored
        g_entropies,  # (N,) divided by the temperature
        grad,  # (N, V) out
        first,  # first id of the block of V ids
        N,
        V,
        C,
        group,  # rows whose programs run before those of the next rows
        inverse_temperature,
        cap,  # bounds hidden @ weight.T, if HAS_CAP
        HAS_BIAS: tl.constexpr,
        HAS_CAP: tl.constexpr,
        EVEN_C: tl.constexpr,  # BLOCK_C divides C
        BLOCK_N: tl.constexpr,
        BLOCK_V: tl.constexpr,
        BLOCK_C: tl.constexpr,
    ):
        row_block, id_block = in_groups(group, BLOCK_N)
        rows = row_block * BLOCK_N + tl.arange(0, BLOCK_N)
        index = id_block * BLOCK_V + tl.arange(0, BLOCK_V)
        ids, is_row = first + index, rows < N
        tile, slope = tile_of_logits(
            hidden, weight, bias, rows, ids, N, first + V, C, inverse_temperature, cap, HAS_BIAS,
            HAS_CAP, EVEN_C, BLOCK_N, BLOCK_V, BLOCK_C,
        )  # fmt: skip
        # g_l * (onehot - p) - g_e * p * (log p + entropy); p is 0 even if all ids are forbidden
        normaliser = tl.load(normalisers + rows, mask=is_row, other=0.0)
        log_p = tile - tl.where(normaliser > -1e30, normaliser, 0.0)[:, None]
        p = tl.exp(log_p)
        g_l = tl.load(g_logprobs + rows, mask=is_row, other=0.0)[:, None]
        g_e = tl.load(g_entropies + rows, mask=is_row, other=0.0)[:, None]
        entropy = tl.load(entropies + rows, mask=is_row, other=0.0)[:, None]
        label = tl.load(labels + rows, mask=is_row, other=-1).to(tl.int32)
        result = tl.where(ids[None, :] == label[:, None], g_l, 0.0)
        result -= p * (g_l + g_e * (log_p + entropy))
        if HAS_CAP:
            result *= slope
        out = grad + rows[:, None] * V + index[None, :]  # GPU_BLOCK numbers: 32 bits are enough
        tl.store(out, result.to(grad.dtype.element_ty), mask=is_row[:, None] & (index[None, :] < V))
