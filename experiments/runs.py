"""Runs of a study: commands, the files they write, and the order in which they run.

A study is a function that turns its settings into runs. It yields them in phases, and a phase may read the results of
the previous one. Finished runs are not repeated, so a table can grow.
"""

import io
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from nanorlhf.cli import Count
from nanorlhf.errors import InputError
from nanorlhf.progress import Progress

Words = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Args:
    out: Path
    """directory of the runs"""
    jobs: Count = 2
    """runs in parallel, one thread each"""
    dry_run: bool = False
    """print the commands of all runs, including finished ones, and run none"""


@dataclass(frozen=True)
class Run:
    """A Python command, the file that exists once it has finished, and the files it waits for."""

    words: Words
    done: Path | None = None  # None: always run
    needs: tuple[Path, ...] = ()
    state: Path | None = None  # directory of the states that an interrupted run leaves behind
    then: Callable[[], None] | None = field(default=None, compare=False)  # called after success
    diverged: Callable[[], None] | None = field(default=None, compare=False)  # called if its loss is not finite

    def command(self) -> list[str]:
        if self.state is None:
            return [sys.executable, *self.words]
        return [sys.executable, *self.words, "--resume" if [*self.state.glob("step-*")] else "--overwrite"]


def stage(out: Path, seed: int, *words: object, needs: tuple[Path, ...] = ()) -> Run:
    """Return a run of a training script, which continues from its last state."""
    command = (*map(str, words), "--out", str(out), "--seed", str(seed))
    return Run(command, out / "summary.json", needs, out / "state")


def evaluation(out: Path, *words: object, needs: tuple[Path, ...] = ()) -> Run:
    command = ("eval.py", *map(str, words), "--out", str(out), "--overwrite")
    return Run(command, out / "eval.json", needs)


# the experiments use a larger model and more demonstrations than `make demo`
START = ("train_sft.py", "--n-layer", 3)


def world(out: Path, seed: int, *words: object, num_demonstrations: int = 8000) -> Run:
    words = ("--num-demonstrations", num_demonstrations, *words)
    command = ("-m", "data.tiny", "--out", str(out), "--seed", str(seed), *map(str, words))
    return Run(command, out / "tokenizer.json")


def flag(entry: str) -> Words:
    """Turn FLAG/VALUE,VALUE into --FLAG VALUE VALUE; a name without a value has no flags."""
    name, _, values = entry.partition("/")
    return (f"--{name}", *values.split(",")) if values else ()


def execute(runs: list[Run], jobs: int) -> None:
    """Run what hasn't finished, each run after those it needs. Raises InputError if a command fails."""
    waiting = [run for run in dict.fromkeys(runs) if run.done is None or not run.done.exists()]
    running: dict[Future[tuple[int, bytes]], Run] = {}
    with ThreadPoolExecutor(jobs) as pool, Progress(total=len(waiting), unit="run") as bar:
        while waiting or running:
            unfinished = {run.done for run in running.values()}  # a file may exist before its run ends
            ready = [run for run in waiting if all(file.exists() and file not in unfinished for file in run.needs)]
            for run in ready[: jobs - len(running)]:
                waiting.remove(run)
                running[pool.submit(call, run.command())] = run
            assert running, f"nothing writes {waiting[0].needs}"
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                run, (status, output) = running.pop(future), future.result()
                bar.update()
                if status != 0 and run.diverged is not None and b"not finite" in output:
                    run.diverged()
                    after = [waiting_run for waiting_run in waiting if run.done in waiting_run.needs]
                    bar.update(len(after))
                    waiting = [waiting_run for waiting_run in waiting if waiting_run not in after]
                    continue
                if status == 0 and run.then is not None:
                    run.then()
                if status != 0 or (run.done is not None and not run.done.exists()):
                    raise InputError(f"{shlex.join(run.words)} failed with exit status {status}.")


def call(command: list[str]) -> tuple[int, bytes]:
    """Run a command on one thread, showing its stderr. Returns its exit status and the end of its stderr."""
    end = b""
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        assert isinstance(process.stderr, io.BufferedReader)
        while output := process.stderr.read1():
            sys.stderr.write(output.decode(errors="replace"))
            sys.stderr.flush()
            end = (end + output)[-2000:]
    return process.returncode, end
