"""Submissions that try to get points without a solution: each gets none, and a reason.

Nothing is forbidden to a student's code. It runs in a separate process, which the operating system confines, and only
values leave that process.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from course.copies import CODE, ROOT
from course.edit import rewritten
from course.exercises import chosen
from course.grader.grade import Grader, grade
from course.grader.submission import arranged
from course.start import start
from nanorlhf.errors import InputError

AT_K = "nanorlhf/metrics/at_k.py"
SOLUTION = ROOT / AT_K
[EXERCISE] = chosen(["pass-at-k"])
LIMIT = 300.0  # seconds, on a busy machine
ENDED = "the code under test has ended the process"
UNSOLVED = "exercise pass-at-k: write this function"
PASSES = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    report.outcome = "passed"
"""


@dataclass(frozen=True)
class Attack:
    does: str
    body: str = ""
    """body of pass_at_k; empty: as `start` left it"""
    says: str = UNSOLVED
    """part of the expected reason"""
    files: dict[str, str] = field(default_factory=dict)
    """files planted in the copy"""


def planted(path: str, text: str, does: str) -> Attack:
    return Attack(does, files={path: text})


ATTACKS = (
    # ------------------------------------------------------------------------------------------ 1. around the function
    planted(
        "tests/metrics/test_metrics.py",
        "def test_pass_at_k_is_the_share_of_draws_that_include_a_pass(): pass\n"
        "def test_pass_at_k_rejects_impossible_counts(): pass\n",
        "edits the tests",
    ),
    planted("conftest.py", PASSES, "plants a conftest.py that reports passes"),
    planted("tests/conftest.py", PASSES, "edits the tests' own conftest.py"),
    planted("nanorlhf/metrics/conftest.py", PASSES, "plants a conftest.py next to the function"),
    planted("pyproject.toml", '[tool.pytest.ini_options]\naddopts = "--collect-only"\n', "changes pytest's settings"),
    planted("sitecustomize.py", "import os; os._exit(0)\n", "ends every Python that starts in the copy"),
    planted("torch.py", "equal = allclose = lambda *_: True\n", "brings its own torch"),
    planted("nanorlhf/__init__.py", "import pytest\npytest.approx = max\n", "edits a package"),
    planted("course/grader/grade.py", "def grade(*_): return {}\n", "edits the grader"),
    planted("course/exercises.py", "EXERCISES = ()\n", "edits the table of exercises"),
    planted(".course", "eyJleGVyY2lzZXMiOiBbXX0=\n", "claims to have no exercises"),
    # ------------------------------------------------------------------------------------------- 2. reads the solution
    Attack("opens the solution", f"exec(open({str(SOLUTION)!r}).read())", "PermissionError"),
    Attack("imports the tests", "from tests.metrics import test_metrics", "ModuleNotFoundError"),
    Attack("imports the course", "from course.copies import ROOT", "Error"),
    Attack("reads its own code", "import inspect\nreturn inspect.getsource(pass_at_k)", "assert 'def pass_at"),
    Attack("reads the tests' memory", "import os\nopen(f'/proc/{os.getppid()}/mem', 'rb').read(1)", "PermissionError"),
    Attack("reads the teacher's home", "import os; os.listdir('/root')", "PermissionError"),
    Attack("calls another exercise", "return mrr_at_k([[1.0] * n], [[1.0] * n], k)", "metric-at-k: not available"),
    # ------------------------------------------------------------------------------------------- 3. changes the verdict
    Attack("replaces a function of NumPy", "np.sort = np.allclose = lambda *_: True\nreturn n", "assert"),
    Attack("replaces pytest's approx", "import pytest\npytest.approx = max\nreturn 0.5", "assert 0.5 =="),
    Attack("patches pytest", "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None\n", "None =="),
    Attack(
        "runs a string that reaches every frame",
        "import torch.utils.benchmark\ntorch.utils.benchmark.Timer('import sys; f = sys._getframe()\\nwhile f:\\n"
        "    [x.pytest_collectreport(None) for x in f.f_locals.values() if type(x).__name__ == \"Reporter\"]\\n"
        "    f = f.f_back').timeit(1)\nreturn 0.5",
        "assert 0.5 ==",
    ),
    Attack("skips the test", "import pytest; pytest.skip('done')", "Skipped: done"),
    Attack("ends the session", "import pytest; pytest.exit('done', 0)", "Exit: done"),
    Attack("ends a loop of the test", "raise StopIteration", "StudentError: StopIteration"),
    Attack(
        "writes a report to every descriptor",
        "import json, os\n"
        "for fd in range(3, 64):\n"
        "    try: os.write(fd, b'[\"passed\", \"x\"]\\n[\"ended\", \"0\"]\\n')\n"
        "    except OSError: pass\n"
        "return 0.5",
        "more than 67108864 bytes",
    ),
    Attack(
        "answers from threads, and in advance",
        "import os, struct, threading\n"
        "def write():\n"
        "    for _ in range(1000):\n"
        "        for fd in range(3, 64):\n"
        "            try: os.write(fd, struct.pack('<II', 13, 0) + b'[\"return\", 1]')\n"
        "            except OSError: pass\n"
        "threads = [threading.Thread(target=write) for _ in range(4)]\n"
        "for thread in threads: thread.start()\n"
        "return 0.5",
        "Malformed",
    ),
    # --------------------------------------------------------------------------------------------- 4. returns no number
    Attack("equals everything", "return type('E', (), {'__eq__': lambda a, b: True})()", "object of type E"),
    Attack("is a float that equals all", "return type('E', (float,), {'__eq__': lambda a, b: True})()", "type E"),
    Attack("takes that from a library", "from unittest.mock import ANY\nreturn ANY", "object of type _ANY"),
    Attack(
        "is a tensor that answers True",
        "import torch\nT = type('T', (torch.Tensor,), {'__torch_function__': classmethod(lambda *_, **__: True)})\n"
        "return torch.zeros(3).as_subclass(T)",
        "Error",
    ),
    Attack("is an array by name", "return type('A', (), {'__array_interface__': {}})()", "object of type A"),
    Attack("is a generator", "yield 0.5", "object of type generator"),
    Attack("is a list in itself", "x = []\nx.append(x)\nreturn x", "RecursionError"),
    Attack("is a deep list", "x = []\nfor _ in range(300): x = [x]\nreturn x", ""),
    Attack("is huge", "return [0] * 2**25", "more than 67108864 bytes"),
    Attack("is a mean error", "raise type('E', (Exception,), {'__str__': lambda self: 1 / 0})", "StudentError: E"),
    # ------------------------------------------------------------------------------------------------ 5. exits or hangs
    Attack("exits with 0", "raise SystemExit(0)", "SystemExit: 0"),
    Attack("interrupts the tests", "raise KeyboardInterrupt", "KeyboardInterrupt"),
    Attack("ends the process", "import os; os._exit(0)", ENDED),
    Attack("aborts", "import os; os.abort()", ENDED),
    Attack("crashes", "import ctypes; ctypes.string_at(0)", ENDED),
    Attack("forks", "import os; os.fork()", "PermissionError"),
    Attack("starts a program", "import subprocess; subprocess.run(['true'])", "PermissionError"),
    Attack("opens a socket", "import socket; socket.socket()", "PermissionError"),
    Attack("kills the grader", "import os; os.kill(os.getppid(), 9)", "PermissionError"),
    Attack("writes to the solution", f"open({str(SOLUTION)!r}, 'w')", "PermissionError"),
    Attack("leaves a file behind", "import os; open(os.path.join(os.getcwd(), 'x'), 'w')", "PermissionError"),
    Attack("prints points", "print('pass-at-k  1 of 1  passed\\npoints  1 of 1')", "assert None =="),
    Attack("fills memory", "x = []\nwhile True: x.append(bytearray(2**28))", "MemoryError"),
    Attack("calls itself forever", "return pass_at_k(n, c, k)", "RecursionError"),
    Attack("writes to the teacher's terminal", "raise OSError('\\x1b[2J\\x1b[H1 of 1 passed')", "OSError:  [2J [H1"),
    Attack("opens brackets without end", "return " + "(" * 5000 + "n" + ")" * 5000, f"{AT_K}, line"),
    Attack("adds without end", "return " + "1 + " * 300 + "n", "is nested 30"),
    Attack("is a huge file", "return 0  # " + "x" * 2**20, "is larger than 524288 bytes"),
)  # fmt: skip


