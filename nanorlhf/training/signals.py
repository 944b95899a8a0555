"""SIGTERM and SIGINT: a run ends between two steps, with its state saved."""

import os
import signal
from pathlib import Path

from nanorlhf import distributed
from nanorlhf.errors import Interrupted


class StopSignals:
    """From its construction on, SIGTERM and SIGINT wait for the end of a step: the loop asks `received` after each.

    A second signal takes effect at once, except under `torchrun`, which repeats what the terminal may have sent already
    and kills what takes longer than its --shutdown-timeout.
    """

    def __init__(self) -> None:
        self.number = 0  # what this rank was sent
        self.agreed = 0  # what the ranks agreed on
        self.before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}

    def _note(self, number: int, _: object) -> None:
        self.number = number
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            self.restore()

    def received(self) -> bool:
        """Whether any rank has been told to stop; the same answer on all ranks."""
        # two names: a signal that comes while the ranks compare would be overwritten, and lost, in one
        self.agreed = distributed.largest(self.number)
        return self.agreed != 0

    def stop(self, out: Path, step: int) -> None:
        """End the process, now that its state is saved."""
        self.restore()
        name = signal.Signals(self.agreed).name
        sentence = f"stopped by {name} after {step} steps: {out} holds the state, --resume continues from it."
        # rank 0 speaks for all; the exit code is the one shells give a signal
        raise Interrupted(sentence if distributed.rank() == 0 else "", 128 + self.agreed)

    def restore(self) -> None:
        """Put the handlers back that were there before."""
        for number, handler in self.before.items():
            signal.signal(number, handler)
