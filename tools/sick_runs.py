"""Plot healthy and buggy runs side by side, from the runs that `tools.doctor` trains.

    python -m tools.sick_runs --demo runs/tiny --doctor runs/doctor

Writes docs/troubleshooting.png.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from nanorlhf.cli import run_module
from nanorlhf.errors import InputError
from nanorlhf.report.page import BLUE, ORANGE, draw, label_axes
from nanorlhf.training.run_directory import read_metrics


class Panel(NamedTuple):
    bug: str
    """name of a bug in course/bugs.py or tools/other_bugs.py"""
    metric: str
    title: str
    unit: str


PANELS = (
    Panel("kl-of-the-wrong-sign", "objective/kl", "The KL penalty has the wrong sign", "KL, nats per response"),
    Panel("reference-is-trained", "objective/kl", "The reference is trained as well", "KL, nats per response"),
    Panel("update-at-temperature-1", "policy/clip_fraction", "The update forgets the temperature", "clipped tokens"),
    Panel("kl-is-averaged-over-padding", "objective/kl", "The KL is averaged over padding", "KL as logged, nats"),
    Panel("score-one-too-late", "objective/score", "The score comes one state late", "score"),
    Panel("returns-and-values-swapped", "value/loss", "Returns and values are swapped", "value loss"),
)


@dataclass(frozen=True, kw_only=True)
class Args:
    demo: Path = Path("runs/tiny")
    """directory of the demo's runs; ppo is the healthy one"""
    doctor: Path = Path("runs/doctor")
    """output directory of `tools.doctor`, with runs/BUG/ppo"""
    out: Path = Path("docs/troubleshooting.png")


def side_by_side(demo: Path, doctor: Path) -> Figure:
    """Draw a panel per bug: the metric that reveals it, in the healthy and in the buggy run."""
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    for axes, panel in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        for run, label, color in (
            (demo / "ppo", "healthy", BLUE),
            (doctor / "runs" / panel.bug / "ppo", "sick", ORANGE),
        ):
            rows = read_metrics(run)
            if not rows:
                raise InputError(f"{run} has no metrics.jsonl: run `python -m tools.doctor` first.")
            draw(axes, rows, panel.metric, label, color)
        label_axes(axes, panel.title, "update", panel.unit)
        axes.legend(frameon=False, fontsize=8)
    return figure


def main(args: Args) -> None:
    side_by_side(args.demo, args.doctor).savefig(args.out, dpi=100)
    print(args.out)


if __name__ == "__main__":
    run_module(main, Args)
