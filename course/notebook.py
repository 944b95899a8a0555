"""Code shared by the notebooks in course/notebooks: run each stage once, and show sliders if ipywidgets is there."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RUNS = os.environ.get("RUNS", "runs/tiny")
"""directory of the notebooks' runs"""

DATA = f"--data {RUNS}/data"
# two processes instead of threads: threads wait for each other more than they compute, above all on a shared machine
TRAIN = f"{DATA} --processes {2 if sys.platform == 'linux' else 1}"
STAGES = {
    "data": f"-m data.tiny --out {RUNS}/data",
    "sft": f"train_sft.py {TRAIN} --out {RUNS}/sft",
    "rm": f"train_rm.py {TRAIN} --sft {RUNS}/sft --out {RUNS}/rm",
    "ppo": f"train_ppo.py {TRAIN} --sft {RUNS}/sft --reward-model {RUNS}/rm --out {RUNS}/ppo",
    "eval": f"eval.py {DATA} --policies sft {RUNS}/sft ppo {RUNS}/ppo --reward-model {RUNS}/rm --out {RUNS}/eval",
}
"""the same commands as in `make demo`"""


def run_stages(*names: str, flags: Sequence[str] = ()) -> None:
    """Run stages of the pipeline, skipping those that already have a result; flags: extra flags for the last one."""
    for name in names:
        if not Path(RUNS, name).exists():
            extra = flags if name == names[-1] else ()
            subprocess.run([sys.executable, *STAGES[name].split(), *extra], check=True)


def play(draw: Callable[..., object], **values: tuple[float, float, float]) -> None:
    """Show sliders for a function: name=(value, min, max). Without ipywidgets, call it once with the values."""
    try:
        from ipywidgets import FloatSlider, IntSlider, interact
    except ImportError:
        print("To get sliders here: pip install ipywidgets")
        draw(**{name: value for name, (value, _, _) in values.items()})
        return
    sliders: dict[str, Any] = {}
    for name, (value, least, most) in values.items():
        if isinstance(value, int):
            sliders[name] = IntSlider(value=value, min=least, max=most)
        else:
            sliders[name] = FloatSlider(value=value, min=least, max=most, step=(most - least) / 40)
    interact(draw, **sliders)
