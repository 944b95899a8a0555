"""Only values leave a student's process, and a message that isn't one is refused."""

import json
import math
import os
import threading

import numpy as np
import pytest
import torch

from course.grader.values import HEADER, Malformed, decode, receive, send

TENSOR = torch.tensor([[1.5, -math.inf], [0.0, 2.0]], dtype=torch.bfloat16)
VALUES = (
    *(None, True, -3, 2**80, 0.1, math.inf, "ä\ud800\0", b"\xff", [], (1, [2.0]), {"a": {3: None}}, slice(1, None, 2)),
    *(np.float32(0.5), np.arange(6).reshape(2, 3), np.zeros((0, 2)), np.array([True, False])),
    *(TENSOR, TENSOR.T, torch.zeros(2, 0), torch.tensor(3), torch.tensor([True]).expand(3)),
)


def crossed(data: bytes) -> object:
    """Return the one value of a message whose bytes are given."""
    reader, writer = os.pipe()
    thread = threading.Thread(target=os.write, args=(writer, data))
    thread.start()
    thread.join()
    os.close(writer)
    try:
        [node], content = receive(reader)
    finally:
        os.close(reader)
    return decode(node, content, lambda kind, value, number: value)


def message(node: object, content: bytes = b"") -> bytes:
    text = json.dumps([node]).encode()
    return HEADER.pack(len(text), len(content)) + text + content


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_value_arrives_as_it_was_sent(value) -> None:
    reader, writer = os.pipe()
    send(writer, [value], lambda part: (part, None) if isinstance(part, torch.Tensor) else None)
    os.close(writer)
    [node], content = receive(reader)
    os.close(reader)
    arrived = decode(node, content, lambda kind, value, number: value)
    assert type(arrived) is type(value)
    if isinstance(value, torch.Tensor | np.ndarray):
        assert arrived.dtype == value.dtype and arrived.shape == value.shape and (arrived == value).all()
    else:
        assert arrived == value


@pytest.mark.parametrize(
    "value",
    [object(), type("E", (), {})(), type("F", (float,), {})(1.0), type("L", (list,), {})(), iter(()), np.array("a")],
)  # fmt: skip
def test_an_object_of_another_type_is_not_sent(value) -> None:
    with pytest.raises(TypeError, match="can't return an object of type"):
        send(-1, [[value]], lambda part: None)


@pytest.mark.parametrize(
    "node",
    [
        {"a": 1}, [], ["list"], ["list", 3], ["what", 1], ["dict", [[1]]],
        ["dict", [[["list", []], 1]]], ["slice", []],
        ["bytes", 0, 9], ["bytes", -1, 1], ["bytes", True, 1], ["bytes", 0, -1],
        ["tensor", "float32", [2], 0, 4, None], ["tensor", "float32", [-1], 0, 4, None],
        ["tensor", "x", [1], 0, 4, None],
        ["tensor", "float32", [1.0], 0, 4, None], ["tensor", "float32", [0, 2**70], 0, 0, None],
        ["tensor", "float32", [1], 0, 4], ["array", "object", [1], 0, 4], ["array", "float64", [1], 0, 4],
        ["array", "uint8", [1] * 99, 0, 1], ["array", "uint8", [4], 0, 4, 0],
    ],
    ids=str,
)  # fmt: skip
def test_a_malformed_value_is_refused(node) -> None:
    with pytest.raises(Malformed):
        print(crossed(message(node, b"\0\0\x80\x3f")))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", EOFError), (HEADER.pack(9, 0) + b"[", EOFError), (HEADER.pack(1, 0) + b"[", Malformed),
        (HEADER.pack(2**31, 0), Malformed), (HEADER.pack(2, 2**31) + b"[]", Malformed),
        (HEADER.pack(3, 0) + b"[\xff]", Malformed),
    ],
)  # fmt: skip
def test_a_message_is_complete_small_and_json(data, error) -> None:
    with pytest.raises(error):
        crossed(data)


def test_a_message_nested_without_end_is_refused() -> None:
    with pytest.raises(Malformed):
        crossed(HEADER.pack(60_000, 0) + b"[" * 60_000)


def test_a_bool_of_another_byte_is_true() -> None:
    assert crossed(message(["tensor", "bool", [2], 0, 2, None], b"\2\0")).tolist() == [True, False]
    assert crossed(message(["array", "bool", [2], 0, 2], b"\2\0")).view("uint8").tolist() == [1, 0]
