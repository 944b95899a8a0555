"""Tokens per second of our generation, a plain loop and transformers."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench import limit
from bench.settings import Args, Shape, make_tokenizer, random_queries
from bench.stopwatch import before_and_after, compare, plain_pytorch, table_rows, with_limit
from kernels.processor import has_int8_matmul
from nanorlhf.cache import KVCache
from nanorlhf.checkpoint import save
from nanorlhf.generate import for_sampling, generate
from nanorlhf.model import GPT
from nanorlhf.padding import left_pad

NUM_ROWS = {"cpu": (1, 8), "cuda": (1, 8, 64, 256)}  # of a batch in bench_decode


def bench_generate(args: Args, shape: Shape, device: torch.device) -> list[dict]:
    """Measure tokens per second: `response_length` tokens per query, no EOS, temperature 0.7."""
    T = shape.response_length
    with device:  # a CPU would take minutes to draw billions of weights
        model = GPT(shape.config)
    query, pad_id = left_pad(random_queries(shape), shape.vocab_size - 1).to(device), shape.vocab_size - 1  # (B, Q)
    query_mask = query != pad_id
    dtype = getattr(torch, args.dtype)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")

    def ours(rollout_dtype: str) -> Callable[[], None]:
        """Sample like a rollout, including the time to prepare the weights."""
        name = args.dtype if rollout_dtype == "same" else rollout_dtype
        on = torch.autocast(device.type, torch.bfloat16, enabled=name == "bfloat16")

        def way() -> None:
            with on, torch.no_grad():
                generate(for_sampling(model, rollout_dtype), query, query_mask, T, 0.7, eos_id=None, pad_id=pad_id)

        return way

    @torch.no_grad()
    def plain() -> None:
        """Sample with a cache that grows by concatenation, softmax and torch.multinomial."""
        with plain_pytorch(), autocast:
            cache = GrowingCache(shape.config, query_mask, T, dtype)
            hidden = model(query, query_mask, cache=cache)[:, -1]
            for t in range(T):
                probabilities = (model.logits(hidden).float() / 0.7).softmax(-1)
                token = torch.multinomial(probabilities, 1)  # (B, 1)
                if t + 1 < T:
                    hidden = model(token, cache=cache)[:, -1]

    ways = {"ours": ours("same"), **{f"ours, rollouts in {name}": ours(name) for name in rollout_dtypes(args, device)}}
    ways |= before_and_after(ways["ours"], device)
    ways["plain PyTorch"] = plain
    with tempfile.TemporaryDirectory() as directory:
        if args.peers:
            save(model, directory, make_tokenizer(shape, Path(directory)))
            from transformers import AutoModelForCausalLM, GenerationConfig

            peer_dtype = dtype if device.type == "cuda" else torch.float32
            peer = AutoModelForCausalLM.from_pretrained(directory, dtype=peer_dtype).to(device).eval()
            settings = GenerationConfig(
                max_new_tokens=T, min_new_tokens=T, do_sample=True, temperature=0.7, top_k=0, top_p=1.0,
                pad_token_id=0, eos_token_id=None,
            )  # fmt: skip
            ids = query.masked_fill(~query_mask, 0)

            @torch.no_grad()
            def generate_with_transformers() -> None:
                out = peer.generate(input_ids=ids, attention_mask=query_mask.long(), generation_config=settings)
                assert out.shape == (len(ids), ids.size(1) + T)

            ways["transformers generate"] = generate_with_transformers
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


def bench_decode(args: Args, shape: Shape, device: torch.device) -> list[dict]:
    """Measure prefill and a decode step separately, at several batch sizes; a step reads all weights and the cache."""
    T, pad_id, dtype = shape.response_length, shape.vocab_size - 1, getattr(torch, args.dtype)
    with device:
        model = GPT(shape.config)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    table = []
    for num_rows in NUM_ROWS[device.type]:
        rows = replace(shape, episodes=num_rows)
        query = left_pad(random_queries(rows), pad_id).to(device)  # (B, Q)
        with autocast:
            sampler = for_sampling(model, "same")

        def sample(num_tokens: int, sampler: GPT = sampler, query: Tensor = query) -> None:
            with autocast, torch.no_grad():
                generate(sampler, query, query != pad_id, num_tokens, 0.7, eos_id=None, pad_id=pad_id)

        prefills, wholes = (before_and_after(partial(sample, num_tokens), device) for num_tokens in (1, T))
        ways = {("prefill", name): way for name, way in prefills.items()}
        results = compare(ways | {("all", name): way for name, way in wholes.items()}, args.rounds, device)
        firsts = {name: results["prefill", name] for name in prefills}
        steps = {}
        for name in wholes:
            whole, peak = results["all", name]
            steps[name] = (whole - firsts[name][0]) / (T - 1), peak
        size = f"{num_rows} x ({shape.query_length} + {T}) {args.dtype}"
        work = limit.generation(shape.config, rows.query_lengths, T, dtype.itemsize)
        table += with_limit(table_rows("prefill", size, firsts), replace(work, steps=()), device, args)
        read_rate = limit.read_rate(device, limit.MOST_READ[device.type])
        for row in with_limit(table_rows("decode step", size, steps), replace(work, flops=0), device, args):
            for name in {"limit_seconds", "mfu", "matmul_share"} & set(row):
                row[name] /= T - 1
            num_bytes = sum(num_bytes for _, num_bytes in work.steps) / (T - 1)
            table.append(row | {"bytes_per_second": num_bytes / row["seconds"], "read_rate": read_rate})
    return table


def rollout_dtypes(args: Args, device: torch.device) -> list[str]:
    """Return the values of `--sampler.dtype` that run on this machine and differ from args.dtype."""
    dtypes = ["bfloat16"] if args.dtype != "bfloat16" else []
    return dtypes + ["int8"] * (device.type == "cpu" and has_int8_matmul())


class GrowingCache(KVCache):
    """A cache that grows by concatenation, one tensor per layer."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.fixed_shape = False  # also on a GPU: only the tokens so far exist
        self.first = None  # PyTorch's attention, with a bias
        self.keys, self.values = [None] * self.config.n_layer, [None] * self.config.n_layer

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys[layer] is not None:
            key, value = torch.cat((self.keys[layer], key), dim=2), torch.cat((self.values[layer], value), dim=2)
        self.keys[layer], self.values[layer] = key, value
        return key, value
