"""What a run takes of a GPU's memory, on paper: `python train_ppo.py tldr --sft EleutherAI/pythia-1b-deduped --plan`.

Weights, gradients and AdamW are arithmetic: float32, so 4, 4 and 8 bytes a parameter that is trained. What the passes
take is no formula: the models' own code runs once on tensors that have a shape and no memory (fake tensors: meta
tensors that say which device they stand for), and `Live` adds up the storages that are alive at each moment. So
activation checkpointing, autocast's copies of the weights and an LM head that never holds all logits are in it as they
are in the code. Each phase of a run has a peak of its own:

    sampling     KV cache and prefill of --rollout-batch-size rows
    scoring      the same rows through all models, without gradients
    updating     forward and backward of --micro-batch-size rows, all of them as long as they may be
    exchanging   the gradients once more: several GPUs add them up in one piece

How it is spread over W GPUs is arithmetic again, of what these flags mean:

    --shard none   everything is on each GPU
    --shard fsdp   1/W of weights, gradients and optimizer, of the frozen models too. Whole, in the type of the
                   computation: embedding and head, two blocks (one computes, the next is on its way), and of two blocks
                   the gradients, which leave in float32. What samples or validates is a whole float32 copy
    --offload      frozen models wait in the CPU's memory and come one at a time

The fake tensors are on a CPU. CUDA's attention keeps the same tensors for the backward pass; its LM head works on 64 MB
of logits at a time where the CPU's takes 8. Not counted: CUDA's context and libraries, NCCL's buffers, fragmentation;
USABLE leaves room for them.
"""

import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels import linear_logprobs
from nanorlhf.checkpoint import read_config
from nanorlhf.cli import check_ranges
from nanorlhf.errors import InputError
from nanorlhf.generate import draw
from nanorlhf.model import GPT, GPTConfig, KVCache, ScalarModel
from nanorlhf.peft import tune
from nanorlhf.training.optimizer import train_linear_layers

MACHINES = ((8, 80), (1, 141))  # GPUs of a node, GB of each
USABLE = 0.9  # of a GPU's nominal size
COLUMNS = ("weights", "gradients", "optimizer", "copies", "KV-cache", "activations", "head", "temporary")

PYTHIA = {  # Biderman et al. 2023, Table 1, and the config.json of EleutherAI/pythia-{1b,2.8b,6.9b}, deduped or not
    size: GPTConfig(
        vocab_size=vocab_size,  # GPT-NeoX pads it to a multiple of 128 times the GPUs that share a layer
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


# ------------------------------------------------------------------------------------------------ what is alive, when
class Live(TorchDispatchMode):
    """Bytes of the storages that operations within it made and that are still alive, by label, and their peak.

    A label is (column, role) and stays with a storage from the moment it was made; a weight that autocast copies has
    ("copies", role). Columns in `ignored` are not counted. Fake and real tensors are counted alike.
    """

    def __init__(self, ignored: tuple[str, ...] = ()):
        super().__init__()
        self.ignored, self.label = ignored, ("other", "")
        self.bytes, self.peak = Counter(), Counter()
        self.labels = weakref.WeakKeyDictionary()  # storage: its label

    @contextmanager
    def labelled(self, column: str, role: str = "") -> Iterator[None]:
        before, self.label = self.label, (column, role)
        yield
        self.label = before

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs)):  # views and writes in place make no storage
            if isinstance(tensor, Tensor):
                self.labels.setdefault(tensor.untyped_storage(), ("other", ""))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self.labels:
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


# ----------------------------------------------------------------------------------------------- what a script does
@dataclass(frozen=True, kw_only=True)
class Flags:
    """What may change to make a run fit; the result stays the same."""

    micro_batch_size: int
    rollout_batch_size: int | None = None  # None: the script has no such flag
    checkpoint_activations: bool = False
    shard: str = "none"
    offload: bool = False

    def __str__(self) -> str:
        words = [f"--micro-batch-size {self.micro_batch_size}"]
        words += [f"--rollout-batch-size {self.rollout_batch_size}"] if self.rollout_batch_size else []
        words += ["--checkpoint-activations"] if self.checkpoint_activations else []
        words += ["--shard fsdp"] if self.shard == "fsdp" else []
        return " ".join(words + (["--offload"] if self.offload else []))


@dataclass(frozen=True, eq=False)
class Phase:
    name: str
    run: Callable[..., None]  # update, sample or score
    roles: tuple[str, ...]  # whose models take part, in this order
    flag: str | None  # the one that says of how many examples; None: of one
    rows: int = 1  # of an example


