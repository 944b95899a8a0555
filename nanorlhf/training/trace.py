"""--trace N: save the tensors of N responses at a few updates, for nanorlhf.report.microscope.

    OUT/trace/update-00000012.safetensors     one file per traced update

n responses of T tokens, E epochs, the first traced update's N responses ("fixed"):

    index, scores, eos_index, score_index, has_eos                                    (n,)
    query (n, Q), response, actions, states, in_loss                                  (n, T)
    logprobs, ref_logprobs, sampled_logprobs, token_rewards, advantages               (n, T)
    rewards, returns                                         PPO and REINFORCE++:     (n, T)
    values, raw_advantages                                                   PPO:     (n, T)
    new_logprobs, and with a value model new_values; NaN: not used in this epoch      (E, n, T)
    fixed_logprobs    the policy before this update, of the fixed responses           (N, T)

They are copies of the run's tensors, except for REINFORCE++'s rewards and returns, which are recomputed as in
train_grpo.py. The file's metadata contains `about` as JSON: texts, settings, the statistics used in whitening, and
`answers`, a new response to each fixed query.
"""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from kernels import gae
from nanorlhf import distributed
from nanorlhf.batch import Batch
from nanorlhf.checkpoint import write_tensors
from nanorlhf.dataset import field
from nanorlhf.errors import InputError
from nanorlhf.files import atomic, open_regular, parse_json, to_json
from nanorlhf.generate import for_sampling, generate
from nanorlhf.grpo import find_policy_loss
from nanorlhf.logprobs import response_logprobs
from nanorlhf.model import GPT
from nanorlhf.tokenizer import Tokenizer
from nanorlhf.training.run import Run
from nanorlhf.training.settings import RewardArgs
from nanorlhf.training.update_metrics import response_kl

MOST_UPDATES = 10
BATCH_FIELDS = (
    *("index", "query", "response", "actions", "states", "in_loss", "eos_index", "score_index", "has_eos"),
    *("logprobs", "ref_logprobs", "sampled_logprobs", "token_rewards", "advantages"),
)
PER_ROW = ("index", "scores", "eos_index", "score_index", "has_eos")
MASKS = ("actions", "states", "in_loss", "has_eos")
IDS = ("index", "query", "response", "eos_index", "score_index")
WITH_RETURNS = ("rewards", "returns")
WITH_VALUES = (*WITH_RETURNS, "values", "raw_advantages", "new_values")
NUMBERS = ("kl_coef", *(f"{name}_{suffix}" for name in ("advantage", "return", "reward") for suffix in ("mean", "var")))
"""fields of `about` that may be NaN or infinite in a diverged run"""
Tensors = dict[str, Tensor]


