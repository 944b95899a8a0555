"""Kill runs at random moments, resume them, and compare the result with uninterrupted runs.

    python -m tools.kills --kills 50                                # the scripts in turn, one process each
    python -m tools.kills --kills 20 --processes 2 --shard fsdp     # two gloo processes, of which one is killed

A run is forked from this process, so that it starts at once, and killed (SIGKILL: nothing can clean up) after a random
time or in the middle of a save. Sometimes the newest of several states is truncated too. Then the run is resumed, or
started again where there is nothing to resume from; in the end it may finish. Weights, samples and metrics except times
must be the same to the last bit. Exits with 1 if they are not.
"""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch._dynamo  # which an optimizer imports at its first step: here it is imported once, not in every run
import tyro

import train_dpo
import train_ppo
import train_rm
import train_sft
from nanorlhf.training.resume import states
from tests.conftest import make_miniature

MAIN = {"ppo": train_ppo.main, "sft": train_sft.main, "rm": train_rm.main, "dpo": train_dpo.main}


@dataclass(frozen=True, kw_only=True)
class Args:
    kills: int = 50
    """kills in all, over the scripts"""
    processes: int = 1
    """processes per run"""
    shard: str = "none"
    """none or fsdp"""
    seed: int = 0
    """seed of the moments; they repeat as far as the machine's speed does"""
    miniature: Path | None = None
    """directory of a trained miniature (tests/conftest.py); None trains one"""


def start(stage: str, args, processes: int) -> list[int]:
    """Fork a run; returns the ids of its processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if processes > 1:
                    place = {"RANK": rank, "WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                    os.environ.update({name: str(value) for name, value in place.items()})
                log = (args.out.parent / f"log.{rank}").open("w")
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                MAIN[stage](args)
                code = 0
            except BaseException as error:
                print(repr(error), file=sys.stderr)
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return children


def wait(children: list[int]) -> int:
    """The largest exit code: 0 if all of them succeeded."""
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children)


def saves(out: Path) -> set[tuple[Path, int]]:
    """Directories of unfinished saves, with the time of their last change."""
    found = set()
    for place in (out, out / "state", out / "value_model", out / "best"):
        for path in (place / ".partial", place / ".doomed"):
            with contextlib.suppress(FileNotFoundError):
                found.add((path, path.stat().st_ctime_ns))
    return found


def kill(children: list[int], out: Path, draw: random.Random, seconds: float) -> str | None:
    """Kill a run's processes, one first, at a random moment; returns where it was, None if it had ended."""
    in_save, before = draw.random() < 0.5, saves(out)
    end = time.monotonic() + draw.uniform(0, seconds)
    while time.monotonic() < end and not (in_save and saves(out) - before):
        if os.waitid(os.P_PID, children[0], os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
    time.sleep(draw.choice((0, 0.001, 0.003)) if in_save else 0)
    ended = all(os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) for child in children)
    order = draw.sample(children, len(children))
    os.kill(order[0], signal.SIGKILL)
    time.sleep(draw.uniform(0, 0.2) if len(order) > 1 else 0)  # the others must cope without it
    for child in order[1:]:
        os.kill(child, signal.SIGKILL)
    wait(children)
    return None if ended else "in the middle of a save" if saves(out) - before else "between saves"


def fingerprint(out: Path) -> dict[str, str]:
    """File -> hash, of all that a run leaves except times."""
    found = {}
    for path in sorted(out.rglob("*.safetensors")):
        found[str(path.relative_to(out))] = hashlib.sha256(path.read_bytes()).hexdigest()
    for name in ("metrics.jsonl", "samples.jsonl"):
        if (out / name).exists():
            rows = [json.loads(line) for line in (out / name).open()]
            untimed = [{key: value for key, value in row.items() if key != "episodes_per_second"} for row in rows]
            found[name] = hashlib.sha256(json.dumps(untimed).encode()).hexdigest()
    return found


def main(args: Args) -> bool:
    draw = random.Random(args.seed)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        if args.miniature is not None:
            shutil.copytree(args.miniature, root, dirs_exist_ok=True)
        else:
            child = os.fork()  # this process trains nothing itself: a fork would not survive PyTorch's threads
            if child == 0:
                with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
                    make_miniature(root)
                os._exit(0)
            wait([child])
        settings, whole, seconds = {}, {}, {}
        counts, same = Counter(), True
        while same and counts["kills"] < args.kills:
            stage = tuple(MAIN)[counts["runs"] % len(MAIN)]
            if stage not in whole:
                base = getattr(make_miniature(root, train=False), stage)
                extra = {"eval_every": 3} if stage != "ppo" else {"total_episodes": 64, "kl_target": 0.01}
                out = root / "killed" / f"{stage}_whole" / "run"
                settings[stage] = replace(base, save_every=1, shard=args.shard, out=out, **extra)
                settings[stage].out.parent.mkdir(parents=True)
                begin = time.monotonic()
                assert wait(start(stage, settings[stage], args.processes)) == 0, (out.parent / "log.0").read_text()
                seconds[stage], whole[stage] = time.monotonic() - begin, fingerprint(settings[stage].out)
                (root / "killed" / f"{stage}_broken").mkdir()
            broken = replace(settings[stage], out=root / "killed" / f"{stage}_broken" / "run", overwrite=True)
            for _ in range(min(draw.randint(1, 6), args.kills - counts["kills"])):
                where = kill(start(stage, broken, args.processes), broken.out, draw, 1.2 * seconds[stage])
                if where is None or (broken.out / "summary.json").exists():
                    counts["too late"] += 1
                    break
                counts.update(("kills", where, f"kills of {stage}"))
                if len(states(broken.out)) > 1 and draw.random() < 0.15:
                    newest = states(broken.out)[0] / "state.pt"
                    newest.write_bytes(newest.read_bytes()[: -draw.randint(1, 5000)])
                    counts["newest state truncated"] += 1
                resume = bool(states(broken.out))
                counts["resumed" if resume else "started again"] += 1
                broken = replace(broken, resume=resume, overwrite=not resume)
            if not (broken.out / "summary.json").exists() and wait(start(stage, broken, args.processes)) != 0:
                print(f"{stage}: the run did not resume:\n{(broken.out.parent / 'log.0').read_text()[-3000:]}")
                same = False
            elif fingerprint(broken.out) != whole[stage]:
                now = fingerprint(broken.out)
                names = sorted(name for name in now | whole[stage] if now.get(name) != whole[stage].get(name))
                print(f"{stage}: differs from the uninterrupted run: {', '.join(names)}")
                same = False
            counts["runs"] += 1
            print(f"\r{counts['kills']} of {args.kills} kills", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print("; ".join(f"{name}: {number}" for name, number in counts.items()))
    print("all ended in the same bits" if same else "NOT the same")
    return same


if __name__ == "__main__":
    sys.exit(0 if main(tyro.cli(Args)) else 1)
