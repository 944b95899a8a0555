"""A progress bar that keeps a log short."""

from time import monotonic
from typing import Any

from tqdm import tqdm

INTERVAL = 10.0  # seconds


class Progress(tqdm):
    """tqdm on a terminal; elsewhere a line every ten seconds at most, for all bars together."""

    last_line = monotonic()  # when one was written; at first, when the program began

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        if self.fp.isatty():
            return super().display(msg, pos)
        if msg is None and monotonic() - Progress.last_line >= INTERVAL:
            Progress.last_line = monotonic()
            self.fp.write(f"{self}\n")
        return False  # there is nothing to erase

    def clear(self, *args: Any, **kwargs: Any) -> None:
        if not self.disable and self.fp.isatty():
            super().clear(*args, **kwargs)

    def close(self) -> None:
        if hasattr(self, "fp") and not self.fp.isatty():  # without: disabled, or not quite made
            self.leave = False  # what tqdm leaves is one more line
        super().close()
