"""Log-probabilities and GAE on their own, compared with simple implementations."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import limit
from bench.settings import Args, Shape
from bench.stopwatch import compare, table_rows, with_limit
from kernels import gae, linear_logprobs
from kernels.gae import gae_loop


def bench_logprobs(args: Args, shape: Shape, device: torch.device) -> list[dict]:
    """Measure LM head, log-softmax and gather, forward and backward, for the response tokens of one minibatch."""
    # as many rows as a large minibatch: shows the memory saved and keeps a GPU busy
    N, V, C = 8192 if device.type == "cuda" else 1024, shape.vocab_size, shape.d_model
    dtype = getattr(torch, args.dtype)
    hidden = torch.randn(N, C, device=device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(V, C, device=device) * 0.02).to(dtype).requires_grad_()
    labels = torch.randint(V, (N,), device=device)

    def run(way: Callable) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: torch.autograd.grad(way().sum(), (hidden, weight))

    def plain() -> Tensor:
        return F.linear(hidden, weight).float().log_softmax(-1).gather(1, labels[:, None])

    def plain_with_entropy() -> Tensor:  # which ours also computes and PPO logs
        log_p = F.linear(hidden, weight).float().log_softmax(-1)
        with torch.no_grad():
            (log_p.exp() * log_p).sum(-1)
        return log_p.gather(1, labels[:, None])

    def chunks_of_128() -> Tensor:
        def chunk(h: Tensor, y: Tensor) -> Tensor:
            return F.linear(h, weight).float().log_softmax(-1).gather(1, y[:, None])

        pieces = zip(hidden.split(128), labels.split(128), strict=True)
        return torch.cat([torch.utils.checkpoint.checkpoint(chunk, h, y, use_reentrant=False) for h, y in pieces])

    ways = {
        "ours": run(lambda: linear_logprobs(hidden, weight, labels)[0]),
        "log_softmax on stored logits": run(plain),
        "the same, and the entropy": run(plain_with_entropy),
        "checkpointed chunks of 128": run(chunks_of_128),
    }
    if device.type == "cuda":
        ways["torch.compile of log_softmax"] = run(torch.compile(plain))
    size = f"N={N} V={V} C={C} {args.dtype}"
    rows = table_rows("linear_logprobs, forward + backward", size, compare(ways, args.rounds, device))
    for row in rows:  # memory beyond the two gradients
        row["peak_bytes"] -= (hidden.numel() + weight.numel()) * weight.element_size()
    # logits and the gradients of both inputs; ours computes the logits twice instead of storing them
    return with_limit(rows, limit.Work(3 * 2 * N * V * C), device, args)


def bench_gae(args: Args, shape: Shape, device: torch.device) -> list[dict]:
    """Measure advantages for a rollout's shape and for (512, 1024), with a scan and with a Python loop over T."""
    rows = []
    for B, T in ((shape.episodes, shape.response_length), (512, 1024)):
        rewards, values = torch.randn(B, T, device=device), torch.randn(B, T, device=device)
        mask = torch.zeros(B, T, dtype=torch.bool, device=device)
        ways = {
            "ours": lambda r=rewards, v=values, m=mask: gae(r, v, 1.0, 0.95, m),
            "loop over T": lambda r=rewards, v=values: gae_loop(r, v, 1.0, 0.95),
        }
        rows += table_rows("gae", f"B={B} T={T}", compare(ways, args.rounds, device))
    return rows
