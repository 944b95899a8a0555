"""Run test code in separate processes.

They are forked from a process that has imported everything, because starting Python takes longer than the work.
"""

import copy
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch._dynamo  # an optimizer imports it at its first step; here it is imported once

from kernels.processor import has_int8_matmul
from nanorlhf import distributed, launch
from nanorlhf.batch import Batch
from nanorlhf.checkpoint import load_gpt, save, scalar_from_gpt
from nanorlhf.errors import InputError
from nanorlhf.generate import for_sampling
from nanorlhf.logprobs import response_logprobs
from nanorlhf.model import GPT, Transformer
from nanorlhf.pretrained.family import find_family
from nanorlhf.t5 import T5Config
from nanorlhf.training.optimizer import FiniteSteps
from nanorlhf.training.run import check_weights
from nanorlhf.training.signals import StopSignals
from tests.conftest import TINY

DEVICE = torch.device("cpu")
"""this rank's device"""
WITHIN: int | None = None
"""number of ranks that share a copy of a sharded model; None: all"""


def forkserver() -> multiprocessing.context.ForkServerContext:
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([__name__])
    return forks


def start(log: Path, work: Callable, *arguments: object) -> multiprocessing.context.ForkServerProcess:
    """Call work(*arguments) in a new process, which writes stdout and stderr to the log."""
    process = forkserver().Process(target=call, args=(log, work, *arguments))
    process.start()
    return process


def call(log: Path, work: Callable, *arguments: object) -> None:
    write_to(log)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
    work(*arguments)


def write_to(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(descriptor, sys.__stdout__.fileno())
    os.dup2(descriptor, sys.__stderr__.fileno())


def on_processes(
    work: Callable, argument: object, directory: Path, number: int = 2, device: str = "cpu", per_node: int | None = None
) -> None:
    """Call work(argument) on each rank, as if per_node of them ran on each node.

    Their output goes to log files in the directory, and into the error if one fails.
    """
    # the preloaded modules look for a CUDA device, and then a process can't be forked
    forks = multiprocessing.get_context("spawn") if device == "cuda" else forkserver()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs = [directory / f"log.{rank}" for rank in range(number)]
    ranks = [
        forks.Process(target=be_rank, args=(rank, number, per_node, device, port, log, work, argument))
        for rank, log in enumerate(logs)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(300)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0] * number, "\n".join(log.read_text()[-2000:] for log in logs)


def be_rank(
    rank: int, number: int, per_node: int | None, device: str, port: int, log: Path, work: Callable, argument: object
) -> None:
    global DEVICE, WITHIN
    write_to(log)
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": number,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    environment["LOCAL_WORLD_SIZE"] = per_node or number
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    DEVICE, WITHIN = launch.setup(device), per_node
    if number == 1:  # FSDP2 and NCCL need a group, also of one process
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    work(argument)


def run_all(runs: list[tuple[Callable, object]]) -> None:
    """Call main(args) of each pair, one after the other."""
    for main, args in runs:
        print(f"{main.__module__} to {args.out}", file=sys.stderr, flush=True)
        main(args)
        distributed.barrier()


def run_tests(names: list[str]) -> None:
    """Run tests in this file by name."""
    for name in names:
        globals()[name]()
        distributed.barrier()


def make(shard: bool) -> tuple[GPT, FiniteSteps]:
    torch.manual_seed(0)
    model = GPT(replace(TINY, tied_head=True)).to(DEVICE).forbid(3, 36)
    if shard:
        distributed.shard(model, DEVICE, bfloat16=False, ranks_per_copy=WITHIN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5)
    return model, FiniteSteps(optimizer, Path("run"), "lower --lr")


def step(model: GPT, steps: FiniteSteps, seed: int, poisoned: bool = False) -> bool:
    """Take one step on this rank's half of the batch."""
    ids = torch.randint(4, 36, (4, 9), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    ids = ids[distributed.rank_slice(4)]
    steps.optimizer.zero_grad()
    loss = model.logits(model(ids[:, :-1])).log_softmax(-1).gather(2, ids[:, 1:, None]).sum() / -32
    (loss * float("nan") if poisoned else loss).backward()
    distributed.sum_gradients(model)
    return steps.step(model.parameters(), 1.0, max_norm=0.1)


def weights(model: GPT) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in distributed.unshard(model).parameters()])


