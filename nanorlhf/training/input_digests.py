"""Digests of the files that a run reads. A state stores them, and --resume refuses a file if its content has changed.

Only the content counts: a file may be touched, or moved if the flag that names it is updated. Large files are hashed
completely, because a fine-tuned copy of a model may differ only in a few biases.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nanorlhf.pretrained.weight_files import files_of_model
from nanorlhf.rewards.weighted_sum import is_function, items, parse
from nanorlhf.tokenizer import files_of_tokenizer
from nanorlhf.training.resume import Inputs, sha256
from nanorlhf.training.settings import RunArgs

Part = tuple[str, str, Path]  # a setting, the file's name within the setting, the file


def digest_inputs(args: RunArgs, data: Sequence[Path]) -> Inputs:
    """Hash the data files and the files named by settings: models, tokenizer, reward functions, judges."""
    settings = vars(args)
    parts = [*(("data", path.name, path) for path in data), *models(settings), *rewards(settings)]
    inputs: Inputs = {setting: {} for setting, _, _ in parts}
    with ThreadPoolExecutor() as pool:  # hashlib releases the GIL
        for (setting, part, path), digest in zip(parts, pool.map(digest_part, parts), strict=True):
            inputs[setting][part] = str(path), digest
    return inputs


def models(settings: dict[str, Any]) -> Iterator[Part]:
    """Yield the files of the checkpoints, the tokenizer and the encoders."""
    for name in ("model", "sft", "value_model", "gold"):
        where = settings.get(name)
        if where not in (None, "shared") and not is_function(where):
            yield from named(name, "", where, files_of_model(where))
    for name in ("tokenizer", "model", "sft", "data"):  # the tokenizer comes from the first one that is set
        if settings.get(name) is not None:
            yield from named(name, "", settings[name], files_of_tokenizer(settings[name]))
            break
    if settings.get("encoder") is None and settings.get("discriminator") is None:
        return
    from nanorlhf.pretrained.encoder import encoder_directory, files_of_encoder

    if settings.get("encoder") is not None:
        yield from named("encoder", "", settings["encoder"], files_of_encoder(encoder_directory(settings["encoder"])))
    if settings.get("discriminator") is not None:
        directory = Path(settings["discriminator"])
        yield from named("discriminator", "", directory, files_of_encoder(directory))


def rewards(settings: dict[str, Any]) -> Iterator[Part]:
    """Yield the files of everything that scores responses; --reward replaces --reward-model."""
    flag = "reward_model" if settings.get("reward") is None else "reward"
    for number, item in enumerate(items(settings.get(flag)), start=1):
        kind, path = parse(item) if flag == "reward" else ("model", item)
        if kind == "function":
            yield from function(flag, f"{number} ", path)
        elif kind in ("judge", "tests"):
            if path:  # `--reward tests` has none
                yield flag, f"{number} {kind}", Path(path)
        else:
            yield from named(flag, f"{number} {kind} ", path, files_of_model(path))
    if is_function(settings.get("gold") or ""):
        yield from function("gold", "", settings["gold"])
    jars = (Path(jar) for jar in (settings.get("error_prone_jar") or "").split(os.pathsep))
    yield from (("error_prone_jar", jar.name, jar) for jar in jars if jar.is_file())


def named(setting: str, prefix: str, where: str | Path, files: Sequence[Path]) -> Iterator[Part]:
    """Yield the files of a setting by name. If the setting is itself a file, its name doesn't count."""
    for file in files:
        yield setting, prefix + ("" if file == Path(where) else file.name), file


def function(setting: str, prefix: str, where: str) -> Iterator[Part]:
    """Yield the file of FILE.py:FUNCTION, except for our own files: a run may continue with a newer version."""
    from nanorlhf.rewards.function import OURS, find_file

    file = find_file(where.rpartition(":")[0])
    if file.resolve().parent not in [folder / "data" for folder in OURS]:
        yield setting, f"{prefix}function {where.rpartition(':')[2]}", file


def digest_part(part: Part) -> str:
    """Hash a file; of a judge's or the tests' settings only those that decide a score: the URL, say, may change."""
    setting, name, path = part
    kind = name.partition(" ")[2]  # of `NUMBER KIND`
    if setting != "reward" or kind not in ("judge", "tests"):
        return sha256(path)
    from nanorlhf.rewards import judge, unit_tests

    module = judge if kind == "judge" else unit_tests
    fields = module.read_settings(f"--{setting} {kind}:{path}", str(path))
    return hashlib.sha256(json.dumps([fields[field] for field in module.DECIDES_SCORES]).encode()).hexdigest()
