"""Estimate per-GPU memory of a run: `python train_ppo.py tldr --sft EleutherAI/pythia-1b-deduped --plan`.

Weights, gradients and AdamW's state are arithmetic: float32, so 4, 4 and 8 bytes per trained parameter; frozen models
keep the weights of their products in the dtype of the computation. Activations are measured: the models' own code runs
on fake tensors, which have a shape and a device but no memory, and `Live` sums the storages that are alive at each
moment. So activation checkpointing, autocast's copies of the weights and an LM head
that never stores all logits count as in the code. Each phase of a run has its own peak:

    sampling     KV cache and prefill of --rollout-batch-size rows
    scoring      the same rows through one model after the other, without gradients
    updating     forward and backward of --micro-batch-size rows, all of maximum length
    exchanging   a second copy of the gradients, all-reduced across GPUs as one tensor

How this is distributed over W GPUs is arithmetic again:

    --shard none   everything on each GPU
    --shard fsdp   1/W of weights, gradients and optimizer state, of the frozen models too. In full, in the dtype of the
                   computation: embedding and head, two blocks (one computes, the next is being gathered), and the
                   gradients of two blocks, reduced in float32. Sampling and validation use a full float32 copy
    --offload      frozen models stay in CPU memory; the one that computes has a copy on the GPU

The fake tensors are on a CPU. CUDA's attention saves the same tensors for the backward pass; its LM head works on 64 MB
of logits at a time, the CPU's on 8 MB. Not counted: CUDA's context and libraries, NCCL's buffers, fragmentation;
USABLE leaves room for them.
"""

import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import linear_logprobs
from nanorlhf.checkpoint import read_config, round_products
from nanorlhf.cli import check_ranges
from nanorlhf.errors import InputError
from nanorlhf.generate import draw, for_sampling
from nanorlhf.model import GPT, GPTConfig, ScalarModel
from nanorlhf.peft import tune
from nanorlhf.reward import places
from nanorlhf.t5 import T5Config
from nanorlhf.training.optimizer import train_linear_layers

Label = tuple[str, str]  # (column of the table, role of a model or "")
MACHINES = ((8, 80), (1, 141))  # (GPUs of a node, GB of each)
LEAST = {"micro_batch_size": 4, "rollout_batch_size": 16, "batch_size": 16}  # rows that keep a GPU busy
USABLE = 0.9  # fraction of a GPU's nominal memory
COLUMNS = ("weights", "gradients", "optimizer", "copies", "KV-cache", "activations", "head", "temporary")

PYTHIA = {  # Biderman et al. 2023, Table 1, and the config.json of EleutherAI/pythia-{1b,2.8b,6.9b}, deduped or not
    size: GPTConfig(
        vocab_size=vocab_size,  # GPT-NeoX pads it to a multiple of 128 times its tensor-parallel size
        n_ctx=2048,
        d_model=d_model,
        n_layer=n_layer,
        n_head=n_head,
        d_mlp=4 * d_model,
        rotary_dim=d_model // n_head // 4,
    )
    for size, n_layer, d_model, n_head, vocab_size in (
        ("1b", 16, 2048, 8, 50304),
        ("2.8b", 32, 2560, 32, 50304),
        ("6.9b", 32, 4096, 32, 50432),
    )
}
CODET5 = {  # Wang et al. 2021, section 4.2, and Le et al. 2022: T5's small, base and large, with 32,100 ids
    f"Salesforce/codet5-{name}": T5Config(
        vocab_size=32100,
        d_model=d_model,
        n_layer=n_layer,
        n_head=n_head,
        d_head=64,
        d_mlp=4 * d_model,
        tied_head=True,
        head_scale=d_model**-0.5,
        query_start_id=1,
        query_end_id=2,
    )
    for name, n_layer, d_model, n_head in (
        ("small", 6, 512, 8),
        ("base", 12, 768, 12),
        ("large", 24, 1024, 16),
        ("large-ntp-py", 24, 1024, 16),
    )
}


