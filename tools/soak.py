"""The pipeline in miniature, again and again, under faults that a seed draws: does it always end in the same bits?

    python -m tools.soak --hours 6

A round is SFT, reward model, PPO, GRPO, DPO and an evaluation, in one process, in two, or in two with sharded weights.
Each stage runs once undisturbed. After that, faults hit it at random moments; a run that ends is resumed, or started
again where there is no state. In the end all files of the stage must be those of the undisturbed run, times apart, and
nothing else may be left: no other file, no process, no shared memory. Linux only.

The disk is a tmpfs of its own, which really fills up and really becomes read-only. Where the kernel permits no mounts,
files may not grow beyond a size (RLIMIT_FSIZE), and no disk is read-only. The clock that jumps is Python's time.time.
"""

import atexit
import contextlib
import ctypes
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which an optimizer imports at its first step: here it is imported once, not in every run
import torch.distributed.fsdp
import tyro
from tqdm import tqdm

import eval as evaluation
import train_dpo
import train_grpo
import train_ppo
import train_rm
import train_sft
from data import tiny
from nanorlhf import launch
from nanorlhf.cli import command_line
from nanorlhf.rewards.endpoint import read_cache
from nanorlhf.training.resume import damage, states
from nanorlhf.training.trace import read_trace
from tests.conftest import make_miniature

STAGES: dict[str, Callable[[Any], Any]] = {
    "sft": train_sft.main, "rm": train_rm.main, "ppo": train_ppo.main, "grpo": train_grpo.main,
    "dpo": train_dpo.main, "eval": evaluation.main,
}  # fmt: skip
LAYOUTS: tuple[dict[str, Any], ...] = ({"processes": 1}, {"processes": 2}, {"processes": 2, "shard": "fsdp"})
# fault -> exit codes of a run that it ends; none: the run must go on as if nothing had happened. 0 is always right
FAULTS: dict[str, tuple[int, ...]] = {
    "SIGKILL": (-signal.SIGKILL,),
    "SIGKILL in a save": (-signal.SIGKILL,),
    "SIGINT": (128 + signal.SIGINT,),
    "SIGTERM": (128 + signal.SIGTERM, -signal.SIGTERM),  # the second before the first step
    "SIGHUP": (-signal.SIGHUP,),
    "SIGSTOP, SIGCONT": (),
    "dead rank": (1,),
    "full disk": (2,),
    "read-only disk": (2,),
    "jumping clock": (),
    "slow judge": (),
    "dripping judge": (),
    "failing judge": (2,),
    "dead judge": (2,),
    "truncated state": (-signal.SIGKILL,),
    "foreign file": (-signal.SIGKILL,),
}
OF_STATES = ("SIGKILL in a save", "dead rank", "truncated state", "foreign file")  # not of an evaluation
FOREIGN = ("notes.txt", "step-00000001.bak", "step-99999999", "step-the-best")
TIMES = ("seconds", "peak_resident_bytes", "episodes_per_second", "resume", "overwrite")
DISK = 2**26  # bytes; a round leaves a few million
PATIENCE = 300.0  # seconds that a run may take on a busy machine; undisturbed it takes less than 20
SPARE = 2**23  # bytes by which this process may grow after three rounds: a state kept per run is more within minutes
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000  # from sched.h
PR_SET_CHILD_SUBREAPER = 36  # from prctl.h
RUBRIC = "Rate from 1 to 10 how well {response} sums up {query}."
CLOCK = {"seconds": 0.0}  # by which the clock of a run is wrong


@dataclass(frozen=True, kw_only=True)
class Args:
    hours: float
    """no round begins after this time; the first always does"""
    seed: int = 0
    """seed of the faults and their moments; they repeat as far as the machine's speed does"""
    first_round: int = 1
    """begin with this round, to repeat a failure"""


class Failure(Exception):
    """What a fault may not do."""


# -------------------------------------------------------------------------------------------------------- 1. the world
@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[bool]:
    """A tmpfs of DISK bytes there, and an empty /dev/shm, that only this process and its children see.

    Yields False where the kernel permits no mounts.
    """
    user = os.getuid()
    own = ctypes.CDLL(None).unshare(CLONE_NEWNS | (CLONE_NEWUSER if user else 0)) == 0
    if own and user:
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    tmpfs = ("mount", "-t", "tmpfs", "-o", f"size={DISK}", "soak")
    commands = (("mount", "--make-rprivate", "/"), (*tmpfs, directory), (*tmpfs, "/dev/shm"))
    mounted = own and all(subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0 for command in commands)
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(("umount", "--lazy", directory), check=True)


