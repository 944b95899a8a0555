"""SIGTERM and SIGINT: a run ends between two steps, with its state saved."""

import os
import signal
from pathlib import Path

from nanorlhf import distributed
from nanorlhf.errors import Interrupted


class StopSignals:
    """Delays SIGTERM and SIGINT until the end of a step, where the loop asks `received`.

    A second signal takes effect at once, except under `torchrun`: it repeats a signal that the terminal may have sent
    already, and kills processes that take longer than its --shutdown-timeout.
    """

    def __init__(self) -> None:
        self.number = 0  # signal that this rank received
        self.agreed = 0  # signal that the ranks agreed on
        self.before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        for number in self.before:  # known by now: a signal may arrive with the first of them
            signal.signal(number, self._note)

    def _note(self, number: int, _: object) -> None:
        self.number = number
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            self.restore()

    def received(self) -> bool:
        """Whether any rank was told to stop; the same answer on all ranks."""
        # not into `number`: a signal that arrives during the comparison would be overwritten and lost
        self.agreed = distributed.largest(self.number)
        return self.agreed != 0

    def stop(self, out: Path, step: int) -> None:
        """End the process, now that its state is saved."""
        self.restore()
        name = signal.Signals(self.agreed).name
        sentence = f"stopped by {name} after {step} steps: {out} holds the state, --resume continues from it."
        # one rank prints; the exit code is the shell's for a signal
        raise Interrupted(sentence if distributed.rank() == 0 else "", 128 + self.agreed)

    def restore(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self.before.items():
            signal.signal(number, handler)
