"""The doctor finds bugs in modified code and in runs. docs/doctor.md

python -m nanorlhf.doctor code                   check invariants of any policy-gradient code in this tree
python -m nanorlhf.doctor code --scripts DIR     check scripts and packages that you have modified in DIR
python -m nanorlhf.doctor code -- --my-flag 0.1  pass your own flag to the training scripts that have it
python -m nanorlhf.doctor run runs/tiny/ppo      check a run's metrics, settings, samples and traces

The exit status is 0 without findings, 1 with findings, and 2 for bad input.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from nanorlhf.cli import run_module
from nanorlhf.doctor import code
from nanorlhf.errors import InputError
from nanorlhf.rules.finding import report


@dataclass(frozen=True, kw_only=True)
class Code:
    """Run the scripts on tiny models, and check invariants of any policy-gradient code."""

    scripts: Path = code.ROOT
    """directory with modified scripts, nanorlhf/ or kernels/; missing files are taken from this tree"""
    flags: tyro.conf.Positional[tuple[str, ...]] = ()
    """after `--`: flags of the training scripts, such as one that you added; each script gets the flags that it has"""

    def run(self) -> int:
        findings, unchecked = code.examine(self.scripts, self.flags)
        for sentence in unchecked:
            print(f"not checked: {sentence}")
        return report(findings)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Check the files of finished or running runs."""

    directories: tyro.conf.Positional[tuple[Path, ...]]
    """run directories; a reward model's run provides the expected first scores of PPO"""

    def run(self) -> int:
        if not self.directories:
            raise InputError("nanorlhf.doctor run: missing the directory of a run.")
        from nanorlhf.doctor import diagnosis  # imports PyTorch, and code that `doctor code` may find broken

        status = report(diagnosis.examine(self.directories))
        for sentence in diagnosis.unchecked(self.directories):
            print(f"not checked: {sentence}")
        return status


@dataclass(frozen=True, kw_only=True)
class Args:
    command: Annotated[Code | Run, tyro.conf.OmitSubcommandPrefixes, tyro.conf.arg(name="")]


def main(args: Args) -> None:
    sys.exit(args.command.run())


if __name__ == "__main__":
    run_module(main, Args)