# -------------------------------------------------------------------------------------------------------- live storages
class Live(TorchDispatchMode):
    """Counts the bytes, by label, of the storages that are created under this mode and still alive, and their peak.

    A storage keeps the label it was created under; a weight's copy made by autocast has ("copies", role). Columns in
    `ignored` are not counted. Fake and real tensors are counted alike. `kept` are the bytes at the last `mark`.
    """

    def __init__(self, ignored: tuple[str, ...] = ()):
        super().__init__()
        self.ignored, self.label = ignored, ("other", "")
        self.bytes: Counter[Label] = Counter()
        self.peak: Counter[Label] = Counter()
        self.kept: Counter[Label] = Counter()
        self.labels: weakref.WeakKeyDictionary[UntypedStorage, Label] = weakref.WeakKeyDictionary()

    @contextmanager
    def labelled(self, column: str, role: str = "") -> Iterator[None]:
        before, self.label = self.label, (column, role)
        yield
        self.label = before

    def mark(self) -> None:
        self.kept = self.bytes.copy()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.prim.device.default:  # more than half of all calls, and none makes a storage
            return result
        for tensor in tensors_in((*args, *(kwargs or {}).values())):  # views and in-place writes create no storage
            self.labels.setdefault(tensor.untyped_storage(), ("other", ""))
        for tensor in tensors_in(result if isinstance(result, (tuple, list)) else (result,)):
            if (storage := tensor.untyped_storage()) not in self.labels:
                label = self.label
                if function is torch.ops.aten._to_copy.default:
                    column, role = self.labels.get(args[0].untyped_storage(), label)
                    label = ("copies", role) if column == "weights" else label
                self.labels[storage] = label
                if label[0] not in self.ignored:
                    self.bytes[label] += storage.nbytes()
                    weakref.finalize(storage, self.bytes.subtract, {label: storage.nbytes()})
                    if self.bytes.total() > self.peak.total():
                        self.peak = self.bytes.copy()
        return result


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an operator's arguments or results, in lists too; several times as fast as a pytree's walk."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)


