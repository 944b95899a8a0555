"""Handling of SIGTERM and SIGINT: a run saves its state and ends between two steps."""

import os
import signal
from pathlib import Path

from nanorlhf import distributed
from nanorlhf.errors import Interrupted


class StopSignals:
    """Delays SIGTERM and SIGINT until the end of a step, when the loop checks `received`.

    A second signal takes effect at once, except under `torchrun`, which repeats a signal that the terminal may have
    sent already and kills processes that take longer than its --shutdown-timeout.
    """

    def __init__(self) -> None:
        self.number = 0  # the signal that this rank received
        self.agreed = 0  # the signal that the ranks agreed on
        self.before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        for number in self.before:  # set before the loop: a signal may arrive as soon as one handler is installed
            signal.signal(number, self._note)

    def _note(self, number: int, _: object) -> None:
        self.number = number
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            self.restore()

    def received(self) -> bool:
        """Return True, on all ranks, if any rank received a signal."""
        # not assigned to `number`: a signal that arrives during the reduction would be overwritten and lost
        self.agreed = distributed.largest(self.number)
        return self.agreed != 0

    def stop(self, out: Path, step: int) -> None:
        """End the process after its state has been saved."""
        self.restore()
        name = signal.Signals(self.agreed).name
        sentence = f"stopped by {name} after {step} steps: the state is in {out}; continue with --resume."
        # one rank prints; the exit code follows the shell's convention for a signal
        raise Interrupted(sentence if distributed.rank() == 0 else "", 128 + self.agreed)

    def restore(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self.before.items():
            signal.signal(number, handler)
