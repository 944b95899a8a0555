"""Training states on disk: all it takes to resume bit for bit, whenever and however a run ended.

    state/step-00000500/state.pt        weights, optimizers, counters, and every random number generator of each process
                       /args.json       the settings they belong to
                       /manifest.json   the SHA-256 of the two

A state is written to state/.partial, synced to disk and then renamed: whatever interrupts this, a full disk included,
leaves the earlier states as they were. Checksums tell a state that the disk has damaged since, and the run resumes from
the one before it. Only rank 0 writes.
"""

import hashlib
import json
import os
import random
import shutil
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanorlhf import distributed
from nanorlhf.checkpoint import load_pickle, to_disk
from nanorlhf.errors import InputError
from nanorlhf.files import open_regular, read_object

# of what a state holds; one that another version wrote is refused
FORMAT = 3
# settings that may differ on --resume: any other would make it a different run. What follows stays the same to the
# last bit with those of the first two lines, to rounding with those of the third: sums and shapes are cut differently
MAY_CHANGE = frozenset(
    ("out", "resume", "overwrite", "save_every", "keep_last", "max_skipped_steps", "eval_every", "sample_every")
    + ("trackio", "push_to_hub")
    + ("offload", "checkpoint_activations")
    + ("device", "processes", "micro_batch_size", "rollout_batch_size", "shard")
)


# ---------------------------------------------------------------------------------------------------------------- write
def save_state(out: Path, args: Any, step: int, keep_last: int, state: dict[str, Any]) -> None:
    """Write a state as out/state/step-N and delete all but the `keep_last` newest. Every rank calls it."""
    generators = distributed.all_gather_objects([generator_states()])
    if distributed.rank() != 0:
        return
    directory = out / "state"
    partial, target = directory / ".partial", directory / f"step-{step:08}"
    remove(partial)  # of a save that was killed
    partial.mkdir(parents=True)
    try:
        write_tensors({**state, "format": FORMAT, "step": step, "generators": generators}, partial / "state.pt")
        (partial / "args.json").write_text(json.dumps(asdict(args), indent=2, default=str) + "\n")
        manifest = {path.name: sha256(path) for path in sorted(partial.iterdir())}
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        for path in (*partial.iterdir(), partial):
            to_disk(path)
        remove(target)  # a damaged one: the run went on from the state before it
        os.rename(partial, target)
        to_disk(directory)
    finally:
        remove(partial)
    for path in states(out):
        if path not in states(out, up_to=step)[:keep_last]:  # what lies behind this step is of no run any more
            remove(path)


def write_tensors(state: dict[str, Any], path: Path) -> None:
    try:
        with path.open("wb") as file:
            torch.save(state, file)
    except RuntimeError as error:  # how PyTorch reports that the file's own error, a full disk say, stopped it
        cause = error.__context__
        raise OSError(cause.errno, cause.strerror, str(path)) if isinstance(cause, OSError) else error from error


def remove(path: Path) -> None:
    """Delete a state so that a kill in between leaves none that looks whole."""
    if path.exists():
        doomed = path.with_name(".doomed")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        shutil.rmtree(doomed)


def forget(out: Path) -> None:
    """Delete all states: a run begins anew."""
    remove(out / "state")


def generator_states() -> dict[str, Any]:
    """Of Python, NumPy and PyTorch, as what `torch.load` reads without running code."""
    numpy = np.random.get_state(legacy=False)
    keys = torch.from_numpy(numpy["state"]["key"].astype(np.int64))
    return {
        "python": random.getstate(),
        "numpy": numpy | {"state": {"key": keys, "pos": int(numpy["state"]["pos"])}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def set_generator_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    numpy = states["numpy"]
    key = numpy["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state(numpy | {"state": {"key": key, "pos": numpy["state"]["pos"]}})
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])


# ----------------------------------------------------------------------------------------------------------------- read
def states(out: Path, up_to: int | None = None) -> list[Path]:
    """The states in a run's directory, newest first, whole or not."""
    paths = sorted((out / "state").glob("step-????????"), reverse=True)
    return [path for path in paths if up_to is None or int(path.name.removeprefix("step-")) <= up_to]


def load_state(out: Path, args: Any, must_stay: tuple[str, ...] = ()) -> dict[str, Any]:
    """The newest state that is whole, on the CPU; this process's random number generators are set to it.

    Raises InputError where there is none, and where the run was started with settings that matter and differ.
    must_stay: settings that matter to this run and not to others.
    """
    # rank 0 looks, so that all go on from the same one
    found, damages = distributed.from_first(lambda: newest_whole_state(out))
    for path, reason in damages:
        if distributed.rank() == 0:
            before = f"going on from {found.name}" if found else "and there is none before it"
            print(f"{path} is damaged ({reason}): {before}.", file=sys.stderr)
    if found is None:
        raise InputError(f"--resume: {out} holds no state that can be read: start anew with --overwrite.")
    try:  # mapped: ranks that read the same file share its memory
        state = load_pickle(found / "state.pt", mmap=True)
    except InputError as error:
        raise InputError(f"--resume: {str(error).rstrip('.')}: start anew with --overwrite.") from error
    if not isinstance(state, dict) or state.pop("format", 1) != FORMAT:
        raise InputError(
            f"--resume: {found} was written by another version of nanorlhf: finish the run with that version, or start "
            "anew with --overwrite."
        )
    settings = read_object(found / "args.json")
    now = json.loads(json.dumps(asdict(args), default=str))
    matter = (settings.keys() | now.keys()) - MAY_CHANGE.difference(must_stay)
    if matter - now.keys():
        raise InputError(f"--resume: {out} holds another script's run: name this script's --out.")
    ours = {field.name: field.default for field in fields(args)}
    for name in sorted(matter):
        if name not in settings and getattr(args, name) == ours[name]:
            continue  # a flag that came after the run was started, and is off
        if name not in settings:
            raise InputError(f"--resume: the run in {out} was started without --{name.replace('_', '-')}: omit it.")
        if settings[name] != now[name]:
            raise InputError(
                f"--resume: the run in {out} was started with --{name.replace('_', '-')} {settings[name]}, "
                f"not {now[name]}: pass the same, or start anew with --overwrite."
            )
    generators = state.pop("generators")
    # with another number of processes the run is the same to rounding, so nothing is refused
    if len(generators) != distributed.world_size() and distributed.rank() == 0:
        print(
            f"{out} goes on with {distributed.world_size()} process(es) instead of {len(generators)}: the same global "
            "batches, sums to rounding."
        )
    set_generator_states(generators[distributed.rank() % len(generators)])
    return state


def newest_whole_state(out: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest undamaged state, and what is wrong with each newer one."""
    damages: list[tuple[Path, str]] = []
    for path in states(out):
        reason = damage(path)
        if reason is None:
            return path, damages
        damages.append((path, reason))
    return None, damages


def damage(state: Path) -> str | None:
    """What is wrong with a state; None: all its files are as they were written."""
    try:
        for name in ("manifest.json", "state.pt", "args.json"):
            if not (state / name).exists():
                return f"{name} is missing"
        manifest = read_object(state / "manifest.json")
        if set(manifest) != {"state.pt", "args.json"}:
            return "manifest.json names other files"
        for name, checksum in manifest.items():
            if sha256(state / name) != checksum:
                return f"{name} does not match its checksum"
    except InputError as error:
        return str(error).rstrip(".")
    return None


def sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
