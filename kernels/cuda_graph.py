"""Capture a decode step as a CUDA graph and replay it.

A decode step of a small model is hundreds of short kernels. Launching them from Python takes longer
than running them; a replay launches them all at once. It repeats the operations on the same memory,
so the step must keep its tensors at fixed addresses, never wait for the GPU, and read no number
that Python changes.
"""

from collections.abc import Callable

import torch

WARM_UP = 1  # steps to run before the capture: libraries initialise in the first one
# capture only if more than this many steps remain: on an H200, a capture takes the time that two
# replayed steps save at 124M and four at 1B
CAPTURE_PAYS = 5


def replays(device: torch.device) -> bool:
    """Return whether decode steps are replayed on this device."""
    return device.type == "cuda"


class Replay:
    """Wrapper that calls a step without arguments or result, as a graph once captured."""

    def __init__(self, step: Callable[[], None]):
        self.step = step
        self.reset()

    def reset(self) -> None:
        """Drop the graph, because the step's tensors have moved."""
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
