"""Submit a make target as a job on a GPU rented from Hugging Face. Not run: the tests only check the request.

    python -m tools.hf_job someone/tldr-runs --target tldr --hours 24 --dry-run

The job clones the repository, installs it with the tested versions and runs `make TARGET`. A bucket is mounted at /runs
and keeps the results: pipelines skip finished stages and continue the interrupted one, so submit the job again if it
ended early.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro
from huggingface_hub import Volume, run_job

from nanorlhf.cli import PositiveFloat, run_module
from tools.repository import GITHUB, repository

# git, make, gcc and Python's headers are in it; uv picks PyTorch's build for the driver
IMAGE = "python:3.13"


@dataclass(frozen=True, kw_only=True)
class Args:
    bucket: Annotated[str, tyro.conf.Positional]
    """OWNER/NAME of a bucket on the Hub, for the results"""
    target: Literal["gpu", "tldr"] = "gpu"
    """make gpu: tests and benchmark; make tldr: the paper's run at 1B"""
    flavor: str = "h200"
    """the hardware; `hf jobs hardware` lists it with its prices"""
    hours: PositiveFloat = 1.0
    """the job is stopped after this time"""
    dry_run: bool = False
    """print the request instead of sending it"""


def request(args: Args) -> dict[str, Any]:
    """Return the arguments of huggingface_hub.run_job."""
    script = " && ".join(
        (
            f"git clone --depth 1 {GITHUB}{repository()} nanorlhf",
            "cd nanorlhf",
            "pip install --quiet uv",
            "UV_CONSTRAINT=.ci/constraints.txt make .venv/test",
            "TLDR=/runs/tldr make tldr" if args.target == "tldr" else "make gpu && cp -r runs/gpu /runs",
        )
    )
    return {
        "image": IMAGE,
        "command": ["bash", "-c", script],
        "flavor": args.flavor,
        "timeout": f"{round(args.hours * 60)}m",
        "volumes": [Volume(type="bucket", source=args.bucket, mount_path="/runs")],
        "name": f"nanorlhf-{args.target}",
    }


def main(args: Args) -> None:
    if args.dry_run:
        print(json.dumps(request(args), indent=2, default=vars))
    else:
        print(run_job(**request(args)).url)


if __name__ == "__main__":
    run_module(main, Args)
