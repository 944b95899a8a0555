"""Simulate a GPU with CUDA graphs on a CPU, including the operations that a real GPU rejects.

Its tensors report the device cuda:0 and store their data on the CPU. So the code under test takes the GPU branches, and
host tensors differ from device tensors. Python sees the simulated device, PyTorch's C++ sees a CPU.

    with PretendGPU() as gpu:
        x = torch.zeros(3, device=gpu.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):    # records; rejects synchronisation and host copies
            x += 1
        graph.replay()                   # x is 1

A replay repeats operators on the same memory without running Python: it doesn't see a number that Python has changed
or a newly allocated tensor. Outside a capture, `gpu.waits` lists the operations that made the host wait.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kernels.decode import decode_reference

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
MPS = torch.device("mps", 0)
# like all pointwise operators, they accept a host number as a 0-dimensional tensor
FILL = (aten.fill_.Tensor, aten.masked_fill.Tensor, aten.masked_fill_.Tensor, aten.index_fill_.int_Tensor)
PUT = (aten.index_put.default, aten.index_put_.default)
# they read a number internally
ASK = (aten.multinomial.default,)
PRODUCTS: dict[Any, Callable] = {  # not available on a CPU
    aten.mm.dtype: lambda a, b, dtype: a.to(dtype) @ b.to(dtype),
}


def changed(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Map the tensors in an operator's arguments or result."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, list | tuple):
        items = (changed(item, change) for item in tree)
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return {name: changed(item, change) for name, item in tree.items()} if isinstance(tree, dict) else tree


def tensors(tree: Any) -> list[Tensor]:
    leaves: list[Tensor] = []
    changed(tree, lambda tensor: leaves.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return leaves


def as_on_a_cpu(function: Callable) -> Callable:
    """Wrap a function that queries autocast for a device: C++ sees a CPU."""
    return lambda device, *arguments, **settings: function("cpu", *arguments, **settings)


class OnGPU(Tensor):
    """Tensor on the simulated GPU; its data is in `held`."""

    held: Tensor
    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> "OnGPU":
        shape = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        with torch.inference_mode(False):  # views of tensors from outside the mode must also be simulated
            return Tensor._make_wrapper_subclass(cls, held.size(), **shape)

    def __init__(self, held: Tensor):
        self.held = held

    def __repr__(self):
        return f"OnGPU({self.held})"

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), settings=None):
        raise AssertionError("a tensor on the simulated GPU was used outside `with PretendGPU()`")

    def to(self, *arguments, **settings):
        """Copy to the host; C++ treats the tensor as a host tensor and would return it unchanged."""
        device = torch._C._nn._parse_to(*arguments, **{name: settings[name] for name in settings if name != "copy"})[0]
        if device is not None and device.type == "cpu":
            PretendGPU.current.wait("a copy to the host")
            return self.held.to(*arguments, **settings)
        return super().to(*arguments, **settings)

    def cpu(self):
        return self.to("cpu")

    def new_tensor(self, data, **settings):
        """Copy from the host; C++ would create a host tensor."""
        return torch.tensor(data, **{"dtype": self.dtype, **settings}).to(self.device)

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self):
        raise TypeError("can't convert a GPU tensor to numpy: copy it to the host first")


class OnMPS(OnGPU):
    """Tensor on a simulated GPU of Apple's, which has no float64."""

    device = property(lambda self: MPS)  # type: ignore[assignment]
    is_cuda = property(lambda self: False)  # type: ignore[assignment]
    is_mps = property(lambda self: True)  # type: ignore[assignment]

    def __init__(self, held: Tensor):
        if held.dtype in (torch.float64, torch.complex128):
            raise TypeError("MPS has no float64")
        super().__init__(held)


class Graph:
    """Replacement for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []  # function, arguments, settings, result
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        with _disable_current_modes(), torch.autocast("cpu", enabled=False):  # its casts have been recorded
            for function, arguments, settings, result in self.calls:
                again = function(*arguments, **settings)
                for old, new in zip(tensors(result), tensors(again), strict=True):
                    if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():  # no view, not in place
                        old.copy_(new)


class Memory:
    """Copies of the storages that a capture must restore: those that it didn't allocate itself."""

    def __init__(self) -> None:
        self.allocated: set[int] = set()
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # other storages, with a copy from before the capture

    def used(self, read: list[Tensor]) -> None:
        for tensor in read:
            address = tensor.untyped_storage().data_ptr()
            if address not in self.allocated and address not in self.before:
                whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                self.before[address] = whole, whole.clone()

    def made(self, written: list[Tensor]) -> None:
        self.allocated |= {tensor.untyped_storage().data_ptr() for tensor in written} - self.before.keys()

    def restore(self) -> None:
        for whole, copy in self.before.values():
            whole.copy_(copy)


