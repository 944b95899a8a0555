"""What all training programs share of a run: its directory, progress bar, saving, stopping and resuming.

    args.json         the settings          metrics.jsonl   one object per logged step
    samples.jsonl     what the model said   summary.json    the final numbers; where it exists, the run is finished
    state/            what --resume loads (resume.py)       events.out.tfevents.*   TensorBoard

The checkpoint itself (config.json, model.safetensors, tokenizer.json) lies beside them, and with --trackio the metrics
go to a project of trackio too. Only rank 0 writes.
"""

import functools
import json
import os
import re
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from nanorlhf import distributed, launch
from nanorlhf.checkpoint import round_products, save, to_disk
from nanorlhf.cli import check_ranges
from nanorlhf.dataset import write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.peft import has_updates, merge, save_updates
from nanorlhf.tokenizer import Tokenizer
from nanorlhf.training.hub import check_hub_id, model_card, push
from nanorlhf.training.resume import forget, load_state, save_state, states
from nanorlhf.training.run_directory import whole_rows
from nanorlhf.training.signals import StopSignals

Main = Callable[[Any], dict[str, float]]
OF_A_RUN = ("metrics.jsonl", "samples.jsonl", "args.json")
SAMPLING = "generated.partial.jsonl"
"""what a run has sampled before its first step, while it samples: --resume goes on from there"""


def with_plan(plan: Callable[[Any], str]) -> Callable[[Main], Main]:
    """With --plan the decorated `main` prints plan(args) and trains nothing."""

    def decorate(main: Main) -> Main:
        @functools.wraps(main)
        def planned(args: Any) -> dict[str, float]:
            if not args.plan:
                return main(args)
            print(plan(args))
            return {}

        return planned

    return decorate


def begin(args: Any, *batch_sizes: str) -> torch.device:
    """Check the settings, join the other ranks and seed; returns this rank's device.

    batch_sizes: the flags whose batches are shared by the ranks. Raises InputError, before anything is written.
    """
    check_ranges(args)
    check_output(args.out, args.overwrite, args.resume)
    if args.trackio is not None and find_spec("trackio") is None:  # the optional extra `trackio`
        raise InputError(f"--trackio {args.trackio}: it is not installed: `pip install trackio`, or omit the flag.")
    if args.push_to_hub is not None:
        check_hub_id(args.push_to_hub)
    device = launch.setup(args.device)
    torch.manual_seed(args.seed)
    world = distributed.world_size()
    for name in batch_sizes:
        if getattr(args, name) % world:
            raise InputError(
                f"--{name.replace('_', '-')} {getattr(args, name)} can't be shared by {world} processes: make it a "
                f"multiple of {world}."
            )
    return device


