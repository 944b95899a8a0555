"""Forward and backward of a micro-batch, and profiles of it and of generation."""

from collections.abc import Callable

import torch

from bench import limit
from bench.kernel_times import kernel_times
from bench.settings import MICRO_BATCH_SIZE, Args, Shape, random_queries, random_texts
from bench.stopwatch import before_and_after, compare, table_rows, with_limit
from kernels.linear import kept_casts
from nanorlhf.batch import Batch
from nanorlhf.generate import for_sampling, generate
from nanorlhf.logprobs import response_logprobs
from nanorlhf.model import GPT
from nanorlhf.padding import left_pad
from nanorlhf.ppo import policy_loss
from nanorlhf.training.flops import forward_flops, text, total


def bench_micro_batch(args: Args, shape: Shape, device: torch.device) -> list[dict]:
    """Measure a micro-batch of PPO's policy in random order, without the optimizer; then profile it and generation."""
    T, pad_id = shape.response_length, shape.vocab_size - 1
    num_rows = min(MICRO_BATCH_SIZE[device.type], shape.episodes)
    with device:
        policy = GPT(shape.config)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    query = left_pad(random_queries(shape), pad_id).to(device)  # (B, Q)
    response = torch.tensor(random_texts(shape, [T] * shape.episodes), device=device)  # (B, T)
    zeros = torch.zeros(response.shape, device=device)
    batch = Batch.of([{}] * len(query), query, response, zeros, 0, pad_id, "after_eos")[:num_rows]
    batch.logprobs, batch.advantages = zeros[:num_rows], torch.ones_like(zeros[:num_rows])

    def train() -> None:
        with autocast:
            new_logprobs, _ = response_logprobs(policy, batch.query_response, batch.real, batch.actions, 0.7)
        losses, _ = policy_loss(new_logprobs, batch.logprobs, batch.advantages, batch.actions, 0.2)
        losses.mean().backward()

    def train_compiled() -> None:
        policy.transformer.compile_blocks = True
        train()
        policy.transformer.compile_blocks = False

    def sample() -> None:
        with autocast, torch.no_grad():
            generate(for_sampling(policy, "same"), query, query != pad_id, T, 0.7, eos_id=None, pad_id=pad_id)

    ways: dict[str, Callable[[], object]] = before_and_after(train, device)
    if device.type == "cuda":
        ways["ours, compiled blocks"] = train_compiled
    lengths = shape.query_lengths[:num_rows]
    read, used = (total([text(length + T - 1, last) for length in lengths]) for last in (None, T))
    work = limit.Work(3 * forward_flops(shape.config, read, used, num_rows * T))
    size = f"{num_rows} x ({shape.query_length} + {T}) {args.dtype}, {batch.real.float().mean().item():.0%} real"
    with kept_casts():  # as between two optimizer steps
        rows = table_rows("micro-batch, forward + backward", size, compare(ways, args.rounds, device))
        rows = with_limit(rows, work, device, args)
        rows += profiled("profile of a micro-batch", size, train, device)
    size = f"{shape.episodes} x ({shape.query_length} + {T}) {args.dtype}"
    return rows + profiled("profile of generation", size, sample, device)


def profiled(what: str, size: str, way: Callable[[], object], device: torch.device) -> list[dict]:
    """Return a row per kind of kernel, as shares of their sum."""
    times = kernel_times(way, device)
    return table_rows(what, size, {"ours": (sum(times.values()), 0)} | {kind: (t, 0) for kind, t in times.items()})
