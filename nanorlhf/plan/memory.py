"""Estimate a run's memory per GPU from the models' shapes, without weights.

Bytes on a GPU:

    weights       4 per parameter; a frozen model's linear weights are stored in the compute dtype, unless it follows
                  the policy (--reference.rate, --elastic-reset.every)
    gradients     4 per trained parameter
    optimizer     8 per trained parameter: AdamW's two moments
    copies        2 per parameter that is cast to bfloat16 while a phase lasts
    cache         keys and values, while sampling
    activations   one block's; in comparisons, also the keys and values of the queries; while updating, also everything
                  saved for the backward pass

Activations are measured: the models' code runs on fake tensors, which have a shape but no memory, and hooks record what
autograd saves. With --checkpoint-activations, only the inputs of all blocks are saved, in float32.

    --offload      a frozen model is on the GPU only in its own phase
    --shard fsdp   each of N GPUs stores 1/N of weights, gradients and optimizer state. Copies are then the gathered
                   weights: two blocks with their gradients; while sampling and validating, the full model in float32

Rows are as long as the settings allow. Not counted: CUDA's context and libraries, NCCL's buffers, fragmentation and
small tensors, for which USABLE leaves room.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels import linear_logprobs
from nanorlhf.checkpoint import cast_linear_weights, read_config
from nanorlhf.config import GPTConfig
from nanorlhf.errors import InputError
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.peft import tune
from nanorlhf.shared_queries import Groups
from nanorlhf.t5 import T5Config
from nanorlhf.training.settings import LoRAArgs, TrainingArgs

MACHINES = ((1, 80), (8, 80), (1, 141))  # (GPUs of a node, GB of each)
USABLE = 0.9  # fraction of a GPU's nominal memory
BUSY = {"micro_batch_size": 4, "batch_size": 16}  # rows that keep a GPU busy

# shapes that need no config.json: Biderman et al. 2023, Table 1; Radford et al. 2019, Table 2; Wang et al. 2021,
# section 4.2; Le et al. 2022; OLMo team 2025
PUBLISHED: dict[str, GPTConfig] = {
    f"EleutherAI/pythia-{name}": GPTConfig(
        vocab_size=V, n_ctx=2048, d_model=C, n_layer=N, n_head=H, d_mlp=4 * C, rotary_dim=C // H // 4
    )
    for name, N, C, H, V in (("1b", 16, 2048, 8, 50304), ("2.8b", 32, 2560, 32, 50304), ("6.9b", 32, 4096, 32, 50432))
}
PUBLISHED |= {
    f"openai-community/gpt2{name}": GPTConfig(
        vocab_size=50257, n_ctx=1024, d_model=C, n_layer=N, n_head=C // 64, d_mlp=4 * C, activation="gelu_new",
        positions="learned", parallel_residual=False, tied_head=True, architecture="gpt2",
    )
    for name, N, C in (("", 12, 768), ("-medium", 24, 1024), ("-large", 36, 1280), ("-xl", 48, 1600))
}  # fmt: skip
PUBLISHED |= {
    f"Salesforce/codet5-{name}": T5Config(
        vocab_size=32100, d_model=C, n_layer=N, n_head=C // 64, d_mlp=4 * C, tied_head=True, head_scale=C**-0.5
    )
    for name, N, C in (("small", 6, 512), ("base", 12, 768), ("large", 24, 1024), ("large-ntp-py", 24, 1024))
}
PUBLISHED["allenai/OLMo-2-0425-1B"] = GPTConfig(
    vocab_size=100_352, n_ctx=4096, d_model=2048, n_layer=16, n_head=16, d_mlp=8192, activation="silu", norm="rms",
    norm_eps=1e-6, rotary_dim=128, rotary_base=500_000.0, positions="rotary_half", parallel_residual=False,
    gated_mlp=True, pre_norm=False, post_norm=True, qk_norm=True, qk_norm_joint=True, qkv_bias=False,
    attention_out_bias=False, mlp_bias=False, architecture="olmo2",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------ what a run does
@dataclass(frozen=True)
class Rows:
    """The lengths of the longest rows, and the compute dtype."""

    query_length: int
    response_length: int
    dtype: str
    num_responses: int = 1  # 2 in a comparison, which reads its query once

    @property
    def tokens(self) -> int:
        return self.query_length + self.num_responses * self.response_length


@dataclass(frozen=True)
class Model:
    config: GPTConfig
    parameters: int
    trained: int  # number of trained parameters
    weights: int  # bytes, without frozen weights shared with the policy
    saved: int  # bytes per row saved for the backward pass
    moves: bool = False  # follows the policy: in float32 and never offloaded


@dataclass(frozen=True)
class Phase:
    """A part of a run, such as sampling or updating. Sharded models are gathered for sampling and validation."""

    name: str
    kind: Literal["sample", "read", "update", "validate"]
    models: tuple[str, ...]
    num_rows: int  # over all GPUs
    limit: str | None = None  # the setting that limits the rows of a pass; None: one pass for all rows
    times: int = 1  # rows of a pass, as a multiple of the setting


@dataclass(frozen=True)
class Flags:
    """The settings that may be changed to make a run fit, because they don't affect its result."""

    limits: dict[str, int]  # rows of a pass
    checkpoint_activations: bool = False
    shard: str = "none"
    offload: bool | None = None  # None: the script can neither offload nor shard its frozen models

    def __str__(self) -> str:
        words = [f"--{name.replace('_', '-')} {limit}" for name, limit in self.limits.items()]
        words += ["--checkpoint-activations"] if self.checkpoint_activations else []
        words += [f"--shard {self.shard}"] if self.shard != "none" else []
        words += ["--offload"] if self.offload else []
        return " ".join(words)


