"""Speed and memory of generation, log-probabilities, GAE, training steps and static checks, beside alternatives.

    python bench.py                                   # all parts on shape tiny, beside plain PyTorch
    python bench.py --shape small --parts ppo --peers # also transformers' generate and TRL's PPO trainer
    python bench.py --shape 124m --json speed.json
    python bench.py --parts compile                   # needs a JDK
    python bench.py --quick                           # tiny, and 16 tokens of small, once: two minutes

Each part alternates between the implementations round by round and reports medians; a ratio is an alternative's time
divided by ours, and "of the limit" the least time that the arithmetic takes here (tools/limit.py) divided by what a way
took. Weights are random. Peak memory is that of the allocator beyond what was held before (linear_logprobs:
also beyond the two gradients; PPO on a CPU and compilers: the peak resident size of the process).

`--peers` needs `pip install -e .[bench]`: TRL 1.12.0, the last release with a PPO trainer.
"""

import copy
import gc
import importlib.util
import json
import multiprocessing
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.profiler import ProfilerActivity, profile

import train_dpo
import train_ppo
import train_rm
import train_sft
from kernels import gae, linear_logprobs
from kernels.gae import gae_loop
from kernels.processor import has_int8_products
from nanorlhf import distributed, launch
from nanorlhf.checkpoint import load_gpt, load_scalar, save, scalar_from_gpt
from nanorlhf.cli import run_module
from nanorlhf.dataset import load_comparisons, load_demonstrations, write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.files import to_json
from nanorlhf.generate import for_sampling, generate
from nanorlhf.launch import die_with_parent
from nanorlhf.model import GPT, GPTConfig, KVCache, ScalarModel
from nanorlhf.padding import left_pad, right_pad
from nanorlhf.ppo import eos_masks, policy_loss, value_loss, whiten
from nanorlhf.progress import Progress
from nanorlhf.rlcf.compilers import JAVAC, JavaCompiler, PythonCompiler
from nanorlhf.tokenizer import load_tokenizer
from nanorlhf.training.run import Run
from nanorlhf.training.settings import SamplerSettings
from tools import limit