def test_a_rank_has_half_of_the_weights_and_plain_returns_all() -> None:
    (one, _), (model, _) = make(False), make(True)
    here = sum(distributed.local_tensor(p).numel() for p in model.parameters())
    assert here <= 0.6 * sum(p.numel() for p in one.parameters())  # one rank may have more, if rows don't divide
    assert torch.equal(weights(one), weights(model)) and distributed.unshard(one) is one
    plain = distributed.unshard(model)
    assert plain.lm_head.weight.data_ptr() == plain.transformer.embedding.weight.data_ptr()
    assert torch.equal(plain.forbidden, one.forbidden)


def test_a_rank_reads_its_own_rows_and_no_others() -> None:
    """For each family, because their files order rows differently, and for a tied head. Only a shard is in memory."""
    directory = Path(tempfile.gettempdir()) / f"stored.{os.environ['MASTER_PORT']}"
    for architecture in ("gpt2", "gpt_neo", "gpt_neox", "codegen"):
        for tied_head in (False, True) if architecture == "gpt2" else (False,):
            fixed = find_family(architecture).fixed
            rotary_dim = 4 if "rotary" in fixed["positions"] else 0
            config = replace(TINY, architecture=architecture, tied_head=tied_head, rotary_dim=rotary_dim, **fixed)
            torch.manual_seed(0)
            one = GPT(config)
            where = directory / f"{architecture}.{tied_head}"
            distributed.from_first(lambda one=one, where=where: save(one, where))
            model = load_gpt(where, "meta").forbid(3, 36)
            reference = copy.deepcopy(model).requires_grad_(False)
            scalar = scalar_from_gpt(model)
            plain, read = model.elsewhere.read, []
            model.elsewhere = replace(
                model.elsewhere, read=lambda *a, plain=plain, read=read: read.append(plain(*a)) or read[-1]
            )
            distributed.shard(model, torch.device("cpu"), bfloat16=False)
            here = sum(distributed.local_tensor(p).numel() for p in model.parameters())
            assert sum(rows.numel() for rows in read) == here <= 0.6 * sum(p.numel() for p in one.parameters())
            distributed.shard(reference, torch.device("cpu"), bfloat16=False, offload=True)
            distributed.shard(scalar, torch.device("cpu"), bfloat16=False)
            assert torch.equal(weights(model), weights(one)) and torch.equal(weights(reference), weights(one))
            assert not any(p.requires_grad for p in reference.parameters())
            gathered = distributed.unshard(model)
            assert (gathered.lm_head.weight is gathered.transformer.embedding.weight) == tied_head
            torch.manual_seed(1)
            again = scalar_from_gpt(load_gpt(where, "meta"))
            torch.manual_seed(1)
            head = scalar_from_gpt(one).score.weight
            assert torch.equal(again.score.weight, head) and not torch.equal(
                distributed.full_tensor(scalar.score.weight), head
            )
            (model(torch.arange(4, 12)[None]).sum()).backward()  # FSDP gathers the shards
            assert all(p.grad is not None for p in model.transformer.parameters())


def check_collectives() -> None:
    """Check sums and gathers with the device's library."""
    number, rank = distributed.world_size(), distributed.rank()
    total = torch.full((3,), rank + 1.0, device=DEVICE)
    torch.distributed.all_reduce(total)
    assert total.tolist() == [number * (number + 1) / 2] * 3
    assert distributed.all_gather_rows(torch.full((2, 1), rank, device=DEVICE)).flatten().tolist() == [
        r for r in range(number) for _ in range(2)
    ]
    assert distributed.from_first(lambda: {"rank": rank}) == {"rank": 0}


def check_that_each_node_has_all_rows() -> None:
    """Check that two ranks share a copy: each has and reads half of it, from a file or from memory."""
    assert distributed.world_size() == 4 and distributed.node_size() == WITHIN == 2
    (one, _), (model, _) = make(False), make(True)
    here, size = (sum(distributed.local_tensor(p).numel() for p in m.parameters()) for m in (model, one))
    assert 0.4 * size <= here <= 0.6 * size and torch.equal(weights(one), weights(model))
    where = Path(tempfile.gettempdir()) / f"stored.{os.environ['MASTER_PORT']}"
    distributed.from_first(lambda: save(one, where))
    read = load_gpt(where, "meta")
    distributed.shard(read, DEVICE, bfloat16=False, ranks_per_copy=WITHIN)
    assert torch.equal(weights(read), weights(one))
    assert sum(distributed.local_tensor(p).numel() for p in read.parameters()) == here


