"""A PPO iteration and the supervised steps with our scripts, plain PyTorch and TRL's trainer."""

import copy
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import train_dpo
import train_grpo
import train_ppo
import train_rm
import train_sft
from bench import limit
from bench.generation import rollout_dtypes
from bench.settings import (
    MICRO_BATCH_SIZE,
    NUM_EPOCHS,
    SAMPLES_PER_QUERY,
    SHAPES,
    Args,
    Shape,
    make_run,
    random_queries,
)
from bench.stopwatch import (
    BEFORE,
    in_processes,
    padded_and_unfused,
    peak_of_process,
    plain_pytorch,
    synchronise,
    table_rows,
    with_limit,
)
from kernels.gae import gae_loop
from nanorlhf import distributed, launch
from nanorlhf.checkpoint import load_gpt, load_scalar
from nanorlhf.dataset import load_comparisons, load_demonstrations
from nanorlhf.generate import generate
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.padding import left_pad, right_pad
from nanorlhf.ppo import eos_masks, policy_loss, value_loss, whiten
from nanorlhf.shared_queries import Groups
from nanorlhf.tokenizer import load_tokenizer
from nanorlhf.training.run import Run
from nanorlhf.training.settings import SamplerSettings


def bench_ppo(args: Args, shape: Shape, device: torch.device) -> list[dict]:
    """Measure one update of train_ppo.py and of TRL's trainer on the same queries and weights: 4 epochs, 1 minibatch.

    Each implementation runs in its own process, and memory is its peak resident size. On a CPU, each also runs in two
    processes with one thread each. The second of two updates is timed; the first also allocates the optimizer's state.
    """
    ways = {"ours": our_ppo}
    for name in rollout_dtypes(args, device):
        ways[f"ours, rollouts in {name}"] = partial(our_ppo, rollout_dtype=name)
    if args.peers:
        ways["TRL 1.12.0"] = trl_ppo
    if device.type == "cuda":
        ways["ours, compiled blocks"] = partial(our_ppo, compile=True)
        ways[BEFORE] = our_ppo_before
    if device.type == "cpu" and sys.platform == "linux":
        ways |= {f"{name}, 2 processes": partial(way, processes=2) for name, way in ways.items()}
    ways["plain PyTorch"] = plain_pytorch_ppo
    with tempfile.TemporaryDirectory() as directory:
        make_run(shape, Path(directory), device)
        result = in_processes(ways, args, Path(directory), "ppo")
    size = f"{shape.episodes} x ({shape.query_length} + {shape.response_length}) {args.dtype}"
    itemsize = getattr(torch, args.dtype).itemsize
    work = limit.ppo_iteration(shape.config, shape.query_lengths, shape.response_length, NUM_EPOCHS, itemsize)
    return with_limit(table_rows("PPO iteration", size, result), work, device, args)


