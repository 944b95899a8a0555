"""The grader's side of a student's process: the tests call `call`, and the student's function runs over there.

The tests' process never runs a student's code. It sends the arguments (with pickle, as it is trusted) and decodes what
comes back (`values.py`); every comparison is made here, with values that were made here.

- Tensors are copied. One that the student's function computed from differentiable ones is the output of `Crossing`,
  whose backward pass asks the student's process for the gradients.
- Models and functions stay here: the student's process gets a `student.Remote`, which calls them in this one. So
  hooks, parameters and their gradients are the tests' own. Other objects of the project are copied.
- What a test replaces in a module (`monkeypatch`) is replaced over there during the call.
- Only functions in CHANGES may change an argument: otherwise a test that reads it afterwards would compare a result
  with a number that the student has written.
"""

import builtins
import functools
import inspect
import io
import pickle
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from course.grader import values
from course.grader.values import Malformed, raw

CHANGES = {  # functions whose docstrings allow them to change an argument in place
    *("kernels.attention:apply_rotary_", "nanorlhf.cache:KVCache.append", "nanorlhf.distributed:sum_gradients"),
    *("nanorlhf.training.supervised:backward", "train_rm:normalise", "nanorlhf.ppo:KLCoefficient.update"),
    "kernels.gae:gae_kernel",
}
PROJECT = {
    *("nanorlhf", "kernels", "data", "nano", "eval"),
    *("train_dpo", "train_grpo", "train_ppo", "train_rlcf", "train_rm", "train_sft"),
}
NAMED = {"nanorlhf.shared_queries:Groups"}  # named tuples that a student's process may send
READING = {  # methods of a model that a student's process may call
    *("parameters", "named_parameters", "buffers", "named_buffers", "modules", "children"),
    *("forward", "logits", "embed", "encode", "ids"),
}
CHANGING = {"zero_grad"}  # and in CHANGES also these
LONGEST = 2000  # characters of an error
DEEPEST = 20  # calls from one process to the other and back


class StudentError(Exception):
    """The student's process has ended, or has answered with what no test expects."""


class Call:
    """A call of a student's function, with the tensors that the student's process knows, by number."""

    def __init__(self, number: int, may_change: bool):
        self.number, self.may_change = number, may_change
        self.tensors: list[Tensor] = []
        self.numbers: dict[int, int] = {}  # by id
        self.storages: dict[int, tuple[int, torch.UntypedStorage]] = {}  # by address
        self.copies: set[int] = set()  # numbers of the objects that it has copies of

    def describe(self, tensor: Tensor) -> tuple:
        """Return what the student's process needs to make this tensor, or only its number if it has it already."""
        leaf = tensor.requires_grad and tensor.is_leaf
        gradient = tensor.grad if leaf else None
        if (number := self.numbers.get(id(tensor))) is not None:
            return (number, gradient)
        number = self.numbers[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        name = str(tensor.dtype).removeprefix("torch.")
        if tensor.requires_grad:
            return (number, gradient, name, tuple(tensor.shape), raw(tensor), leaf)
        storage = tensor.untyped_storage()
        known = self.storages.setdefault(storage.data_ptr() or -number - 1, (len(self.storages), storage))
        content = storage_bytes(storage) if known[0] == len(self.storages) - 1 and known[1] is storage else b""
        layout = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        return (number, gradient, name, *layout, known[0], content)


def storage_view(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]


def storage_bytes(storage: torch.UntypedStorage) -> bytes:
    return storage_view(storage).numpy().tobytes()


class Sender(pickle.Pickler):
    """Pickle values for the student's process; see `student.Receiver`."""

    def __init__(self, file: Any, student: "Student", call: Call):
        super().__init__(file, protocol=5)
        self.student, self.call = student, call

    def persistent_id(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, Tensor):
            return ("tensor", *self.call.describe(value))
        if kind is np.ndarray and value.dtype.name in values.NUMPY:
            return ("array", value.dtype.name, value.shape, value.tobytes())
        if isinstance(value, nn.Module) or is_local_function(value):
            return ("object", self.student.number_of(value))
        if kind.__module__.partition(".")[0] in PROJECT and not isinstance(value, type | BaseException | tuple):
            if isinstance(value, Sequence):
                return ("list", list(value))
            number = self.student.number_of(value)
            self.call.copies.add(number)
            return ("copy", number, kind, vars(value))
        return None


def is_local_function(value: Any) -> bool:
    """Return whether a function can't be imported by the student's process."""
    if isinstance(value, types.MethodType):
        return True
    if not isinstance(value, types.FunctionType):
        return False
    try:
        here = functools.reduce(getattr, value.__qualname__.split("."), sys.modules[value.__module__])
    except (KeyError, AttributeError):
        return True
    return here is not value or value.__module__.partition(".")[0] not in PROJECT | {"torch"}


class Crossing(torch.autograd.Function):
    """A tensor computed in the student's process from tensors of this one."""

    @staticmethod
    def forward(ctx: Any, student: "Student", call: Call, number: int, value: Tensor, *inputs: Tensor) -> Tensor:
        ctx.student, ctx.call, ctx.number = student, call, number
        ctx.wanted = [call.numbers[id(tensor)] for tensor in inputs]
        ctx.shapes = [(tensor.shape, tensor.dtype) for tensor in inputs]
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        gradients = ctx.student.gradients(ctx.call, ctx.number, gradient, ctx.wanted)
        for tensor, (shape, dtype) in zip(gradients, ctx.shapes, strict=True):
            if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype):
                raise Malformed("a gradient doesn't have the shape of its tensor")
        return None, None, None, None, *gradients