@dataclass(frozen=True, eq=False, kw_only=True)
class Work:
    models: dict[str, Callable[[], GPT | ScalarModel]]  # by role; called, it makes one with requires_grad set
    phases: tuple[Phase, ...]
    flags: Flags  # as asked for
    minibatch: int  # examples of an optimizer step, over all GPUs
    rollout: int | None = None  # and of a rollout
    dtype: str
    query_length: int
    response_length: int
    logprobs_of_all: bool = False  # of the query's tokens too
    notes: tuple[str, ...] = ()


def autocast(work: Work) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=work.dtype == "bfloat16")


def forward(live: Live, role: str, model: GPT | ScalarModel, rows: int, work: Work) -> Tensor:
    """Log-probabilities (b * S,), or values or scores (b, S), of so many rows as long as they may be."""
    L = work.query_length + work.response_length
    ids, mask = torch.zeros((rows, L), dtype=torch.long), torch.ones((rows, L), dtype=torch.bool)
    last = L if work.logprobs_of_all else work.response_length + 1
    is_kept = torch.is_grad_enabled()
    with live.labelled(*(("activations", role) if is_kept else ("temporary",))):
        output = model(ids, mask, last=last)[:, :-1]  # (b, S, C) or (b, S)
    if isinstance(model, ScalarModel):
        return output
    with live.labelled(*(("head", role) if is_kept else ("temporary",))):
        # as `response_logprobs` where all tokens count: which of them do is nothing that a shape could say
        hidden = output.flatten(0, 1)  # a copy, as picking them is
        labels = torch.zeros(len(hidden), dtype=torch.long)
        return linear_logprobs(hidden, model.lm_head.weight, labels, model.head_bias)[0]


def update(live: Live, models: dict[str, GPT | ScalarModel], rows: int, work: Work) -> None:
    """A micro-batch behind the first: gradients are there already."""
    total = torch.zeros(())
    for role, model in models.items():
        with live.labelled("gradients", role):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        with autocast(work):
            output = forward(live, role, model, rows, work)
        total = total + output.sum()
    with live.labelled("temporary"):
        total.backward()


@torch.no_grad()
def sample(live: Live, models: dict[str, GPT], rows: int, work: Work) -> None:
    """Prefill and one decode step."""
    ((role, model),) = models.items()
    query = torch.zeros((rows, work.query_length), dtype=torch.long)
    mask, uniforms = torch.ones_like(query, dtype=torch.bool), torch.zeros((rows, 1), dtype=torch.float64)
    dtype = torch.bfloat16 if work.dtype == "bfloat16" else torch.float32
    with live.labelled("KV-cache", role):
        cache = KVCache(model.config, mask, work.response_length, dtype)
    with live.labelled("temporary"), autocast(work):
        for ids in (query, query[:, -1:]):
            logits = model.logits(model(ids, mask, cache, last=1)[:, -1]).float()  # (b, V)
            draw((logits - logits.logsumexp(-1, keepdim=True)).exp_(), uniforms)


@torch.no_grad()
def score(live: Live, models: dict[str, GPT | ScalarModel], rows: int, work: Work) -> None:
    with autocast(work):  # one for all: copies of the weights that are trained stay until its end
        for role, model in models.items():
            forward(live, role, model, rows, work)


# ------------------------------------------------------------------------------------------------- bytes of one GPU
@cache
def passes(work: Work, phase: Phase, rows: int, checkpoint_activations: bool, copies: bool) -> Counter:
    """What a phase takes at its peak beyond weights and gradients: bytes by (column, role)."""
    ignored = ("weights", "gradients") if copies else ("weights", "gradients", "copies")
    with FakeTensorMode(), Live(ignored) as live:
        models = {}
        for role in phase.roles:
            with live.labelled("weights", role):
                models[role] = work.models[role]()
            models[role].transformer.checkpoint_activations = checkpoint_activations
        phase.run(live, models, rows, work)
    return live.peak


@dataclass(frozen=True)
class Size:
    """Numbers of parameters."""

    all: int
    trained: int
    block: int
    rest: int  # in no block


@cache
def sizes(work: Work) -> dict[str, Size]:
    found = {}
    for role, build in work.models.items():
        with torch.device("meta"):
            model = build()
        number = sum(parameter.numel() for parameter in model.parameters())
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        blocks = model.transformer.blocks
        block = sum(parameter.numel() for parameter in blocks[0].parameters())
        found[role] = Size(number, trained, block, number - len(blocks) * block)
    return found


def resident(work: Work, flags: Flags, num_gpus: int) -> Counter:
    """What is there from the first update on: bytes by (column, role)."""
    share, held = num_gpus if flags.shard == "fsdp" else 1, Counter()
    for role, size in sizes(work).items():
        held["weights", role] = 0 if flags.offload and not size.trained else 4 * size.all // share
        held["gradients", role] = 4 * size.trained // share
        held["optimizer", role] = 8 * size.trained // share  # AdamW's two moments
    return held


