"""The doctor: what is wrong with changed code, or with a run. docs/doctor.md

python -m nanorlhf.doctor code                   does what must hold for any policy-gradient code still hold?
python -m nanorlhf.doctor code --scripts DIR     of scripts, and a package, that you have changed elsewhere
python -m nanorlhf.doctor code -- --my-flag 0.1  with a flag of yours, which the training runs get that have it
python -m nanorlhf.doctor run runs/tiny/ppo      what do a run's metrics, settings, samples and traces say?

The exit status is 0 where nothing was found, 1 where something was, and 2 for bad input.
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
    """Run the scripts on tiny models, and check what must hold for any policy-gradient code."""

    scripts: Path = code.ROOT
    """directory of changed scripts, and of a changed nanorlhf/ or kernels/; what it lacks is taken from here"""
    flags: tyro.conf.Positional[tuple[str, ...]] = ()
    """after `--`: flags of the training scripts, such as one that you have added; each script gets those that it has"""

    def run(self) -> int:
        findings, unchecked = code.examine(self.scripts, self.flags)
        for sentence in unchecked:
            print(f"not checked: {sentence}")
        return report(findings)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Read what runs have written, finished or not."""

    directories: tyro.conf.Positional[tuple[Path, ...]]
    """of runs; a reward model's run says what PPO's first scores should be"""

    def run(self) -> int:
        if not self.directories:
            raise InputError("nanorlhf.doctor run: name the directory of a run.")
        from nanorlhf.doctor import diagnosis  # imports PyTorch, and code that the other form may find broken

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
