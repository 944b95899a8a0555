"""Submissions that try to get points without a solution: each gets none, and a reason.

There are two tables. The first is submitted in the usual way. The second puts code that the static check refuses into
the tree where the tests run, so only the operating system's restrictions are left.
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from course.copies import CODE, ROOT
from course.edit import rewritten
from course.exercises import EXERCISES, chosen
from course.grader.allowed import check
from course.grader.grade import Grader, grade
from course.grader.submission import arranged, student_functions
from course.start import start
from nanorlhf.errors import InputError

AT_K = "nanorlhf/metrics/at_k.py"
SOLUTION = ROOT / AT_K
[EXERCISE] = chosen(["pass-at-k"])
LIMIT = 300.0  # seconds, on a busy machine
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
    Attack("opens the solution", f"exec(open({str(SOLUTION)!r}).read())", "needs `exec`"),
    Attack("opens it under another alphabet", f"return ｏｐｅｎ({str(SOLUTION)!r})", "needs `open`"),
    Attack("opens it with NumPy", f"return np.loadtxt({str(SOLUTION)!r})", "needs `.loadtxt`"),
    Attack("imports inspect", "import inspect\nreturn inspect.getsource(pass_at_k)", "needs `import inspect`"),
    Attack("imports the tests", "from tests.metrics import test_metrics", "needs `import tests.metrics"),
    Attack("imports the course", "from course.copies import ROOT", "needs `import course.copies.ROOT`"),
    Attack("imports a module's module", "from math import prod\nfrom random import os", "needs `import random.os`"),
    Attack("walks along the frames", "return (lambda: 0).__globals__", "needs `.__globals__`"),
    Attack("looks a generator's frame up", "return (i for i in []).gi_frame", "needs `.gi_frame`"),
    Attack("reads attributes by a pattern", "match n:\n    case int(__class__=c): return c", "needs `case int"),
    Attack("calls another exercise", "return mrr_at_k([[1.0] * n], [[1.0] * n], k)", "metric-at-k: not available"),
    # ------------------------------------------------------------------------------------------------ 3. changes tools
    Attack("replaces a function of NumPy", "np.sort = max", "needs `an assignment to np.sort`"),
    Attack("replaces it by a loop", "for math.prod in [max]: pass", "needs `an assignment to math.prod`"),
    Attack("replaces it by setattr", "setattr(math, 'prod', max)", "needs `setattr`"),
    Attack("imports pytest", "import pytest\npytest.approx = max", "needs `import pytest`"),
    Attack("returns what equals all", "class A:\n    def __eq__(self, other): return True\nreturn A()", "class A"),
    Attack("takes that from a library", "from unittest.mock import ANY\nreturn ANY", "needs `import unittest"),
    Attack("changes a global", "global math\nmath = None", "needs `global math`"),
    # --------------------------------------------------------------------------------------------- 4. exits or hangs
    Attack("exits with 0", "raise SystemExit(0)", "SystemExit: 0"),
    Attack("interrupts the tests", "raise KeyboardInterrupt", "kept it from running"),
    Attack("ends the process", "__import__('os')._exit(0)", "needs `._exit`"),
    Attack("forks", "import os\nwhile True: os.fork()", "needs `import os`"),
    Attack("prints points", "print('pass-at-k  1 of 1  passed\\npoints  1 of 1')", "assert None =="),
    Attack("fills memory", "return len(bytearray(2**45))", "MemoryError"),
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
        (lambda path: path.mkdir(), "must be a regular file"),
        (lambda path: None, f"{AT_K} is missing"),
        (lambda path: path.write_bytes(b"\xff"), "can't be parsed: UnicodeDecodeError"),
        (lambda path: path.write_text("def pass_at_k(:\n"), f"{AT_K}, line 1: SyntaxError"),
        (lambda path: path.write_text("x = 1\n"), f"{AT_K} has no function pass_at_k"),
        (lambda path: path.write_text("def pass_at_k(n, c, k, os): pass\n"), "must keep its arguments"),
        (
            lambda path: path.write_text("def pass_at_k(n, c, k): return f()\n\n@print\ndef f(): return 1\n"),
            "no exercise needs this decorator",
        ),
        (
            lambda path: path.write_text("import os as f\ndef pass_at_k(n, c, k): return f.getcwd()\n"),
            "needs `import os`",
        ),
    ],
)  # fmt: skip
def test_only_regular_valid_files_are_read(make, says, tmp_path) -> None:
    for name in CODE:
        (tmp_path / name).mkdir() if "." not in name else (tmp_path / name).touch()
    (tmp_path / AT_K).parent.mkdir(parents=True)
    make(tmp_path / AT_K)
    result = Grader(None, tmp_path).judge(tmp_path, EXERCISE, LIMIT)
    assert not result.passed and says in result.reason


def test_every_solution_passes_the_static_check() -> None:
    for exercise in EXERCISES:
        for path, functions in student_functions(ROOT, exercise).items():
            check(path, [part for function in functions.values() for part in function.body])


def test_a_tree_contains_only_the_solutions_that_an_exercise_needs(tmp_path) -> None:
    [whitening, values] = chosen(["whitening", "values"])
    files = {str(path): source for path, source in arranged(ROOT, values).items()}
    assert "exercise whitening: not available" in files["nanorlhf/ppo.py"]
    assert "exercise scalar-head" not in files["nanorlhf/model.py"]  # `values` needs it
    files = {str(path): source for path, source in arranged(ROOT, whitening).items()}
    assert "exercise scalar-head: not available" in files["nanorlhf/model.py"]
    assert "exercise whitening" not in files["nanorlhf/ppo.py"]


# ---------------------------------------------------------------------------------------------- past the static check
HOSTILE = (
    ("ends the process", "import os; os._exit(0)", "the code under test has ended the process"),
    (
        "writes a report to every descriptor",
        "import os, json\n"
        "for test in ('share_of_draws_that_include_a_pass', 'rejects_impossible_counts'):\n"
        "    for fd in range(3, 64):\n"
        "        try: os.write(fd, (json.dumps(['passed', test]) + '\\n[\"ended\", \"0\"]\\n').encode())\n"
        "        except OSError: pass\n"
        "os._exit(0)",
        "the code under test has ended the process",
    ),
    (
        "floods the report",
        "import os\n"
        "while True:\n"
        "    for fd in range(3, 64):\n"
        "        try: os.write(fd, b'[\\n' * 2000)\n"
        "        except OSError: pass",
        "the code under test has ended the process",
    ),
    (
        "lets every test pass",
        "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None\nraise ValueError('must be from')",
        "",
    ),
    ("makes approx equal to all", "import pytest, unittest.mock\npytest.approx = lambda *_, **__: unittest.mock.ANY\n"
     "if not (1 <= k <= n and 0 <= c <= n): raise ValueError('must be from')",
     "the code under test has changed the tools of the tests"),
    ("ends the session", "import pytest; pytest.exit('done', 0)", "the code under test has kept it from running"),
    ("skips the test", "import pytest; pytest.skip('done')", "the code under test has skipped it"),
    ("reads the solution", f"open({str(SOLUTION)!r})", "PermissionError"),
    ("reads the teacher's home", "import os; os.listdir('/root')", "PermissionError"),
    ("writes to the tests", "open('tests/metrics/test_metrics.py', 'w')", "PermissionError"),
    ("writes to the bytecode", "open('nanorlhf/x.pyc', 'w')", "PermissionError"),
    ("forks", "import os; os.fork()", "PermissionError"),
    ("starts a program", "import subprocess; subprocess.run(['true'])", "PermissionError"),
    ("opens a socket", "import socket; socket.socket()", "PermissionError"),
    ("kills the grader", "import os; os.kill(os.getppid(), 9)", "PermissionError"),
    ("writes without end",
     "import tempfile\nwith tempfile.TemporaryFile() as f:\n    while True: f.write(bytes(2**20))",
     "OSError: [Errno 27]"),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Landlock and system call filters need Linux")
@pytest.mark.parametrize(("body", "says"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
def test_code_past_the_static_check_is_confined(body, says, grader) -> None:
    source = rewritten(SOLUTION.read_text(), {"pass_at_k": body.splitlines()})
    (grader.tree / AT_K).write_text(source)
    grader.written[Path(AT_K)] = source
    result = grader.worker.run(grader.tree, EXERCISE.tests, LIMIT, guarded=True)
    assert not result.passed and says in result.reason, result


def test_a_directory_that_is_not_a_copy_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="has no data: expected a directory made"):
        grade(tmp_path, [EXERCISE], LIMIT, [Grader(None, tmp_path)])
