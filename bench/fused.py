"""Operations between a block's matmuls and attention of one new token, compared with PyTorch and its compiler."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import limit
from bench.settings import Args, Shape
from bench.stopwatch import compare, table_rows
from kernels.activation import activated, activated_reference, gated, gated_reference
from kernels.attention import apply_rotary_, rotary_tables, rotated, split_heads
from kernels.decode import Columns, decode_attention, decode_reference
from kernels.norm import add_norm, add_norm_reference, fuses
from kernels.rotary import rotary_store_triton, rotary_triton_

NUM_TOKENS = {"cpu": 1024, "cuda": 8192}  # of a micro-batch


def bench_fused(args: Args, shape: Shape, device: torch.device) -> list[dict]:
    """Measure each kernel forward and backward; the limit is the time to read and write each tensor once.

    The residual stream is float32 and the matmuls' outputs have args.dtype. On a CPU, the library runs plain PyTorch.
    """
    config, N, dtype = shape.config, NUM_TOKENS[device.type], getattr(torch, args.dtype)
    C, H, K, D, M = config.d_model, config.n_head, config.kv_heads, config.head_width, config.d_mlp

    def random(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(size, device=device, dtype=dtype, requires_grad=True)

    x, residual, weight, bias = random(N, C), random(N, C, dtype=dtype), random(C), random(C)
    up, gate, mlp_bias = random(N, M, dtype=dtype), random(N, M, dtype=dtype), random(M)
    rows, kind = [], config.activation
    for norm, inputs in (("layer", (x, residual, weight, bias)), ("rms", (x, residual, weight))):
        arguments = *inputs, *(None,) * (4 - len(inputs)), config.norm_eps, norm

        def plain(arguments: tuple = arguments) -> tuple[Tensor, Tensor]:
            s, y = add_norm_reference(*arguments)
            return s, y.to(dtype)

        ours = lambda arguments=arguments: add_norm(*arguments, dtype)  # noqa: E731
        # both inputs and their gradients; s and y are written; s and two gradients are read
        num_bytes = 2 * (x.nbytes + residual.nbytes) + 3 * x.nbytes + 2 * residual.nbytes
        rows += measured(f"residual sum and {norm} norm", ours, plain, inputs, num_bytes, args)
    rows += measured(
        "layer norm", lambda: add_norm(x, None, weight, bias, config.norm_eps, "layer", dtype)[1],
        lambda: F.layer_norm(x, (C,), weight, bias, config.norm_eps).to(dtype), (x, weight, bias),
        3 * x.nbytes + 2 * residual.nbytes, args,
    )  # fmt: skip
    rows += measured(
        f"{kind} and bias", lambda: activated(up, mlp_bias, kind),
        lambda: activated_reference(up, mlp_bias.to(dtype), kind), (up, mlp_bias), 5 * up.nbytes, args,
    )  # fmt: skip
    rows += measured(
        "silu gate", lambda: gated(gate, up, "silu"), lambda: gated_reference(gate, up, "silu"), (gate, up),
        8 * up.nbytes, args,
    )  # fmt: skip
    if config.rotary_dim:  # the backward pass is the same rotation
        qkv = random(1, N, H + 2 * K, D, dtype=dtype).detach()
        cos, sin = rotary_tables(torch.arange(N, device=device)[None], config.rotary_dim, config.rotary_base)
        num_bytes = 2 * qkv[:, :, : H + K, : config.rotary_dim].numel() * qkv.itemsize + cos.nbytes + sin.nbytes
        rows += measured(
            "rotation", lambda: rotary_triton_(qkv, cos, sin, H, False), lambda: apply_rotary_(qkv, cos, sin, H, False),
            (), num_bytes, args, compiled=lambda: rotated(qkv, cos, sin, H, False),
        )  # fmt: skip
    for row in rows:
        row["size"] = f"N={N} C={C} M={M} {args.dtype}"
    return rows + bench_one_token(args, shape, device)


def bench_one_token(args: Args, shape: Shape, device: torch.device) -> list[dict]:
    """Measure rotation and attention of one new token per row, at the end of a full cache of left-padded queries.

    The rotation stores keys and values in the cache. PyTorch's attention gets a bias and reads padding too; the limit
    is the time to read the real columns.
    """
    config, dtype = shape.config, getattr(torch, args.dtype)
    B, L, D, scale = shape.episodes, shape.query_length + shape.response_length, config.head_width, 0.1
    H, K, rows = config.n_head, config.kv_heads, []
    q = torch.randn(B, H, 1, D, device=device, dtype=dtype)
    k, v = (torch.randn(B, K, L, D, device=device, dtype=dtype) for _ in range(2))
    if config.rotary_dim:
        qkv, at = torch.randn(B, 1, H + 2 * K, D, device=device, dtype=dtype), torch.tensor([L - 1], device=device)
        cos, sin = rotary_tables(at.expand(B, 1), config.rotary_dim, config.rotary_base)

        def stored(rotate: Callable) -> Tensor:
            _, new_k, new_v = split_heads(rotate(qkv, cos, sin, H, False), H)
            v.index_copy_(2, at, new_v)
            return k.index_copy_(2, at, new_k)

        num_bytes = B * (2 * H * config.rotary_dim + 4 * K * D) * dtype.itemsize + cos.nbytes + sin.nbytes
        rows += measured(
            "rotation of one token into the cache", lambda: rotary_store_triton(qkv, cos, sin, H, False, k, v, at),
            lambda: stored(apply_rotary_), (), num_bytes, args, compiled=lambda: stored(rotated),
        )  # fmt: skip
    first = shape.query_length - torch.tensor(shape.query_lengths, device=device)  # (B,)
    columns = Columns(first, torch.full((1,), L - 1, device=device), None)
    padding = torch.arange(L, device=device) < first[:, None]  # (B, L)
    bias = torch.zeros(B, H, 1, L, device=device, dtype=dtype)
    bias.masked_fill_(padding[:, None, None], -torch.inf)
    num_bytes = int((~padding).sum()) * 2 * K * D * dtype.itemsize + 2 * q.nbytes
    rows += measured(
        "attention of one token", lambda: decode_attention(q, k, v, columns, scale),
        lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=True), (), num_bytes,
        args, compiled=lambda: decode_reference(q, k, v, columns, scale),
    )  # fmt: skip
    return [row | {"size": f"{B} x {L} H={H} D={D} {args.dtype}"} for row in rows]


def measured(
    what: str, ours: Callable, plain: Callable, inputs: Sequence[Tensor], num_bytes: int, args: Args,
    compiled: Callable | None = None,
) -> list[dict]:  # fmt: skip
    """Compare a kernel with plain PyTorch and, on a GPU, with `compiled` (default: the same) through the compiler."""
    outputs = plain()
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    device = outputs[0].device
    grads = [torch.randn_like(y) for y in outputs]

    def run(way: Callable) -> Callable[[], object]:
        return (lambda: torch.autograd.grad(way(), inputs, grads)) if inputs else way

    ways = {"ours": run(ours if fuses(outputs[0]) else plain)}
    if device.type == "cuda":
        ways |= {"plain PyTorch": run(plain), "torch.compile": run(torch.compile(compiled or plain))}
    rate = limit.read_rate(device, limit.MOST_READ[device.type])
    rows = table_rows(what + (", forward + backward" if inputs else ""), "", compare(ways, args.rounds, device))
    added = {"limit_seconds": num_bytes / rate, "read_rate": rate}
    return [row | added | {"bytes_per_second": num_bytes / row["seconds"]} for row in rows]