# -------------------------------------------------------------------------------------------------- the phases of a run
@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags that may change to make a run fit; its result stays the same."""

    micro_batch_size: int | None = None  # None: the script has no such flag
    rollout_batch_size: int | None = None
    batch_size: int | None = None
    checkpoint_activations: bool = False
    shard: str = "none"
    offload: bool = False

    def __str__(self) -> str:
        sizes = {name: getattr(self, name) for name in LEAST}
        words = [f"--{name.replace('_', '-')} {size}" for name, size in sizes.items() if size is not None]
        words += ["--checkpoint-activations"] if self.checkpoint_activations else []
        words += [f"--shard {self.shard}"] if self.shard != "none" else []
        return " ".join(words + (["--offload"] if self.offload else []))


@dataclass(frozen=True, eq=False)
class Phase:
    name: str
    run: Callable[..., None]  # update, sample or score
    roles: tuple[str, ...]  # the models that take part, in order
    flag: str | None  # the flag with the number of examples; None: one example
    rows: int = 1  # rows per example
    responses: int = 1  # per row: two of a comparison, after their query (join_pairs)


@dataclass(frozen=True, eq=False)
class Shape:
    config: GPTConfig
    build: Callable[[GPTConfig], GPT | ScalarModel]  # with requires_grad set


@dataclass(frozen=True, eq=False, kw_only=True)
class Work:
    models: dict[str, Shape]  # by role
    phases: tuple[Phase, ...]
    flags: Flags  # as requested
    minibatch: int | None = None  # examples per optimizer step, over all GPUs
    rollout: int | None = None  # examples per rollout, over all GPUs
    dtype: str
    rollout_dtype: str = "same"  # of the sampler's weights, or bfloat16
    query_length: int
    response_length: int
    responses: int = 1  # per row, of a phase
    logprobs_of_all: bool = False  # log-probabilities of the query's tokens too
    on_call: tuple[str, ...] = ()  # frozen models that are loaded when they compute, with or without --offload
    on_policy: tuple[str, ...] = ()  # models whose frozen weights are the policy's own, unless sharded
    notes: tuple[str, ...] = ()


def autocast(work: Work) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=work.dtype == "bfloat16")


def sampling(work: Work) -> Work:
    """The same work in the dtype of the sampler."""
    return work if work.rollout_dtype == "same" else replace(work, dtype=work.rollout_dtype)


def forward(live: Live, role: str, model: GPT | ScalarModel, rows: int, work: Work) -> Tensor:
    """Log-probabilities (b * S,), or values or scores (b, S), of `rows` rows of maximum length."""
    responses = work.responses
    if isinstance(model.config, T5Config):  # reads a comparison's texts in rows of their own
        rows, responses = rows * responses, 1
    T = responses * work.response_length
    L = work.query_length + T
    ids, mask = torch.zeros((rows, L), dtype=torch.long), torch.ones((rows, L), dtype=torch.bool)
    branch = torch.zeros_like(ids) if responses > 1 else None
    last = L if work.logprobs_of_all else T + 1
    is_kept = torch.is_grad_enabled()
    with live.labelled(*(("activations", role) if is_kept else ("temporary", ""))):
        output = model(ids, mask, last=last, query_length=work.query_length, branch=branch)
        output = output[:, :-1]  # (b, S, C) or (b, S)
    if isinstance(model, ScalarModel):
        return output
    with live.labelled(*(("head", role) if is_kept else ("temporary", ""))):
        # as `response_logprobs` with nothing masked: fake tensors have no mask values
        hidden = output.flatten(0, 1)  # a copy, as indexing by the mask is
        labels = torch.zeros(len(hidden), dtype=torch.long)
        return linear_logprobs(hidden, model.lm_head.weight, labels, model.head_bias)[0]


def update(live: Live, models: dict[str, GPT | ScalarModel], rows: int, work: Work) -> None:
    """Any micro-batch after the first: the gradients already exist."""
    total = torch.zeros(())
    for role, model in models.items():
        with live.labelled("gradients", role):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        with autocast(work):
            output = forward(live, role, model, rows, work)
        total = total + output.sum()
    live.mark()
    with live.labelled("temporary"):
        total.backward()


@torch.no_grad()
def sample(live: Live, models: dict[str, GPT], rows: int, work: Work) -> None:
    """Prefill and one decode step, of the policy or of its rounded copy."""
    ((role, model),), work = models.items(), sampling(work)
    query = torch.zeros((rows, work.query_length), dtype=torch.long)
    mask, uniforms = torch.ones_like(query, dtype=torch.bool), torch.zeros((rows, 1), dtype=torch.float64)
    dtype = torch.bfloat16 if work.dtype == "bfloat16" else torch.float32
    if work.rollout_dtype != "same":  # a GPU samples with the policy itself
        with live.labelled("copies", role):
            model = for_sampling(model, work.rollout_dtype)
    with live.labelled("KV-cache", role):
        cache = model.transformer.cache(mask, work.response_length, dtype)
    with live.labelled("temporary"), autocast(work):
        head = model.rounded_head()
        for ids in (query, query[:, -1:]):
            logits = model.logits(model(ids, mask, cache, last=1)[:, -1], head).float()  # (b, V)
            draw((logits - logits.logsumexp(-1, keepdim=True)).exp_(), uniforms)
        live.mark()


@torch.no_grad()
def score(live: Live, models: dict[str, GPT | ScalarModel], rows: int, work: Work) -> None:
    """A forward pass of one model."""
    ((role, model),) = models.items()
    with autocast(work):
        forward(live, role, model, rows, work)
        live.mark()


# -------------------------------------------------------------------------------------------------------- bytes per GPU
@cache
def passes(
    work: Work,
    run: Callable[..., None],
    roles: tuple[str, ...],
    rows: int,
    responses: int,
    checkpoint_activations: bool,
    copies: bool,
) -> tuple[Counter[Label], Counter[Label]]:
    """Bytes by label, without weights and gradients: at the peak of a phase, and of autocast's copies at its end.

    Of deep models, two and three blocks run. A middle block holds at any time nothing or what its forward pass has
    kept, so the peak over time is a maximum of functions that are affine in the number of blocks. If with the third
    one it grows by all that a block keeps, no other can overtake it; else all blocks run.
    """

    def at(depth: int | None) -> tuple[Counter[Label], Counter[Label]]:
        live = Live(("gradients",) if copies else ("gradients", "copies"))
        with FakeTensorMode():
            models = {}
            for role in roles:
                shape = work.models[role]
                models[role] = shape.build(shape.config if depth is None else replace(shape.config, n_layer=depth))
                if copies and role not in work.on_policy:  # not sharded
                    round_if_frozen(models[role], work)
                models[role].transformer.checkpoint_activations = checkpoint_activations
                for weight in models[role].parameters():
                    live.labels[weight.untyped_storage()] = ("weights", role)
            with live:
                run(live, models, rows, replace(work, responses=responses))
        return live.peak, live.kept

    configs = [work.models[role].config for role in roles]
    depth = configs[0].n_layer
    is_alike = all(config.n_layer == depth and config.attention_windows is None for config in configs) and not any(
        isinstance(config, T5Config) and config.num_decoder_blocks != depth for config in configs
    )
    if is_alike and depth > 3:
        of_two, of_three = at(2), at(3)
        if of_three[0].total() - of_two[0].total() == of_three[1].total() - of_two[1].total():
            peak, kept = (
                Counter({label: x[label] + (depth - 3) * (x[label] - w[label]) for label in w.keys() | x.keys()})
                for w, x in zip(of_two, of_three, strict=True)
            )
            return peak, only_copies(kept)
    peak, kept = at(None)
    return peak, only_copies(kept)


def only_copies(held: Counter[Label]) -> Counter[Label]:
    return Counter({label: number for label, number in held.items() if label[0] == "copies"})


def round_if_frozen(model: GPT | ScalarModel, work: Work) -> None:
    """As `place_models` does."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        round_products(model, getattr(torch, work.dtype))


