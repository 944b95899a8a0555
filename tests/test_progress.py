"""Progress bars write few lines; the test controls the clock."""

import ast
import io

import pytest

from nanorlhf import progress
from nanorlhf.progress import Progress
from tests.conftest import ROOT

FOLDERS = ("nanorlhf", "kernels", "data", "experiments", "course", "tools", "bench")


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


def test_every_bar_keeps_logs_short():
    """Other bars are off unless stderr is a terminal: `disable=None`."""
    bars = {}
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("tqdm", "trange"):
                bars[path.relative_to(ROOT).as_posix()] = {ast.unparse(word) for word in node.keywords}
    assert bars.keys() == {"nanorlhf/sandbox/execution.py"}
    assert "disable=None" in bars["nanorlhf/sandbox/execution.py"]
