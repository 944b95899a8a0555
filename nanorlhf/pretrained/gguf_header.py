"""Read the header of a GGUF file: its metadata and the positions of its tensors.

We check every count, type and offset against the file's size before using it. The library's own
reader trusts them: it creates a Python object per array element, whatever length the file claims,
and accepts overlapping tensors.

    bytes     content (all numbers are little-endian)
    4         "GGUF"
    4         version, 2 or 3
    8, 8      number of tensors, number of fields
    fields    name, type (4), value; a string is its length (8) and UTF-8; an array is the type of its elements (4),
              their number (8), and the elements
    tensors   name, number of dimensions (4), dimensions (8 each, fastest first), type (4), offset (8)
    data      starts at the next multiple of general.alignment; offsets are relative to it, aligned, and without gaps

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
    """A tensor as stored in the file."""

    name: str
    kind: Any  # the library's GGMLQuantizationType
    shape: tuple[int, ...]  # in elements, fastest dimension last
    data: np.ndarray  # uint8, memory-mapped; like `shape`, but the last dimension is in bytes


@dataclass(frozen=True)
class Header:
    fields: dict[str, Any]  # numbers, booleans, strings, and lists of one of these
    tensors: dict[str, StoredTensor]


@cache
def open_gguf(path: Path) -> Header:
    """Read the header and map the tensors, including those in further files (NAME-00002-of-00003.gguf, ...).

    Raises InputError if a file is damaged or missing, or if the library isn't installed.
    """
    first = read_header(path)
    count = first.fields.get("split.count", 1)
    if count in (0, 1):
        return first
    name = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if name is None or int(name[3]) != count:
        raise InputError(f"{path} is one of {count} files: its name must end with -00001-of-0000N.gguf, N = {count}.")
    parts = [path.with_name(f"{name[1]}-{number:05}-of-{name[3]}.gguf") for number in range(1, count + 1)]
    if path != parts[0]:
        raise InputError(f"{path} is part {int(name[2])} of {count}: pass the first part, {parts[0].name}.")
    tensors = dict(first.tensors)
    for part in parts[1:]:
        if not part.is_file():
            raise InputError(f"{path} is the first of {count} files, but {part.name} is missing: download it too.")
        for tensor in read_header(part).tensors.values():
            if tensor.name in tensors:
                raise InputError(f"{part}: tensor {tensor.name:.80} is also in another part: download it again.")
            tensors[tensor.name] = tensor
    return Header(first.fields, tensors)


def read_header(path: Path) -> Header:
    """Read the metadata of one file and map its tensors."""
    open_regular(path).close()
    try:
        import gguf
    except ImportError as error:  # part of the optional extra `gguf`
        raise InputError(f"{path}: reading GGUF needs `pip install gguf`.") from error
    with open_regular(path) as file:
        reader = Reader(path, file)
        if reader.take(4, "its first bytes") != b"GGUF":
            reader.fail("it doesn't start with GGUF")
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
        layouts: dict[str, tuple[Any, tuple[int, ...], int, int]] = {}  # kind, shape, offset and size
        for _ in range(num_tensors):
            name = reader.name("a tensor")
            if name in layouts:
                reader.fail(f"tensor {name:.80} appears twice")
            layouts[name] = reader.tensor_layout(name, gguf.GGMLQuantizationType, gguf.GGML_QUANT_SIZES)
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
            reader.fail(f"general.alignment must be a power of two, got {alignment!r:.80}")
        data_start = -(-file.tell() // alignment) * alignment
    end = 0
    for name, (_, _, offset, size) in sorted(layouts.items(), key=lambda item: item[1][2]):
        end = -(-end // alignment) * alignment
        if offset != end:  # an overlap or a gap means that a type or a shape is wrong
            reader.fail(f"tensor {name:.80} starts at byte {offset:,} of the data instead of {end:,}")
        end += size
        if data_start + end > reader.size:
            reader.fail(f"tensor {name:.80} ends at byte {data_start + end:,}, but the file has only {reader.size:,}")
    mapped = np.memmap(path, mode="r")
    tensors = {
        name: StoredTensor(
            name, kind, shape, mapped[data_start + offset : data_start + offset + size].reshape(*shape[:-1], -1)
        )
        for name, (kind, shape, offset, size) in layouts.items()
    }
    return Header(fields, tensors)


class Reader:
    """Read numbers and strings from a file with untrusted counts."""

    def __init__(self, path: Path, file: BufferedReader):
        self.path, self.file = path, file
        self.size = os.fstat(file.fileno()).st_size
        self.num_values = 0  # in arrays so far

    def fail(self, reason: str) -> NoReturn:
        raise InputError(f"{self.path} can't be read as GGUF ({reason}).")

    def take(self, num_bytes: int, what: str) -> bytes:
        left = self.size - self.file.tell()
        if num_bytes > left:
            self.fail(f"{what} needs {num_bytes:,} bytes, but only {left:,} are left")
        return self.file.read(num_bytes)

    def number(self, kind: str, what: str) -> Any:
        return np.frombuffer(self.take(np.dtype(kind).itemsize, what), kind)[0].item()

    def count(self, what: str, least_bytes: int) -> int:
        """Read the number of items that take at least `least_bytes` each."""
        count = self.number("<u8", f"its {what}")
        if count * least_bytes > self.size:
            self.fail(f"its {what} is {count:,}, too large for {self.size:,} bytes")
        return count

    def text(self, what: str) -> str:
        return decode(self.take(self.number("<u8", what), what), f"{self.path}: {what}")

    def name(self, what: str) -> str:
        name = self.text(f"the name of {what}")
        if not name or not name.isprintable():
            self.fail(f"the name of {what} is {name!r:.80}")
        return name

    def value(self, name: str) -> Any:
        """Read the value of a field."""
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
            self.fail(f"{what} has {count:,} elements: more than {MAX_VALUES:,} in total")
        if kind == STRING:
            return [self.text(what) for _ in range(count)]
        if kind not in SCALARS:
            self.fail(f"{what} is an array of unsupported type {kind}")
        return np.frombuffer(self.take(count * np.dtype(SCALARS[kind]).itemsize, what), SCALARS[kind]).tolist()

    def tensor_layout(self, name: str, kinds: Any, sizes: dict) -> tuple[Any, tuple[int, ...], int, int]:
        """Read the kind, shape, offset and size in bytes of a tensor; kinds and sizes come from the library."""
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
            self.fail(f"{what} has shape {shape}, which is invalid for {kind.name}")
        return kind, shape, offset, math.prod(shape) // elements * num_bytes
