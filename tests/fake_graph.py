"""A CUDA graph on a CPU: records the operators of a decode step with the tensors they read and wrote, and repeats them.

What a replay repeats are operators on the same memory, not Python: a number that Python has changed since is not seen,
and a tensor that was allocated anew is not read. As on a GPU, recording changes nothing, and asking for a number fails.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class FakeGraph:
    """Stands for `torch.cuda.CUDAGraph`."""

    captured: list["FakeGraph"] = []

    def __init__(self) -> None:
        self.calls: list[tuple] = []  # function, arguments, settings, result
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        for function, arguments, settings, result in self.calls:
            again = function(*arguments, **settings)
            for old, new in zip(tensors(result), tensors(again), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():  # neither a view nor in place
                    old.copy_(new)


class Recorder(TorchDispatchMode):
    def __init__(self, graph: FakeGraph):
        super().__init__()
        self.graph = graph
        self.own: set[int] = set()  # storages that the step allocated
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # the others, and a copy from before the step

    def __torch_dispatch__(self, function, types, arguments=(), settings=None):
        settings = settings or {}
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a captured step must not wait for a number")
        for tensor in tensors((arguments, settings)):
            address = tensor.untyped_storage().data_ptr()
            if address not in self.own and address not in self.before:
                whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                self.before[address] = whole, whole.clone()
        result = function(*arguments, **settings)
        self.own |= {t.untyped_storage().data_ptr() for t in tensors(result)} - self.before.keys()
        self.graph.calls.append((function, arguments, settings, result))  # which keeps what it allocated
        return result


@contextmanager
def fake_graph(graph: FakeGraph) -> Iterator[None]:
    """Stands for `torch.cuda.graph`: records the operators within, and undoes what they wrote."""
    FakeGraph.captured.append(graph)
    recorder = Recorder(graph)
    with recorder:
        yield
    for whole, copy in recorder.before.values():
        whole.copy_(copy)
