"""Training states on disk: everything needed to resume a run bit for bit, however it ended.

    state/step-00000500/state.pt        weights, optimizers, counters, and each process's random number generators
                       /args.json       the settings of the run
                       /manifest.json   the SHA-256 of the other two files

A state is written to state/.partial, synced to disk and then renamed, so an interruption or a full disk leaves earlier
states intact. Checksums detect a state that was damaged on disk later; the run then resumes from the previous one. Only
rank 0 writes.
"""

import hashlib
import json
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanorlhf import distributed
from nanorlhf.errors import InputError
from nanorlhf.files import delete, open_regular, read_object, to_disk, to_json
from nanorlhf.pretrained.weight_files import load_pickle
from nanorlhf.training.run_directory import flat_settings
from nanorlhf.training.settings import RunArgs

# the files that a run reads: setting -> file name within it -> path and SHA-256 of the content (input_digests.py)
Inputs = dict[str, dict[str, tuple[str, str]]]
FORMAT = 3  # of a state; other formats are refused
# Settings that may differ on --resume; changing any other would make it a different run. Those in the "device" line
# change results by rounding, because sums and shapes are split differently; the others change no bit.
MAY_CHANGE = frozenset(
    ("out", "resume", "overwrite", "track", "save_every", "keep_every", "eval_every")
    + ("offload", "checkpoint_activations")
    + ("device", "processes", "micro_batch_size", "rollout_batch_size", "shard", "compile")
    + ("plan",)  # a flag in 1.0, now a command
)
KEEP_LAST = 2  # states: if the newest is damaged, --resume uses the previous one


# ---------------------------------------------------------------------------------------------------------------- write
def save_state(out: Path, args: RunArgs, step: int, state: dict[str, Any]) -> None:
    """Write a state to out/state/step-N and delete all but the KEEP_LAST newest. Every rank must call it."""
    generators = distributed.all_gather_objects([generator_states()])
    if distributed.rank() != 0:
        return
    directory = out / "state"
    partial, target = directory / ".partial", directory / f"step-{step:08}"
    remove(partial)  # left by a save that was killed
    partial.mkdir(parents=True)
    try:
        write_tensors({**state, "format": FORMAT, "step": step, "generators": generators}, partial / "state.pt")
        (partial / "args.json").write_text(to_json(asdict(args), indent=2, default=str) + "\n")
        manifest = {path.name: sha256(path) for path in sorted(partial.iterdir())}
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        for path in (*partial.iterdir(), partial):
            to_disk(path)
        remove(target)  # a damaged one: the run resumed from the previous state
        os.rename(partial, target)
        to_disk(directory)
    finally:
        remove(partial)
    keep_last(out, step)


def keep_last(out: Path, step: int) -> None:
    """Delete all states but the KEEP_LAST newest up to this step; later ones are left over from an earlier run."""
    kept = states(out, up_to=step)[:KEEP_LAST]
    for path in states(out):
        if path not in kept:
            remove(path)


def write_tensors(state: dict[str, Any], path: Path) -> None:
    try:
        with path.open("wb") as file:
            torch.save(state, file)
    except RuntimeError as error:  # PyTorch wraps an OSError, such as a full disk
        cause = error.__context__
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror, str(path)) from error
        raise


def remove(path: Path) -> None:
    """Delete a state or a link to one. If we are killed halfway, nothing that looks like a state remains."""
    if os.path.lexists(path):
        doomed = path.with_name(".doomed")
        delete(doomed)
        os.rename(path, doomed)
        delete(doomed)


def forget(out: Path) -> None:
    """Delete all states of a run that starts over."""
    remove(out / "state")


def generator_states() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and PyTorch's generators, in types that `torch.load` reads safely."""
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
    """Return the states in a run's directory, newest first, including damaged ones; ignore other files."""
    paths = sorted((path for path in (out / "state").glob(f"step-{8 * '[0-9]'}") if path.is_dir()), reverse=True)
    return [path for path in paths if up_to is None or int(path.name.removeprefix("step-")) <= up_to]