class Student:
    """The process that runs a student's code."""

    def __init__(self, reader: int, writer: int):
        self.reader, self.writer = reader, writer
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}  # by id
        self.errors: list[BaseException] = []
        self.calls: list[Call] = []
        self.num_calls = 0
        self.random = b""

    def number_of(self, value: Any) -> int:
        """Return the number of an object; a bound method is a new object each time."""
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self.numbers[id(value)]

    # -------------------------------------------------------------------------------------------- 1. from here to there
    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a student's function and return its result; raise what it raises."""
        if len(self.calls) >= DEEPEST:
            raise StudentError("the functions call each other without end")
        call = Call(self.num_calls, name in CHANGES)
        self.num_calls += 1
        self.calls.append(call)
        state = torch.get_rng_state().numpy().tobytes()
        random, self.random = state if state != self.random else None, state
        try:
            self.send(call, ("call", name, args, kwargs, context(), random, replaced()))
            while True:
                kind, *rest = self.receive()
                if kind == "return":
                    return self.returned(call, name, args, *rest)
                if kind == "raise":
                    raise self.error(*rest)
                self.answer(call, kind, *rest)
        finally:
            self.calls.pop()

    def gradients(self, call: Call, number: int, gradient: Tensor, wanted: list[int]) -> list[Tensor | None]:
        name = str(gradient.dtype).removeprefix("torch.")
        self.send(call, ("backward", number, (name, tuple(gradient.shape), raw(gradient)), wanted))
        kind, *rest = self.receive()
        if kind == "raise":
            raise self.error(*rest)
        [gradients] = [self.decode(call, node) for node in rest]
        if kind != "gradients" or not isinstance(gradients, list) or len(gradients) != len(wanted):
            raise Malformed("the answer isn't a list of gradients")
        if not all(tensor is None or isinstance(tensor, Tensor) for tensor in gradients):
            raise Malformed("the answer isn't a list of gradients")
        return gradients

    def send(self, call: Call, message: tuple) -> None:
        file = io.BytesIO()
        Sender(file, self, call).dump(message)
        try:
            values.write_all(self.writer, values.HEADER.pack(file.tell(), call.number) + file.getvalue())
        except OSError as error:
            raise StudentError("the code under test has ended the process") from error

    def receive(self) -> list:
        try:
            message, self.data = values.receive(self.reader)
        except EOFError as error:
            raise StudentError("the code under test has ended the process") from error
        if not isinstance(message, list) or not message:
            raise Malformed("the answer isn't a message")
        return message

    # -------------------------------------------------------------------------------------------- 2. from there to here
    def decode(self, call: Call, node: Any) -> Any:
        def known(kind: str, value: Any, number: Any) -> Any:
            if kind == "named":
                module, _, name = value.partition(":")
                if value not in NAMED:
                    raise ValueError
                return getattr(sys.modules[module], name)(*number)
            if kind == "tensor" and number is None:
                return value
            if type(number) is not int or number < 0:
                raise ValueError
            if kind == "tensor":
                inputs = [tensor for tensor in call.tensors if tensor.requires_grad]
                return Crossing.apply(self, call, number, value, *inputs)
            return call.tensors[number] if kind == "known" else self.objects[number]

        return values.decode(node, self.data, known)

    def error(self, name: Any, text: Any, number: Any) -> BaseException:
        """Return the exception that the student's function has raised, or let pass through."""
        if type(number) is int and 0 <= number < len(self.errors):
            return self.errors[number]
        errors = vars(builtins) | {"InputError": getattr(sys.modules.get("nanorlhf.errors"), "InputError", None)}
        kind = errors.get(name) if isinstance(name, str) else None
        # a StopIteration would end a loop of the test without an error
        if (
            isinstance(kind, type)
            and issubclass(kind, Exception)
            and name not in ("StopIteration", "StopAsyncIteration")
        ):
            with suppress(TypeError):  # UnicodeDecodeError needs more than a text
                return kind(str(text)[:LONGEST])
        return StudentError(f"{str(name)[:LONGEST]}: {str(text)[:LONGEST]}")

    def returned(self, call: Call, name: str, args: tuple, *rest: Any) -> Any:
        """Return the result, after the changes to the arguments."""
        decoded = [self.decode(call, node) for node in rest]
        if len(decoded) != 6:
            raise Malformed("the answer isn't a message")
        result, storages, tensors, gradients, attributes, in_arrays = decoded
        if (storages or tensors or gradients or attributes or in_arrays) and not call.may_change:
            raise StudentError("the function changes an argument in place")
        if in_arrays:
            raise StudentError("the function changes an array in place")
        ours = {number: storage for number, storage in call.storages.values()}
        try:
            for number, content in storages:
                storage_view(ours[number]).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            for number, value in tensors:
                with torch.set_grad_enabled(torch.is_grad_enabled() and not call.tensors[number].is_leaf):
                    call.tensors[number].copy_(value)
            for number, gradient in gradients:
                call.tensors[number].grad = gradient
            for number, attribute, value in attributes:
                if number not in call.copies or attribute not in vars(self.objects[number]):
                    raise ValueError
                setattr(self.objects[number], attribute, value)
            if name.endswith(".__init__"):
                rebuild(args[0], **result)
                return None
        except (ValueError, TypeError, LookupError, RuntimeError, AttributeError) as error:
            raise Malformed("the changed arguments aren't the arguments") from error
        return result

    def answer(self, call: Call, kind: Any, *rest: Any) -> None:
        """Answer a question that the student's function asks while it runs."""
        answers = {"get": self.get, "set": self.set, "run": self.run, "backward": self.backward}
        if not isinstance(kind, str) or kind not in answers:
            raise Malformed("the answer isn't a message")
        decoded = [self.decode(call, node) for node in rest]
        try:
            answer = answers[kind](call, *decoded)
        except (Malformed, StudentError):
            raise
        except Exception as error:  # the student's function may catch it; if not, it passes through to the test
            self.errors.append(error)
            self.send(call, ("error", type(error).__name__, str(error), len(self.errors) - 1))
        else:
            self.send(call, ("answer", *answer))

    def get(self, call: Call, model: Any, name: Any) -> tuple:
        """Return a model's public attribute, and whether it is a method."""
        if not isinstance(model, nn.Module) or not isinstance(name, str) or name.startswith("_"):
            raise AttributeError(name)
        value = getattr(model, name)
        if isinstance(value, types.MethodType):
            if name not in READING | (CHANGING if call.may_change else set()):
                raise AttributeError(name)
            return True, None
        plain = value is None or isinstance(value, bool | int | float | str | Tensor | nn.Module | torch.device)
        if not plain and type(value).__module__.partition(".")[0] not in PROJECT:
            raise AttributeError(name)
        return False, value

    def set(self, call: Call, model: Any, name: Any, value: Any) -> tuple:
        """Set a model's parameter or buffer."""
        if not call.may_change or not isinstance(model, nn.Module) or not isinstance(value, Tensor):
            raise StudentError(f"the function changes an argument's attribute {name}")
        if name not in dict([*model.named_parameters(recurse=False), *model.named_buffers(recurse=False)]):
            raise AttributeError(name)
        setattr(model, name, value)
        return ()

    def run(self, call: Call, function: Any, name: Any, args: Any, kwargs: Any, modes: Any) -> tuple:
        """Call a function, a model, or the method `name` of a model; return also the arguments that it has changed."""
        if name is not None:
            is_method, _ = self.get(call, function, name)
            if not is_method:
                raise AttributeError(name)
            function = getattr(function, name)
        before = [value.detach().clone() if isinstance(value, Tensor) else None for value in args]
        with in_context(*modes):
            result = function(*args, **kwargs)
        changed = [
            (i, value)
            for i, (value, old) in enumerate(zip(args, before, strict=True))
            if isinstance(value, Tensor) and raw(value) != raw(old)
        ]
        iterates = inspect.isgenerator(result) or isinstance(result, types.GeneratorType | map | filter | zip)
        return iterates, list(result) if iterates else result, changed

    def backward(self, call: Call, tensor: Any, gradient: Any) -> tuple:
        """Run the backward pass of a tensor, when the student's function does."""
        if not call.may_change:
            raise StudentError("the function runs a backward pass")
        torch.autograd.backward(tensor, gradient)
        return ()