@dataclass(frozen=True, kw_only=True)
class Args:
    shape: Literal["tiny", "small", "124m", "1b", "6.9b"] = "tiny"
    """model and episode sizes, see SHAPES"""
    parts: tuple[Literal["generate", "logprobs", "gae", "supervised", "ppo", "compile"], ...] = (
        "generate", "logprobs", "gae", "supervised", "ppo", "compile",
    )  # fmt: skip
    """what to measure; without a JDK, compile is skipped unless named"""
    rounds: int = 5
    """number of timed rounds; the median is reported"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of ours (bfloat16: autocast); on a CPU the peers stay in float32"""
    peers: bool = False
    """also measure transformers' generate and TRL's PPO trainer"""
    quick: bool = False
    """two minutes: shape tiny, and generation of 16 tokens on small, one round each"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """device to measure on; auto: CUDA if available"""
    json: Path | None = None
    """also write the rows to this file"""


@dataclass(frozen=True)
class Shape:
    n_layer: int
    d_model: int
    n_head: int
    vocab_size: int
    query_length: int
    response_length: int
    episodes: int
    gpt2: bool = False
    """GPT-2 (learned positions, tied head) instead of an untied GPT-NeoX"""

    @property
    def query_lengths(self) -> list[int]:
        """Uniform between half the maximum and the maximum."""
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(self.query_length // 2, self.query_length + 1, (self.episodes,), generator=generator)
        return [self.query_length, *lengths[1:].tolist()]

    @property
    def config(self) -> GPTConfig:
        family = (
            dict(
                architecture="gpt2", positions="learned", parallel_residual=False, activation="gelu_new", tied_head=True
            )
            if self.gpt2
            else dict(rotary_dim=self.d_model // self.n_head // 4 // 2 * 2)
        )
        return GPTConfig(
            vocab_size=self.vocab_size, n_ctx=max(512, self.query_length + self.response_length), d_model=self.d_model,
            n_layer=self.n_layer, n_head=self.n_head, d_mlp=4 * self.d_model, **family,
        )  # fmt: skip


SHAPES = {
    "tiny": Shape(4, 128, 4, 1024, 64, 53, 64),
    "small": Shape(12, 768, 12, 50304, 128, 53, 8),
    "124m": Shape(12, 768, 12, 50257, 512, 53, 8, gpt2=True),
    "1b": Shape(16, 2048, 8, 50304, 512, 53, 64),
    "6.9b": Shape(32, 4096, 32, 50432, 512, 53, 64),
}


NUM_EPOCHS = 4  # of a PPO iteration, over one minibatch
MICRO_BATCH_SIZE = {"cpu": 32, "cuda": 16}  # on CUDA also of plain PyTorch and TRL: 1b would not fit otherwise
NUM_PROGRAMS = 300  # per round of a persistent compiler
NUM_PROCESSES = 8  # per round of single processes, half a second each


# -------------------------------------------------------------------------------------------------------- the stopwatch
def compare(ways: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, tuple[float, int]]:
    """Alternate between the ways for `rounds` rounds, after a warm-up -> (median seconds, peak bytes) of each."""
    peaks = {name: peak_bytes(way, device) for name, way in ways.items()}  # also the warm-up
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            synchronise(device)
            start = time.perf_counter()
            way()
            synchronise(device)
            times[name].append(time.perf_counter() - start)
    return {name: (statistics.median(times[name]), peaks[name]) for name in ways}


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak_bytes(way: Callable[[], object], device: torch.device) -> int:
    """Peak bytes of torch's allocator during the call, beyond those held before.

    On a CPU from the profiler's record of each allocation, which does not include oneDNN's own.
    """
    gc.collect()
    if device.type == "cuda":
        way()  # compiles and autotunes
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        way()
        return torch.cuda.max_memory_allocated() - before
    way()  # allocates what it keeps, such as gradients
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        way()
    events = record.profiler.kineto_results.events()
    held = peak = 0
    for _, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        held += size
        peak = max(peak, held)
    return peak


# -------------------------------------------------------------------------------------------------- 1. what is measured
def bench_logprobs(args: Args, shape: Shape, device: torch.device) -> list[dict]:
    """LM head, log-softmax and gather, forward and backward, for the response tokens of one minibatch."""
    # the rows of a large minibatch: shows the memory saved, and keeps a GPU busy
    N, V, C = 8192 if device.type == "cuda" else 1024, shape.vocab_size, shape.d_model
    dtype = getattr(torch, args.dtype)
    hidden = torch.randn(N, C, device=device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(V, C, device=device) * 0.02).to(dtype).requires_grad_()
    labels = torch.randint(V, (N,), device=device)

    def run(way: Callable) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: torch.autograd.grad(way().sum(), (hidden, weight))

    def plain() -> Tensor:
        return F.linear(hidden, weight).float().log_softmax(-1).gather(1, labels[:, None])

    def plain_with_entropy() -> Tensor:  # which ours computes too, and PPO logs
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
    # logits, and the gradients of both factors; ours makes the logits twice instead of storing them
    return with_limit(rows, limit.Work(3 * 2 * N * V * C), device, args)


def bench_gae(args: Args, shape: Shape, device: torch.device) -> list[dict]:
    """Advantages of a rollout, and of (512, 1024), as a scan and as a Python loop over T."""
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


def bench_generate(args: Args, shape: Shape, device: torch.device) -> list[dict]:
    """Tokens per second: `response_length` tokens per query, no EOS, temperature 0.7."""
    T = shape.response_length
    with device:  # a CPU would take minutes to draw billions of weights
        model = GPT(shape.config)
    query, pad_id = left_pad(random_queries(shape), shape.vocab_size - 1).to(device), shape.vocab_size - 1  # (B, Q)
    query_mask = query != pad_id
    dtype = getattr(torch, args.dtype)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")

    def ours(rollout_dtype: str) -> Callable[[], None]:
        """With the weights prepared as at the beginning of a rollout, which counts."""
        name = args.dtype if rollout_dtype == "same" else rollout_dtype
        on = torch.autocast(device.type, torch.bfloat16, enabled=name == "bfloat16")

        def way() -> None:
            with on, torch.no_grad():
                generate(for_sampling(model, rollout_dtype), query, query_mask, T, 0.7, eos_id=None, pad_id=pad_id)

        return way

    @torch.no_grad()
    def plain() -> None:
        """A cache that grows by concatenation, F.softmax and torch.multinomial."""
        with plain_products(), autocast:
            cache = GrowingCache(shape.config, query_mask, T, dtype)
            hidden = model(query, query_mask, cache=cache)[:, -1]
            for t in range(T):
                probabilities = (model.logits(hidden).float() / 0.7).softmax(-1)
                token = torch.multinomial(probabilities, 1)  # (B, 1)
                if t + 1 < T:
                    hidden = model(token, cache=cache)[:, -1]

    ways = {"ours": ours("same"), **{f"ours, rollouts in {name}": ours(name) for name in rollout_dtypes(args, device)}}
    ways["plain PyTorch"] = plain
    with tempfile.TemporaryDirectory() as directory:
        if args.peers:
            save(model, directory, tokenizer_of(shape, Path(directory)))
            from transformers import AutoModelForCausalLM, GenerationConfig

            peer_dtype = dtype if device.type == "cuda" else torch.float32
            peer = AutoModelForCausalLM.from_pretrained(directory, dtype=peer_dtype).to(device).eval()
            settings = GenerationConfig(
                max_new_tokens=T, min_new_tokens=T, do_sample=True, temperature=0.7, top_k=0, top_p=1.0,
                pad_token_id=0, eos_token_id=None,
            )  # fmt: skip
            ids = query.masked_fill(~query_mask, 0)

            @torch.no_grad()
            def generate_of_transformers() -> None:
                out = peer.generate(input_ids=ids, attention_mask=query_mask.long(), generation_config=settings)
                assert out.shape == (len(ids), ids.size(1) + T)

            ways["transformers generate"] = generate_of_transformers
        rows = table_rows(
            "generate", f"{shape.episodes} x ({shape.query_length} + {T}) {args.dtype}",
            compare(ways, args.rounds, device),
        )  # fmt: skip
    for row in rows:
        row["tokens_per_second"] = shape.episodes * T / row["seconds"]
        for name in rollout_dtypes(args, device):
            if row["way"].endswith(f"rollouts in {name}"):
                packed = compare({"packing": partial(for_sampling, model, name)}, args.rounds, device)
                row["packing_seconds"] = packed["packing"][0]
    work = limit.generation(shape.config, shape.query_lengths, T, dtype.itemsize)
    return with_limit(rows, work, device, args)


def rollout_dtypes(args: Args, device: torch.device) -> list[str]:
    """Those of `--sampler.dtype` that run here and are not the dtype of ours."""
    found = ["bfloat16"] if args.dtype != "bfloat16" else []
    return found + ["int8"] * (device.type == "cpu" and has_int8_products())


class GrowingCache(KVCache):
    """A cache that grows by concatenation, one tensor per layer."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.fixed_shape = False  # on a GPU as well: there is nothing to attend to but the part written so far
        self.keys, self.values = [None] * self.config.n_layer, [None] * self.config.n_layer

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys[layer] is not None:
            key, value = torch.cat((self.keys[layer], key), dim=2), torch.cat((self.values[layer], value), dim=2)
        self.keys[layer], self.values[layer] = key, value
        return key, value