@dataclass(frozen=True)
class Size:
    """Numbers of parameters."""

    all: int
    trained: int
    block: int  # of one block, the largest
    rest: int  # outside the blocks
    whole: int  # bytes of its weights on a device that holds all of them, but for those that are the policy's


@cache
def sizes(work: Work) -> dict[str, Size]:
    found = {}
    for role, shape in work.models.items():
        with torch.device("meta"):
            model = shape.build(shape.config)
        number = sum(parameter.numel() for parameter in model.parameters())
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in model.transformer.blocks]
        if role in work.on_policy:
            whole = 4 * trained
        else:
            round_if_frozen(model, work)
            whole = sum(parameter.nbytes for parameter in model.parameters())
        found[role] = Size(number, trained, max(blocks), number - sum(blocks), whole)
    return found


def is_visitor(work: Work, role: str, flags: Flags) -> bool:
    """Whether a model is on the device only while it computes."""
    is_frozen = sizes(work)[role].trained == 0 and role not in work.on_policy
    return is_frozen and (flags.offload or role in work.on_call)


def resident(work: Work, flags: Flags, num_gpus: int) -> Counter[Label]:
    """Bytes by label that are held from the first update on."""
    is_sharded = flags.shard != "none"
    share = num_gpus if is_sharded else 1
    held: Counter[Label] = Counter()
    for role, size in sizes(work).items():
        held["weights", role] = (
            0 if is_visitor(work, role, flags) else 4 * size.all // share if is_sharded else size.whole
        )
        held["gradients", role] = 4 * size.trained // share
        held["optimizer", role] = 8 * size.trained // share  # AdamW's two moments
    return held


def phase_bytes(work: Work, phase: Phase, flags: Flags, num_gpus: int) -> Counter[Label]:
    """Bytes by label at the peak of a phase, including `resident`."""
    rows = phase.rows * (getattr(flags, phase.flag) if phase.flag else 1)
    is_sharded, taking_part = flags.shard != "none", {role: sizes(work)[role] for role in phase.roles}
    held = resident(work, flags, num_gpus)
    checkpoint_activations = flags.checkpoint_activations and phase.run is update
    most: Counter[Label] = Counter()
    kept: Counter[Label] = Counter()  # copies of trained weights, which autocast keeps until it ends
    if phase.run is score and work.rollout_dtype != "same" and not is_sharded:  # the sampler's, rollout by rollout
        kept = passes(work, sample, ("policy",), 1, 1, False, True)[1]
    for roles in [(role,) for role in phase.roles] if phase.run is score else [phase.roles]:
        peak, left = passes(work, phase.run, roles, rows, phase.responses, checkpoint_activations, not is_sharded)
        now = kept + peak
        for role in roles:
            if not is_sharded and is_visitor(work, role, flags):
                now["weights", role] += taking_part[role].whole
        most, kept = max(most, now, key=Counter.total), kept + left
    held += most
    if is_sharded:
        width = 2 if work.dtype == "bfloat16" else 4
        block = max(size.block for size in taking_part.values())
        held["copies", ""] += 2 * block * width
        for role, size in taking_part.items():
            is_whole = phase.run is not update and (role == "policy" or phase.name == "validating")
            # `distributed.unshard` gathers float32, and autocast or `for_sampling` adds a bfloat16 copy
            both = width == 2 or sampling(work).dtype == "bfloat16"
            held["copies", role] += size.all * (6 if both else 4) if is_whole else size.rest * width
        if phase.run is update:
            held["temporary", ""] += 2 * block * (width + 4)
    return held