def phase_bytes(work: Work, phase: Phase, flags: Flags, num_gpus: int) -> Counter:
    """What is alive at the peak of a phase, the resident part included: bytes by (column, role)."""
    rows = phase.rows * (getattr(flags, phase.flag) if phase.flag else 1)
    is_sharded, taking_part = flags.shard == "fsdp", {role: sizes(work)[role] for role in phase.roles}
    held = resident(work, flags, num_gpus)
    checkpoint_activations = flags.checkpoint_activations and phase.run is update
    held += passes(work, phase, rows, checkpoint_activations, not is_sharded)
    if is_sharded:
        width = 2 if work.dtype == "bfloat16" else 4
        block = max(size.block for size in taking_part.values())
        held["copies", ""] += 2 * block * width
        for role, size in taking_part.items():
            is_whole = phase.run is not update and (role == "policy" or phase.name == "validating")
            # `distributed.plain` gathers float32, of which autocast keeps a copy
            held["copies", role] += size.all * (4 if width == 4 else 6) if is_whole else size.rest * width
        if phase.run is update:
            held["temporary", ""] += 2 * block * (width + 4)
    elif flags.offload:
        held["copies", ""] += max((4 * size.all for size in taking_part.values() if not size.trained), default=0)
    return held


def peaks(work: Work, flags: Flags, num_gpus: int) -> dict[str, Counter]:
    """{phase: bytes by (column, role) at its peak}"""
    found = {phase.name: phase_bytes(work, phase, flags, num_gpus) for phase in work.phases}
    if num_gpus > 1 and flags.shard == "none":
        found["exchanging"] = resident(work, flags, num_gpus)
        found["exchanging"]["temporary", ""] = 4 * sum(size.trained for size in sizes(work).values())
    return found