def bench_ppo(args: Args, shape: Shape, device: torch.device) -> list[dict]:
    """One update of train_ppo.py itself, and of TRL's trainer on the same queries and weights: 4 epochs, 1 minibatch.

    Each way runs in a process of its own, whose peak resident size is the memory; on a CPU also in two, of one thread
    each. Of two updates the second is timed: the first also allocates the optimizer's state.
    """
    ways = {"ours": ppo_of_ours}
    for name in rollout_dtypes(args, device):
        ways[f"ours, rollouts in {name}"] = partial(ppo_of_ours, rollout_dtype=name)
    if args.peers:
        ways["TRL 1.12.0"] = ppo_of_trl
    if device.type == "cpu" and sys.platform == "linux":
        ways |= {f"{name}, 2 processes": partial(way, processes=2) for name, way in ways.items()}
    ways["plain PyTorch"] = ppo_of_plain_pytorch
    with tempfile.TemporaryDirectory() as directory:
        make_run(shape, Path(directory), device)
        result = in_processes(ways, args, Path(directory), "ppo")
    size = f"{shape.episodes} x ({shape.query_length} + {shape.response_length}) {args.dtype}"
    itemsize = getattr(torch, args.dtype).itemsize
    work = limit.ppo_iteration(shape.config, shape.query_lengths, shape.response_length, NUM_EPOCHS, itemsize)
    return with_limit(table_rows("PPO iteration", size, result), work, device, args)


def in_processes(
    ways: dict[str, Callable[[Args, Path], tuple[float, int]]], args: Args, directory: Path, what: str
) -> dict[str, tuple[float, int]]:
    """Alternate between the ways, each call in a process of its own -> (median seconds, peak bytes) of each."""
    times, peaks = {name: [] for name in ways}, {}
    for _ in Progress(range(args.rounds), desc=what):
        for name, way in ways.items():
            spawn = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=spawn, initializer=die_with_parent) as worker:
                seconds, peaks[name] = worker.submit(way, args, directory).result()
            times[name].append(seconds)
    return {name: (statistics.median(times[name]), peaks[name]) for name in ways}