def peaks(work: Work, flags: Flags, num_gpus: int) -> dict[str, Counter[Label]]:
    """{phase: bytes by label at its peak}"""
    found = {phase.name: phase_bytes(work, phase, flags, num_gpus) for phase in work.phases}
    if num_gpus > 1 and flags.shard == "none":
        found["exchanging"] = resident(work, flags, num_gpus)
        found["exchanging"]["temporary", ""] = 4 * sum(size.trained for size in sizes(work).values())
    return found


# ----------------------------------------------------------------------------------------------- flags that make it fit
def asked_flags(work: Work, num_gpus: int) -> Flags:
    """The flags as requested, with batch sizes capped at a GPU's share of the rows."""
    flags, caps = work.flags, {"micro_batch_size": work.minibatch, "rollout_batch_size": work.rollout}
    shares = {name: -(-rows // num_gpus) for name, rows in caps.items() if rows is not None}
    return replace(flags, **{name: min(getattr(flags, name), share) for name, share in shares.items()})


def flags_that_fit(work: Work, num_gpus: int, usable: float) -> tuple[Flags, bool]:
    """The cheapest flags that keep every phase within `usable` bytes, and True; else the smallest flags, and False.

    In order of cost: smaller batches, almost free while they keep a GPU busy; offloading frozen models; sharding;
    activation checkpointing (a third more time per update); batches of a few rows.
    """
    asked = asked_flags(work, num_gpus)
    has_frozen, has_trained = (any((size.trained > 0) == it for size in sizes(work).values()) for it in (False, True))
    combinations = product(
        [True] if asked.checkpoint_activations else [False, True] if has_trained else [False],
        ["none"]
        if num_gpus == 1 or "value" in work.on_policy
        else [asked.shard]
        if asked.shard != "none"
        else ["none", "fsdp"],
        [True] if asked.offload else [False, True] if has_frozen else [False],
    )
    names = ("checkpoint_activations", "shard", "offload")
    ways: list[dict[str, Any]] = [dict(zip(names, combination, strict=True)) for combination in combinations]

    def largest(flags: Flags, name: str, least: int) -> Flags | None:
        """The flags with the first of size, size / 2, ..., least for which the phases of this flag fit; None: none."""

        def with_size(size: int) -> Flags:
            change: dict[str, Any] = {name: size}
            return replace(flags, **change)

        def fits(size: int) -> bool:
            phases = [phase for phase in work.phases if phase.flag == name]
            return all(phase_bytes(work, phase, with_size(size), num_gpus).total() <= usable for phase in phases)

        size = getattr(flags, name)
        least = min(least, size)
        if not fits(size) and not fits(least):  # in this order: mostly the first answer is all that is needed
            return None
        while not fits(size):
            size = max(size // 2, least)
        return with_size(size)

    for few in (False, True):
        for way in ways:
            start = replace(asked, **way)
            if resident(work, start, num_gpus).total() > usable:
                continue
            flags: Flags | None = start
            for name, least in LEAST.items():
                if flags is not None and getattr(flags, name) is not None:
                    flags = largest(flags, name, 1 if few else least)
            if flags is not None and all(held.total() <= usable for held in peaks(work, flags, num_gpus).values()):
                return flags, True
    smallest: dict[str, Any] = {name: 1 for name in LEAST if getattr(asked, name) is not None}
    return replace(asked, **ways[-1], **smallest), False


def memory_plan(work: Work, machines: tuple[tuple[int, int], ...] = MACHINES) -> str:
    """One table per kind of machine, (number of GPUs, GB of each)."""
    lines = [
        f"GB (10^9 bytes) per GPU in {work.dtype}, rows of {work.query_length} + {work.response_length} tokens",
        f"{'':<14}{'parameters':>12}" + "".join(f"{column:>12}" for column in COLUMNS) + f"{'all':>12}",
    ]
    for num_gpus, gigabytes in machines:
        flags, fits = flags_that_fit(work, num_gpus, USABLE * gigabytes * 1e9)
        held = peaks(work, flags, num_gpus)
        name, most = max(((name, held[name].total()) for name in held), key=lambda item: item[1])
        percent = most / gigabytes / 1e7
        verdict = f"at most {most / 1e9:.1f} GB, {name}, {percent:.0f}% of a GPU"
        if not fits:
            verdict = f"does not fit, not even with {flags}: {verdict}"
            lines.append(f"{num_gpus} x {gigabytes} GB: {verdict}")
        else:
            lines.append(f"{num_gpus} x {gigabytes} GB with {flags}: {verdict}")
        for role, size in sizes(work).items():
            # each column of a model at the phase where it is largest
            cells = [max(bytes_of[column, role] for bytes_of in held.values()) for column in COLUMNS]
            lines.append(table_row(role, f"{size.all / 1e6:,.1f}M", cells, None))
        for name, bytes_of in held.items():
            cells = [sum(n for (kind, _), n in bytes_of.items() if kind == column) for column in COLUMNS]
            lines.append(table_row(name, "", cells, bytes_of.total()))
    return "\n".join([*lines, *work.notes])


def table_row(name: str, number: str, cells: list[int], total: int | None) -> str:
    words = [f"{cell / 1e9:.2f}" if cell else "-" for cell in cells] + ["" if total is None else f"{total / 1e9:.2f}"]
    return (f"  {name:<12}{number:>12}" + "".join(f"{word:>12}" for word in words)).rstrip()


# ---------------------------------------------------------------------------------------------------------- the scripts
def shape_of(flag: str, where: str, num_tokens: int) -> GPTConfig:
    """The model's shape: of a Pythia or CodeT5 by its Hub id, else from config.json of a directory or Hub id.

    Loads no weights. Raises InputError, naming `flag`, if there is no config.json or `num_tokens` exceed the positions.
    """
    published = re.fullmatch(r"EleutherAI/pythia-(.+?)(-deduped)?", where)
    if published and published[1] in PYTHIA:
        config = PYTHIA[published[1]]
    elif where in CODET5:
        config = CODET5[where]
    else:
        try:
            config = read_config(where)
        except InputError as error:
            known = ", ".join([*(f"EleutherAI/pythia-{size}" for size in PYTHIA), *CODET5])
            raise InputError(f"{flag} {str(error).rstrip('.')}; --plan knows {known} without their files.") from error
    if num_tokens > config.n_ctx:
        raise InputError(
            f"queries and responses of {num_tokens} tokens are longer than the {config.n_ctx} positions of {flag} "
            f"{where}: lower a length, or name another model."
        )
    return config


def frozen(model_class: type[GPT | ScalarModel], config: GPTConfig) -> Shape:
    return Shape(config, lambda config: model_class(config).requires_grad_(False))


def tuned(model_class: type[GPT | ScalarModel], config: GPTConfig, args: Any) -> Shape:
    def build(config: GPTConfig) -> GPT | ScalarModel:
        model = model_class(config)
        tune(model, args.tune, args.lora_rank, args.lora_alpha, args.lora_targets)
        return model

    return Shape(config, build)


def ppo_plan(args: Any) -> str:
    """What `train_ppo.py --plan` prints; args are its settings."""
    check_ranges(args)
    num_tokens = args.max_query_length + args.response_length
    config = value_config = shape_of("--sft", args.sft, num_tokens)
    models = {"policy": tuned(GPT, config, args), "reference": frozen(GPT, config)}
    shares = {"reference": args.tune == "lora", "value": args.share_trunk}
    notes = []

    def reward_shape(flag: str, where: str) -> GPTConfig:
        if Path(where).is_dir():
            return shape_of(flag, where, num_tokens)
        notes.append(f"({flag} {where} isn't there: taken to be as large as the policy)")
        return config

    for number, place in enumerate(places(args.reward_model), start=1):
        reward_config = reward_shape("--reward-model", place)
        value_config = reward_config if number == 1 and not args.share_trunk else value_config
        models["reward" if number == 1 else f"reward {number}"] = frozen(ScalarModel, reward_config)
    if args.gold is not None and ".py:" not in args.gold:  # a larger reward model
        models["gold"] = frozen(ScalarModel, reward_shape("--gold", args.gold))
    if args.value_model is not None:
        value_config = shape_of("--value-model", args.value_model, num_tokens)
    trained: tuple[str, ...] = ("policy",)
    if args.advantages == "gae":
        models["value"], trained = tuned(ScalarModel, value_config, args), ("policy", "value")
    if args.discriminator is not None:
        notes.append(f"(--discriminator {args.discriminator} is not counted)")
    if args.rollout_dtype == "int8":
        raise InputError("--plan is about GPUs, and --rollout-dtype int8 about CPUs: leave one of them out.")
    if args.sync_every > 1:
        notes.append(f"(the copy of the policy that --sync-every {args.sync_every} keeps is not counted)")
    work = Work(
        models=models,
        phases=(
            Phase("sampling", sample, ("policy",), "rollout_batch_size"),
            Phase("scoring", score, tuple(models), "rollout_batch_size"),
            Phase("updating", update, trained, "micro_batch_size"),
        ),
        flags=Flags(
            micro_batch_size=args.micro_batch_size,
            rollout_batch_size=args.rollout_batch_size,
            checkpoint_activations=args.checkpoint_activations,
            shard=args.shard,
            offload=args.offload,
        ),
        minibatch=args.batch_size // args.num_minibatches,
        rollout=args.batch_size,
        dtype=args.dtype,
        rollout_dtype=args.rollout_dtype,
        query_length=args.max_query_length,
        response_length=args.response_length,
        on_policy=tuple(role for role, is_shared in shares.items() if is_shared),
        notes=tuple(notes),
    )
    return memory_plan(work)


def work_without_rollouts(
    args: Any, models: dict[str, Shape], phases: tuple[Phase, ...], logprobs_of_all: bool
) -> Work:
    """The work of SFT or reward-model training, whose settings have the same names."""
    return Work(
        models=models,
        phases=phases,
        flags=Flags(
            micro_batch_size=args.micro_batch_size,
            checkpoint_activations=args.checkpoint_activations,
            shard=args.shard,
        ),
        minibatch=args.batch_size,
        dtype=args.dtype,
        query_length=args.max_query_length,
        response_length=args.max_response_length,
        logprobs_of_all=logprobs_of_all,
    )


def sft_plan(args: Any) -> str:
    """What `train_sft.py --plan` prints."""
    check_ranges(args)
    if args.model is None:
        raise InputError("--model None: --plan needs a shape: name a checkpoint directory or a Hub id.")
    config = shape_of("--model", args.model, args.max_query_length + args.max_response_length)
    shape = tuned(GPT, config, args)
    with torch.device("meta"):
        config = shape.build(config).config  # with the width of the adapters, which depends on the number of blocks
    phases = (
        Phase("updating", update, ("policy",), "micro_batch_size"),
        Phase("sampling", sample, ("policy",), None, args.num_samples),
    )
    models = {"policy": replace(shape, config=config)}
    return memory_plan(work_without_rollouts(args, models, phases, args.loss_on == "all"))


def rm_plan(args: Any) -> str:
    """What `train_rm.py --plan` prints."""
    check_ranges(args)
    if args.loss == "dpo":
        raise InputError("--plan can't estimate --loss dpo: use that of train_sft.py and add the reference's weights.")
    config = shape_of("--sft", args.sft, args.max_query_length + args.max_response_length)

    def linear(config: GPTConfig) -> ScalarModel:
        model = ScalarModel(config)
        train_linear_layers(model)
        return model

    shape = Shape(config, linear) if args.trainable == "linear" else tuned(ScalarModel, config, args)
    responses = 1 if args.loss == "regression" else 2
    phases = (
        Phase("updating", update, ("reward",), "micro_batch_size", 1, responses),
        Phase("validating", score, ("reward",), "micro_batch_size", 4, responses),
    )
    return memory_plan(work_without_rollouts(args, {"reward": shape}, phases, logprobs_of_all=True))
