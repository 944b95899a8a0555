"""A run's directory: settings, metrics, samples, and the state to go on from.

    args.json         the settings          metrics.jsonl   one object a logged step
    samples.jsonl     what the model said   summary.json    the final numbers; where it is, the run is finished
    state/            what --resume goes on from (resume.py)        events.out.tfevents.*   TensorBoard

The checkpoint itself (config.json, model.safetensors, tokenizer.json) lies beside them. Only rank 0 writes.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.tensorboard import SummaryWriter

from nanorlhf import distributed
from nanorlhf.checkpoint import to_disk
from nanorlhf.dataset import write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.training.resume import forget, save_state, states

OF_A_RUN = ("metrics.jsonl", "samples.jsonl", "args.json")


def check_output(out: Path, overwrite: bool, resume: bool) -> None:
    """Refuse to write over a run. Call it before anything slow; it writes nothing."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file: name a directory.")
    parent = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"--out {out}: {parent} is no directory that can be written to: name another.")
    if overwrite and resume:
        raise InputError("--resume and --overwrite: pass only one, a run goes on or begins anew.")
    if (out / "summary.json").exists() and not overwrite:
        raise InputError(f"--out {out} holds a finished run: name another directory, or pass --overwrite.")
    if (out / "metrics.jsonl").exists() and not overwrite and not resume:
        raise InputError(f"--out {out} holds an interrupted run: pass --resume to go on or --overwrite to begin anew.")
    if resume and not states(out):
        instead = "with --overwrite" if (out / "metrics.jsonl").exists() else "without --resume"
        raise InputError(f"--resume: nothing to go on from, {out / 'state'} holds no state yet: start {instead}.")


class Run:
    """Writes what a run leaves behind."""

    def __init__(self, out: Path, args: Any, first_step: int = 0):
        self.out, self.args = out, args
        self.main = distributed.rank() == 0
        if not self.main:
            return
        out.mkdir(parents=True, exist_ok=True)
        if first_step == 0:
            # in this order: what a kill leaves of the old run is neither a finished one nor a state without metrics
            (out / "summary.json").unlink(missing_ok=True)
            forget(out)
            for name in OF_A_RUN:
                (out / name).unlink(missing_ok=True)
            for events in out.glob("events.out.tfevents.*"):
                events.unlink()
        else:  # resumed: forget what was logged after the state was saved
            for path in (out / "metrics.jsonl", out / "samples.jsonl"):
                lines = path.read_text().splitlines(keepends=True) if path.exists() else []
                rows = [json.loads(line) for line in lines if line.endswith("\n")]  # killed while writing the last one?
                if lines:
                    write_jsonl(path, [row for row in rows if row["step"] < first_step])
        write_json(out / "args.json", asdict(args))
        self.board = SummaryWriter(str(out), purge_step=first_step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Append one row to metrics.jsonl and to TensorBoard."""
        if not self.main:
            return
        with (self.out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        for name, value in metrics.items():
            self.board.add_scalar(name, value, step)

    def log_samples(self, step: int, samples: list[dict]) -> None:
        """Append texts to samples.jsonl."""
        if not self.main:
            return
        with (self.out / "samples.jsonl").open("a") as file:
            for sample in samples:
                file.write(json.dumps({"step": step, **sample}) + "\n")

    def save_state(self, step: int, **state: Any) -> None:
        """What `--resume` goes on from, after so many steps; every rank calls it. See resume.py."""
        if self.main:
            self.board.flush()
            for name in ("metrics.jsonl", "samples.jsonl"):  # no row may be lost that the state won't write again
                if (self.out / name).exists():
                    to_disk(self.out / name)
        save_state(self.out, self.args, step, self.args.keep_last, distributed.on_first(state))

    def finish(self, summary: dict[str, float]) -> None:
        """Write summary.json, last of all."""
        if self.main:
            self.board.close()
            write_json(self.out / "summary.json", summary)


def check_weights(step: int, *models: nn.Module) -> None:
    """Stop before weights that a step has made NaN or infinite replace the last good checkpoint.

    Every rank calls it.
    """
    bad = [
        name
        for model in models
        for name, tensor in model.state_dict().items()
        if not distributed.mine(tensor).isfinite().all()
    ]
    for name in distributed.all_gather_objects(bad):
        raise InputError(
            f"after step {step} the weights {name} are not finite: lower --lr; "
            "the last checkpoint that was saved before is left as it is."
        )


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(json.dumps(value, indent=2, default=str) + "\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