def bench_supervised(args: Args, shape: Shape, device: torch.device) -> list[dict]:
    """One optimizer step of train_sft.py, train_rm.py and train_dpo.py themselves, `episodes` rows each."""
    rows = []
    lengths = [(length, shape.response_length) for length in shape.query_lengths]
    with tempfile.TemporaryDirectory() as directory:
        make_run(shape, Path(directory), device)
        for stage, work in (("sft", limit.sft_step), ("rm", limit.rm_step), ("dpo", limit.dpo_step)):
            ways = {
                "ours": partial(stage_of_ours, stage=stage),
                "plain PyTorch": partial(stage_of_plain_pytorch, stage=stage),
            }
            result = in_processes(ways, args, Path(directory), stage)
            size = f"{shape.episodes} x ({shape.query_length} + {shape.response_length}) {args.dtype}"
            table = table_rows(f"{stage.upper()} step", size, result)
            rows += with_limit(table, work(shape.config, lengths), device, args)
    return rows


def bench_compile(args: Args, shape: Shape, device: torch.device) -> list[dict]:
    """Programs per second: a persistent compiler beside one process per program.

    Milliseconds are per program. The processes run one after the other, each on as many cores as it uses. Ours also
    finds unused variables, which javac doesn't. The start of the persistent compiler is printed, not counted.
    """
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        javac = ["javac", "-d", directory, *JAVAC]
        for what, compiler, way, command, ending, program in (
            ("compile Java", JavaCompiler(), "javac, one process per program", javac, "java", java_program),
            ("compile Python", PythonCompiler(), "pyflakes, one process per program",
             [sys.executable, "-m", "pyflakes"], "py", python_program),
        ):  # fmt: skip
            programs = [program(number) for number in range(NUM_PROGRAMS)]
            files = [Path(directory) / f"Example{number}.{ending}" for number in range(NUM_PROCESSES)]
            for file, text in zip(files, programs, strict=False):
                file.write_text(text)
            times, peaks = {"ours": [], way: []}, {}
            with compiler:
                start = time.perf_counter()
                compiler.check(programs[:1])
                start_seconds = time.perf_counter() - start
                assert not any(compiler.check(programs))  # also the warm-up
                peaks[way] = peak_of_command([*command, files[0]])
                for _ in Progress(range(args.rounds), desc=what):
                    start = time.perf_counter()
                    compiler.check(programs)
                    times["ours"].append((time.perf_counter() - start) / len(programs))
                    start = time.perf_counter()
                    for file in files:
                        subprocess.run([*command, file], check=True)
                    times[way].append((time.perf_counter() - start) / len(files))
                peaks["ours"] = peak_of(compiler.server.process)
            size = f"{NUM_PROGRAMS} programs, start of {start_seconds:.1f} s not counted"
            rows += table_rows(what, size, {name: (statistics.median(times[name]), peaks[name]) for name in times})
    for row in rows:
        row["programs_per_second"] = 1 / row["seconds"]
    return rows


def peak_of(process: subprocess.Popen) -> int:
    """Peak resident size so far in bytes; wait4 would report the parent's if that is larger."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    return 1024 * int(peak[1]) if peak else 0  # it has ended


def peak_of_command(command: list) -> int:
    process, peak = subprocess.Popen(command), 0
    while process.poll() is None:
        peak = peak_of(process) or peak
        time.sleep(0.002)
    return peak


def java_program(number: int) -> str:
    """A small class that takes javac as long as a typical solution of MBJP."""
    return f"""import java.util.*;

class Example{number} {{
    public static List<Integer> largest(List<Integer> values, int limit) {{
        int[] counts = new int[{number + 2}];
        for (int value : values) {{
            counts[value % counts.length]++;
        }}
        List<Integer> found = new ArrayList<>();
        for (int i = 0; i < counts.length && found.size() < limit; i++) {{
            if (counts[i] * {number} > limit || i == counts.length - 1) {{
                found.add(i);
            }}
        }}
        return found.size() > {number} ? found : values;
    }}
}}
"""


def python_program(number: int) -> str:
    return f"""def largest(values, limit):
    counts = [0] * {number + 2}
    for value in values:
        counts[value % len(counts)] += 1
    found = []
    for i, count in enumerate(counts):
        if len(found) < limit and (count * {number} > limit or i == len(counts) - 1):
            found.append(i)
    return found if len(found) > {number} else values
