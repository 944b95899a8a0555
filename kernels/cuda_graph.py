"""A decode step as a CUDA graph: captured once, then replayed.

A step of a small model is hundreds of short kernels, and starting them from Python takes longer
than running them; a replay starts them all at once. It repeats operations on the same memory: the
step must keep its tensors at their addresses, wait for no number, and read none that Python
changes.
"""

from collections.abc import Callable

import torch

WARM_UP = 1  # steps that run before one is captured: libraries set themselves up in the first one
# steps left above which a capture is worth its time: on an H200 it takes what two replayed steps
# save at 124M and four at 1B
CAPTURE_PAYS = 5


def replays(device: torch.device) -> bool:
    """Whether decode steps on this device are replayed."""
    return device.type == "cuda"


class Replay:
    """Calls a step that takes nothing and returns nothing, as a graph once it has been captured."""

    def __init__(self, step: Callable[[], None]):
        self.step = step
        self.reset()

    def reset(self) -> None:
        """The step's tensors have moved: drop the graph."""
        self.graph: torch.cuda.CUDAGraph | None = None
        self.num_calls = 0

    def __call__(self, may_capture: bool) -> None:
        if self.graph is None and may_capture and self.num_calls >= WARM_UP:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):  # records the step without running it
                self.step()
        if self.graph is not None:
            self.graph.replay()
        else:
            self.step()
            self.num_calls += 1