def check_output(out: Path, overwrite: bool, resume: bool) -> None:
    """Refuse to overwrite a run, before anything slow; writes nothing."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file: name a directory.")
    parent = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"--out {out}: {parent} is no directory that can be written to: name another.")
    if overwrite and resume:
        raise InputError("--resume and --overwrite: pass only one: a run continues or starts anew.")
    sampling = (out / SAMPLING).exists()  # then what else is here belongs to the run that --overwrite replaces
    if (out / "summary.json").exists() and not overwrite and not (resume and sampling):
        raise InputError(f"--out {out} holds a finished run: name another directory, or pass --overwrite.")
    if (sampling or (out / "metrics.jsonl").exists()) and not overwrite and not resume:
        raise InputError(
            f"--out {out} holds an interrupted run: pass --resume to continue it or --overwrite to start anew."
        )
    if resume and not sampling and not states(out):
        instead = "with --overwrite" if (out / "metrics.jsonl").exists() else "without --resume"
        raise InputError(f"--resume: {out / 'state'} holds no state yet: start {instead}.")


class Run:
    """One training run: its directory, its state, its progress bar, and how it stops and resumes.

    parts  all that the run consists of, name -> module, optimizer, generator or dict: what a state saves and --resume
           restores, in this one place
    write  writes the checkpoint; every rank calls it

        run = Run(args, "SFT", {"model": model, "steps": steps}, write)
        for step in run.steps(num_steps):
            ...
            run.log(step, metrics, loss=f"{loss:.3f}")
        run.finish(summary)
    """

    def __init__(self, args: Any, name: str, parts: dict[str, Any], write: Callable[[], None], **state_settings: Any):
        self.out, self.args, self.name, self.parts, self.write = args.out, args, name, parts, write
        self.main = distributed.rank() == 0
        self.first_step = 0
        self.metrics: dict[str, float] = {}  # of the last logged step
        self.seconds = 0.0  # that the steps have taken, those before a resume included
        self.board: SummaryWriter | None = None
        self.tracker: Any = None  # trackio's run
        if args.resume:
            state = load_state(args.out, args, **state_settings)
            for part_name, part in parts.items():
                restore(part, state[part_name])
            self.first_step, self.metrics = state["step"], state["metrics"]
            self.seconds = state.get("seconds", 0.0)

    def opened(self) -> SummaryWriter:
        """Begin the directory, on rank 0, with the first thing that is written: a refusal before it leaves nothing."""
        if self.board is not None:
            return self.board
        self.out.mkdir(parents=True, exist_ok=True)
        if self.first_step == 0:
            # in this order: a kill leaves of the old run neither a finished one nor a state without metrics
            (self.out / "summary.json").unlink(missing_ok=True)
            forget(self.out)
            for name in OF_A_RUN:
                (self.out / name).unlink(missing_ok=True)
            for events in self.out.glob("events.out.tfevents.*"):
                events.unlink()
        else:  # resumed: drop what was logged after the state was saved
            for path in (self.out / "metrics.jsonl", self.out / "samples.jsonl"):
                if path.exists():
                    write_jsonl(path, [row for row in whole_rows(path) if row["step"] < self.first_step])
        write_json(self.out / "args.json", asdict(self.args))
        self.board = SummaryWriter(str(self.out), purge_step=self.first_step)
        if self.args.trackio is not None:
            import trackio

            settings = json.loads(json.dumps(asdict(self.args), default=str))
            self.tracker = trackio.init(
                self.args.trackio, name=str(self.out), resume="allow" if self.first_step else "never", config=settings,
                embed=False, auto_log_cpu=False, auto_log_gpu=False,
            )  # fmt: skip
        return self.board

    def print(self, text: str) -> None:
        """On rank 0."""
        if self.main:
            print(text)

    def warn(self, text: str) -> None:
        """On rank 0, above the progress bar."""
        if self.main:
            self.progress.write(text)

    def steps(self, num_steps: int) -> Iterator[int]:
        """The remaining steps, with a progress bar; saves every --save-every steps, at the end and on a signal."""
        self.progress = tqdm(
            range(self.first_step, num_steps),
            initial=self.first_step,
            total=num_steps,
            desc=self.name,
            disable=not self.main,
        )
        signals = StopSignals()
        start = time.perf_counter() - self.seconds
        try:
            for step in self.progress:
                yield step
                self.seconds = time.perf_counter() - start
                stopping = signals.received()
                if stopping or step + 1 == num_steps or (step + 1) % self.args.save_every == 0:
                    self.save(step + 1)
                if stopping:
                    signals.stop(self.out, step + 1)
        finally:
            signals.restore()

    def save(self, step: int) -> None:
        """Write the checkpoint and, after so many steps, the state to resume from; every rank calls it."""
        check_weights(step - 1, *(part for part in self.parts.values() if isinstance(part, nn.Module)))
        self.write()
        if self.main:
            self.opened().flush()
            for name in ("metrics.jsonl", "samples.jsonl"):  # a row that is lost is not logged again on --resume
                if (self.out / name).exists():
                    to_disk(self.out / name)
        state = {name: snapshot(part) for name, part in self.parts.items()} | {"metrics": self.metrics}
        state["seconds"] = self.seconds
        save_state(self.out, self.args, step, self.args.keep_last, distributed.gather_on_first(state))
        distributed.barrier()

    def log(self, step: int, metrics: dict[str, float], **shown: str) -> None:
        """Append one row to metrics.jsonl and to TensorBoard; `shown` goes to the progress bar."""
        self.metrics = metrics
        if shown:
            self.progress.set_postfix(**shown)
        if not self.main:
            return
        board = self.opened()
        with (self.out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        for name, value in metrics.items():
            board.add_scalar(name, value, step)
        if self.tracker:
            self.tracker.log(metrics, step=step)

    def log_samples(self, step: int, samples: list[dict]) -> None:
        """Append texts to samples.jsonl."""
        if not self.main:
            return
        self.opened()
        with (self.out / "samples.jsonl").open("a") as file:
            for sample in samples:
                file.write(json.dumps({"step": step, **sample}) + "\n")

    def finish(self, summary: dict[str, float]) -> None:
        """Write summary.json, last of all that belongs to the run, and upload it where --push-to-hub says so.

        It also says what the run cost: the seconds of its steps, and the peak memory of rank 0.
        """
        if self.main:
            self.opened().close()
            if self.tracker:
                self.tracker.finish()
            cost = {"seconds": self.seconds, "peak_resident_bytes": peak_resident_bytes()}
            write_json(self.out / "summary.json", {**summary, **cost})
            if self.args.push_to_hub is not None:
                print(f"pushed: {push(self.args.push_to_hub, self.out, model_card(self.name, self.args, summary))}")


def home(args: Any, device: torch.device) -> torch.device:
    """Where a script loads its models: on its device, or nowhere yet, and `place_models` reads each rank's shard."""
    return device if args.shard == "none" else torch.device("meta")


