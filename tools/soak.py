"""Run the pipeline in miniature over and over under random faults, and check that the results are always bit-identical.

    python -m tools.soak --hours 6

A round is SFT, reward model, PPO, GRPO, DPO and an evaluation, in one process, in two, or in two with sharded weights.
Each stage first runs undisturbed. Then faults (tools/faults.py) hit it at random moments; a run that dies is resumed,
or restarted if there is no saved state. At the end, all files of the stage must equal those of the undisturbed run,
except for times, and nothing else may be left: no other file, no process, no shared memory. Linux only.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimizer imports it at its first step: import it once here, not in every run
import torch.distributed.fsdp
from tqdm import tqdm

import eval as evaluation
import train_dpo
import train_grpo
import train_ppo
import train_rm
import train_sft
from data import tiny
from nanorlhf import launch
from nanorlhf.cli import command_line, run_module
from nanorlhf.progress import Progress
from nanorlhf.rewards.endpoint import read_cache
from nanorlhf.training.resume import damage, states
from nanorlhf.training.run import TIME_METRICS
from nanorlhf.training.trace import read_trace
from tests.conftest import make_miniature
from tools.faults import FAULTS, World, saves, small_disk, wrong_clock

STAGES: dict[str, Callable[[Any], Any]] = {
    "sft": train_sft.main, "rm": train_rm.main, "ppo": train_ppo.main, "grpo": train_grpo.main,
    "dpo": train_dpo.main, "eval": evaluation.main,
}  # fmt: skip
LAYOUTS: tuple[dict[str, Any], ...] = ({"processes": 1}, {"processes": 2}, {"processes": 2, "shard": "fsdp"})
STATE_FAULTS = ("SIGKILL in a save", "dead rank", "truncated state", "foreign file")  # an evaluation saves no states
FOREIGN = ("notes.txt", "step-00000001.bak", "step-99999999", "step-the-best")
TIMES = ("seconds", "peak_resident_bytes", *TIME_METRICS, "resume", "overwrite")
PATIENCE = 600.0  # time limit of a run on a busy machine, seconds; on an idle one it takes less than 20
CRASH, MOST_CRASHES = "a library's crash", 2  # native code crashes without a fault: listed and resumed if rare
CRASHED = re.compile(r"in another process: rank \d+ died of SIG(SEGV|BUS|ILL|FPE|ABRT)\b")
GRACE = 2 * launch.GRACE_PERIOD  # time limit for the last process of a run to end, seconds
SPARE = 2**23  # bytes that this process may grow after three rounds; leaking a state per run exceeds it in minutes
PR_SET_CHILD_SUBREAPER = 36  # from prctl.h
RUBRIC = "Rate from 1 to 10 how well {response} sums up {query}."
RULE = "def score(queries, responses):\n    return [len(response) / 10 for response in responses]\n"


@dataclass(frozen=True, kw_only=True)
class Args:
    hours: float
    """no new round starts after this time; the first always runs"""
    seed: int = 0
    """seed of the faults and their timing, which repeats only as well as the machine's speed does"""
    first_round: int = 1
    """start with this round, to reproduce a failure"""


class Failure(Exception):
    """A wrong effect of a fault."""


def fingerprint(disk: Path) -> dict[str, str]:
    """Map each path to a hash of its content without times; directories and the names of states are included."""
    hashes = {}
    for path in sorted(disk.rglob("*")):
        # None for directories; for states, because they contain times and resuming shows that they are right; and for
        # the evaluation's page, because it shows how each run was last started
        content: object = None
        if path.name == "answers.jsonl":  # in the order of arrival
            content = sorted(read_cache(path.read_bytes()).items())
        elif path.parent.name == "trace":  # has the settings of the start that wrote it
            tensors, about = read_trace(path)
            about["settings"] = {name: about["settings"][name] for name in about["settings"] if name not in TIMES}
            content = [{name: sha256(tensors[name].numpy().tobytes()).hexdigest() for name in sorted(tensors)}, about]
        elif path.suffix in (".json", ".jsonl") and "state" not in path.parts:
            texts = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            rows = [json.loads(text) for text in texts]
            content = [{key: row[key] for key in row if key not in TIMES} for row in rows]
        elif path.is_file() and "state" not in path.parts and path.name != "report.html":
            content = sha256(path.read_bytes()).hexdigest()
        if not path.name.startswith("events.out.tfevents."):  # one per start, named by time
            hashes[str(path.relative_to(disk))] = sha256(json.dumps(content).encode()).hexdigest()
    return hashes