class Trace:
    """Records a few responses of a few updates.

    samples_per_query: rows of a rollout that belong to one query; all rows of a group are traced.

        trace = Trace(args, run, num_updates, policy, tokenizer)
        for update in run.steps(num_updates):
            trace.rollout(update, batch, scores, kl_coef)     before the epochs
            ...                                               UpdateStatistics.add_tokens fills batch.trace
            trace.write(batch)                                after them
    """

    def __init__(
        self,
        args: RewardArgs,
        run: Run,
        num_updates: int,
        policy: GPT,
        tokenizer: Tokenizer,
        samples_per_query: int = 1,
    ):
        if args.trace > args.batch_size:
            raise InputError(f"--trace {args.trace}: a rollout has only --batch-size {args.batch_size} responses.")
        self.args, self.run, self.policy, self.tokenizer = args, run, policy, tokenizer
        self.group_size = samples_per_query
        self.num_rows = -(-args.trace // samples_per_query) * samples_per_query
        self.updates = traced_updates(num_updates)
        self.pending: dict[str, Any] = {}  # the arguments of `rollout`
        self.fixed: Tensors = {}  # query, response, actions of the first traced update's responses
        if run.first_step > self.updates[0]:  # resumed
            tensors, _ = distributed.from_first(lambda: read_trace(trace_path(args.out, self.updates[0])))
            self.fix(tensors)

    def rollout(
        self,
        update: int,
        batch: Batch,
        scores: Tensor,
        kl_coef: float,
        rewards: Tensor | None = None,
        raw_advantages: Tensor | None = None,
    ) -> None:
        """Call before the epochs, with scores (B,), and rewards and advantages before whitening (B, T), as in GAE."""
        if update not in self.updates:
            return
        batch.trace = []
        self.pending = {"update": update, "scores": scores, "kl_coef": kl_coef}
        if rewards is not None:
            self.pending |= {"rewards": rewards, "raw_advantages": raw_advantages}
        if self.fixed:
            self.pending |= {"fixed_logprobs": self.read_fixed(), "answers": self.answer()}

    def write(self, batch: Batch) -> None:
        """Call after the epochs, on every rank; rank 0 writes."""
        if batch.trace is None:
            return
        tensors, about = self.rollout_tensors(batch)
        rows = self.choose(tensors, batch)
        about |= {"queries": [batch.records[i]["query"] for i in rows], "texts": self.texts(tensors, rows)}
        tensors = {name: x[:, rows] if x.ndim == 3 else x[rows] for name, x in tensors.items()}
        if not self.fixed:
            self.fix(tensors)
        fixed_logprobs = self.pending.get("fixed_logprobs", tensors["logprobs"])
        answers = self.pending.get("answers", tensors["response"])
        about["answers"] = [self.tokenizer.decode(ids) for ids in answers.tolist()]
        if self.run.main:
            self.run.opened()
            path = trace_path(self.args.out, self.pending["update"])
            save_trace(path, tensors | {"fixed_logprobs": fixed_logprobs.cpu()}, about)
        self.pending = {}

    def rollout_tensors(self, batch: Batch) -> tuple[Tensors, dict[str, Any]]:
        """Return the tensors of all rows on the CPU, and the `about` that is saved with them."""
        values = dict(self.pending)
        about = {name: values.pop(name) for name in ("update", "kl_coef")}
        for name in ("fixed_logprobs", "answers"):
            values.pop(name, None)
        values |= {name: getattr(batch, name) for name in (*BATCH_FIELDS, "values", "returns") if hasattr(batch, name)}
        tensors = {name: x.detach().cpu() for name, x in values.items()}
        tensors |= self.epochs(batch)
        tensors = {name: x.float() if x.is_floating_point() else x for name, x in tensors.items()}
        about |= {"algorithm": getattr(self.args, "algorithm", "ppo"), "settings": asdict(self.args)}
        if about["algorithm"] == "reinforce++":
            rewards = unwhitened_rewards(tensors, about["kl_coef"])
            returns, _ = gae(rewards, torch.zeros_like(rewards), about["settings"]["gamma"], 1.0)
            tensors |= {"rewards": rewards, "returns": returns}
            about |= whitening("return", returns[tensors["actions"]])
        if "raw_advantages" in tensors:
            about |= whitening("advantage", tensors["raw_advantages"][tensors["actions"]])
        if about["settings"].get("whiten_rewards"):
            about |= whitening("reward", unwhitened_rewards(tensors, about["kl_coef"])[tensors["states"]])
        return tensors, about

    def epochs(self, batch: Batch) -> Tensors:
        """Return new_logprobs and, with a value model, new_values (E, B, T) of all ranks.

        0 where a token does not count, NaN in rows that no step of the epoch used.
        """
        epochs = batch.trace or []
        pieces: list[tuple[int, Tensor, list[Tensor]]] = []  # of this rank: epoch, rows, model outputs
        for epoch, micro_batches in enumerate(epochs):
            for index, *read in micro_batches:
                pieces.append((epoch, index.cpu(), [x.float().cpu() for x in read if x is not None]))
        names = ("new_logprobs", "new_values") if hasattr(batch, "values") else ("new_logprobs",)
        T = batch.response.size(1)
        outputs = {name: torch.full((len(epochs), len(batch), T), torch.nan) for name in names}
        for epoch, rows, readings in distributed.all_gather_objects(pieces):
            for name, x in zip(names, readings, strict=True):
                outputs[name][epoch, rows] = F.pad(x, (0, T - x.size(1)))
        return outputs

    def choose(self, tensors: Tensors, batch: Batch) -> list[int]:
        """Choose the rows with the largest |advantage| and KL, the most clipping and no EOS, then the first rows."""
        actions = tensors["actions"]
        kl = response_kl(batch)  # (B,)
        sizes = torch.where(actions, tensors["advantages"].abs(), 0.0).amax(1)  # (B,)
        clip_range = self.args.clip_range  # type: ignore[attr-defined]  # both scripts have it
        policy_loss = find_policy_loss(getattr(self.args, "algorithm", "ppo"))
        counted = actions & tensors["in_loss"]
        old = tensors[ratio_to(self.args.sampler.correction)]
        _, is_clipped = policy_loss(tensors["new_logprobs"], old, tensors["advantages"], counted, clip_range)
        clipped = is_clipped.sum((0, 2))  # (B,)
        cut = (~tensors["has_eos"]).nonzero().flatten()[:1].tolist()
        wanted = [sizes.argmax().item(), clipped.argmax().item(), *cut, kl.argmax().item(), *range(len(batch))]
        groups = list(dict.fromkeys(int(row) // self.group_size for row in wanted))
        groups = sorted(groups[: self.num_rows // self.group_size])
        return [group * self.group_size + i for group in groups for i in range(self.group_size)]

    def texts(self, tensors: Tensors, rows: list[int]) -> list[list[str]]:
        """Return the text of each response token up to the end, EOS as [EOS]."""
        tokenizer, texts = self.tokenizer, []
        for row in rows:
            ids = tensors["response"][row, : int(tensors["eos_index"][row]) + 1].tolist()
            texts.append(["[EOS]" if i == tokenizer.eos_id else tokenizer.decode([i]) for i in ids])
        return texts

    def fix(self, tensors: Tensors) -> None:
        """Keep the responses whose log-probabilities every later traced update computes again."""
        device = self.policy.lm_head.weight.device
        self.fixed = {name: tensors[name].to(device) for name in ("query", "response", "actions")}

    @torch.no_grad()
    def read_fixed(self) -> Tensor:
        """Return the current policy's log-probabilities (N, T) of the fixed responses."""
        query, response, actions = self.fixed.values()
        real = torch.cat((query != self.tokenizer.pad_id, actions), dim=1)
        with torch.autocast(query.device.type, torch.bfloat16, enabled=self.args.dtype == "bfloat16"):
            logprobs, _ = response_logprobs(
                self.policy, torch.cat((query, response), dim=1), real, actions, self.args.temperature
            )
        return logprobs.float()

    def answer(self) -> Tensor:
        """Sample the current policy's responses (N, T) to the fixed queries, always with the same random numbers."""
        query, response, _ = self.fixed.values()
        generator = torch.Generator().manual_seed(self.args.seed)
        uniforms = torch.rand(response.shape, generator=generator, dtype=torch.float64)
        T = response.size(1)
        with torch.autocast(query.device.type, torch.bfloat16, enabled=self.args.dtype == "bfloat16"):
            model = for_sampling(distributed.unshard(self.policy), "same")
            sampled, _ = generate(
                model, query, query != self.tokenizer.pad_id, T, self.args.temperature, eos_id=self.tokenizer.eos_id,
                pad_id=self.tokenizer.pad_id, uniforms=uniforms, stop_ids=self.tokenizer.stop_ids,
            )  # fmt: skip
        return sampled


def ratio_to(correction: str) -> str:
    """Return the tensor of a trace that the ratio is taken to, with --sampler.correction `correction`."""
    return "sampled_logprobs" if correction == "sampler_logprobs" else "logprobs"


def unwhitened_rewards(tensors: Tensors, kl_coef: float) -> Tensor:
    """Return the rewards (B, T): token reward minus beta times KL, plus the score at the response's score_index.

    kl_coef: beta. `tensors` are fields of Batch and scores (B,); log-probabilities may be NaN outside `actions`.
    """
    kl = torch.where(tensors["actions"], tensors["logprobs"] - tensors["ref_logprobs"], 0.0)
    rewards = tensors["token_rewards"] - kl_coef * kl
    rewards[torch.arange(len(rewards)), tensors["score_index"]] += tensors["scores"]
    return rewards


def whitening(name: str, counted: Tensor) -> dict[str, float]:
    """Return the statistics used by `whiten`, from the values that count in the rollout."""
    return {f"{name}_mean": counted.mean().item(), f"{name}_var": counted.var(correction=0).item()}


def traced_updates(num_updates: int) -> list[int]:
    """Return the first update, the last, and evenly spaced ones in between.

    >>> traced_updates(3), traced_updates(100)
    ([0, 1, 2], [0, 11, 22, 33, 44, 55, 66, 77, 88, 99])
    """
    count = min(MOST_UPDATES, num_updates)
    return sorted({round(i * (num_updates - 1) / max(1, count - 1)) for i in range(count)})


def trace_path(out: Path, update: int) -> Path:
    return out / "trace" / f"update-{update:08}.safetensors"


def save_trace(path: Path, tensors: Tensors, about: dict[str, Any]) -> None:
    """Write a trace atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as temporary:
        contiguous = {name: x.clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}
        write_tensors(contiguous, temporary, path.parents[1] / "args.json", {"about": to_json(about, default=str)})


AGAIN = "delete it, or train again with --trace"  # advice about a damaged file


def read_trace(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors of one traced update, with the shapes and kinds listed above, and `about`.

    Raises InputError for a damaged file.
    """
    with open_regular(path) as file:
        content = file.read()
    try:
        tensors = load(content)  # safe_open would leak a kilobyte per file
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise InputError(f"{path}: damaged ({error}): {AGAIN}.") from error
    about = parse_json(metadata.get("about", "").encode(), f"{path}: about")
    if not isinstance(about, dict):
        raise InputError(f"{path}: about must be an object: {AGAIN}.")
    where = f"{path}: about"
    algorithm = field(about, "algorithm", str, where)
    needed = {*BATCH_FIELDS, "scores", "new_logprobs", "fixed_logprobs"}
    needed |= {"ppo": {*WITH_VALUES}, "reinforce++": {*WITH_RETURNS}}.get(algorithm, set())
    if missing := sorted(needed - tensors.keys()):
        raise InputError(f"{path}: missing tensor {missing[0]}: {AGAIN}.")
    n, T = check_tensors(tensors, needed, path)
    if n and T:
        check_about(about, n, T, len(tensors["fixed_logprobs"]), where)
    return tensors, about


def check_tensors(tensors: Tensors, needed: set[str], path: Path) -> tuple[int, int]:
    """Check shapes, kinds and indices against the list above, and return n and T."""
    n, T = tensors["response"].shape if tensors["response"].ndim == 2 else (-1, -1)
    for name in sorted(needed):
        x = tensors[name]
        if name == "query":
            shape = (n, *x.shape[-1:])
        elif name == "fixed_logprobs":
            shape = (*x.shape[:1], T)
        elif name.startswith("new_"):
            shape = (*tensors["new_logprobs"].shape[:1], n, T)
        else:
            shape = (n,) if name in PER_ROW else (n, T)
        kind = "bool" if x.dtype == torch.bool else "float" if x.is_floating_point() else "int"
        wanted = "bool" if name in MASKS else "int" if name in IDS else "float"
        if tuple(x.shape) != shape:
            raise InputError(f"{path}: {name}: expected shape {shape}, got {tuple(x.shape)}: {AGAIN}.")
        if kind != wanted:
            raise InputError(f"{path}: {name}: expected {wanted}, got {kind}: {AGAIN}.")
    if not len(tensors["new_logprobs"]):
        raise InputError(f"{path} has no epochs: {AGAIN}.")
    if not (n and T):  # no tokens, so nothing left to check
        return n, T
    if not (tensors["actions"] & tensors["states"])[:, 0].all():
        raise InputError(f"{path}: a response has no first token: {AGAIN}.")
    for name in ("eos_index", "score_index"):
        if not ((0 <= tensors[name]) & (tensors[name] < T)).all():
            raise InputError(f"{path}: {name} must be from 0 to {T - 1}: {AGAIN}.")
    return n, T


def check_about(about: dict[str, Any], n: int, T: int, num_answers: int, where: str) -> None:
    """Check `about` for n responses of T tokens, and replace null by NaN."""
    field(about, "update", int, where)
    # JSON stores NaN and infinity as null
    about |= {name: math.nan for name in NUMBERS if name in about and about[name] is None}
    if not isinstance(about.get("kl_coef"), float):
        field(about, "kl_coef", float, where)
    settings = field(about, "settings", dict, where)
    whitened = {"ppo": ("advantage",), "reinforce++": ("return",)}.get(about["algorithm"], ())
    for name in (*whitened, *(("reward",) if settings.get("whiten_rewards") else ())):
        for statistic in (f"{name}_mean", f"{name}_var"):
            if not isinstance(about.get(statistic), float):
                raise InputError(f"{where}: the field {statistic!r} must be a number: {AGAIN}.")
    lengths = {"queries": n, "texts": n, "answers": num_answers}
    kinds: dict[str, Any] = {"queries": list[str], "texts": list[list[str]], "answers": list[str]}
    for name, kind in kinds.items():
        if len(field(about, name, kind, where)) != lengths[name]:
            raise InputError(f"{where}: {name} must have {lengths[name]} items: {AGAIN}.")
    if any(len(texts) > T for texts in about["texts"]):
        raise InputError(f"{where}: texts must have at most {T} tokens per response: {AGAIN}.")


def read_traces(run: Path) -> list[tuple[Tensors, dict[str, Any]]]:
    """Return all traced updates of a run, in order. Raises InputError if there are none."""
    paths = sorted((run / "trace").glob("update-*.safetensors"))
    if not paths:
        raise InputError(f"{run} has no trace: train with --trace 4.")
    return [read_trace(path) for path in paths]