def place_models(args: Any, device: torch.device, trained: Sequence[Any], frozen: Sequence[Any] = ()) -> None:
    """Checkpoint activations and shard as the settings say; frozen models may wait in CPU memory (--offload).

    Those that are not sharded keep their products' weights in the dtype of the computation, unless they are a trained
    model's own, as LoRA's reference is. None is no model.
    """
    is_bfloat16, within = args.dtype == "bfloat16", distributed.node_size() if args.shard == "hsdp" else None
    for model in trained:
        model.transformer.checkpoint_activations = args.checkpoint_activations
        if args.shard != "none":
            distributed.shard(model, device, is_bfloat16, within=within)
        else:
            model.to(device)
    weights = {id(weight) for model in trained for weight in model.parameters()}
    for model in filter(None, frozen):
        if args.shard != "none":
            distributed.shard(model, device, is_bfloat16, args.offload, within)
        is_shared = any(id(weight) in weights for weight in model.parameters())
        if not distributed.is_sharded(model) and not is_shared:
            round_products(model, getattr(torch, args.dtype))
            if args.offload:
                distributed.offload(model, device)


def snapshot(part: Any) -> Any:
    """What a state keeps of a part of a run."""
    if isinstance(part, dict):
        return dict(part)
    return part.get_state() if isinstance(part, torch.Generator) else part.state_dict()


def restore(part: Any, saved: Any) -> None:
    """Set a part of a run to what `snapshot` gave."""
    if isinstance(part, dict):
        part.update(saved)
    elif isinstance(part, torch.Generator):
        part.set_state(saved)
    elif isinstance(part, nn.Module):
        distributed.load_model(part, saved)
    else:
        part.load_state_dict(saved)


def write_checkpoint(
    model: GPT | ScalarModel | None, directory: Path, tokenizer: Tokenizer, base: str | None = None
) -> None:
    """Save a model, sharded or not, as a Hugging Face directory; every rank calls it.

    LoRA's updates are merged into the weights; those of a policy also stand alone in directory/adapter, with the name
    of the checkpoint `base` that it started from. None deletes the directory, which is of a run that this one replaces.
    """
    if model is None:
        if distributed.rank() == 0:
            shutil.rmtree(directory, ignore_errors=True)
        return
    whole = distributed.unshard(model)
    if distributed.rank() == 0:
        save(merge(whole), directory, tokenizer)
        if isinstance(whole, GPT) and base is not None and has_updates(whole):
            save_updates(whole, directory / "adapter", base)
        else:  # of a run that this one replaces
            shutil.rmtree(directory / "adapter", ignore_errors=True)


def check_weights(step: int, *models: nn.Module) -> None:
    """Refuse to replace the last good checkpoint with weights that are NaN or infinite; every rank calls it."""
    bad = [
        name
        for model in models
        for name, tensor in model.state_dict().items()
        if not distributed.local_tensor(tensor).isfinite().all()
    ]
    for name in distributed.all_gather_objects(bad):
        raise InputError(
            f"after step {step} the weights {name} are not finite: lower --lr; "
            "the last checkpoint before it is left as it is."
        )


def peak_resident_bytes() -> int:
    """The most memory that this process has held so far; on Linux its own, not that of the program that started it."""
    status = Path("/proc/self/status")
    peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return 1024 * int(peak[1]) if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS counts bytes


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(json.dumps(value, indent=2, default=str) + "\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
