"""Progress bars write few lines; the test controls the clock."""

import io

import pytest

from nanorlhf import progress
from nanorlhf.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def train(out: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run 60 steps of four seconds, with an inner bar in each step; return the output."""
    now = [0.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    monkeypatch.setattr(Progress, "last_line", 0.0)
    with Progress(range(60), desc="ppo", file=out, mininterval=0) as steps:
        for step in steps:
            for _ in Progress(range(4), desc="answers", file=out, mininterval=0, leave=False):
                now[0] += 1
            steps.set_postfix(step=step)
            steps.clear()
            steps.refresh()
    return out.getvalue()


def test_a_log_has_a_line_every_ten_seconds_at_most(monkeypatch):
    log = train(io.StringIO(), monkeypatch)
    lines = log.splitlines()
    assert 20 <= len(lines) <= 24 and "\r" not in log
    assert {line.partition(":")[0] for line in lines} <= {"ppo", "answers"} and all("/" in line for line in lines)


def test_a_short_program_logs_no_bar(monkeypatch):
    monkeypatch.setattr(Progress, "last_line", progress.monotonic())
    log = io.StringIO()
    assert list(Progress(range(3), file=log, mininterval=0)) == [0, 1, 2] and log.getvalue() == ""
    with Progress(total=3, file=log, disable=True) as silent:
        silent.clear()


def test_a_terminal_shows_every_step(monkeypatch):
    shown = train(Terminal(), monkeypatch)
    assert shown.count("\r") > 300 and "60/60" in shown and shown.endswith("\n")


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_a_bar_that_is_collected_after_its_file_was_closed_raises_nothing(kind):
    """It would raise in the code that triggers the collection, and break `ast.parse` in Python 3.11."""
    out = kind()
    bar = Progress(range(60), file=out, mininterval=0)
    assert next(iter(bar)) == 0
    out.close()
    bar.close()
    assert bar.disable
