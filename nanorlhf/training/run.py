"""A training run, for all training programs: its directory, progress bar, checkpoints, stopping and resuming.

    args.json         the settings          metrics.jsonl   one object per logged step
    command.txt       the command line      summary.json    the final numbers, written when the run is finished
    samples.jsonl     samples of the model  events.out.tfevents.*   TensorBoard, or another tracker (tracking.py)
    state/            what --resume loads (resume.py)
    checkpoints/      with --keep-every, step-N is the checkpoint after N steps
    trace/            with --trace, tensors of a few responses (trace.py)

The checkpoint (config.json, model.safetensors, tokenizer.json) is in the same directory. Only rank 0 writes.
"""

import errno
import fcntl
import os
import re
import resource
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanorlhf import distributed, launch
from nanorlhf.checkpoint import save
from nanorlhf.cli import check_ranges
from nanorlhf.dataset import write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.files import check_out, delete, to_disk, to_json, write_text
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.peft import has_updates, merge
from nanorlhf.progress import Progress
from nanorlhf.tokenizer import Tokenizer
from nanorlhf.training.input_digests import digest_inputs
from nanorlhf.training.resume import as_saved, fitting, forget, keep_last, load_state, save_state, states
from nanorlhf.training.run_directory import (
    CHECKPOINTS,
    flat_settings,
    kept_checkpoints,
    read_metrics,
    read_settings,
    whole_rows,
)
from nanorlhf.training.settings import RunArgs
from nanorlhf.training.signals import StopSignals
from nanorlhf.training.tracking import ONLINE, TRACK_ID, Tracker, check_tracker

Main = Callable[[Any], dict[str, float]]
COMMAND = "command.txt"
OF_A_RUN = ("metrics.jsonl", "samples.jsonl", "args.json", TRACK_ID)
SUBDIRECTORIES = ("adapter", "best", CHECKPOINTS, "state", "trace", "wandb")
SAMPLING = "generated.partial.jsonl"
"""samples that a run draws before its first step; while the file exists, --resume continues sampling"""
TIME_METRICS = (
    "episodes_per_second", "time/generating_share", "time/mfu", "time/matmul_share", "time/decode_bandwidth",
)  # fmt: skip
"""metrics that depend on the clock, and so differ between two runs that are otherwise equal"""


def begin(args: RunArgs, *batch_sizes: str) -> torch.device:
    """Check the settings, join the other ranks, set the seed and return this rank's device.

    batch_sizes: settings whose batches are divided among the ranks. Raises InputError before anything is written.
    """
    check_ranges(args)
    check_tracker(args.track)
    check_output(args.out, args.overwrite, args.resume)
    device = launch.setup(args.device, args.dtype)
    torch.manual_seed(args.seed)
    world = distributed.world_size()
    for name in batch_sizes:
        if getattr(args, name) % world:
            raise InputError(
                f"--{name.replace('_', '-')} {getattr(args, name)} can't be divided among {world} processes: make it a "
                f"multiple of {world}."
            )
    return device


def check_output(out: Path, overwrite: bool, resume: bool) -> None:
    """Refuse to overwrite a run. Comes before anything slow and writes nothing."""
    check_out(out)
    for name in SUBDIRECTORIES:  # a run writes into them; through a link it would write elsewhere
        if (out / name).is_symlink() or not (out / name).is_dir() and (out / name).exists():
            raise InputError(f"--out {out}: {out / name} must be a directory, not a file or a link: move it away.")
    if (out / COMMAND).is_symlink():  # we lock it and write it in place; other files are replaced
        raise InputError(f"--out {out}: {out / COMMAND} must be a file, not a link: move it away.")
    if (out / COMMAND).is_file():
        with (out / COMMAND).open() as file:
            lock(file.fileno(), out, fcntl.LOCK_SH)
    if overwrite and resume:
        raise InputError("--resume and --overwrite: pass only one of them.")
    sampling = (out / SAMPLING).exists()  # then the other files belong to the run that --overwrite replaces
    if (out / "summary.json").exists() and not overwrite and not (resume and sampling):
        raise InputError(f"--out {out} contains a finished run: choose another directory or pass --overwrite.")
    if (sampling or (out / "metrics.jsonl").exists()) and not overwrite and not resume:
        raise InputError(
            f"--out {out} contains an interrupted run: pass --resume to continue it or --overwrite to start over."
        )
    if resume and not sampling and not states(out):
        instead = "with --overwrite" if (out / "metrics.jsonl").exists() else "without --resume"
        raise InputError(f"--resume: {out / 'state'} has no state yet: start {instead}.")