class Soak:
    """Runs one stage at a time and counts faults."""

    def __init__(self, root: Path, seed: int, world: World):
        self.root, self.seed, self.world, self.run = root, seed, world, world.run
        self.drawn, self.hit = Counter[str](), Counter[str]()
        self.resumed, self.restarted = Counter[str](), Counter[str]()  # by fault
        self.undisturbed: dict[
            tuple[str, int], tuple[dict[str, str], float]
        ] = {}  # undisturbed runs: fingerprint, seconds
        self.job = 0  # process id; 0: none
        self.runs = self.largest_rss = 0
        self.stage = self.fault = ""

    # -------------------------------------------------------------------------------------------------------- 1. a run
    def settings(self, layout: dict[str, Any]) -> Any:
        """Return the settings of the current stage."""
        small = make_miniature(self.run, train=False)
        common = {"out": self.run / self.stage, "save_every": 1, **layout}
        sampled = {"data": small.ppo.data, "device": "cpu", "max_query_length": 160, "response_length": 12}
        if self.stage == "eval":
            pairs = [(stage, str(self.run / stage)) for stage in ("sft", "ppo", "grpo", "dpo")]
            return replace(
                evaluation.RECIPES["tiny"][1],
                **sampled, out=common["out"], overwrite=True, num_queries=8, batch_size=4, max_response_length=64,
                policies=tuple(word for pair in pairs for word in pair), reward_model=small.ppo.reward_model,
            )  # fmt: skip
        if self.stage == "grpo":
            return replace(
                train_grpo.RECIPES["tiny"][1],
                **sampled, **common, sft=small.ppo.sft, total_episodes=48, batch_size=8, micro_batch_size=4,
                samples_per_query=4, num_epochs=1, reward_model=None, reward_workers=1,
                reward=(f"judge:{self.run / 'judge.toml'}", f"{self.run / 'rule.py'}:score"),
            )  # fmt: skip
        extra = (
            {"total_episodes": 64, "kl_target": 0.01, "trace": 2, "keep_every": 3}
            if self.stage == "ppo"
            else {"eval_every": 3}
        )
        return replace(getattr(small, self.stage), **common, **extra)

    def start(self, args: Any) -> None:
        """Fork the current stage, in a new session."""
        self.runs += 1
        log = os.open(self.root / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.job = os.fork()
        if self.job:
            os.close(log)
            return
        code = 1
        try:
            try:
                os.setsid()
                launch.die_with_parent()
                signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background jobs
                signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup
                wrong_clock()
                os.dup2(log, 1)
                os.dup2(log, 2)
                sys.argv = [self.stage]
                command_line(STAGES[self.stage], {"soak": ("", args)})
                code = 0
            except SystemExit as stop:
                code = int(stop.code or 0)
            except KeyboardInterrupt:
                code = 128 + signal.SIGINT
            except BaseException:
                traceback.print_exc()
            threading._shutdown()  # as at the interpreter's exit
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def begin(self, args: Any) -> None:
        """Start the current stage; after a fault, resume it if there is a saved state."""
        if self.fault:
            resume = bool(states(args.out))
            (self.resumed if resume else self.restarted)[self.fault] += 1
            if self.stage != "eval":
                args = replace(args, resume=resume, overwrite=not resume)
        self.start(args)

    def wait(self, *codes: int) -> int:
        """Return the run's exit code, which must be 0 or one of `codes`. Also reaps adopted orphans."""
        end = time.monotonic() + PATIENCE
        child, status = 0, 0
        while child != self.job:
            child, status, usage = os.wait4(-1, os.WNOHANG)
            if child and child == self.world.judge:
                raise Failure("the judge itself died")
            self.largest_rss = max(self.largest_rss, 1024 * usage.ru_maxrss)
            if child == 0 and time.monotonic() > end:
                raise Failure(f"the run has not ended after {PATIENCE:.0f} seconds")
            time.sleep(0 if child else 0.01)
        self.job = 0
        code, log = os.waitstatus_to_exitcode(status), (self.root / "log").read_text()
        if code not in codes and (CRASHED.search(log) or -code in (signal.SIGSEGV, signal.SIGBUS)):
            self.fault = CRASH
            self.hit[CRASH] += 1
            if self.hit[CRASH] > MOST_CRASHES:
                raise Failure(f"native code has crashed {self.hit[CRASH]} times: {log[-500:]}")
            (self.root / "log").unlink()
            return code
        if code not in (0, *codes):
            raise Failure(f"the run ended with {code}: {log[-500:]}")
        # TensorBoard's thread prints a traceback if the disk is full, and so does a tqdm bar interrupted by Ctrl-C
        noise = log.count("Exception in thread") + log.count("Exception ignored in: <function tqdm.__del__")
        tracebacks = log.count("Traceback") - noise
        if code not in (0, 1) and tracebacks or code == 2 and "error: " not in log:
            raise Failure("the run ended with a traceback or without an error message")
        (self.root / "log").unlink()
        return code

    # ------------------------------------------------------------------------------------------------------- 2. a stage
    def disturb(self, args: Any, faults: list[str], seconds: float) -> None:
        """Run the current stage to its end while faults hit it."""
        out, world = args.out, self.world
        last = out / ("eval.json" if self.stage == "eval" else "summary.json")  # exists once a run has finished
        foreign: set[Path] = set()
        for fault in faults:
            self.drawn[fault] += 1
            if not self.job:
                self.begin(args)
            self.fault, before = fault, saves(out)
            alive = world.moment(fault, self.job, out, seconds)
            struck = False
            with contextlib.suppress(ProcessLookupError):
                struck = alive and world.strike(fault, self.job, out)
            if alive and not (struck and FAULTS[fault]):
                self.hit[fault] += struck
                continue  # the run continues, and the next fault hits it
            code = self.wait(*(FAULTS[fault] if struck else ()))
            struck = struck and self.fault != CRASH
            world.heal(self.stage == "grpo")
            if fault == "SIGKILL in a save":
                struck = bool(saves(out) - before)
            elif fault == "truncated state" and (struck := struck and len(states(out)) > 1 and not last.exists()):
                file = states(out)[0] / "state.pt"
                os.truncate(file, file.stat().st_size - world.draw.randint(1, 5000))
            elif fault == "foreign file" and (struck := struck and bool(states(out))):
                foreign.add(out / "state" / world.draw.choice(FOREIGN))
                for path in foreign:
                    path.write_text("not a state")
            self.hit[fault] += struck
            if code == 0 or last.exists():
                break
        while self.job or not last.exists():
            if not self.job:
                self.begin(args)
            if self.wait() == 0:  # otherwise it has crashed
                break
        world.heal(judged=False)
        for path in foreign:
            if not path.exists():
                raise Failure(f"it deleted {path}, which isn't one of its files")
            path.unlink()

    def check(self, out: Path, expected: dict[str, str]) -> None:
        """Check that the disk is as the undisturbed run left it, and that no process or shared memory is left."""
        now = fingerprint(self.world.disk)
        if wrong := sorted(name for name in now | expected if now.get(name) != expected.get(name)):
            raise Failure(f"its files differ from the undisturbed run: {', '.join(wrong)}")
        for state in states(out):
            if reason := damage(state):
                raise Failure(f"{state.name} is damaged ({reason})")
        if self.world.mounted and (segments := os.listdir("/dev/shm")):
            raise Failure(f"it left shared memory: {', '.join(segments)}")
        end = time.monotonic() + GRACE
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait4(-1, os.WNOHANG)
                if time.monotonic() > end:
                    raise Failure("it left a process")
                time.sleep(0.01)

    def play(self, number: int) -> Iterator[None]:
        """Run one round; yields after each stage."""
        draw = self.world.draw = random.Random(f"{self.seed} {number}")
        index = (number - 1) % len(LAYOUTS)
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.copytree(self.root / "start", self.run)
        for self.stage in STAGES:
            self.fault = ""
            args = self.settings(LAYOUTS[index])
            self.world.heal(self.stage == "grpo")
            if (self.stage, index) not in self.undisturbed:
                shutil.copytree(self.run, self.root / "before")
                begin = time.monotonic()
                self.start(args)
                if self.wait():
                    raise Failure("the undisturbed run crashed")
                self.undisturbed[self.stage, index] = fingerprint(self.world.disk), time.monotonic() - begin
                shutil.rmtree(self.run)
                shutil.move(self.root / "before", self.run)
            possible = [
                fault
                for fault in FAULTS
                if ("judge" not in fault or self.stage == "grpo")
                and (fault not in STATE_FAULTS or self.stage != "eval")
                and (fault != "dead rank" or LAYOUTS[index]["processes"] > 1)
                and (fault != "read-only disk" or self.world.mounted)
            ]
            expected, seconds = self.undisturbed[self.stage, index]
            self.disturb(args, draw.choices(possible, k=draw.randint(2, 4)), seconds)
            self.check(args.out, expected)
            yield

    def table(self) -> str:
        columns = {"drawn": self.drawn, "hit": self.hit, "resumed": self.resumed, "started again": self.restarted}
        rows = [("fault", *columns), ("---", *("---:" for _ in columns))]
        faults = (*FAULTS, CRASH) if self.hit[CRASH] else FAULTS
        rows += [(fault, *(str(column[fault]) for column in columns.values())) for fault in faults]
        rows.append(("all", *(str(column.total()) for column in columns.values())))
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


# ------------------------------------------------------------------------------------------------------------- 3. main
def process_size() -> tuple[int, int]:
    """Return this process's bytes in memory and number of open files."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # free memory that glibc caches isn't a leak; other libcs lack the call
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))


def make_inputs(directory: Path, world: World) -> None:
    """Write the files that each round starts from: the data, a reward function, and the judge's settings."""
    child = os.fork()  # this process starts no threads: a fork would lose them
    if child == 0:
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
            sizes = {"num_demonstrations": 64, "num_comparisons": 64, "num_validation": 16, "vocab_size": 320}
            tiny.main(tiny.Args(out=directory / "data", **sizes))
        os._exit(0)
    os.waitpid(child, 0)
    (directory / "rule.py").write_text(RULE)
    url, cache = f"http://127.0.0.1:{world.reserved.getsockname()[1]}/v1", str(world.run / "answers.jsonl")
    judge = {"url": url, "model": "judge", "rubric": RUBRIC, "timeout": 10.0, "workers": 4, "cache": cache}
    (directory / "judge.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in judge.items()))


def main(args: Args) -> int:
    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    root = Path(tempfile.mkdtemp(prefix="soak-"))
    for name in ("disk", "view"):
        (root / name).mkdir()
    begin, number, code, sizes = time.monotonic(), args.first_round, 0, (0, 0)
    tqdm.monitor_interval = 0  # no monitor thread: a fork would wait for its lock forever
    tqdm.set_lock(threading.RLock())  # tqdm's default lock is shared with forks: a killed fork may still hold it
    bar = Progress(total=round(3600 * args.hours), unit="s", bar_format="{l_bar}{bar}| {n}/{total} s{postfix}")
    with small_disk(root / "disk") as mounted:
        soak = Soak(root, args.seed, World(root, mounted))
        tempfile.tempdir = os.environ["TMPDIR"] = str(root / "disk" / "tmp")
        os.mkdir(tempfile.tempdir)
        try:
            make_inputs(root / "start", soak.world)
            while number == args.first_round or time.monotonic() - begin < 3600 * args.hours:
                for _ in soak.play(number):
                    bar.n = min(bar.total, round(time.monotonic() - begin))
                    bar.set_postfix_str(f"round {number}, {soak.hit.total()} faults")
                now = process_size()
                sizes = now if number < args.first_round + 3 else sizes
                if now[0] > sizes[0] + SPARE or now[1] > sizes[1]:
                    raise Failure(f"the soak itself grew from {sizes} to {now} (bytes, open files)")
                number += 1
        except Failure as failure:
            code = 1
            bar.close()
            shutil.copytree(soak.world.disk, root / "kept", symlinks=True)
            layout = LAYOUTS[(number - 1) % len(LAYOUTS)]
            print(
                f"FAILED in round {number}, {soak.stage} with {layout}, after {soak.fault or 'no fault'}: {failure}. "
                f"All files are in {root}, the run's output in {root / 'log'}. To reproduce: "
                f"python -m tools.soak --hours 0 --seed {args.seed} --first-round {number}"
            )
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        finally:
            bar.close()
            if soak.job:
                os.kill(soak.job, signal.SIGKILL)  # its children die with it
                os.waitpid(soak.job, 0)
            soak.world.heal(judged=False)
    if code != 1:
        shutil.rmtree(root)
    print(soak.table())
    memory = [f"{size / 2**20:.0f} MiB" for size in (soak.largest_rss, sizes[0], process_size()[0])]
    print(
        f"{number - args.first_round} rounds, {soak.runs} runs, {time.monotonic() - begin:.0f} seconds. Memory: a run "
        f"at most {memory[0]}, the soak {memory[1]} after three rounds and {memory[2]} at the end."
    )
    return code


if __name__ == "__main__":
    sys.exit(run_module(main, Args))