@dataclass(frozen=True)
class Work:
    models: dict[str, Model]
    phases: tuple[Phase, ...]
    flags: Flags  # as requested
    rows: Rows
    notes: tuple[str, ...] = ()
    can_shard: bool = True


def sized_model(
    kind: type[GPT | ScalarModel],
    config: GPTConfig,
    rows: Rows,
    args: TrainingArgs | None = None,
    shares_policy: bool = False,
    moves: bool = False,
) -> Model:
    """Return the sizes of a model that is trained with `args`, or of a frozen or moving model if None."""
    tuning: tuple = ("full",)
    if isinstance(args, LoRAArgs) and args.tune != "full":
        tuning = (args.tune, args.lora_rank, args.lora_targets)
    with FakeTensorMode():
        model = kind(config)
        tune(model, *tuning)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        if args is None:
            trained = 0
            if not moves:
                cast_linear_weights(model, getattr(torch, rows.dtype))
        weights = 4 * trained if shares_policy else sum(parameter.nbytes for parameter in model.parameters())
    saved = saved_per_row(kind, config, rows, tuning)  # type: ignore[arg-type]  # mypy takes no class as hashable
    return Model(config, parameters, trained, weights, saved, moves)


@cache  # several models of a run have the same shape
def saved_per_row(kind: type[GPT | ScalarModel], config: GPTConfig, rows: Rows, tuning: tuple) -> int:
    """Return the bytes that autograd saves per row: two rows minus one row, so that saved weights cancel."""
    with FakeTensorMode():
        model = kind(config)
        tune(model, *tuning)
        return saved_bytes(model, 2, rows) - saved_bytes(model, 1, rows)