def check_gradients() -> None:
    """Check that gradients are summed over all ranks, whichever share a copy: AdamW would hide a factor."""
    (one, _), (model, _) = make(False), make(True)
    ids = torch.randint(4, 36, (4, 9), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    ids = ids[distributed.rank_slice(4)]
    for m in (one, model):
        m.logits(m(ids[:, :-1])).log_softmax(-1).gather(2, ids[:, 1:, None]).sum().backward()
        distributed.sum_gradients(m)
    for expected, actual in zip(one.parameters(), model.parameters(), strict=True):
        assert expected.grad is not None and actual.grad is not None
        difference = (distributed.full_tensor(actual.grad) - expected.grad).abs().max()
        assert difference <= 1e-5 * max(1, expected.grad.abs().max()), (difference, expected.grad.abs().max())


def test_an_encoder_decoder_is_sharded_as_well() -> None:
    """Each rank reads its own rows of the files; a step equals a single process's, up to rounding."""
    where = Path(tempfile.gettempdir()) / f"t5.{os.environ['MASTER_PORT']}"
    torch.manual_seed(0)
    unsharded = GPT(T5Config(vocab_size=37, d_model=24, n_layer=2, n_decoder_layer=3, n_head=3, d_head=10, d_mlp=40))
    distributed.from_first(lambda: save(unsharded, where))
    model = load_gpt(where, "meta")
    distributed.shard(model, DEVICE, bfloat16=False)
    here = sum(distributed.local_tensor(p).numel() for p in model.parameters())
    assert here <= 0.6 * sum(p.numel() for p in unsharded.parameters()) and torch.equal(
        weights(model), weights(unsharded)
    )
    ids = torch.randint(37, (4, 13), generator=torch.Generator().manual_seed(1))
    for replica, rows in ((unsharded, ids), (model, ids[distributed.rank_slice(4)])):
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
        replica.logits(replica(rows, last=6)[:, :-1]).log_softmax(-1).gather(2, rows[:, -5:, None]).mean().backward()
        if replica is model:  # gradients are summed over the ranks, but each rank took the mean of its half
            for parameter in replica.parameters():
                parameter.grad /= 2
        optimizer.step()
    assert torch.allclose(weights(model), weights(unsharded), atol=1e-6)
    assert not torch.equal(weights(load_gpt(where)), weights(unsharded))


def test_sharded_steps_equal_unsharded_ones() -> None:
    """Up to rounding."""
    (one, steps), (model, sharded_steps) = make(False), make(True)
    for seed in range(5):
        assert step(one, steps, seed) and step(model, sharded_steps, seed)
        assert torch.allclose(weights(one), weights(model), atol=2e-5)


def test_ranks_with_and_without_equal_queries_gather_each_block_equally_often() -> None:
    """GRPO's minibatches are shuffled: here the first rank has one query four times, the second has four queries."""
    (one, _), (model, _) = make(False), make(True)
    ids = torch.randint(4, 36, (8, 9), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    ids[:4, :5] = ids[0, :5]
    batch = Batch.of([{}] * 8, ids[:, :5], ids[:, 5:], torch.zeros(8, 4), eos_id=1, pad_id=36, score_at="last_token")
    batch.shares_queries = True
    for replica, mb in ((one, batch), (model, batch.shard())):
        with mock.patch.object(Transformer, "run", autospec=True, side_effect=Transformer.run) as run:
            logprobs, _ = response_logprobs(replica, mb.query_response, mb.real, mb.actions, 1.0, mb.groups)
        logprobs.sum().backward()
    assert [(run.call_count, len(mb.groups.first))] == [(2 * TINY.n_layer, (1, 4)[distributed.rank()])]
    for expected, actual in zip(one.parameters(), model.parameters(), strict=True):
        assert torch.allclose(distributed.full_tensor(actual.grad), expected.grad, atol=1e-4)


def test_sharded_blocks_run_the_kernels_between_matmuls() -> None:
    """FSDP frees a block's weights after the forward pass and gathers them for recomputation and the backward pass."""
    pytest.importorskip("triton", reason="triton is not installed")
    gradients = []
    for on in (False, True):
        torch.manual_seed(0)
        model = GPT(replace(TINY, parallel_residual=False))
        model.transformer.checkpoint_activations = True
        distributed.shard(model, DEVICE, bfloat16=False)
        ids = torch.randint(37, (2, 7), generator=torch.Generator().manual_seed(distributed.rank()))
        with ExitStack() as patches:
            for module in ("nanorlhf.layers", "kernels.attention"):
                patches.enter_context(mock.patch(f"{module}.fuses", lambda x, on=on: on))
            model(ids).square().mean().backward()
        shards = [distributed.local_tensor(p.grad) for p in model.parameters() if p.grad is not None]
        gradients.append(torch.cat([shard.flatten() for shard in shards]))
    assert not torch.equal(*gradients) and torch.allclose(*gradients, atol=1e-5)


def test_a_state_resumes_bit_for_bit_if_it_stays_sharded() -> None:
    """On one process, up to rounding."""
    model, steps = make(True)
    for seed in range(3):
        step(model, steps, seed)
    state = distributed.gather_on_first((model.state_dict(), steps.state_dict()))
    kept = distributed.from_first(lambda: state)
    again, again_steps = make(True)
    one, one_steps = make(False)
    for other, other_steps in ((again, again_steps), (one, one_steps)):
        distributed.load_model(other, kept[0])
        other_steps.load_state_dict(copy.deepcopy(kept[1]))
        assert torch.equal(weights(other), weights(model))
    for m, s in ((model, steps), (again, again_steps), (one, one_steps)):
        step(m, s, 3)
    assert torch.equal(weights(again), weights(model)) and torch.allclose(weights(one), weights(model), atol=2e-5)


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all() -> None:
    for shard in (False, True):
        model, steps = make(shard)
        step(model, steps, 0)
        before = weights(model)
        assert not step(model, steps, 1, poisoned=distributed.rank() == 1)
        assert torch.equal(weights(model), before) and steps.skipped == 1
        assert step(model, steps, 2) and not torch.equal(weights(model), before)


def test_weights_that_are_nan_on_one_rank_stop_all() -> None:
    model, _ = make(True)
    check_weights(1, model)
    if distributed.rank() == 1:
        distributed.local_tensor(next(model.parameters()).detach())[0] = float("nan")
    with pytest.raises(InputError, match="embedding.weight are not finite"):
        check_weights(1, model)


def test_a_weight_that_is_nan_in_the_rows_of_one_rank_is_named_by_all() -> None:
    model = GPT(TINY)
    with torch.no_grad():
        model.lm_head.weight[-1, 3] = float("nan")
    with tempfile.TemporaryDirectory() as directory:
        save(model, directory)
        mapped = load_gpt(directory, "meta")
        with pytest.raises(InputError, match=r"model.safetensors: embed_out.weight has a value of nan"):
            distributed.shard(mapped, DEVICE, False)


def test_a_sharded_model_whose_output_is_nan_is_refused_by_all() -> None:
    model = GPT(replace(TINY, norm_eps=0.0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with tempfile.TemporaryDirectory() as directory:
        save(model, directory)
        mapped = load_gpt(directory, "meta").forbid(3, 36)
        with pytest.raises(InputError, match="the model's output for 8 tokens is not finite"):
            distributed.shard(mapped, DEVICE, False)


def test_a_signal_to_one_rank_is_a_signal_to_all() -> None:
    signals = StopSignals()
    assert not signals.received()
    if distributed.rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    assert signals.received() and signals.agreed == signal.SIGTERM
    with pytest.raises(Exception, match="stopped by SIGTERM after 3 steps" if distributed.rank() == 0 else "^$"):
        signals.stop(Path("run"), 3)


def test_a_sharded_policy_is_rounded_for_sampling_as_a_whole_one_is() -> None:
    (one, _), (model, _) = make(False), make(True)
    ids = torch.arange(4, 24)[None]
    for dtype in ("bfloat16", "int8") if has_int8_matmul() else ("bfloat16",):
        samplers = [for_sampling(distributed.unshard(policy), dtype) for policy in (one, model)]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            logits = [sampler.logits(sampler(ids)) for sampler in samplers]
        assert torch.equal(*logits)
