"""Read the settings file of a reward."""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nanorlhf.errors import InputError
from nanorlhf.files import read_text


def read_toml(flag: str, path: str, known: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a TOML file. Raises InputError, with the flag's name, for an unknown field."""
    try:
        fields = tomllib.loads(read_text(Path(path)))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{flag}: {path} isn't a TOML file ({error}).") from error
    if unknown := sorted(fields.keys() - {*known}):
        raise InputError(f"{flag}: {path} has the unknown field {unknown[0]!r}; known fields: {', '.join(known)}.")
    return fields