def saved_bytes(model: GPT | ScalarModel, num_rows: int, rows: Rows) -> int:
    """Return the bytes that autograd saves in a forward pass."""
    storages = set()  # several tensors may be views of one storage

    def save(tensor: Tensor) -> Tensor:
        storages.add(tensor.untyped_storage())
        return tensor

    T, k = rows.response_length, rows.num_responses
    ids = torch.zeros((num_rows * k, rows.query_length + T), dtype=torch.long)
    real = torch.ones_like(ids, dtype=torch.bool)
    groups = Groups(torch.arange(0, num_rows * k, k), torch.arange(num_rows * k) // k)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=rows.dtype == "bfloat16")
    with autocast, torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        hidden = model(ids, real, last=T + 1, query_length=rows.query_length, groups=groups)
        output = hidden[:, :-1]  # (b, T, C) or (b, T)
        if isinstance(model, GPT):
            labels = ids[:, -T:].flatten()
            linear_logprobs(
                output.flatten(0, 1), model.lm_head.weight, labels, model.head_bias, cap=model.config.logit_cap
            )
    return sum(storage.nbytes() for storage in storages)


# -------------------------------------------------------------------------------------------------------- bytes per GPU
class Memory(NamedTuple):
    weights: int
    gradients: int
    optimizer: int
    copies: int
    cache: int
    activations: int


def phase_memory(work: Work, phase: Phase, flags: Flags, num_gpus: int) -> Memory:
    """Return the bytes on a GPU at the peak of a phase."""
    shard = flags.shard != "none"
    share = num_gpus if shard else 1
    weights = trained = 0
    for name, model in work.models.items():
        trained += model.trained // share
        if model.trained or model.moves or name in phase.models or not flags.offload:
            is_sharded = shard and (model.trained or flags.offload is not None)
            weights += 4 * model.parameters // share if is_sharded else model.weights

    rows = -(-phase.num_rows // num_gpus)
    if phase.limit is not None:
        rows = min(rows, phase.times * flags.limits[phase.limit])
    tokens = rows * work.rows.tokens
    width = 2 if work.rows.dtype == "bfloat16" else 4
    copies = cache = saved = block = 0
    for model in (work.models[name] for name in phase.models):
        config = model.config
        keys = 2 * config.n_layer * config.kv_heads * config.head_width * width  # and values, of a token
        reading = rows * model.saved // config.n_layer
        is_saved = phase.kind == "update" and model.trained and not flags.checkpoint_activations
        if work.rows.num_responses > 1 and not is_saved:  # the queries' pass, then the responses'
            Q = work.rows.query_length
            reading = reading * max(Q, work.rows.tokens - Q) // work.rows.tokens + keys * rows * Q
        block = max(block, reading)
        cast = model.parameters if model.trained or model.moves else 0  # others are stored as they are multiplied
        if phase.kind == "sample":
            cache += keys * tokens
        if phase.kind == "update" and model.trained:
            inputs = 4 * config.n_layer * config.d_model * tokens
            saved += inputs if flags.checkpoint_activations else rows * model.saved
        if shard and phase.kind in ("sample", "validate"):
            copies += (4 + 2 * (width == 2)) * model.parameters
        elif shard:
            copies += 16 * model.parameters // config.n_layer  # two blocks and gradients in bfloat16 and float32
        elif width == 2:
            copies += 2 * cast
    return Memory(weights, 4 * trained, 8 * trained, copies, cache, saved + block)


def largest_phase(work: Work, flags: Flags, num_gpus: int) -> tuple[Phase, int]:
    """Return the phase with the most memory, and its bytes."""
    totals = [sum(phase_memory(work, phase, flags, num_gpus)) for phase in work.phases]
    return work.phases[totals.index(max(totals))], max(totals)


# ----------------------------------------------------------------------------------------------- flags that make it fit
def flags_that_fit(work: Work, num_gpus: int, usable: float) -> Flags:
    """Return the cheapest flags for which all phases fit into `usable` bytes; if none fit, those with the least memory.

    In order of cost: smaller batches that still keep a GPU busy; --offload; --shard; --checkpoint-activations (a third
    more time per update); batches of a few rows.
    """
    requested = work.flags
    shards = ["none", "fsdp"] if requested.shard == "none" else [requested.shard]
    can_shard = work.can_shard and not any(model.moves for model in work.models.values())
    options = product(
        (BUSY, dict.fromkeys(BUSY, 1)),
        sorted({requested.checkpoint_activations, any(model.trained for model in work.models.values())}),
        shards if num_gpus > 1 and can_shard else ["none"],
        [None] if requested.offload is None else sorted({requested.offload, True}),
    )
    for minimum, checkpoint_activations, shard, offload in options:
        flags = Flags(requested.limits, checkpoint_activations, shard, offload)
        while True:
            phase, total = largest_phase(work, flags, num_gpus)
            if total <= usable:
                return flags
            if phase.limit is None or flags.limits[phase.limit] <= minimum[phase.limit]:
                break
            smaller = max(flags.limits[phase.limit] // 2, minimum[phase.limit])
            flags = replace(flags, limits={**flags.limits, phase.limit: smaller})
    return flags


def memory_plan(work: Work, machines: tuple[tuple[int, int], ...] = MACHINES) -> str:
    """Return a table per machine, (number of GPUs, GB of each)."""
    rows = work.rows
    lines = [f"GB (10^9 bytes) per GPU in {rows.dtype}, rows of {rows.query_length} + {rows.response_length} tokens"]
    lines.append(" " * 12 + "".join(f"{column:>12}" for column in (*Memory._fields, "all")))
    for num_gpus, gigabytes in machines:
        flags = flags_that_fit(work, num_gpus, USABLE * gigabytes * 1e9)
        phase, most = largest_phase(work, flags, num_gpus)
        share = most / gigabytes / 1e9
        verdict = "with" if share <= USABLE else "does not fit, not even with"
        peak = f"at most {most / 1e9:.1f} GB, {phase.name}, {share:.0%} of a GPU"
        lines.append(f"{num_gpus} x {gigabytes} GB {verdict} {flags}: {peak}")
        for phase in work.phases:
            memory = phase_memory(work, phase, flags, num_gpus)
            numbers = "".join(f"{number / 1e9:>12.2f}" for number in (*memory, sum(memory)))
            lines.append(f"  {phase.name:<10}{numbers}")
    return "\n".join([*lines, *work.notes])


def read_shape(flag: str, path: str, num_tokens: int) -> GPTConfig:
    """Return the shape of a checkpoint, from PUBLISHED or its config.json.

    Raises InputError if the shape is unknown, or if `num_tokens` exceed the positions of the model.
    """
    try:
        config = PUBLISHED.get(path.removesuffix("-deduped")) or read_config(path)
    except InputError as error:
        raise InputError(f"{flag} {str(error).rstrip('.')}; built-in shapes are {', '.join(PUBLISHED)}.") from error
    if num_tokens > config.n_ctx:
        raise InputError(f"rows of {num_tokens} tokens are longer than the {config.n_ctx} positions of {flag} {path}.")
    return config