def load_state(
    out: Path, args: RunArgs, inputs: Inputs | None = None, must_stay: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Load the newest undamaged state on the CPU and set this process's random number generators to it.

    inputs: what the run reads now. must_stay: settings in MAY_CHANGE that may not change in this run. Raises InputError
    if there is no state or the run was started with other settings or inputs.
    """
    # rank 0 chooses, so that all ranks resume from the same state
    newest, damages = distributed.from_first(lambda: newest_undamaged_state(out))
    for path, reason in damages:
        if distributed.rank() == 0:
            then = f"resuming from {newest.name}" if newest else "no earlier state is left"
            print(f"{path} is damaged ({reason}): {then}.", file=sys.stderr)
    if newest is None:
        raise InputError(f"--resume: {out} has no readable state: start over with --overwrite.")
    try:  # memory-mapped: ranks that read the same file share its memory
        state = load_pickle(newest / "state.pt", mmap=True)
    except InputError as error:
        raise InputError(f"--resume: {str(error).rstrip('.')}: start over with --overwrite.") from error
    if not isinstance(state, dict) or state.pop("format", 1) != FORMAT:
        raise InputError(
            f"--resume: {newest} was written by another version of nanorlhf: finish the run with that version or start "
            "over with --overwrite."
        )
    inputs, inputs_before = inputs or {}, state.pop("inputs", None)
    before, now = flat_settings(read_object(newest / "args.json")), as_saved(asdict(args))
    defaults = as_saved({field.name: field.default for field in fields(args)})
    names = (before.keys() | now.keys()) - MAY_CHANGE.difference(must_stay)
    with fitting(newest):
        names -= moved(inputs_before or {}, inputs)
        changed = changes(inputs_before or {}, inputs)
    if unknown := sorted(names - now.keys()):
        raise InputError(
            f"--resume: {out} contains a run of another script or version, with the setting {unknown[0]}: finish it "
            "with that one, or start over with --overwrite."
        )
    for name in sorted(names):
        flag = f"--{name.replace('_', '-')}"
        if name not in before and now[name] == defaults[name]:
            continue  # a flag newer than the run, and at its default
        if name not in before:
            raise InputError(f"--resume: the run in {out} was started without {flag}.")
        if before[name] != now[name]:
            raise InputError(
                f"--resume: the run in {out} was started with {flag} {before[name]}, not {now[name]}: pass the same "
                "value, or start over with --overwrite."
            )
    if inputs_before is None and inputs and distributed.rank() == 0:
        print(
            f"{newest} is from a version that kept no digests: can't check whether data or models have changed.",
            file=sys.stderr,
        )
    for change in changed:
        raise InputError(
            f"--resume: {change} since the run in {out} was started: restore it, or start a new run from the "
            f"checkpoint in {out}."
        )
    with fitting(newest):
        generators = [*state.pop("generators")]
        if state["step"] != int(newest.name.removeprefix("step-")):
            raise ValueError("it belongs to another step")
    # a different number of processes changes the run only by rounding
    if len(generators) != distributed.world_size() and distributed.rank() == 0:
        print(
            f"{out} continues with {distributed.world_size()} process(es) instead of {len(generators)}: the global "
            "batches stay the same, but sums differ by rounding."
        )
    with fitting(newest):
        set_generator_states(generators[distributed.rank() % len(generators)])
    return state


def moved(before: Inputs, now: Inputs) -> set[str]:
    """Return the settings whose files have the same contents as before, even at another path."""

    def contents(inputs: Inputs, name: str) -> dict[str, str]:
        return {part: digest for part, (_, digest) in inputs.get(name, {}).items()}

    return {name for name in now if now[name] and contents(before, name) == contents(now, name)}


def changes(before: Inputs, now: Inputs) -> list[str]:
    """Describe the files that have changed or gone since the run started."""
    changed = []
    for name, parts in before.items():
        for part, (path, digest) in parts.items():
            if part not in now.get(name, {}):
                changed.append(f"{path} has gone")
            elif now[name][part][1] != digest:
                changed.append(f"{now[name][part][0]} has changed")
    return changed


@contextmanager
def fitting(where: Path) -> Iterator[None]:
    """Turn the errors of restoring a state, such as a missing key or another shape, into InputError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split()):.300}".rstrip(".")
        raise InputError(f"--resume: {where} doesn't fit this run ({reason}): start over with --overwrite.") from error


def as_saved(settings: dict) -> dict[str, Any]:
    """Return the settings flat, as a state's args.json stores them."""

    def plain(value: Any) -> Any:
        return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)

    return flat_settings(json.loads(json.dumps(settings, default=plain)))


def newest_undamaged_state(out: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the newest undamaged state, and the newer states with what is wrong with each."""
    damages: list[tuple[Path, str]] = []
    for path in states(out):
        reason = damage(path)
        if reason is None:
            return path, damages
        damages.append((path, reason))
    return None, damages


def damage(state: Path) -> str | None:
    """Return what is wrong with a state; None if all its files match their checksums."""
    try:
        for name in ("manifest.json", "state.pt", "args.json"):
            if not (state / name).exists():
                return f"{name} is missing"
        manifest = read_object(state / "manifest.json")
        if set(manifest) != {"state.pt", "args.json"}:
            return "manifest.json lists other files"
        for name, checksum in manifest.items():
            if sha256(state / name) != checksum:
                return f"{name} does not match its checksum"
    except InputError as error:
        return str(error).rstrip(".")
    return None


def sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
