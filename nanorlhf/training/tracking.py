"""Curves of a run for `--track`: TensorBoard events, Weights & Biases, trackio, or none.

The library is imported when a run starts. W&B and trackio know a run by an id that is kept in OUT/track_id.txt, so
that --resume continues it. Environment variables choose the rest: WANDB_PROJECT and WANDB_ENTITY, or TRACKIO_PROJECT
and TRACKIO_SPACE_ID, where the curves appear, and WANDB_MODE=offline that W&B writes them to OUT/wandb.
"""

import importlib
import importlib.util
import os
import secrets
from pathlib import Path
from typing import Any

from nanorlhf.errors import InputError
from nanorlhf.files import write_text

TRACK_ID = "track_id.txt"
ONLINE = ("wandb", "trackio")
"""trackers with a project and an id per run; the packages have the same names"""


def check_tracker(name: str) -> None:
    """Raise InputError if the package of a tracker isn't installed."""
    if name in ONLINE and importlib.util.find_spec(name) is None:
        raise InputError(f"--track {name} needs a package: install it with `pip install {name}`.")


class Tracker:
    """Log metrics of a run in `out` with the tracker `name`, from `first_step` on.

    settings: of the run, flat. Raises InputError if the tracker refuses the run, for example without a login.
    """

    def __init__(self, name: str, out: Path, settings: dict[str, Any], first_step: int):
        self.board = self.run = None
        if name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(out), purge_step=first_step)
        elif name in ONLINE:
            id_file = out / TRACK_ID
            if not id_file.exists():
                write_text(id_file, secrets.token_hex(4))
            run_id = id_file.read_text().strip()
            names = {"name": f"{out.name}-{run_id}"}  # trackio has no ids: it continues the run of this name
            if name == "wandb":
                names = {"name": out.name, "id": run_id, "dir": str(out)}
            project = os.environ.get(f"{name.upper()}_PROJECT", "nanorlhf")
            try:
                self.run = importlib.import_module(name).init(project=project, resume="allow", config=settings, **names)
            except Exception as error:  # no login, no network, a bad name: each has its own class
                raise InputError(f"--track {name}: {type(error).__name__}: {error}") from error

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics of a step; after a resume, steps since the last state are logged again."""
        if self.board is not None:
            for name, value in metrics.items():
                self.board.add_scalar(name, value, step)
        if self.run is not None:
            self.run.log(metrics, step=step)

    def flush(self) -> None:
        """Write to disk what TensorBoard buffers; the others send from their own threads."""
        if self.board is not None:
            self.board.flush()

    def close(self, summary: dict[str, float]) -> None:
        """End the run; in W&B, add the final numbers to its table of runs."""
        if self.board is not None:
            self.board.close()
        if self.run is not None:
            if hasattr(self.run, "summary"):  # trackio has none
                self.run.summary.update(summary)
            self.run.finish()