def bench_grpo(args: Args, shape: Shape, device: torch.device) -> list[dict]:
    """Measure one update of train_grpo.py, with shared queries and with a row per response: 4 epochs, 1 minibatch.

    TRL's trainer gets the same queries and weights.
    """
    ways = {"ours": our_grpo, "ours, a row per response": partial(our_grpo, shares_queries=False)}
    if args.peers:
        ways[f"TRL {version('trl')}"] = trl_grpo
    with tempfile.TemporaryDirectory() as directory:
        make_run(shape, Path(directory), device)
        result = in_processes(ways, args, Path(directory), "grpo")
    k = min(SAMPLES_PER_QUERY, shape.episodes)
    queries = shape.query_lengths[: shape.episodes // k]
    size = f"{len(queries)} x ({shape.query_length} + {k} x {shape.response_length}) {args.dtype}"
    itemsize = getattr(torch, args.dtype).itemsize
    work = limit.grpo_iteration(shape.config, queries, k, shape.response_length, NUM_EPOCHS, itemsize)
    return with_limit(table_rows("GRPO iteration", size, result), work, device, args)


def bench_supervised(args: Args, shape: Shape, device: torch.device) -> list[dict]:
    """Measure one optimizer step of train_sft.py, train_rm.py and train_dpo.py on `episodes` rows each."""
    rows = []
    lengths = [(length, shape.response_length) for length in shape.query_lengths]
    with tempfile.TemporaryDirectory() as directory:
        make_run(shape, Path(directory), device)
        for stage, work in (("sft", limit.sft_step), ("rm", limit.rm_step), ("dpo", limit.dpo_step)):
            ways = {
                "ours": partial(our_stage, stage=stage),
                "plain PyTorch": partial(plain_pytorch_stage, stage=stage),
            }
            result = in_processes(ways, args, Path(directory), stage)
            size = f"{shape.episodes} x ({shape.query_length} + {shape.response_length}) {args.dtype}"
            table = table_rows(f"{stage.upper()} step", size, result)
            rows += with_limit(table, work(shape.config, lengths), device, args)
    return rows


def our_ppo(
    args: Args, directory: Path, rollout_dtype: str = "same", processes: int = 1, compile: bool = False
) -> tuple[float, int]:
    """Run train_ppo.py with TL;DR's settings and return (seconds per update, peak bytes)."""
    shape = SHAPES[args.shape]
    settings = replace(
        train_ppo.RECIPES["tldr"][1], data=directory, out=directory / "ppo", sft=str(directory / "sft"),
        num_ppo_epochs=NUM_EPOCHS, reward_model=str(directory / "rm"), device=args.device, dtype=args.dtype,
        batch_size=shape.episodes, micro_batch_size=min(MICRO_BATCH_SIZE[args.device], shape.episodes),
        total_episodes=2 * shape.episodes, max_query_length=shape.query_length, response_length=shape.response_length,
        sampler=SamplerSettings(dtype=rollout_dtype), processes=processes, compile=compile, overwrite=True,
    )  # fmt: skip
    with mock.patch.object(Run, "save"):  # writing 1b's state takes longer than the two updates
        launch.run(partial(train_ppo.main, settings), args.device, processes)
    last = json.loads((directory / "ppo" / "metrics.jsonl").read_text().splitlines()[-1])
    return shape.episodes / last["episodes_per_second"], peak_of_process(args.device)


@padded_and_unfused()
def our_ppo_before(args: Args, directory: Path) -> tuple[float, int]:
    return our_ppo(args, directory)


def our_grpo(args: Args, directory: Path, shares_queries: bool = True) -> tuple[float, int]:
    """Run train_grpo.py on the first queries and return (seconds per update, peak bytes)."""
    shape = SHAPES[args.shape]
    k = min(SAMPLES_PER_QUERY, shape.episodes)
    settings = train_grpo.Args(
        data=directory, out=directory / "grpo", sft=str(directory / "sft"), reward_model=str(directory / "rm"),
        samples_per_query=k, num_epochs=NUM_EPOCHS, batch_size=shape.episodes, total_episodes=2 * shape.episodes,
        micro_batch_size=min(MICRO_BATCH_SIZE[args.device], shape.episodes), max_query_length=shape.query_length,
        response_length=shape.response_length, device=args.device, dtype=args.dtype, overwrite=True,
    )  # fmt: skip
    first = range(shape.episodes // k)  # the queries that limit.grpo_iteration counts
    with mock.patch.object(Run, "save"), mock.patch("train_grpo.batch_indices", lambda *arguments: first):
        if shares_queries:
            train_grpo.main(settings)
        else:
            separate = lambda query, mask: Groups(*[torch.arange(len(query), device=query.device)] * 2)  # noqa: E731
            with (
                mock.patch("nanorlhf.reading.find_groups", separate),
                mock.patch("nanorlhf.generate.find_groups", separate),
                mock.patch("nanorlhf.batch.find_groups", separate),
            ):
                train_grpo.main(settings)
    last = json.loads((directory / "grpo" / "metrics.jsonl").read_text().splitlines()[-1])
    return shape.episodes / last["episodes_per_second"], peak_of_process(args.device)


def our_stage(args: Args, directory: Path, stage: str) -> tuple[float, int]:
    """Run three steps of a script on the same rows and return (seconds of the second step, peak bytes)."""
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


def plain_pytorch_stage(args: Args, directory: Path, stage: str) -> tuple[float, int]:
    """Run a straightforward implementation: stores all logits, computes padding, a comparison is two rows."""
    shape, device = SHAPES[args.shape], torch.device(args.device)
    tokenizer = load_tokenizer(directory / "sft")
    Q, T = shape.query_length, shape.response_length
    if stage == "sft":
        texts = [
            (row.query, row.response) for row in load_demonstrations(directory / "sft.train.jsonl", tokenizer, Q, T)
        ]
    else:
        pairs = list(load_comparisons(directory / "comparisons.train.jsonl", tokenizer, Q, T))
        texts = [(row.query, row.chosen) for row in pairs] + [(row.query, row.rejected) for row in pairs]
    ids = right_pad([query + response for query, response in texts], tokenizer.pad_id).to(device)  # (B, L)
    real = ids != tokenizer.pad_id
    ends = real.sum(1, keepdim=True) - 1
    first = torch.tensor([[len(query)] for query, _ in texts], device=device)
    in_response = (real & (torch.arange(ids.size(1), device=device) >= first))[:, 1:]  # mask of labels
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

    with plain_pytorch():
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


def trl_ppo(args: Args, directory: Path, processes: int = 1) -> tuple[float, int]:
    times: list[float] = []
    launch.run(partial(trl_updates, args, directory, times, processes), args.device, processes)
    return times[-1] - times[-2], peak_of_process(args.device)


def trl_updates(args: Args, directory: Path, times: list[float], processes: int) -> None:
    """Run two updates of TRL's trainer and append the end time of each to `times`."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoXForSequenceClassification
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
    rows = shape.episodes // processes  # per process
    at_a_time = rows if args.device == "cpu" else min(MICRO_BATCH_SIZE["cuda"], rows)
    in_bfloat16 = args.device == "cuda" and args.dtype == "bfloat16"
    # TRL's accelerator reads the precision here; before version 5, transformers set it from PPOConfig
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if in_bfloat16 else "no"
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
        Dataset.from_dict({"input_ids": random_queries(shape)}), value, callbacks=[clock(times)],
        eval_dataset=Dataset.from_dict({"input_ids": random_queries(shape)}),
    )  # fmt: skip
    assert (trainer.accelerator.mixed_precision == "bf16") == in_bfloat16
    trainer.train()


def trl_grpo(args: Args, directory: Path) -> tuple[float, int]:
    """Run two updates of TRL's trainer and return (seconds of the second, peak bytes)."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoXForSequenceClassification
    from trl import GRPOConfig, GRPOTrainer

    shape, times = SHAPES[args.shape], []
    k = min(SAMPLES_PER_QUERY, shape.episodes)
    tokenizer = AutoTokenizer.from_pretrained(directory / "sft", padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(directory / "sft", dtype=torch.float32)
    with torch.device(args.device):
        reward = GPTNeoXForSequenceClassification(copy.deepcopy(policy.config))
    at_a_time = shape.episodes if args.device == "cpu" else min(MICRO_BATCH_SIZE["cuda"], shape.episodes)
    in_bfloat16 = args.device == "cuda" and args.dtype == "bfloat16"
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if in_bfloat16 else "no"  # as in trl_updates
    settings = GRPOConfig(
        output_dir=str(directory / "trl"), per_device_train_batch_size=at_a_time, num_generations=k,
        gradient_accumulation_steps=shape.episodes // at_a_time, num_iterations=NUM_EPOCHS, max_steps=2 * NUM_EPOCHS,
        max_completion_length=shape.response_length, temperature=0.7, top_k=0, beta=0.05, loss_type="grpo",
        shuffle_dataset=False, bf16=in_bfloat16, use_cpu=args.device == "cpu", report_to="none", disable_tqdm=True,
        gradient_checkpointing=False, save_strategy="no", learning_rate=3e-6,
    )  # fmt: skip
    prompts = [tokenizer.decode(query) for query in random_queries(shape)[: shape.episodes // k]]
    trainer = GRPOTrainer(
        policy, reward, settings, Dataset.from_dict({"prompt": prompts}), processing_class=tokenizer,
        reward_processing_classes=tokenizer, callbacks=[clock(times)],
    )  # fmt: skip
    assert (trainer.accelerator.mixed_precision == "bf16") == in_bfloat16
    trainer.train()
    return times[-1] - times[-1 - NUM_EPOCHS], peak_of_process(args.device)


def clock(times: list[float]) -> Any:
    """Make a callback of transformers' trainer that appends the end time of each step to `times`."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_end(self, *arguments, **keywords) -> None:
            times.append(time.perf_counter())

    return Clock()


def plain_pytorch_ppo(args: Args, directory: Path) -> tuple[float, int]:
    """Run a straightforward implementation: stores all logits, computes padding, loops over T, default AdamW."""
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
        """Return log-probabilities and entropies (B, T) from all logits (B, Q + T, V)."""
        with autocast:
            log_p = (model.logits(model(ids, real)).float() / 0.7)[:, Q - 1 : -1].log_softmax(-1)
        return log_p.gather(-1, ids[:, Q:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)

    @plain_pytorch()
    def iteration() -> None:
        with torch.no_grad(), autocast:
            response, _ = generate(policy, query, query != tokenizer.pad_id, T, 0.7, 0, 1.0, 0, None, tokenizer.pad_id)
            eos_index, actions, states = eos_masks(response, tokenizer.eos_id, tokenizer.pad_id)
            ids = torch.cat((query, response.masked_fill(~actions, tokenizer.pad_id)), dim=1)
            real = ids != tokenizer.pad_id
            chunks = list(zip(ids.split(at_a_time), real.split(at_a_time), strict=True))
            logprobs, ref_logprobs = (
                torch.cat([forward(model, *chunk)[0] for chunk in chunks]) for model in (policy, reference)
            )
            values = torch.cat([value(*chunk) for chunk in chunks])[:, Q - 1 : -1].masked_fill(~states, 0.0)
            scores = torch.cat([reward(*chunk) for chunk in chunks]).gather(1, Q + eos_index[:, None]).squeeze(1)
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