def lock(file: int, out: Path, kind: int) -> None:
    """Lock an open command.txt until this process closes it or ends.

    Raises InputError if another process holds the lock: two runs in one directory would mix their files.
    """
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):  # any other error: a file system without locks
            raise InputError(f"--out {out}: another run is writing there: choose another directory.") from error


class Run:
    """A training run: its directory, state and progress bar, stopping and resuming.

    write      a function that writes the checkpoint to a directory; every rank calls it
    data       the data files that the run reads
    must_stay  settings that may not change on --resume, although other scripts allow it

        run = Run(args, "SFT", write, [path])
        run.track(model=model, steps=steps)
        for step in run.steps(num_steps):
            ...
            run.log(step, metrics, loss=f"{loss:.3f}")
        run.finish(summary)
    """

    def __init__(
        self,
        args: RunArgs,
        name: str,
        write: Callable[[Path], None],
        data: Sequence[Path] = (),
        must_stay: Sequence[str] = (),
    ):
        self.out, self.args, self.name, self.write = args.out, args, name, write
        self.main = distributed.rank() == 0
        self.first_step = 0
        self.num_steps = 0
        self.metrics: dict[str, float] = {}  # of the last logged step
        self.step_start = 0.0  # time.perf_counter at the start of the current step
        self.generating_seconds = 0.0  # of the current step, spent sampling
        self.seconds = 0.0  # spent in steps, including those before a resume
        self.state: dict[str, Any] = {}  # what `track` saves
        self.saved: dict[str, Any] = {}  # what --resume restores
        self.tracker: Tracker | None = None
        self.lock: int | None = None  # file descriptor of command.txt
        self.inputs = distributed.from_first(lambda: digest_inputs(args, data))
        if args.resume:
            self.saved = load_state(args.out, args, self.inputs, tuple(must_stay))
            with fitting(self.out / "state"):
                self.first_step = self.saved["step"]
                self.metrics = dict(self.saved["metrics"])
                self.seconds = float(self.saved.get("seconds", 0.0))

    def track(self, **state: Any) -> None:
        """Save these modules, optimizers, generators and dicts with each state; on --resume, restore them now."""
        self.state |= state
        if self.args.resume:
            for name, value in state.items():
                with fitting(self.out / "state"):
                    restore(value, self.saved.pop(name))

    def opened(self) -> Tracker:
        """Create the directory, on rank 0, at the first write, so that a run refused before it leaves no files."""
        if self.tracker is not None:
            return self.tracker
        self.out.mkdir(parents=True, exist_ok=True)
        locked = self.out / COMMAND
        if self.first_step == 0 and locked.exists() and locked.stat().st_nlink > 1:
            locked.unlink()  # the directory is a hard-linked copy: keep the other run's command
        self.lock = os.open(locked, os.O_RDWR | os.O_CREAT, 0o666)
        lock(self.lock, self.out, fcntl.LOCK_EX)
        if self.first_step == 0:
            # in this order, so that after a kill the old run neither looks finished nor has a state without metrics
            (self.out / "summary.json").unlink(missing_ok=True)
            forget(self.out)
            delete(self.out / "trace")
            for path in kept_checkpoints(self.out).values():
                delete(path)
            for name in OF_A_RUN:
                (self.out / name).unlink(missing_ok=True)
            for events in self.out.glob("events.out.tfevents.*"):
                delete(events)
            command = shlex.join(("python", Path(sys.argv[0]).name, *sys.argv[1:]))
            os.truncate(self.lock, 0)  # keep it open: closing would unlock it
            os.write(self.lock, (command + "\n").encode(errors="backslashreplace"))
        else:  # resumed: drop what was logged after the state was saved, and states left by a kill
            keep_last(self.out, self.first_step)
            for path in (self.out / "metrics.jsonl", self.out / "samples.jsonl"):
                if path.exists():
                    write_jsonl(path, [row for row in whole_rows(path) if row["step"] < self.first_step])
            for path in (self.out / "trace").glob("update-????????.safetensors"):
                if int(path.stem.removeprefix("update-")) >= self.first_step:
                    path.unlink()
            for step, path in kept_checkpoints(self.out).items():
                if step > self.first_step:
                    delete(path)
        write_json(self.out / "args.json", asdict(self.args))
        self.tracker = Tracker(self.args.track, self.out, as_saved(asdict(self.args)), self.first_step)
        return self.tracker

    def print(self, text: str) -> None:
        """Print on rank 0."""
        if self.main:
            print(text)

    def warn(self, text: str) -> None:
        """Print on rank 0, above the progress bar."""
        if self.main:
            self.progress.write(text)

    def steps(self, num_steps: int) -> Iterator[int]:
        """Yield the remaining steps with a progress bar; save every --save-every steps, at the end and on a signal.

        A copy of the checkpoint stays every --keep-every steps.
        """
        self.num_steps = num_steps
        self.progress = Progress(
            range(self.first_step, num_steps),
            initial=self.first_step,
            total=num_steps,
            desc=self.name,
            disable=not self.main,
        )
        keep_every = self.args.keep_every
        if keep_every:
            self.print_disk_need(num_steps // keep_every - self.first_step // keep_every)
        signals = StopSignals()
        start = time.perf_counter() - self.seconds
        try:
            if self.main and self.args.track in ONLINE:
                self.opened()  # a missing login ends the run here, not after its first step
            for step in self.progress:
                self.step_start, self.generating_seconds = time.perf_counter(), 0.0
                yield step
                self.seconds = time.perf_counter() - start
                stopping = signals.received()
                if keep_every and (step + 1) % keep_every == 0:
                    self.keep(step + 1)  # before the state: a run resumed from there skips this step
                if stopping or step + 1 == num_steps or (step + 1) % self.args.save_every == 0:
                    self.save(step + 1)
                if stopping:
                    signals.stop(self.out, step + 1)
        except BaseException:  # the run ends, but in a notebook the process lives on
            self.unlock()
            raise
        finally:
            signals.restore()

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Count the time in this context as sampling, for the metric `time/generating_share`."""
        start = time.perf_counter()
        yield
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # kernels run after the call that launches them
        self.generating_seconds += time.perf_counter() - start

    def unlock(self) -> None:
        """Release the directory for other processes."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def models(self) -> list[nn.Module]:
        """Return the tracked models."""
        return [value for value in self.state.values() if isinstance(value, nn.Module)]

    def print_disk_need(self, num_checkpoints: int) -> None:
        """Print how much disk the checkpoints that will be kept need, and how much is free."""
        tensors = [tensor for model in self.models() for tensor in model.state_dict().values()]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        existing = next(path for path in (self.out, *self.out.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free
        self.print(
            f"{self.out / CHECKPOINTS} will keep {num_checkpoints} checkpoints of about {size / 1e9:,.3f} GB: "
            f"{num_checkpoints * size / 1e9:,.3f} GB in all; {free / 1e9:,.3f} GB are free"
        )

    def keep(self, step: int) -> None:
        """Write a checkpoint after `step` steps that later ones don't replace; every rank must call it."""
        check_weights(step - 1, *self.models())
        if self.main:
            self.opened()  # deletes the checkpoints of an earlier run
        self.write(self.out / CHECKPOINTS / f"step-{step:08}")

    def save(self, step: int) -> None:
        """Write the checkpoint and the state to resume from after `step` steps; every rank must call it."""
        check_weights(step - 1, *self.models())
        self.write(self.out)
        if self.main:
            self.opened().flush()
            for name in ("metrics.jsonl", "samples.jsonl"):  # --resume would not log a lost row again
                if (self.out / name).exists():
                    to_disk(self.out / name)
        state = {name: snapshot(value) for name, value in self.state.items()} | {"metrics": self.metrics}
        state |= {"seconds": self.seconds, "inputs": self.inputs}
        save_state(self.out, self.args, step, distributed.gather_on_first(state))
        distributed.barrier()

    def log(self, step: int, metrics: dict[str, float], **shown: str) -> None:
        """Append a row to metrics.jsonl and the tracker; show `shown` in the progress bar."""
        self.metrics = metrics
        if shown:
            self.progress.set_postfix(**shown)
        if not self.main:
            return
        tracker = self.opened()
        with (self.out / "metrics.jsonl").open("a") as file:
            file.write(to_json({"step": step, **metrics}) + "\n")
        tracker.log(step, metrics)

    def log_samples(self, step: int, samples: list[dict]) -> None:
        """Append rows to samples.jsonl."""
        if not self.main:
            return
        self.opened()
        with (self.out / "samples.jsonl").open("a") as file:
            for sample in samples:
                file.write(to_json({"step": step, **sample}) + "\n")

    def finish(self, summary: dict[str, float]) -> dict[str, float]:
        """Write summary.json, the run's last file, and return the summary.

        The file also has the cost of the run: the seconds spent in steps, the parameters trained, and the peak memory
        of rank 0.
        """
        summary = {name: value for name, value in summary.items() if name not in TIME_METRICS}
        if self.main:
            self.opened().close(summary)
            self.unlock()
            # a set, because a shared value model has the policy's parameters
            trained = {p for model in self.models() for p in model.parameters() if p.requires_grad}
            cost = {
                "seconds": self.seconds,
                "num_trained_parameters": sum(p.numel() for p in trained),
                "peak_resident_bytes": peak_resident_bytes(),
            }
            write_json(self.out / "summary.json", {**summary, **cost})
            self.diagnose(summary)
        return summary

    def diagnose(self, summary: dict[str, float]) -> None:
        """Print problems that show in the metrics: the part of `nanorlhf.doctor run` that costs nothing."""
        from nanorlhf.rules.finding import paragraphs  # imported late: needed once, at the end of a run
        from nanorlhf.rules.metric_rules import examine_metrics
        from nanorlhf.rules.record import Record

        try:
            settings = flat_settings(read_settings(self.out))
            findings = examine_metrics(Record(settings=settings, rows=read_metrics(self.out), summary=summary))
        except Exception as error:  # advice must never fail a finished run
            self.print(f"the doctor can't read {self.out}: {type(error).__name__}: {error}")
            return
        if findings:
            self.print(f"\n{paragraphs(findings)}")


def snapshot(value: Any) -> Any:
    """Return what a saved state stores for a tracked object."""
    if isinstance(value, dict):
        return dict(value)
    return value.get_state() if isinstance(value, torch.Generator) else value.state_dict()


def restore(value: Any, saved: Any) -> None:
    """Restore a tracked object to what `snapshot` returned."""
    if isinstance(value, dict):
        value.update(saved)
    elif isinstance(value, torch.Generator):
        value.set_state(saved)
    elif isinstance(value, nn.Module):
        distributed.load_model(value, saved)
    else:
        value.load_state_dict(saved)


def write_checkpoint(model: GPT | ScalarModel, directory: Path, tokenizer: Tokenizer, base: str | None = None) -> None:
    """Save a model, sharded or not, as a Hugging Face directory; every rank must call it.

    LoRA's updates are merged into the weights. For a policy they are also saved separately in directory/adapter, with
    the name of the checkpoint `base` that it started from.
    """
    full = distributed.unshard(model)
    if distributed.rank() == 0:
        save(merge(full), directory, tokenizer)
        if isinstance(full, GPT) and base is not None and has_updates(full):
            from nanorlhf.pretrained.adapters import save_updates

            save_updates(full, directory / "adapter", base)
        else:  # left by the run that this one replaces
            delete(directory / "adapter")


def check_weights(step: int, *models: nn.Module) -> None:
    """Refuse to replace the last good checkpoint with NaN or infinite weights; every rank must call it."""
    bad = [
        name
        for model in models
        for name, tensor in model.state_dict().items()
        if not distributed.local_tensor(tensor).isfinite().all()
    ]
    for name in distributed.all_gather_objects(bad):
        raise InputError(
            f"after step {step} the weights {name} are not finite: lower --lr; "
            "the last checkpoint before it is unchanged."
        )


def peak_resident_bytes() -> int:
    """Return this process's peak memory so far; on Linux without its parent's."""
    status = Path("/proc/self/status")
    peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return 1024 * int(peak[1]) if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS counts bytes


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically."""
    write_text(path, to_json(value, indent=2, default=str) + "\n")