class PretendGPU(TorchDispatchMode):
    current: "PretendGPU"
    device = CUDA
    kind: type[OnGPU] = OnGPU

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[Graph] = []  # captured graphs
        self.graph: Graph | None = None  # graph being captured
        self.memory = Memory()
        self.waits: list[str] = []
        self.patches = ExitStack()
        self.depth = 0  # composite operators re-enter it

    def __enter__(self):
        if self.depth == 0:
            PretendGPU.current = self
            for name, value in (("_lazy_init", lambda: None), ("CUDAGraph", Graph), ("graph", self.capture)):
                self.patches.enter_context(mock.patch.object(torch.cuda, name, value))
            # no FlashAttention and no Triton: their functions in plain PyTorch
            self.patches.enter_context(mock.patch("torch.cuda.get_device_capability", lambda device: (7, 5)))
            self.patches.enter_context(mock.patch("nanorlhf.model.decode_attention", decode_reference))
            for module in ("nanorlhf.layers", "kernels.attention"):
                self.patches.enter_context(mock.patch(f"{module}.fuses", lambda x: False))
            for name in ("autocast", "is_autocast_enabled", "get_autocast_dtype"):
                self.patches.enter_context(mock.patch.object(torch, name, as_on_a_cpu(getattr(torch, name))))
            torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) creates a host tensor and copies it
        self.depth += 1
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.depth -= 1
        if self.depth == 0:
            torch._C._set_only_lift_cpu_tensors(False)
            self.patches.close()

    @contextmanager
    def capture(self, graph: Graph) -> Iterator[None]:
        """Replacement for `torch.cuda.graph`: records the operators and undoes their writes."""
        self.graph, self.memory = graph, Memory()
        try:
            yield
        finally:
            self.graph = None
            self.memory.restore()
        self.graphs.append(graph)

    def wait(self, reason: str) -> None:
        if self.graph is not None:
            raise RuntimeError(f"not permitted while a stream is captured: {reason}")
        self.waits.append(reason)

    def move(self, model: nn.Module) -> nn.Module:
        """Replacement for `model.to("cuda")`, in place; shared tensors stay shared."""
        moved: dict[int, OnGPU] = {}
        for module in model.modules():
            for named in (module._parameters, module._buffers):
                for name, tensor in named.items():
                    if tensor is not None and not isinstance(tensor, OnGPU):
                        named[name] = moved.setdefault(id(tensor), self.kind(tensor.detach()))
                        named[name]._is_param = named is module._parameters
                        named[name].requires_grad_(tensor.requires_grad)
        return model

    def __torch_dispatch__(self, function, types, arguments=(), settings=None):
        settings = settings or {}
        if function is not aten.scaled_dot_product_attention.default and function._can_decompose():
            with self:  # in inference mode, composite operators aren't decomposed
                return function.decompose(*arguments, **settings)
        inputs = tensors((arguments, settings))
        device = settings.pop("device", None)
        if function is aten._to_copy.default and isinstance(arguments[0], OnGPU) and device == torch.device("cpu"):
            device = None  # a backward pass, where C++ chooses the device; Python's copies call `OnGPU.to`
        is_on_gpu = any(isinstance(tensor, OnGPU) for tensor in inputs)
        if function is aten._to_copy.default and device is not None and (device.type == self.device.type) != is_on_gpu:
            self.wait(f"a copy {'to' if is_on_gpu else 'from'} the host")
        elif is_on_gpu:
            self.check(function, arguments, inputs)
        if device is not None:
            is_on_gpu = device.type == self.device.type
            settings["device"] = torch.device("cpu") if is_on_gpu else device
        on_gpu = {id(tensor.held): tensor for tensor in inputs if isinstance(tensor, OnGPU)}
        arguments, settings = changed((arguments, settings), lambda tensor: getattr(tensor, "held", tensor))
        function = PRODUCTS.get(function, function)
        if is_on_gpu and self.graph is not None:
            self.memory.used(tensors((arguments, settings)))
        result = function(*arguments, **settings)
        if not is_on_gpu:
            return result
        if self.graph is not None:
            self.memory.made(tensors(result))
            self.graph.calls.append((function, arguments, settings, result))  # keep its allocations
        return changed(result, lambda tensor: on_gpu[id(tensor)] if id(tensor) in on_gpu else self.kind(tensor))

    def check(self, function, arguments: tuple, inputs: list[Tensor]) -> None:
        """Reject host copies and synchronisation during a capture; count them otherwise."""
        name = function.name()
        of_host = [tensor for tensor in inputs if not isinstance(tensor, OnGPU)]
        if torch.Tag.data_dependent_output in function.tags or function in ASK:
            self.wait(f"{name} reads a number")
        if function in (aten.index.Tensor, *PUT):
            masks = [index for index in arguments[1] if index is not None and index.dtype == torch.bool]
            # a host number at a mask: PyTorch uses masked_fill
            is_fill = function in PUT and len(arguments[1]) == 1 and any(arguments[2] is tensor for tensor in of_host)
            if masks and not is_fill:
                self.wait(f"{name} by a mask has a shape that depends on numbers")
            elif of_host and not masks:
                self.wait(f"{name} copies indices or values from the host")
        elif torch.Tag.dynamic_output_shape in function.tags:
            self.wait(f"{name} has a shape that depends on numbers")
        elif function is aten.copy_.default and of_host:
            self.wait("a copy between host and device")
        elif of_host:
            takes_a_number = torch.Tag.pointwise in function.tags or function in FILL
            if not takes_a_number or any(tensor.ndim for tensor in of_host):
                raise RuntimeError(f"{name}: expected all tensors to be on the same device, found cuda:0 and cpu")


class PretendMPS(PretendGPU):
    """The same for Apple's GPUs: no float64, no CUDA."""

    device = MPS
    kind = OnMPS