class Judge(BaseHTTPRequestHandler):
    """Grades by the prompt alone."""

    mood = ""

    def do_POST(self) -> None:
        prompt = self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": f"Score: {sha256(prompt).digest()[0] % 10 + 1}"}
        answer = json.dumps({"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}).encode()
        time.sleep(0.3 if self.mood == "slow judge" else 0)
        self.send_response(500 if self.mood == "failing judge" else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        for byte in answer:
            self.wfile.write(bytes([byte]))
            time.sleep(0.01 if self.mood == "dripping judge" else 0)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def jump(*_: object) -> None:
    """The clock of this run jumps, from a year ahead to a year back."""
    CLOCK["seconds"] = -CLOCK["seconds"] or 365 * 86400.0


def saves(out: Path) -> set[tuple[Path, int]]:
    """Directories of unfinished saves, with the time of their last change."""
    found = set()
    for place in (out, out / "state", out / "value_model", out / "best"):
        for path in (place / ".partial", place / ".doomed"):
            with contextlib.suppress(FileNotFoundError):
                found.add((path, path.stat().st_ctime_ns))
    return found


def fingerprint(disk: Path) -> dict[str, str]:
    """Path -> hash of what lies there, times apart; directories and the names of states included."""
    found = {}
    for path in sorted(disk.rglob("*")):
        content: object = None  # of directories; states hold times, and resuming shows that they are right
        if path.name == "answers.jsonl":  # in the order in which they came
            content = sorted(read_cache(path.read_bytes()).items())
        elif path.parent.name == "trace":  # with the settings of the start that wrote it
            tensors, about = read_trace(path)
            about["settings"] = {name: about["settings"][name] for name in about["settings"] if name not in TIMES}
            content = [{name: sha256(tensors[name].numpy().tobytes()).hexdigest() for name in sorted(tensors)}, about]
        elif path.suffix in (".json", ".jsonl") and "state" not in path.parts:
            texts = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            rows = [json.loads(text) for text in texts]
            content = [{key: row[key] for key in row if key not in TIMES} for row in rows]
        elif path.is_file() and "state" not in path.parts:
            content = sha256(path.read_bytes()).hexdigest()
        if not path.name.startswith("events.out.tfevents."):  # one per start, with its time
            found[str(path.relative_to(disk))] = sha256(json.dumps(content).encode()).hexdigest()
    return found


# --------------------------------------------------------------------------------------------------------- 2. the soak
class Soak:
    """Runs one stage at a time, with its judge, and counts."""

    def __init__(self, root: Path, seed: int, mounted: bool):
        self.root, self.disk, self.run = root, root / "disk", root / "disk" / "run"
        self.seed, self.mounted, self.read_only = seed, mounted, False
        self.drawn, self.hit = Counter[str](), Counter[str]()
        self.resumed, self.restarted = Counter[str](), Counter[str]()
        self.whole: dict[tuple[str, int], tuple[dict[str, str], float]] = {}  # undisturbed: fingerprint, seconds
        self.job = self.judge = 0  # process ids; 0: none
        self.round = self.runs = self.largest_rss = 0
        self.stage = self.fault = ""
        self.draw = random.Random()
        self.reserved = socket.socket()  # nobody else gets its port while the judge is dead
        self.reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.reserved.bind(("127.0.0.1", 0))

    # ------------------------------------------------------------------------------------------------------ 2.1 a run
    def settings(self, layout: dict[str, Any]) -> Any:
        """Of the present stage, in the directory of the round."""
        small = make_miniature(self.run, train=False)
        places = {stage: str(self.run / stage) for stage in STAGES}
        common = {"out": self.run / self.stage, "save_every": 1, **layout}
        if self.stage == "eval":
            return replace(
                evaluation.RECIPES["tiny"][1],
                data=small.ppo.data, out=self.run / "eval", device="cpu", overwrite=True, num_queries=8, batch_size=4,
                policies=tuple(word for stage in ("sft", "ppo", "grpo", "dpo") for word in (stage, places[stage])),
                reward_model=places["rm"], max_query_length=160, max_response_length=64, response_length=12,
            )  # fmt: skip
        if self.stage == "grpo":
            return replace(
                train_grpo.RECIPES["tiny"][1],
                data=small.ppo.data, device="cpu", sft=places["sft"], max_query_length=160, response_length=12,
                total_episodes=48, batch_size=8, micro_batch_size=4, samples_per_query=4, num_epochs=1,
                reward_model=None, reward=(f"judge:{self.run / 'judge.toml'}", f"{self.run / 'rule.py'}:score"),
                reward_workers=1, **common,
            )  # fmt: skip
        extra = {"total_episodes": 64, "kl_target": 0.01, "trace": 2} if self.stage == "ppo" else {"eval_every": 3}
        return replace(getattr(small, self.stage), **common, **extra)

    def start(self, args: Any) -> None:
        """Fork the present stage, in a session of its own."""
        self.runs += 1
        self.job = os.fork()
        if self.job:
            return
        code = 1
        try:
            os.setsid()
            launch.die_with_parent()
            right = time.time
            time.time = lambda: right() + CLOCK["seconds"]
            log = os.open(self.root / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.argv = [self.stage]
            command_line(STAGES[self.stage], {"soak": ("", args)})
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:  # as the interpreter ends: with what was registered for it
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def begin(self, args: Any) -> None:
        """Start the present stage; resume it where there is a state."""
        if (self.run / self.stage).exists():
            resume = bool(states(args.out))
            if self.stage != "eval":
                args = replace(args, resume=resume, overwrite=not resume)
            (self.resumed if resume else self.restarted)[self.fault] += 1
        self.start(args)

    def wait(self, *codes: int) -> int:
        """The run's exit code, which must be 0 or one of `codes`. Reaps orphans too, which this process adopts."""
        end = time.monotonic() + PATIENCE
        child, status = 0, 0
        while child != self.job:
            child, status, usage = os.wait4(-1, os.WNOHANG)
            if child and child == self.judge:
                raise Failure("the judge itself ended")
            self.largest_rss = max(self.largest_rss, 1024 * usage.ru_maxrss)
            if child == 0 and time.monotonic() > end:
                raise Failure(f"the run still goes on after {PATIENCE:.0f} seconds")
            time.sleep(0 if child else 0.01)
        self.job = 0
        code, log = os.waitstatus_to_exitcode(status), (self.root / "log").read_text()
        if code not in (0, *codes):
            raise Failure(f"the run ended with {code}")
        tracebacks = log.count("Traceback") - log.count("Exception in thread")  # TensorBoard's own, where the disk is full
        if code != 1 and tracebacks or code == 2 and "error: " not in log.splitlines()[-1]:
            raise Failure("the run ended in more than a sentence")
        (self.root / "log").unlink()
        return code

    def is_alive(self) -> bool:
        return os.waitid(os.P_PID, self.job, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def processes(self) -> list[int]:
        """The run's own."""
        found = []
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, _, group = file.read_text().rpartition(") ")[2].split()[:3]
                if int(group) == self.job and state != "Z":
                    found.append(int(file.parent.name))
        return found

    # ------------------------------------------------------------------------------------------------------ 2.2 faults
    def serve(self, mood: str = "") -> None:
        """Replace the judge by one in this mood."""
        if self.judge:
            os.kill(self.judge, signal.SIGKILL)
            os.waitpid(self.judge, 0)
        self.judge = 0 if mood == "dead judge" else os.fork()
        if self.judge or mood == "dead judge":
            return
        try:
            os.setsid()
            launch.die_with_parent()
            Judge.mood = mood
            ThreadingHTTPServer(self.reserved.getsockname(), Judge).serve_forever()
        finally:
            os._exit(1)

    def moment(self, out: Path, seconds: float) -> bool:
        """Wait for a random moment of the run, or for the first save after it; returns whether the run goes on."""
        end, before = time.monotonic() + self.draw.uniform(0, seconds), saves(out)
        while self.is_alive() and (
            time.monotonic() < end or self.fault == "SIGKILL in a save" and not saves(out) - before
        ):
            time.sleep(0.0005)
        return self.is_alive()

    def strike(self, out: Path) -> bool:
        """Let the present fault happen; returns whether it could."""
        send = self.draw.choice((os.kill, os.killpg))  # to the process that the user started, or to all
        processes = self.processes()
        match self.fault:
            case "SIGKILL" | "SIGKILL in a save" | "truncated state" | "foreign file":
                send(self.job, signal.SIGKILL)
            case "SIGINT" | "SIGTERM" | "SIGHUP":
                send(self.job, signal.Signals[self.fault])
            case "SIGSTOP, SIGCONT":
                chosen = self.draw.choice(processes)
                os.kill(chosen, signal.SIGSTOP)
                time.sleep(self.draw.uniform(0, 1))
                os.kill(chosen, signal.SIGCONT)
            case "dead rank":
                if processes == [self.job]:  # the second is not there yet, or not any more
                    return False
                os.kill(max(processes), signal.SIGKILL)
            case "full disk" if self.mounted:
                with (self.disk / "ballast").open("wb") as file, contextlib.suppress(OSError):
                    while True:  # until nothing fits: the run writes meanwhile
                        free = os.statvfs(self.disk).f_bavail * os.statvfs(self.disk).f_frsize
                        os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free)
            case "full disk":
                for process in processes:
                    most = self.draw.randrange(20_000)
                    resource.prlimit(process, resource.RLIMIT_FSIZE, (most, most))
            case "read-only disk":
                view = self.root / "view"
                subprocess.run(("mount", "-o", "bind,ro", self.run, view), check=True)
                subprocess.run(("mount", "--move", view, self.run), check=True)
                self.read_only = True
            case "jumping clock":
                for process in processes:
                    os.kill(process, signal.SIGUSR1)
                for path in out.rglob("*"):
                    with contextlib.suppress(FileNotFoundError):
                        os.utime(path, (0, 4e9))
            case _:
                self.serve(self.fault)
                if self.draw.random() < 0.5:  # it recovers before the run gives up
                    time.sleep(self.draw.uniform(0, 3))
                    self.serve()
        return True

    def heal(self) -> None:
        (self.disk / "ballast").unlink(missing_ok=True)
        if self.read_only:
            subprocess.run(("umount", "--lazy", self.run), check=True)
            self.read_only = False
        self.serve("" if self.stage == "grpo" else "dead judge")

    # ------------------------------------------------------------------------------------------------------- 2.3 rounds
    def disturb(self, args: Any, faults: list[str], seconds: float) -> None:
        """Run the present stage to its end while faults hit it."""
        foreign: list[Path] = []
        for fault in faults:
            self.fault = fault
            self.drawn[fault] += 1
            if not self.job:
                self.begin(args)
            before = saves(args.out)
            alive = self.moment(args.out, seconds)
            struck = alive and self.strike(args.out)
            if alive and not (struck and FAULTS[fault]):
                self.hit[fault] += struck
                continue  # the run goes on, and the next fault finds it
            code = self.wait(*(FAULTS[fault] if struck else ()))
            self.heal()
            newest = states(args.out)[0] / "state.pt" if states(args.out) else None
            if fault == "SIGKILL in a save":
                struck = bool(saves(args.out) - before)
            elif fault == "truncated state" and (struck := struck and len(states(args.out)) > 1):
                os.truncate(newest, os.path.getsize(newest) - self.draw.randint(1, 5000))
            elif fault == "foreign file" and (struck := struck and newest is not None):
                foreign.append(args.out / "state" / self.draw.choice(FOREIGN))
                foreign[-1].write_text("not a state")
            self.hit[fault] += struck
            if code == 0:
                break
        if not self.job and not (args.out / ("eval.json" if self.stage == "eval" else "summary.json")).exists():
            self.begin(args)
        if self.job:
            self.wait()
        self.heal()
        for path in set(foreign):
            if not path.is_file() or path.read_text() != "not a state":
                raise Failure(f"{path} is gone")
            path.unlink()

    def check(self, out: Path, whole: dict[str, str]) -> None:
        """Nothing but what the undisturbed run left."""
        now = fingerprint(self.disk)
        if wrong := sorted(name for name in now | whole if now.get(name) != whole.get(name)):
            raise Failure(f"it left other files than the undisturbed run: {', '.join(wrong)}")
        for state in states(out):
            if reason := damage(state):
                raise Failure(f"{state.name} is damaged ({reason})")
        if self.mounted and (segments := os.listdir("/dev/shm")):
            raise Failure(f"it left shared memory: {', '.join(segments)}")
        end = time.monotonic() + 20  # an orphan may take the grace period of nanorlhf/launch.py
        with contextlib.suppress(ChildProcessError):  # no child, and so no lock either
            while True:
                os.wait4(-1, os.WNOHANG)
                if time.monotonic() > end:
                    raise Failure("it left a process")
                time.sleep(0.01)

    def play(self, number: int) -> Iterator[None]:
        """One round; yields after each stage."""
        self.round = number
        self.draw = random.Random(f"{self.seed} {number}")
        index = number % len(LAYOUTS)
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.copytree(self.root / "start", self.run)
        for self.stage in STAGES:
            self.fault = "no fault"
            args = self.settings(LAYOUTS[index])
            self.heal()
            if (self.stage, index) not in self.whole:
                shutil.copytree(self.run, self.root / "before")
                begin = time.monotonic()
                self.start(args)
                self.wait()
                self.whole[self.stage, index] = fingerprint(self.disk), time.monotonic() - begin
                shutil.rmtree(self.run)
                shutil.move(self.root / "before", self.run)
            whole, seconds = self.whole[self.stage, index]
            self.disturb(args, self.draw.choices(self.possible(index), k=self.draw.randint(2, 4)), seconds)
            self.serve("dead judge")
            self.check(args.out, whole)
            yield

    def possible(self, index: int) -> list[str]:
        """Faults that can hit the present stage."""
        return [
            fault
            for fault in FAULTS
            if ("judge" not in fault or self.stage == "grpo")
            and (fault not in OF_STATES or self.stage != "eval")
            and (fault != "dead rank" or LAYOUTS[index]["processes"] > 1)
            and (fault != "read-only disk" or self.mounted)
        ]

    # ------------------------------------------------------------------------------------------------------ 2.4 results
    def table(self) -> str:
        columns = {"drawn": self.drawn, "hit": self.hit, "resumed": self.resumed, "started again": self.restarted}
        rows = [" | ".join(("fault", *columns)), " | ".join(("---", *("---:" for _ in columns)))]
        for fault in FAULTS:
            possible = fault != "read-only disk" or self.mounted
            numbers = (str(column[fault]) if possible else "not possible here" for column in columns.values())
            rows.append(" | ".join((fault, *numbers)))
        rows.append(" | ".join(("all", *(str(column.total()) for column in columns.values()))))
        return "\n".join(f"| {row} |" for row in rows)


def own_size() -> tuple[int, int]:
    """Bytes in memory, and open files, of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))


def make_start(start: Path, run: Path, port: int) -> None:
    """What each round begins with: the data, a reward function, and the file of the judge."""
    child = os.fork()  # this process starts no threads: a fork would lose them
    if child == 0:
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
            sizes = {"num_demonstrations": 64, "num_comparisons": 64, "num_validation": 16, "vocab_size": 320}
            tiny.main(tiny.Args(out=start / "data", **sizes))
        os._exit(0)
    os.waitpid(child, 0)
    (start / "rule.py").write_text("def score(queries, responses):\n    return [len(text) / 10 for text in responses]\n")
    judge = {"url": f"http://127.0.0.1:{port}/v1", "model": "judge", "rubric": RUBRIC, "timeout": 2.0, "workers": 4}
    judge["cache"] = str(run / "answers.jsonl")
    (start / "judge.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in judge.items()))


def main(args: Args) -> int:
    torch.set_num_threads(1)
    signal.signal(signal.SIGUSR1, jump)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    root = Path(tempfile.mkdtemp(prefix="soak-"))
    (root / "disk").mkdir()
    (root / "view").mkdir()
    begin, number, code, sizes = time.monotonic(), args.first_round, 0, (0, 0)
    bar = tqdm(total=round(3600 * args.hours), unit="s", bar_format="{l_bar}{bar}| {n}/{total} s{postfix}")
    with small_disk(root / "disk") as mounted:
        soak = Soak(root, args.seed, mounted)
        tempfile.tempdir = os.environ["TMPDIR"] = str(root / "disk" / "tmp")
        os.mkdir(tempfile.tempdir)
        try:
            make_start(root / "start", soak.run, soak.reserved.getsockname()[1])
            while number == args.first_round or time.monotonic() - begin < 3600 * args.hours:
                for _ in soak.play(number):
                    bar.n = min(bar.total, round(time.monotonic() - begin))
                    bar.set_postfix_str(f"round {number}, {soak.hit.total()} faults")
                now = own_size()
                sizes = now if number < args.first_round + 3 else sizes
                if now[0] > sizes[0] + SPARE or now[1] > sizes[1]:
                    raise Failure(f"this process grew from {sizes} to {now} (bytes, open files)")
                number += 1
        except Failure as failure:
            code = 1
            bar.close()
            shutil.copytree(soak.disk, root / "kept", symlinks=True)
            print(
                f"FAILED in round {number}, {soak.stage} with {LAYOUTS[number % len(LAYOUTS)]}, after {soak.fault}: "
                f"{failure}. All files are in {root}, what the run said in {root / 'log'}. To repeat it: "
                f"python -m tools.soak --hours 0 --seed {args.seed} --first-round {number}"
            )
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        finally:
            bar.close()
            if soak.job:
                os.killpg(soak.job, signal.SIGKILL)
            soak.serve("dead judge")
    if code != 1:
        shutil.rmtree(root)
    print(f"{soak.table()}\n")
    memory = [f"{size / 2**20:.0f} MiB" for size in (soak.largest_rss, sizes[0], own_size()[0])]
    print(
        f"{number - args.first_round} rounds, {soak.runs} runs, {time.monotonic() - begin:.0f} seconds. Memory: a run "
        f"{memory[0]} at most, the soak {memory[1]} after three rounds and {memory[2]} in the end."
    )
    return code


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