"""


# ------------------------------------------------------------------------------------------------- 2. one PPO iteration
def random_texts(shape: Shape, lengths: list[int]) -> list[list[int]]:
    """Words, without EOS and [PAD]."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, shape.vocab_size - 1, (length,), generator=generator).tolist() for length in lengths]


def random_queries(shape: Shape) -> list[list[int]]:
    return random_texts(shape, shape.query_lengths)


def tokenizer_of(shape: Shape, directory: Path):
    """A vocabulary of words `w1 w2 ...`, with EOS first and [PAD] last: a query of n words is n ids."""
    import tokenizers

    words = {"<|endoftext|>": 0, **{f"w{i}": i for i in range(1, shape.vocab_size - 1)}, "[PAD]": shape.vocab_size - 1}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    file = directory / "words.json"
    backend.save(str(file))
    return load_tokenizer(file)


def make_run(shape: Shape, directory: Path, device: torch.device) -> None:
    """Write queries, responses of the full length, and a policy and a reward model with random weights."""
    torch.manual_seed(0)
    tokenizer = tokenizer_of(shape, directory)
    queries, (chosen, rejected) = random_queries(shape), random_texts(shape, [shape.response_length - 1] * 2)

    def words(ids: list[int]) -> str:
        return " ".join(f"w{i}" for i in ids)

    pair = {"chosen": f" {words(chosen)}", "rejected": f" {words(rejected)}", "meta": {}}
    comparisons = [{"query": words(ids)} | pair for ids in queries]
    rows = [{"query": words(ids), "response": pair["chosen"], "meta": {}} for ids in queries]
    for name, written in (("sft", rows), ("comparisons", comparisons)):
        write_jsonl(directory / f"{name}.train.jsonl", written)
        write_jsonl(directory / f"{name}.validation.jsonl", written[:1])
    with device:
        policy = GPT(shape.config)
    save(policy, directory / "sft", tokenizer)
    save(scalar_from_gpt(policy), directory / "rm", tokenizer)
    del policy
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the ways run in processes of their own


def ppo_of_ours(args: Args, directory: Path, rollout_dtype: str = "same", processes: int = 1) -> tuple[float, int]:
    """The script itself, with TL;DR's settings -> seconds per update, peak bytes."""
    shape = SHAPES[args.shape]
    settings = replace(
        train_ppo.RECIPES["tldr"][1], data=directory, out=directory / "ppo", sft=str(directory / "sft"),
        num_ppo_epochs=NUM_EPOCHS, reward_model=str(directory / "rm"), device=args.device, dtype=args.dtype,
        batch_size=shape.episodes, micro_batch_size=min(MICRO_BATCH_SIZE[args.device], shape.episodes),
        total_episodes=2 * shape.episodes, max_query_length=shape.query_length, response_length=shape.response_length,
        sampler=SamplerSettings(dtype=rollout_dtype), processes=processes, overwrite=True,
    )  # fmt: skip
    with mock.patch.object(Run, "save"):  # writing 1b's state takes longer than the two updates
        launch.run(partial(train_ppo.main, settings), args.device, processes)
    last = json.loads((directory / "ppo" / "metrics.jsonl").read_text().splitlines()[-1])
    return shape.episodes / last["episodes_per_second"], peak_of_process(args.device)


def stage_of_ours(args: Args, directory: Path, stage: str) -> tuple[float, int]:
    """The script itself, three steps on the same rows -> seconds of the second, peak bytes."""
    shape, times, log = SHAPES[args.shape], [], Run.log

    def timed(run: Run, *arguments, **shown) -> None:
        times.append(time.perf_counter())
        log(run, *arguments, **shown)

    settings: dict[str, Any] = dict(
        data=directory, out=directory / f"{stage}_out", device=args.device, dtype=args.dtype, batch_size=shape.episodes,
        micro_batch_size=min(MICRO_BATCH_SIZE[args.device], shape.episodes), num_epochs=3, overwrite=True,
        max_query_length=shape.query_length, max_response_length=shape.response_length,
    )  # fmt: skip
    with mock.patch.object(Run, "log", timed):
        if stage == "sft":
            train_sft.main(train_sft.Args(model=str(directory / "sft"), **settings))
        else:
            script = {"rm": train_rm, "dpo": train_dpo}[stage]
            script.main(script.Args(sft=str(directory / "sft"), **settings))
    return times[1] - times[0], peak_of_process(args.device)  # the third step ends with a validation