# ---------------------------------------------------------------------------------------------- flags that make it fit
def asked_flags(work: Work, num_gpus: int) -> Flags:
    """No more rows at once than a GPU's share."""
    flags = replace(work.flags, micro_batch_size=min(work.flags.micro_batch_size, -(-work.minibatch // num_gpus)))
    if work.rollout is None:
        return flags
    return replace(flags, rollout_batch_size=min(flags.rollout_batch_size, -(-work.rollout // num_gpus)))


def flags_that_fit(work: Work, num_gpus: int, usable: float) -> tuple[Flags, bool]:
    """The flags that cost least of those that keep every phase below `usable` bytes, and True; or the last resort.

    Smaller batches cost next to nothing while they keep a GPU busy; then come frozen models on the CPU, shards,
    activation checkpointing (a third more time in the update), and batches of a few rows.
    """
    asked = asked_flags(work, num_gpus)
    has_frozen = any(size.trained == 0 for size in sizes(work).values())
    ways = product(
        [True] if asked.checkpoint_activations else [False, True],
        ["fsdp"] if asked.shard == "fsdp" and num_gpus > 1 else ["none", "fsdp"] if num_gpus > 1 else ["none"],
        [True] if asked.offload else [False, True] if has_frozen else [False],
    )
    ways = [dict(zip(("checkpoint_activations", "shard", "offload"), way, strict=True)) for way in ways]

    def largest(flags: Flags, name: str, least: int) -> int | None:
        """The first of size, size / 2, size / 4, ... with which the phases that it rules fit."""

        def fits(size: int) -> bool:
            ruled = [phase for phase in work.phases if phase.flag == name]
            some = replace(flags, **{name: size})
            return all(phase_bytes(work, phase, some, num_gpus).total() <= usable for phase in ruled)

        size = getattr(flags, name)
        least = min(least, size)
        if not fits(least):
            return None
        while not fits(size):
            size = max(size // 2, least)
        return size

    for few in (False, True):
        for way in ways:
            flags = replace(asked, **way)
            if resident(work, flags, num_gpus).total() > usable:
                continue
            for name, least in (("micro_batch_size", 1 if few else 4), ("rollout_batch_size", 1 if few else 16)):
                if flags is not None and getattr(flags, name) is not None:
                    size = largest(flags, name, least)
                    flags = size and replace(flags, **{name: size})
            if flags and all(held.total() <= usable for held in peaks(work, flags, num_gpus).values()):
                return flags, True
    return replace(asked, **ways[-1], micro_batch_size=1, rollout_batch_size=work.rollout and 1), False


def memory_plan(work: Work, machines: tuple[tuple[int, int], ...] = MACHINES) -> str:
    """A table for each kind of machine: (GPUs, GB of each)."""
    lines = [
        f"GB (10^9 bytes) a GPU in {work.dtype}, rows of {work.query_length} + {work.response_length} tokens",
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
            # a model's own columns at the peaks of the phases that have them
            cells = [max(bytes_of[column, role] for bytes_of in held.values()) for column in COLUMNS]
            lines.append(table_row(role, f"{size.all / 1e6:,.1f}M", cells, None))
        for name, bytes_of in held.items():
            cells = [sum(n for (kind, _), n in bytes_of.items() if kind == column) for column in COLUMNS]
            lines.append(table_row(name, "", cells, bytes_of.total()))
    return "\n".join([*lines, *work.notes])


def table_row(name: str, number: str, cells: list[int], total: int | None) -> str:
    words = [f"{cell / 1e9:.2f}" if cell else "-" for cell in cells] + ["" if total is None else f"{total / 1e9:.2f}"]
    return (f"  {name:<12}{number:>12}" + "".join(f"{word:>12}" for word in words)).rstrip()


# ------------------------------------------------------------------------------------------------------- the scripts
def shape_of(flag: str, where: str, num_tokens: int) -> GPTConfig:
    """A published shape by its Hub id, or config.json of a directory or Hub id; the weights are left alone."""
    published = re.fullmatch(r"EleutherAI/pythia-(.+?)(-deduped)?", where)
    if published and published[1] in PYTHIA:
        config = PYTHIA[published[1]]
    else:
        try:
            config = read_config(where)
        except InputError as error:
            known = ", ".join(f"EleutherAI/pythia-{size}" for size in PYTHIA)
            raise InputError(f"{flag} {str(error).rstrip('.')}; --plan knows {known} without their files.") from error
    if num_tokens > config.n_ctx:
        raise InputError(
            f"queries and responses of {num_tokens} tokens are longer than the {config.n_ctx} positions of {flag} "
            f"{where}: lower a length, or name another model."
        )
    return config


def frozen(model: GPT | ScalarModel) -> GPT | ScalarModel:
    return model.requires_grad_(False)


def ppo_plan(args: Any) -> str:
    """What `train_ppo.py --plan` prints; args are its settings."""
    check_ranges(args)
    num_tokens = args.max_query_length + args.response_length
    config, notes = shape_of("--sft", args.sft, num_tokens), []
    value_config, models = config, {"policy": lambda: GPT(config), "reference": lambda: frozen(GPT(config))}
    if args.reward_model is not None:
        if Path(args.reward_model).is_dir():
            value_config = reward_config = shape_of("--reward-model", args.reward_model, num_tokens)
        else:
            reward_config = config
            notes.append(f"(--reward-model {args.reward_model} isn't there: taken to be as large as the policy)")
        models["reward"] = lambda: frozen(ScalarModel(reward_config))
    if args.value_model is not None:
        value_config = shape_of("--value-model", args.value_model, num_tokens)
    models["value"] = lambda: ScalarModel(value_config)
    if args.objective != "ppo":
        raise InputError(f"--plan does not know the passes of --objective {args.objective}: leave one of them out.")
    if args.discriminator is not None:
        notes.append(f"(--discriminator {args.discriminator} is not counted)")
    work = Work(
        models=models,
        phases=(
            Phase("sampling", sample, ("policy",), "rollout_batch_size"),
            Phase("scoring", score, tuple(models), "rollout_batch_size"),
            Phase("updating", update, ("policy", "value"), "micro_batch_size"),
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
        query_length=args.max_query_length,
        response_length=args.response_length,
        notes=tuple(notes),
    )
    return memory_plan(work)


def work_without_rollouts(
    args: Any, models: dict[str, Callable[[], GPT | ScalarModel]], phases: tuple[Phase, ...], logprobs_of_all: bool
) -> Work:
    """Of the first two stages, whose settings have the same names."""
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
        raise InputError("--model None: --plan needs a shape: name a checkpoint or a Hub id.")
    config = shape_of("--model", args.model, args.max_query_length + args.max_response_length)

    def policy() -> GPT:
        model = GPT(config)
        tune(model, args.tune)
        return model

    phases = (
        Phase("updating", update, ("policy",), "micro_batch_size"),
        Phase("sampling", sample, ("policy",), None, args.num_samples),
    )
    return memory_plan(work_without_rollouts(args, {"policy": policy}, phases, args.loss_on == "all"))


def rm_plan(args: Any) -> str:
    """What `train_rm.py --plan` prints, of a reward model."""
    check_ranges(args)
    if args.loss == "dpo":
        raise InputError("--plan does not know --loss dpo: ask train_sft.py, and add the weights of the reference.")
    config = shape_of("--sft", args.sft, args.max_query_length + args.max_response_length)

    def reward() -> ScalarModel:
        model = ScalarModel(config)
        if args.trainable == "linear":
            train_linear_layers(model)
        return model

    rows = 1 if args.loss == "regression" else 2
    phases = (
        Phase("updating", update, ("reward",), "micro_batch_size", rows),
        Phase("validating", score, ("reward",), "micro_batch_size", 4 * rows),
    )
    return memory_plan(work_without_rollouts(args, {"reward": reward}, phases, logprobs_of_all=True))
