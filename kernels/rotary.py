"""Rotation of q and k by their positions' angles in one pass, in place, on a GPU.

A pair (a, b) of channels, (2i, 2i + 1) or (i, i + r/2), becomes

    a' = a cos - b sin        b' = a sin + b cos

in float32, rounded once. The reference, `kernels.attention.apply_rotary_`, multiplies complex
numbers: PyTorch widens both halves, joins them, multiplies, and copies both back, seven passes. A
rotation is orthogonal, so the gradient is rotated by -sin, and only the tables are saved.

Not measured on a card yet.

Shapes: B batch, S tokens, H query heads, K key and value heads, D head width, r rotated channels.
"""

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:  # PyTorch's CPU wheels don't include Triton
    triton = None

PAIRS = 2048  # of channels per program


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
