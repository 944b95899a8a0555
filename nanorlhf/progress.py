"""A progress bar that keeps a log short."""

from time import monotonic
from typing import Any

from tqdm import tqdm

INTERVAL = 10.0  # seconds


class Progress(tqdm):
    """tqdm on a terminal; elsewhere a line every ten seconds at most, for all bars together."""

    last_line = monotonic()  # when one was written; at first, when the program began

    def is_terminal(self) -> bool:
        return not self.fp.closed and self.fp.isatty()

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        if self.is_terminal():
            return super().display(msg, pos)
        if msg is None and monotonic() - Progress.last_line >= INTERVAL:
            Progress.last_line = monotonic()
            self.fp.write(f"{self}\n")
        return False  # there is nothing to erase

    def clear(self, *args: Any, **kwargs: Any) -> None:
        if not self.disable and self.is_terminal():
            super().clear(*args, **kwargs)

    def close(self) -> None:
        # without a file: disabled, or not quite made; a bar that is collected late finds it closed
        if hasattr(self, "fp") and not self.is_terminal():
            self.leave = False  # what tqdm leaves is one more line
        super().close()
