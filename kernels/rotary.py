"""Rotation of q and k by their positions' angles in one pass, in place, on a GPU.

A pair (a, b) of channels, (2i, 2i + 1) or (i, i + r/2), becomes

    a' = a cos - b sin        b' = a sin + b cos

in float32, rounded once. The reference, `kernels.attention.apply_rotary_`, multiplies complex
numbers: PyTorch widens both halves, joins them, multiplies, and copies both back, seven passes. A
rotation is orthogonal, so the gradient is rotated by -sin, and only the tables are saved.

A decode step also stores k and v, in a column of a static cache: one launch instead of a rotation
and two `index_copy_`. The column is a tensor, so that a CUDA graph of one step serves all steps.

Not measured on a card yet.

Shapes: B batch, S tokens, H query heads, K key and value heads, D head width, r rotated channels, L
columns of a cache.
"""

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:  # PyTorch's CPU wheels don't include Triton
    triton = None

PAIRS = 2048  # of channels per program
CHANNELS = 2048  # per program that also stores k and v


def rotary_triton_(qkv: Tensor, cos: Tensor, sin: Tensor, n_head: int, interleaved: bool) -> Tensor:
    """`apply_rotary_` with a program per token, or several for many heads.

    qkv (B, S, H + 2K, D), changed in place; cos, sin (B, S, 1, r / 2) -> qkv
    """
    B, S, heads, _ = qkv.shape
    pairs, rotated_heads = cos.size(-1), (n_head + heads) // 2  # v's heads come last
    width = triton.next_power_of_2(pairs)
    block = min(triton.next_power_of_2(rotated_heads), max(1, PAIRS // width))
    if B * S:
        rotary_kernel[(B * S, triton.cdiv(rotated_heads, block))](
            qkv, cos, sin, S, rotated_heads, pairs, qkv.stride(0), qkv.stride(1), qkv.stride(2),
            qkv.stride(3), cos.stride(0), cos.stride(1), cos.stride(3), sin.stride(0),
            sin.stride(1), sin.stride(3), INTERLEAVED=interleaved, HEADS=block, WIDTH=width,
        )  # fmt: skip
    return qkv


def rotary_store_triton(
    qkv: Tensor, cos: Tensor, sin: Tensor, n_head: int, interleaved: bool, keys: Tensor,
    values: Tensor, at: Tensor,
) -> Tensor:  # fmt: skip
    """Rotate q in place, and store rotated k, and v, in column `at` of a cache -> qkv.

    qkv (B, 1, H + 2K, D); cos, sin (B, 1, 1, r / 2); keys, values (B, K, L, D), with any strides;
    at (1,) integer. k in qkv is not rotated.
    """
    B, _, heads, D = qkv.shape
    pairs, width = cos.size(-1), triton.next_power_of_2(D)
    block = min(triton.next_power_of_2(heads), max(1, CHANNELS // width))
    if B:
        rotary_store_kernel[(B, triton.cdiv(heads, block))](
            qkv, cos, sin, keys, values, at, n_head, keys.size(1), D, pairs, qkv.stride(0),
            qkv.stride(2), qkv.stride(3), cos.stride(0), cos.stride(3), sin.stride(0),
            sin.stride(3), *keys.stride(), *values.stride(), INTERLEAVED=interleaved, HEADS=block,
            WIDTH=triton.next_power_of_2(pairs), D_WIDTH=width,
        )  # fmt: skip
    return qkv


if triton is not None:

    @triton.jit
    def turned(x, first, second, channel_stride, c, s, mask):
        """Rotate the pairs of channels (WIDTH,) of heads x (HEADS, 1) -> (HEADS, WIDTH) twice."""
        a = tl.load(x + first[None, :] * channel_stride, mask=mask).to(tl.float32)
        b = tl.load(x + second[None, :] * channel_stride, mask=mask).to(tl.float32)
        c, s = c[None, :], s[None, :]
        return a * c - b * s, a * s + b * c

    @triton.jit
    def rotary_kernel(
        qkv,  # (B, S, H + 2K, D), in place
        cos,  # (B, S, 1, pairs)
        sin,  # (B, S, 1, pairs)
        S,
        heads,  # H + K, which are rotated
        pairs,  # r / 2
        row_stride, token_stride, head_stride, channel_stride,
        cos_row, cos_token, cos_pair, sin_row, sin_token, sin_pair,  # strides
        INTERLEAVED: tl.constexpr,
        HEADS: tl.constexpr,
        WIDTH: tl.constexpr,
    ):  # fmt: skip
        program = tl.program_id(0)
        row, token = (program // S).to(tl.int64), (program % S).to(tl.int64)
        head, pair = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, WIDTH)
        is_pair = pair < pairs
        # 1. the token's tables
        c = tl.load(cos + row * cos_row + token * cos_token + pair * cos_pair, mask=is_pair)
        s = tl.load(sin + row * sin_row + token * sin_token + pair * sin_pair, mask=is_pair)
        # 2. the pairs of its heads
        first, second = pair, pair + pairs
        if INTERLEAVED:
            first, second = 2 * pair, 2 * pair + 1
        at = qkv + row * row_stride + token * token_stride + head[:, None] * head_stride
        mask = (head < heads)[:, None] & is_pair[None, :]
        a, b = turned(at, first, second, channel_stride, c, s, mask)
        dtype = qkv.dtype.element_ty
        tl.store(at + first[None, :] * channel_stride, a.to(dtype), mask=mask)
        tl.store(at + second[None, :] * channel_stride, b.to(dtype), mask=mask)

    @triton.jit
    def rotary_store_kernel(
        qkv,  # (B, 1, H + 2K, D), q in place
        cos,  # (B, 1, 1, pairs)
        sin,  # (B, 1, 1, pairs)
        keys,  # (B, K, L, D) out, in column `at`
        values,  # (B, K, L, D) out, in column `at`
        at,  # (1,)
        H,
        K,
        D,
        pairs,  # r / 2
        row_stride, head_stride, channel_stride, cos_row, cos_pair, sin_row, sin_pair,  # strides
        k_row, k_head, k_column, k_channel, v_row, v_head, v_column, v_channel,
        INTERLEAVED: tl.constexpr,
        HEADS: tl.constexpr,
        WIDTH: tl.constexpr,
        D_WIDTH: tl.constexpr,
    ):  # fmt: skip
        row, column = tl.program_id(0).to(tl.int64), tl.load(at).to(tl.int64)
        head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
        is_q, is_k = head < H, (head >= H) & (head < H + K)
        is_v = (head >= H + K) & (head < H + 2 * K)
        x = qkv + row * row_stride + head * head_stride
        key = keys + row * k_row + (head - H) * k_head + column * k_column
        value = values + row * v_row + (head - H - K) * v_head + column * v_column
        # 1. the pairs of q, in place, and of k
        pair = tl.arange(0, WIDTH)
        is_pair = pair < pairs
        c = tl.load(cos + row * cos_row + pair * cos_pair, mask=is_pair)
        s = tl.load(sin + row * sin_row + pair * sin_pair, mask=is_pair)
        first, second = pair, pair + pairs
        if INTERLEAVED:
            first, second = 2 * pair, 2 * pair + 1
        is_pair = is_pair[None, :]
        a, b = turned(x, first, second, channel_stride, c, s, (is_q | is_k) & is_pair)
        first, second = first[None, :], second[None, :]
        dtype = qkv.dtype.element_ty
        stored = keys.dtype.element_ty
        tl.store(x + first * channel_stride, a.to(dtype), mask=is_q & is_pair)
        tl.store(x + second * channel_stride, b.to(dtype), mask=is_q & is_pair)
        tl.store(key + first * k_channel, a.to(stored), mask=is_k & is_pair)
        tl.store(key + second * k_channel, b.to(stored), mask=is_k & is_pair)
        # 2. the other channels of k, and v
        channel = tl.arange(0, D_WIDTH)[None, :]
        k_mask, v_mask = is_k & (channel >= 2 * pairs) & (channel < D), is_v & (channel < D)
        rest = tl.load(x + channel * channel_stride, mask=k_mask | v_mask).to(stored)
        tl.store(key + channel * k_channel, rest, mask=k_mask)
        tl.store(value + channel * v_channel, rest, mask=v_mask)