def stage_of_plain_pytorch(args: Args, directory: Path, stage: str) -> tuple[float, int]:
    """A straightforward implementation: all logits stored, padding computed, a comparison as two rows."""
    shape, device = SHAPES[args.shape], torch.device(args.device)
    tokenizer = load_tokenizer(directory / "sft")
    limits = tokenizer, shape.query_length, shape.response_length
    if stage == "sft":
        texts = [(row.query, row.response) for row in load_demonstrations(directory / "sft.train.jsonl", *limits)]
    else:
        pairs = list(load_comparisons(directory / "comparisons.train.jsonl", *limits))
        texts = [(row.query, row.chosen) for row in pairs] + [(row.query, row.rejected) for row in pairs]
    ids = right_pad([query + response for query, response in texts], tokenizer.pad_id).to(device)  # (B, L)
    real = ids != tokenizer.pad_id
    ends = real.sum(1, keepdim=True) - 1
    first = torch.tensor([[len(query)] for query, _ in texts], device=device)
    in_response = (real & (torch.arange(ids.size(1), device=device) >= first))[:, 1:]  # of the labels
    trained = load_scalar(directory / "rm", device) if stage == "rm" else load_gpt(directory / "sft", device)
    reference = load_gpt(directory / "sft", device) if stage == "dpo" else None
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-6, eps=1e-5)

    def logprobs(model: GPT) -> Tensor:  # (B, L - 1)
        log_p = model.logits(model(ids, real)).float()[:, :-1].log_softmax(-1)
        return log_p.gather(-1, ids[:, 1:, None]).squeeze(-1)

    def loss() -> Tensor:
        if isinstance(trained, ScalarModel):
            chosen, rejected = trained(ids, real).gather(1, ends).squeeze(1).chunk(2)
            return -F.logsigmoid(chosen - rejected).mean()
        new_logprobs = logprobs(trained)
        if reference is None:
            return -new_logprobs[real[:, 1:]].mean()
        with torch.no_grad():
            ref_logprobs = logprobs(reference)
        chosen, rejected = ((new_logprobs - ref_logprobs) * in_response).sum(1).chunk(2)
        return -F.logsigmoid(0.05 * (chosen - rejected)).mean()

    with plain_products():
        for _ in range(2):
            start = time.perf_counter()
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
                value = loss()
            value.backward()
            optimizer.step()
            synchronise(device)
            seconds = time.perf_counter() - start
    return seconds, peak_of_process(args.device)


def ppo_of_trl(args: Args, directory: Path, processes: int = 1) -> tuple[float, int]:
    times: list[float] = []
    launch.run(partial(trl_updates, args, directory, times, processes), args.device, processes)
    return times[-1] - times[-2], peak_of_process(args.device)


