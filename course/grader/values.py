"""Values that the student's process sends to the grader's: JSON with raw bytes, because unpickling would run code.

A message is the length of its JSON, the length of its bytes, the JSON and the bytes. A number, a string, True, False or
None is itself in JSON; everything else is a list that begins with its kind:

    ["list", [value, ...]]   ["tuple", [value, ...]]   ["dict", [[key, value], ...]]   ["slice", [start, stop, step]]
    ["bytes", offset, length]   ["scalar" or "array", NumPy's dtype, shape, offset, length]
    ["tensor", dtype, shape, offset, length, number]    number: of a differentiable tensor, for its gradient; or None
    ["known", number]  ["object", number]               a tensor or an object that the grader's process has sent
    ["named", "module:class", [value, ...]]             a named tuple of the project

Whatever arrives is decoded to exactly these types: an object that claims to equal everything can't cross.
"""

import json
import math
import os
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

MOST_JSON, MOST_BYTES = 2**23, 2**26  # of a message; the largest answer of a right solution has 2 MB
HEADER = struct.Struct("<II")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
}
NUMPY = {
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
}


class Malformed(Exception):
    """The student's process has sent what isn't a message."""


def read_exactly(pipe: int, size: int) -> bytes:
    """Read `size` bytes. Raises EOFError if the pipe ends before."""
    data = bytearray()
    while len(data) < size:
        chunk = os.read(pipe, min(size - len(data), 2**20))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


def write_all(pipe: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(pipe, view) :]


def raw(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements as bytes, in row-major order."""
    if not tensor.numel():
        return b""
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()


# ------------------------------------------------------------------------------------------ 1. in the student's process
def send(pipe: int, message: list, known: Callable[[Any], Any]) -> None:
    """Send a message. `known` returns a node, a tensor and its number, or None for what is neither."""
    data = bytearray()

    def put(content: bytes) -> list[int]:
        data.extend(content)
        return [len(data) - len(content), len(content)]

    def node(value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        sent = known(value)
        if isinstance(sent, tuple):
            tensor, number = sent
            name = str(tensor.dtype).removeprefix("torch.")
            return ["tensor", name, list(tensor.shape), *put(raw(tensor)), number]
        if sent is not None:
            return sent
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ["named", f"{kind.__module__}:{kind.__qualname__}", [node(item) for item in value]]
        if kind in (list, tuple, torch.Size):
            kind = list if kind is list else tuple
            return [kind.__name__, [node(item) for item in value]]
        if kind is dict:
            return ["dict", [[node(key), node(item)] for key, item in value.items()]]
        if kind is slice:
            return ["slice", [node(value.start), node(value.stop), node(value.step)]]
        if kind is bytes:
            return ["bytes", *put(value)]
        if isinstance(value, np.ndarray | np.generic) and value.dtype.name in NUMPY:
            name = "array" if isinstance(value, np.ndarray) else "scalar"
            return [name, value.dtype.name, list(value.shape), *put(value.tobytes())]
        raise TypeError(f"can't return an object of type {kind.__name__}")

    text = json.dumps([node(part) for part in message]).encode()
    write_all(pipe, HEADER.pack(len(text), len(data)) + text + data)


# ------------------------------------------------------------------------------------------- 2. in the grader's process
def receive(pipe: int) -> tuple[Any, bytes]:
    """Return the JSON and the bytes of a message. Raises Malformed, or EOFError if the process has ended."""
    json_size, size = HEADER.unpack(read_exactly(pipe, HEADER.size))
    if json_size > MOST_JSON or size > MOST_BYTES:
        raise Malformed(f"the answer has more than {MOST_BYTES} bytes")
    text, data = read_exactly(pipe, json_size), read_exactly(pipe, size)
    try:
        return json.loads(text), data
    except (ValueError, RecursionError) as error:
        raise Malformed("the answer isn't a value") from error


def decode(node: Any, data: bytes, known: Callable[[str, Any, Any], Any]) -> Any:
    """Return the value of a node. `known(kind, value, number)` returns tensors and objects. Raises Malformed."""
    try:
        return decoded(node, data, known)
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, RecursionError, RuntimeError) as error:
        raise Malformed("the answer isn't a value") from error


def decoded(node: Any, data: bytes, known: Callable[[str, Any, Any], Any]) -> Any:
    if not isinstance(node, list):
        if isinstance(node, dict):
            raise ValueError
        return node
    kind, *rest = node
    if kind in ("list", "tuple", "slice"):
        [items] = rest
        values = [decoded(item, data, known) for item in items]
        return values if kind == "list" else tuple(values) if kind == "tuple" else slice(*values)
    if kind == "dict":
        [pairs] = rest
        return {decoded(key, data, known): decoded(value, data, known) for key, value in pairs}
    if kind == "named":
        name, items = rest
        return known(kind, name, [decoded(item, data, known) for item in items])
    if kind in ("known", "object"):
        [number] = rest
        return known(kind, None, number)
    if kind == "bytes":
        return part(data, *rest)
    name, shape, offset, length, *number = rest
    content = part(data, offset, length)
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError
    if kind == "tensor":
        return known("tensor", tensor(DTYPES[name], shape, content), *number)
    if kind not in ("array", "scalar") or name not in NUMPY or number:
        raise ValueError
    array = np.frombuffer(bytearray(content), dtype="uint8" if name == "bool" else name).reshape(shape)
    array = array != 0 if name == "bool" else array
    return array if kind == "array" else array[()]


def part(data: bytes, offset: Any, length: Any) -> bytes:
    if type(offset) is not int or type(length) is not int or not 0 <= offset <= offset + length <= len(data):
        raise ValueError
    return data[offset : offset + length]


def tensor(dtype: torch.dtype, shape: list[int], content: bytes) -> torch.Tensor:
    """Return a tensor from its bytes; a byte of a bool is True if it isn't 0."""
    if math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError
    if not content:
        return torch.empty(shape, dtype=dtype)
    stored = torch.uint8 if dtype == torch.bool else dtype
    values = torch.frombuffer(bytearray(content), dtype=stored).view(shape)
    return values != 0 if dtype == torch.bool else values
