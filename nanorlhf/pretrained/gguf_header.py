"""The header of a GGUF file: its metadata, and where its tensors are.

Every count, type and offset is checked against the file's size before it is used. The library's own
reader believes them: it makes Python objects of each element of an array, however long the file
says it is, and reads tensors that overlap.

    bytes     what, all numbers little-endian
    4         "GGUF"
    4         version, 2 or 3
    8, 8      number of tensors, number of fields
    fields    name, type (4), value; a string is its length (8) and UTF-8; an array the type of its elements (4), their
              number (8), then they
    tensors   name, number of dimensions (4), dimensions (8 each, the fastest first), type (4), offset (8)
    data      from the next multiple of general.alignment; offsets count from here, are multiples of it and leave no gap

Source: docs/gguf.md of ggml.
"""

import math
import os
import re
from dataclasses import dataclass
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from nanorlhf.errors import InputError
from nanorlhf.files import decode, open_regular

SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
STRING, ARRAY = 8, 9
MAX_DIMENSIONS = 4
MAX_VALUES = 2**23  # in all fields; a vocabulary has at most 300,000


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its file stores it."""

    name: str
    kind: Any  # the library's GGMLQuantizationType
    shape: tuple[int, ...]  # in elements, the fastest dimension last
    data: np.ndarray  # uint8, mapped; `shape`, but with the bytes of a row


@dataclass(frozen=True)
class Header:
    fields: dict[str, Any]  # numbers, booleans, strings, and lists of one of these
    tensors: dict[str, StoredTensor]


@cache
def open_gguf(path: Path) -> Header:
    """Read the header and map the tensors, also those of a model's further files, NAME-00002-of-00003.gguf and so on.

    Raises InputError if a file is damaged or isn't there, and if the library is missing.
    """
    first = read_header(path)
    count = first.fields.get("split.count", 1)
    if count in (0, 1):
        return first
    name = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if name is None or int(name[3]) != count:
        raise InputError(f"{path} is one of {count} files: its name must end in -00001-of-0000N.gguf, N = {count}.")
    parts = [path.with_name(f"{name[1]}-{number:05}-of-{name[3]}.gguf") for number in range(1, count + 1)]
    if path != parts[0]:
        raise InputError(f"{path} is part {int(name[2])} of {count}: name the first, {parts[0].name}.")
    tensors = dict(first.tensors)
    for part in parts[1:]:
        if not part.is_file():
            raise InputError(f"{path} is the first of {count} files, and {part.name} isn't there: download it too.")
        for tensor in read_header(part).tensors.values():
            if tensor.name in tensors:
                raise InputError(f"{part}: tensor {tensor.name:.80} is in another part too: download it again.")
            tensors[tensor.name] = tensor
    return Header(first.fields, tensors)


def read_header(path: Path) -> Header:
    """The metadata of one file, and where its tensors are."""
    open_regular(path).close()
    try:
        import gguf
    except ImportError as error:  # part of the optional extra `gguf`
        raise InputError(f"{path}: GGUF needs a library: `pip install gguf`.") from error
    with open_regular(path) as file:
        reader = Reader(path, file)
        if reader.take(4, "its first bytes") != b"GGUF":
            reader.fail("it doesn't begin with GGUF")
        version = reader.number("<u4", "its version")
        if version not in (2, 3):
            reader.fail(f"version {version} isn't 2 or 3, little-endian")
        num_tensors = reader.count("number of tensors", 4 + 8 + 4 + 8)
        num_fields = reader.count("number of fields", 8 + 4 + 1)
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = reader.name("a field")
            if name in fields:
                reader.fail(f"field {name:.80} appears twice")
            fields[name] = reader.value(name)
        places: dict[str, tuple[Any, tuple[int, ...], int, int]] = {}  # kind, shape, offset and size
        for _ in range(num_tensors):
            name = reader.name("a tensor")
            if name in places:
                reader.fail(f"tensor {name:.80} appears twice")
            places[name] = reader.place(name, gguf.GGMLQuantizationType, gguf.GGML_QUANT_SIZES)
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
            reader.fail(f"general.alignment is {alignment!r:.80}, not a power of two")
        start = -(-file.tell() // alignment) * alignment
    end = 0
    for name, (_, _, offset, size) in sorted(places.items(), key=lambda item: item[1][2]):
        end = -(-end // alignment) * alignment
        if offset != end:  # neither over another one nor after a gap: then a type or a shape is wrong
            reader.fail(f"tensor {name:.80} begins at byte {offset:,} of the data instead of {end:,}")
        end += size
        if start + end > reader.size:
            reader.fail(f"tensor {name:.80} ends at byte {start + end:,}, the file at {reader.size:,}")
    mapped = np.memmap(path, mode="r")
    tensors = {
        name: StoredTensor(name, kind, shape, mapped[start + offset : start + offset + size].reshape(*shape[:-1], -1))
        for name, (kind, shape, offset, size) in places.items()
    }
    return Header(fields, tensors)


class Reader:
    """Take numbers and texts from a file that may lie about how many there are."""

    def __init__(self, path: Path, file: BufferedReader):
        self.path, self.file = path, file
        self.size = os.fstat(file.fileno()).st_size
        self.num_values = 0  # in arrays so far

    def fail(self, reason: str) -> NoReturn:
        raise InputError(f"{self.path} can't be read as GGUF ({reason}).")

    def take(self, num_bytes: int, what: str) -> bytes:
        left = self.size - self.file.tell()
        if num_bytes > left:
            self.fail(f"{what} needs {num_bytes:,} bytes, {left:,} are left")
        return self.file.read(num_bytes)

    def number(self, kind: str, what: str) -> Any:
        return np.frombuffer(self.take(np.dtype(kind).itemsize, what), kind)[0].item()

    def count(self, what: str, least_bytes: int) -> int:
        """A number of things of at least so many bytes each."""
        count = self.number("<u8", f"its {what}")
        if count * least_bytes > self.size:
            self.fail(f"its {what} is {count:,}, too many for {self.size:,} bytes")
        return count

    def text(self, what: str) -> str:
        return decode(self.take(self.number("<u8", what), what), f"{self.path}: {what}")

    def name(self, what: str) -> str:
        name = self.text(f"the name of {what}")
        if not name or not name.isprintable():
            self.fail(f"the name of {what} is {name!r:.80}")
        return name

    def value(self, name: str) -> Any:
        """The value of a field."""
        what = f"field {name:.80}"
        kind = self.number("<u4", what)
        if kind == STRING:
            return self.text(what)
        if kind in SCALARS:
            return self.number(SCALARS[kind], what)
        if kind != ARRAY:
            self.fail(f"{what} has the unknown type {kind}")
        kind, count = self.number("<u4", what), self.number("<u8", what)
        self.num_values += count
        if self.num_values > MAX_VALUES:
            self.fail(f"{what} has {count:,} elements: more than {MAX_VALUES:,} in all")
        if kind == STRING:
            return [self.text(what) for _ in range(count)]
        if kind not in SCALARS:
            self.fail(f"{what} is an array of the type {kind}")
        return np.frombuffer(self.take(count * np.dtype(SCALARS[kind]).itemsize, what), SCALARS[kind]).tolist()

    def place(self, name: str, kinds: Any, sizes: dict) -> tuple[Any, tuple[int, ...], int, int]:
        """The kind, shape, offset and size in bytes of a tensor; kinds, sizes: of the library."""
        what = f"tensor {name:.80}"
        num_dimensions = self.number("<u4", what)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            self.fail(f"{what} has {num_dimensions} dimensions")
        shape = tuple(self.number("<u8", what) for _ in range(num_dimensions))[::-1]
        number, offset = self.number("<u4", what), self.number("<u8", what)
        if number not in [*kinds]:
            self.fail(f"{what} has the unknown type {number}")
        kind = kinds(number)
        elements, num_bytes = sizes[kind]  # of a block
        if min(shape) < 1 or shape[-1] % elements:
            self.fail(f"{what} has the shape {shape}, which {kind.name} can't have")
        return kind, shape, offset, math.prod(shape) // elements * num_bytes