def trl_updates(args: Args, directory: Path, times: list[float], processes: int) -> None:
    """Two updates of TRL's trainer; appends when each ended."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoXForSequenceClassification, TrainerCallback
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    shape = SHAPES[args.shape]
    if processes > 1:  # as accelerate expects them
        number = str(distributed.rank())
        os.environ |= {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"LOCAL_WORLD_SIZE": str(processes), "MASTER_PORT": "0"}  # the group exists already
    tokenizer = AutoTokenizer.from_pretrained(directory / "sft", padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(directory / "sft", dtype=torch.float32)
    policy.config.num_labels = 1
    with torch.device(args.device):
        value, reward = (GPTNeoXForSequenceClassification(policy.config) for _ in range(2))
    rows = shape.episodes // processes  # of this process
    at_a_time = rows if args.device == "cpu" else min(MICRO_BATCH_SIZE["cuda"], rows)
    in_bfloat16 = args.device == "cuda" and args.dtype == "bfloat16"
    # TRL's accelerator reads the precision here; before version 5, transformers wrote that of PPOConfig into it
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if in_bfloat16 else "no"

    class Clock(TrainerCallback):
        def on_step_end(self, *arguments, **keywords) -> None:
            times.append(time.perf_counter())

    settings = PPOConfig(
        output_dir=str(directory / "trl"), per_device_train_batch_size=at_a_time, num_mini_batches=1,
        gradient_accumulation_steps=rows // at_a_time, num_ppo_epochs=NUM_EPOCHS, total_episodes=2 * shape.episodes,
        response_length=shape.response_length, local_rollout_forward_batch_size=64, stop_token="eos", temperature=0.7,
        bf16=in_bfloat16, use_cpu=args.device == "cpu", report_to="none",
        gradient_checkpointing=False, save_strategy="no", num_sample_generations=0, disable_tqdm=True,
        learning_rate=3e-6,
    )  # fmt: skip
    trainer = PPOTrainer(
        settings, tokenizer, policy, copy.deepcopy(policy), reward,
        Dataset.from_dict({"input_ids": random_queries(shape)}), value, callbacks=[Clock()],
        eval_dataset=Dataset.from_dict({"input_ids": random_queries(shape)}),
    )  # fmt: skip
    assert (trainer.accelerator.mixed_precision == "bf16") == in_bfloat16
    trainer.train()


def ppo_of_plain_pytorch(args: Args, directory: Path) -> tuple[float, int]:
    """A straightforward implementation: all logits stored, padding computed, a loop over T, default AdamW."""
    shape, device = SHAPES[args.shape], torch.device(args.device)
    T, Q = shape.response_length, shape.query_length
    at_a_time = shape.episodes if args.device == "cpu" else MICRO_BATCH_SIZE["cuda"]
    tokenizer = load_tokenizer(directory / "sft")
    policy, reference = load_gpt(directory / "sft", device), load_gpt(directory / "sft", device)
    value, reward = load_scalar(directory / "rm", device), load_scalar(directory / "rm", device)
    optimizer = torch.optim.AdamW([*policy.parameters(), *value.parameters()], lr=3e-6, eps=1e-5)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    query = left_pad(random_queries(shape), tokenizer.pad_id).to(device)

    def forward(model: GPT, ids: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies (B, T), from all logits (B, Q + T, V)."""
        with autocast:
            log_p = (model.logits(model(ids, real)).float() / 0.7)[:, Q - 1 : -1].log_softmax(-1)
        return log_p.gather(-1, ids[:, Q:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)

    @plain_products()
    def iteration() -> None:
        with torch.no_grad(), autocast:
            response, _ = generate(policy, query, query != tokenizer.pad_id, T, 0.7, 0, 1.0, 0, None, tokenizer.pad_id)
            eos_index, actions, states = eos_masks(response, tokenizer.eos_id, tokenizer.pad_id)
            ids = torch.cat((query, response.masked_fill(~actions, tokenizer.pad_id)), dim=1)
            real = ids != tokenizer.pad_id
            parts = list(zip(ids.split(at_a_time), real.split(at_a_time), strict=True))
            logprobs, ref_logprobs = (torch.cat([forward(m, *part)[0] for part in parts]) for m in (policy, reference))
            values = torch.cat([value(*part) for part in parts])[:, Q - 1 : -1].masked_fill(~states, 0.0)
            scores = torch.cat([reward(*part) for part in parts]).gather(1, Q + eos_index[:, None]).squeeze(1)
        rewards = -0.05 * (logprobs - ref_logprobs).masked_fill(~actions, 0.0)
        rewards[torch.arange(len(scores)), (eos_index + 1).clamp(max=T - 1)] += scores
        advantages, returns = gae_loop(rewards, values, 1.0, 0.95)
        advantages = whiten(advantages, actions)
        for _ in range(NUM_EPOCHS):
            optimizer.zero_grad()
            for mb in torch.arange(len(ids), device=device).split(at_a_time):
                new_logprobs, _ = forward(policy, ids[mb], real[mb])
                with autocast:
                    new_values = value(ids[mb], real[mb])[:, Q - 1 : -1]
                pg_loss, _ = policy_loss(new_logprobs, logprobs[mb], advantages[mb], actions[mb], 0.2)
                vf_loss, _ = value_loss(new_values, values[mb], returns[mb], states[mb], 0.2)
                (pg_loss.sum() / actions.sum() + 0.1 * vf_loss.sum() / states.sum()).backward()
            optimizer.step()

    for _ in range(2):
        synchronise(device)
        start = time.perf_counter()
        iteration()
        synchronise(device)
        seconds = time.perf_counter() - start
    return seconds, peak_of_process(args.device)


def plain_products():
    """Use `torch.nn.functional.linear`'s matrix products."""
    return mock.patch("kernels.linear.onednn_matmul", lambda: None)


def peak_of_process(device: str) -> int:
    """Return the peak bytes of this process and of the one it forked, if any; on CUDA, of PyTorch's allocator."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


# --------------------------------------------------------------------------------------------------------- 3. the table
def table_rows(what: str, size: str, result: dict[str, tuple[float, int]]) -> list[dict]:
    ours = result["ours"]
    return [
        {"what": what, "size": size, "way": name, "seconds": seconds, "ratio": seconds / ours[0], "peak_bytes": peak}
        for name, (seconds, peak) in result.items()
    ]


def with_limit(rows: list[dict], work: limit.Work, device: torch.device, args: Args) -> list[dict]:
    """Rows with the least seconds that the work takes in the dtype of ours; lower precision may need fewer."""
    seconds = work.seconds(device, getattr(torch, args.dtype))
    return [row | {"limit_seconds": seconds} for row in rows]


def attention_backend(shape: Shape, device: torch.device, dtype: torch.dtype, biased: bool) -> str:
    """What PyTorch's attention runs on, for a training pass of this shape: flash_attention, efficient_attention, ..."""
    config, L = shape.config, shape.query_length + shape.response_length
    q = torch.empty(1, config.n_head, L, config.head_width, device=device, dtype=dtype, requires_grad=True)
    bias = torch.zeros(1, 1, L, L, device=device, dtype=dtype) if biased else None
    return SDPBackend(torch._fused_sdp_choice(q, q, q, bias, is_causal=not biased)).name.lower()


def print_table(rows: list[dict]) -> None:
    print(f"{'way':42} {'ms':>10} {'x ours':>7} {'peak MB':>9} {'of the limit':>12}")
    for first, row in zip([None, *rows], rows, strict=False):
        title = f"{row['what']}, {row['size']}"
        if first is None or title != f"{first['what']}, {first['size']}":
            print(title)
        extra = [
            f"{rate:,.{0 if rate > 10 else 1}f} {unit}/s"
            for unit in ("tokens", "programs")
            if (rate := row.get(f"{unit}_per_second")) is not None
        ]
        if "packing_seconds" in row:
            extra.append(f"{1e3 * row['packing_seconds']:,.1f} ms of it rounding and packing weights")
        share = f"{row['limit_seconds'] / row['seconds']:.0%}" if "limit_seconds" in row else "-"
        numbers = f"{1e3 * row['seconds']:10.2f} {row['ratio']:7.2f} {row['peak_bytes'] / 1e6:9.1f} {share:>12}"
        print(f"    {row['way']:38} {numbers}  {', '.join(extra)}")


def main(args: Args) -> None:
    if args.quick and (args.shape, args.parts, args.rounds) != (Args.shape, Args.parts, Args.rounds):
        raise InputError("--quick chooses --shape, --parts and --rounds: leave them out.")
    if args.rounds < 1:
        raise InputError(f"--rounds {args.rounds}: it must be at least 1.")
    if args.peers and importlib.util.find_spec("trl") is None:
        raise InputError("--peers: trl is not installed: pip install -e .[bench], or omit the flag.")
    if args.peers and SHAPES[args.shape].gpt2 and "ppo" in args.parts:
        raise InputError("--peers: TRL is measured on a GPT-NeoX: choose another --shape or omit ppo from --parts.")
    if args.json is not None and not args.json.parent.is_dir():
        raise InputError(f"--json {args.json}: its directory does not exist: create it first.")
    if "compile" in args.parts and shutil.which("javac") is None:
        if args.parts != Args().parts:
            raise InputError("--parts compile: there is no javac: install a JDK 17 or later, or name other parts.")
        print("compile is skipped: there is no javac; install a JDK 17 or later to measure it")
        args = replace(args, parts=tuple(part for part in args.parts if part != "compile"))
    device = launch.setup(args.device)
    args = replace(args, device=device.type)
    parts = {
        "generate": bench_generate, "logprobs": bench_logprobs, "gae": bench_gae, "supervised": bench_supervised,
        "ppo": bench_ppo, "compile": bench_compile,
    }  # fmt: skip
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    if args.quick:
        args = replace(args, rounds=1, parts=("generate", "logprobs", "gae", "ppo"))
    print(f"torch {torch.__version__}, {where}, shape {args.shape}, medians of {args.rounds} rounds")
    measured = [(part, SHAPES[args.shape]) for part in args.parts]
    if args.quick:
        measured.append(("generate", replace(SHAPES["small"], response_length=16)))
    dtype = getattr(torch, args.dtype)
    alone, padded = (attention_backend(SHAPES[args.shape], device, dtype, biased) for biased in (False, True))
    print(f"attention: {alone} where padding is at the right only, on a GPU; {padded} elsewhere")
    rows = []
    for part, shape in measured:
        torch.manual_seed(0)
        rows += parts[part](args, shape, device)
    print_table(rows)
    if args.json is not None:
        found = {"torch": torch.__version__, "where": where, "attention": [alone, padded], "rows": rows}
        args.json.write_text(to_json(found, indent=2) + "\n")


if __name__ == "__main__":
    run_module(main, Args)