def context() -> tuple:
    """Return the modes of PyTorch that a function runs in."""
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    return torch.is_grad_enabled(), *(
        str(part).removeprefix("torch.") if i == 1 else part for i, part in enumerate(autocast)
    )


@contextmanager
def in_context(grad: bool, autocast: bool, dtype: str, cache: bool) -> Iterator[None]:
    with (
        torch.set_grad_enabled(grad),
        torch.autocast("cpu", values.DTYPES[dtype], enabled=autocast, cache_enabled=cache),
    ):
        yield


def rebuild(model: nn.Module, tensors: dict, modules: dict, attributes: dict) -> None:
    """Give a model, built by the project's own constructor, the weights and attributes that the student's has.

    Raises StudentError if the student's has others.
    """
    ours = dict([*model.named_parameters(), *model.named_buffers()])
    theirs = {name: (list(tensor.shape), tensor.dtype, grad) for name, (tensor, grad) in tensors.items()}
    if {name: (list(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in ours.items()} != theirs:
        raise StudentError(f"the model has the tensors {', '.join(theirs)}; expected {', '.join(ours)}")
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    if modules != kinds:
        raise StudentError(f"the model's modules are {modules}; expected {kinds}")
    with torch.no_grad():
        for name, tensor in ours.items():
            tensor.copy_(tensors[name][0])
    for name in [name for name in vars(model) if not name.startswith("_")]:
        if name in attributes:
            setattr(model, name, attributes[name])
        else:
            delattr(model, name)


# --------------------------------------------------------------------------------------------- 3. in the tests' process
student: Student | None = None  # of this process
patched: dict[tuple[str, str], Any] = {}  # module and attribute that a test has replaced -> what was there before


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call the student's function `module:name`: the body of an exercise's function in the grader's tree."""
    assert student is not None
    return student.call(name, *args, **kwargs)


class Kernel:
    """A student's Triton kernel: `kernel[grid](...)` launches it in the student's process."""

    def __init__(self, name: str):
        self.name = name

    def __getitem__(self, grid: Any) -> Any:
        return functools.partial(call, self.name, grid)


def replaced() -> dict[tuple[str, str], Any]:
    """Return what tests have replaced in modules and not yet restored."""
    current = {key: getattr(sys.modules[key[0]], key[1]) for key in patched}
    return {key: value for key, value in current.items() if value is not patched[key]}


def note_replacements(monkeypatch: Any) -> None:
    """Let pytest's MonkeyPatch note what it replaces in modules."""
    setattr_ = monkeypatch.setattr

    @functools.wraps(setattr_)
    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        setattr_(self, *args, **kwargs)
        target, name, old = self._setattr[-1]
        if isinstance(target, types.ModuleType) and target.__name__.partition(".")[0] in PROJECT | {"torch"}:
            patched.setdefault((target.__name__, name), old)

    monkeypatch.setattr = noted
