"""The confined process that runs a student's code and answers the calls of the tests (`judge.py`)."""

import builtins
import functools
import importlib
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from course.grader import values
from course.grader.judge import context, in_context, storage_bytes
from course.grader.values import DTYPES, raw


class PassedThrough(Exception):
    """An error of a test's own function that the student's function has called."""


class Remote:
    """A model or a function of the tests' process, which runs there."""

    def __init__(self, student: "Process", number: int):
        vars(self).update(_student=student, _number=number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._student.run(self, None, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        is_method, value = self._student.ask("get", self, name)
        if is_method:
            return lambda *args, **kwargs: self._student.run(self, name, args, kwargs)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self._student.ask("set", self, name, value)


class Boundary(torch.autograd.Function):
    """A tensor that the tests' process has computed: its backward pass continues there."""

    @staticmethod
    def forward(ctx: Any, call: "Call", number: int, leaf: Tensor) -> Tensor:
        ctx.call, ctx.number = call, number
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        ctx.call.student.ask("backward", ctx.call.tensors[ctx.number], gradient)
        return None, None, None


class Call:
    """The tensors that a call has received, by number, and what they were."""

    def __init__(self, student: "Process"):
        self.student = student
        self.tensors: dict[int, Tensor] = {}
        self.edges: dict[int, Any] = {}  # of autograd's graph, for the gradients of differentiable tensors
        self.received: dict[int, bytes] = {}  # elements of differentiable tensors
        self.gradients: dict[int, Tensor | None] = {}  # of leaves
        self.storages: dict[int, tuple[torch.UntypedStorage, bytes]] = {}  # of the other tensors
        self.arrays: list[tuple[np.ndarray, bytes]] = []
        self.copies: list[tuple[int, Any, dict]] = []  # of objects: number, object, attributes
        self.outputs: list[Tensor] = []

    def output(self, tensor: Tensor) -> tuple[Tensor, int | None]:
        """Return a tensor to send, and its number if it is differentiable."""
        if not tensor.requires_grad:
            return tensor, None
        self.outputs.append(tensor)
        return tensor, len(self.outputs) - 1

    def tensor(self, number: int, gradient: Tensor | None, *layout: Any) -> Tensor:
        """Return a tensor by its number; make it from its layout the first time."""
        match layout:
            case name, shape, content, is_leaf:
                made = values.tensor(DTYPES[name], shape, content).requires_grad_()
                if is_leaf:
                    self.gradients[number] = None
                else:
                    made = Boundary.apply(self, number, made)
                self.tensors[number], self.received[number] = made, content
                self.edges[number] = torch.autograd.graph.get_gradient_edge(made)
            case name, offset, shape, stride, storage, content:
                if storage not in self.storages:
                    elements = values.tensor(torch.uint8, [len(content)], content)
                    self.storages[storage] = elements.untyped_storage(), content
                empty = torch.empty(0, dtype=DTYPES[name])
                self.tensors[number] = empty.set_(self.storages[storage][0], offset, shape, stride)
        made = self.tensors[number]
        if number in self.gradients:
            made.grad = self.gradients[number] = gradient
        return made

    def changes(self) -> list:
        """Return what has changed of the arguments: storages, tensors, gradients, attributes, and whether an array."""
        storages = [[i, now] for i, (storage, was) in self.storages.items() if (now := storage_bytes(storage)) != was]
        tensors = [[i, Computed(self.tensors[i])] for i, was in self.received.items() if raw(self.tensors[i]) != was]
        gradients = [[i, now] for i, was in self.gradients.items() if (now := self.tensors[i].grad) is not was]
        attributes = [
            [number, name, vars(copy)[name]]
            for number, copy, was in self.copies
            for name in was
            if vars(copy).get(name) is not was[name]
        ]
        return [storages, tensors, gradients, attributes, any(array.tobytes() != was for array, was in self.arrays)]


@dataclass
class Computed:
    """A received tensor, to send with its new elements."""

    tensor: Tensor


class Receiver(pickle.Unpickler):
    """Unpickle a message of the tests' process, which is trusted."""

    def __init__(self, data: bytes, student: "Process", call: Call):
        super().__init__(io.BytesIO(data))
        self.student, self.call = student, call

    def persistent_load(self, node: tuple) -> Any:
        kind, *rest = node
        if kind == "tensor":
            return self.call.tensor(*rest)
        if kind == "list":
            return rest[0]
        if kind == "array":
            name, shape, content = rest
            array = np.frombuffer(bytearray(content), dtype=name).reshape(shape)
            self.call.arrays.append((array, content))
            return array
        number = rest[0]
        if kind == "object":
            return self.student.objects.setdefault(number, Remote(self.student, number))
        _, cls, attributes = rest
        copy = object.__new__(cls)
        vars(copy).update(attributes)
        self.student.numbers[id(copy)] = number
        self.call.copies.append((number, copy, attributes))
        return copy


class Process:
    """This process: it reads messages, and sends answers and questions."""

    def __init__(self, reader: int, writer: int):
        self.reader, self.writer = reader, writer
        self.objects: dict[int, Remote] = {}
        self.numbers: dict[int, int] = {}  # of copied objects, by id
        self.calls: dict[int, Call] = {}
        self.current: list[Call] = []
        self.random = torch.get_rng_state()

    def serve(self) -> None:
        while True:
            self.handle(*self.receive())

    def receive(self) -> tuple[Call, list]:
        size, number = values.HEADER.unpack(values.read_exactly(self.reader, values.HEADER.size))
        call = self.calls.setdefault(number, Call(self))
        message = Receiver(values.read_exactly(self.reader, size), self, call).load()
        return call, message

    def handle(self, call: Call, message: tuple) -> None:
        kind, *rest = message
        self.current.append(call)
        try:
            self.send(self.call(call, *rest) if kind == "call" else self.gradients(call, *rest))
        except BaseException as error:  # of the student's code, or an answer that can't be sent
            self.send(["raise", *described(error)])
        finally:
            self.current.pop()

    def send(self, message: list) -> None:
        values.send(self.writer, message, self.known)

    def known(self, value: Any) -> Any:
        call = self.current[-1]
        if isinstance(value, Remote):
            return ["object", value._number]
        if id(value) in self.numbers:
            return ["object", self.numbers[id(value)]]
        if isinstance(value, Computed):
            return call.output(value.tensor)
        if isinstance(value, Tensor):
            known = [i for i, tensor in call.tensors.items() if tensor is value]
            return ["known", known[0]] if known else call.output(value)
        return None

    def ask(self, kind: str, *rest: Any) -> Any:
        """Ask the tests' process, and answer its calls until it has answered."""
        self.send([kind, *rest])
        while True:
            call, message = self.receive()
            if message[0] == "answer":
                return message[1:]
            if message[0] == "error":
                _, name, text, number = message
                error = getattr(builtins, name, PassedThrough)(text)
                error.number = number
                raise error
            self.handle(call, message)

    def run(self, function: Remote, name: str | None, args: tuple, kwargs: dict) -> Any:
        iterates, result, changed = self.ask("run", function, name, args, kwargs, context())
        for i, value in changed:
            with torch.no_grad():
                args[i].copy_(value)
        return iter(result) if iterates else result

    def call(
        self, call: Call, name: str, args: tuple, kwargs: dict, modes: tuple, random: bytes | None, replaced: dict
    ) -> list:
        if random is not None:
            self.random = torch.frombuffer(bytearray(random), dtype=torch.uint8)
        torch.set_rng_state(self.random)
        module, _, path = name.partition(":")
        *parts, last = path.split(".")
        with in_context(*modes), replacements(replaced):
            owner = functools.reduce(getattr, parts, importlib.import_module(module))
            if last == "__init__":
                return ["return", parts_of(owner(*args[1:], **kwargs)), *call.changes()]
            function = getattr(owner, last)
            if hasattr(function, "__getitem__"):  # a Triton kernel: the first argument is the grid
                function, args = function[args[0]], args[1:]
            result = function(*args, **kwargs)
            return ["return", result, *call.changes()]

    def gradients(self, call: Call, number: int, gradient: tuple, wanted: list[int]) -> list:
        name, shape, content = gradient
        edges = [call.edges[i] for i in wanted]
        output_gradient = values.tensor(DTYPES[name], shape, content)
        gradients = torch.autograd.grad(
            call.outputs[number], edges, output_gradient, retain_graph=True, allow_unused=True
        )
        return ["gradients", list(gradients)]


def described(error: BaseException) -> tuple[str, str, int | None]:
    try:
        text = str(error)[:2000]
    except Exception:  # of the student's own exception
        text = ""
    return type(error).__name__, text, getattr(error, "number", None)


def parts_of(model: torch.nn.Module) -> dict:
    """Return a model's tensors, the kinds of its modules and its public attributes, by name."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    return {
        "tensors": {name: (tensor.detach(), tensor.requires_grad) for name, tensor in tensors.items()},
        "modules": {name: type(module).__name__ for name, module in model.named_modules()},
        "attributes": {name: value for name, value in vars(model).items() if not name.startswith("_")},
    }


@contextmanager
def replacements(replaced: dict[tuple[str, str], Any]) -> Iterator[None]:
    """Replace what a test has replaced in modules."""
    before = {}
    for (module, name), value in replaced.items():
        target = importlib.import_module(module)
        before[target, name] = getattr(target, name)
        setattr(target, name, value)
    try:
        yield
    finally:
        for (target, name), value in before.items():
            setattr(target, name, value)