def handed_in(directory: Path, attack: Attack) -> Path:
    start(directory, [EXERCISE])
    if attack.body:
        path = directory / AT_K
        path.write_text(rewritten(path.read_text(), {"pass_at_k": attack.body.splitlines()}))
    for name, text in attack.files.items():
        (directory / name).write_text(text)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.does)
def test_an_attack_gets_no_points_and_a_reason(attack, grader, tmp_path) -> None:
    result = grade(handed_in(tmp_path / "copy", attack), [EXERCISE], LIMIT, [grader])["pass-at-k"]
    assert not result.passed and result.claim
    assert attack.says in result.reason and "\x1b" not in result.reason and len(result.reason) < 400


@pytest.mark.slow
def test_a_solution_with_helpers_passes_after_all_attacks(grader, tmp_path) -> None:
    copy = handed_in(tmp_path / "copy", Attack("solves it", "return 1.0 - product(chances(n, c, k))"))
    path = copy / AT_K
    helpers = (
        "from math import prod as product\nimport os\n\n\ndef chances(n, c, k):\n    _check_k(k, n)\n"
        "    if not 0 <= c <= n:\n        raise ValueError('must be from 0 to n')\n"
        "    return [max(0, n - c - i) / (n - i) for i in range(k)]\n\n\ndef unused():\n    return os.getcwd()\n\n\n"
    )
    path.write_text(path.read_text().replace("def pass_at_k(", helpers + "def pass_at_k("))
    result = grade(copy, [EXERCISE], LIMIT, [grader])["pass-at-k"]
    assert result.passed, result


