"""A progress bar that keeps logs short."""

from time import monotonic
from typing import Any

from tqdm import tqdm

INTERVAL = 10.0  # seconds


class Progress(tqdm):
    """tqdm on a terminal; elsewhere, at most one line every ten seconds for all bars together."""

    last_line = monotonic()  # time of the last line; initially, the start of the program

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
        # no fp: disabled, or __init__ failed; a bar that is collected late finds a closed file
        if hasattr(self, "fp") and not self.is_terminal():
            self.leave = False  # tqdm would leave one more line
        super().close()