@pytest.mark.slow
def test_an_endless_loop_is_stopped(grader, tmp_path) -> None:
    copy = handed_in(tmp_path / "copy", Attack("hangs", "while True: n = 1"))
    result = grade(copy, [EXERCISE], 3.0, [grader])["pass-at-k"]
    assert not result.passed and result.reason == "not finished after 3 s" and result.seconds < 60


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.symlink_to(SOLUTION), "must be a regular file, not a link or a device"),
        (os.mkfifo, "must be a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "must be a regular file"),
        (lambda path: path.symlink_to(path), "must be a regular file"),
        (lambda path: (path.parent.rmdir(), path.parent.symlink_to(SOLUTION.parent)), "must be a regular file"),
        (lambda path: (path.touch(), os.truncate(path, 2**40)), "is larger than 524288 bytes"),
        (lambda path: path.write_bytes(b"x = 0\0"), "SyntaxError"),
        (lambda path: path.mkdir(), "must be a regular file"),
        (lambda path: None, f"{AT_K} is missing"),
        (lambda path: path.write_bytes(b"\xff"), "can't be parsed: UnicodeDecodeError"),
        (lambda path: path.write_text("def pass_at_k(:\n"), f"{AT_K}, line 1: SyntaxError"),
        (lambda path: path.write_text("x = 1\n"), f"{AT_K} has no function pass_at_k"),
        (lambda path: path.write_text("def pass_at_k(n, c, k, os): pass\n"), "must keep its arguments"),
    ],
)  # fmt: skip
def test_only_regular_valid_files_are_read(make, says, tmp_path) -> None:
    for name in CODE:
        (tmp_path / name).mkdir() if "." not in name else (tmp_path / name).touch()
    (tmp_path / AT_K).parent.mkdir(parents=True)
    make(tmp_path / AT_K)
    result = Grader(None, tmp_path, tmp_path).judge(tmp_path, EXERCISE, LIMIT)
    assert not result.passed and says in result.reason


def test_a_tree_contains_only_the_solutions_that_an_exercise_needs(tmp_path) -> None:
    [whitening, values] = chosen(["whitening", "values"])
    files = {str(path): source for path, source in arranged(ROOT, values).items()}
    assert "exercise whitening: not available" in files["nanorlhf/ppo.py"]
    assert "exercise scalar-head" not in files["nanorlhf/model.py"]  # `values` needs it
    files = {str(path): source for path, source in arranged(ROOT, whitening).items()}
    assert "exercise scalar-head: not available" in files["nanorlhf/model.py"]
    assert "exercise whitening" not in files["nanorlhf/ppo.py"]


def test_a_directory_that_is_not_a_copy_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="has no data: expected a directory made"):
        grade(tmp_path, [EXERCISE], LIMIT, [Grader(None, tmp_path, tmp_path)])
