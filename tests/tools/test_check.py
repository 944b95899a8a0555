"""`python -m tools.check` finds the tests affected by a change, in a small repository made for the test."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanorlhf.errors import InputError
from tests import conftest
from tools import check

FILES = {
    "core/sums.py": "def add(a, b):\n    return a + b\n",
    "core/__init__.py": "",
    "core/means.py": "from core.sums import add\n",
    "report.py": "def show():\n    from core import means\n",
    "notes.md": "words\n",
    "tests/test_sums.py": "import core.sums\n\ndef test_a(): ...\ndef test_b(): ...\n",
    "tests/test_means.py": "from core import means\n",
    "tests/test_report.py": "import report\n\ndef test_it(): ...\n",
    "tests/test_notes.py": "NOTES = 'notes.md'\n",
    "tests/test_alone.py": "import json\n",
}


def git(tree: Path, *arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tree, check=True)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check, "SECONDS", tmp_path / "seconds")
    cached = check.python_files, check.test_files, check.known_seconds
    for function in cached:
        function.cache_clear()
    yield tmp_path
    for function in cached:
        function.cache_clear()


def near(tree: Path) -> dict[str, int]:
    return {file.stem: distance for file, distance in check.distances(check.changed_files("HEAD")).items()}


def test_the_distance_of_a_test_is_its_number_of_imports(tree):
    assert near(tree) == {}
    (tree / "core/sums.py").write_text("def add(a, b):\n    return b + a\n")
    assert near(tree) == {"test_sums": 1, "test_means": 2, "test_report": 3}


def test_a_changed_test_has_distance_0_and_new_files_count(tree):
    (tree / "tests/test_alone.py").write_text("import new\n")
    (tree / "new.py").write_text("")
    assert check.changed_files("HEAD") == {Path("tests/test_alone.py"), Path("new.py")}
    check.python_files.cache_clear()
    assert near(tree) == {"test_alone": 0}


def test_a_deleted_file_affects_the_tests_of_its_importers(tree):
    (tree / "core/means.py").unlink()
    assert near(tree) == {"test_means": 1, "test_report": 2}


def test_a_file_that_is_not_python_affects_the_tests_that_name_it(tree):
    (tree / "notes.md").write_text("other words\n")
    assert near(tree) == {"test_notes": 1}


def test_changes_since_another_commit(tree):
    (tree / "core/sums.py").write_text("")
    git(tree, "commit", "-qam", "second")
    assert near(tree) == {}
    assert check.changed_files("HEAD~1") == {Path("core/sums.py")}
    with pytest.raises(InputError, match="git diff .*nowhere.*: --since must be a commit or branch"):
        check.changed_files("nowhere")


def test_the_closest_tests_run_first_within_the_time(tree):
    sums, means, report = (Path(f"tests/test_{name}.py") for name in ("sums", "means", "report"))
    distances = {sums: 1, means: 1, report: 2}
    assert check.file_seconds(sums) == 2 * check.UNKNOWN  # estimated from the number of tests
    check.known_seconds.cache_clear()
    (tree / "seconds").write_text(json.dumps({str(sums): 8.0, str(means): 3.0, str(report): 1.0}))
    assert check.chosen(distances, 100) == [means, sums, report]
    assert check.chosen(distances, 10) == [means, report]  # sums doesn't fit


@pytest.mark.parametrize(
    "changed, test",
    [
        ("train_ppo.py", "tests/test_train_ppo.py"),
        ("nanorlhf/ppo.py", "tests/test_ppo.py"),
        ("kernels/gae.py", "tests/kernels/test_gae.py"),
        ("data/hh.py", "tests/data/test_hh.py"),
        ("nanorlhf/doctor/diagnosis.py", "tests/doctor/test_diagnosis.py"),
        ("course/hunt.py", "tests/course/test_hunt.py"),
        ("tools/check.py", "tests/tools/test_check.py"),
        ("Makefile", "tests/tools/test_makefile.py"),
        ("docs/doctor.md", "tests/tools/test_docs.py"),
        ("README.md", "tests/tools/test_docs.py"),
        (".github/workflows/ci.yml", "tests/tools/test_workflows.py"),
    ],
)
def test_a_changed_file_has_its_own_tests(changed, test):
    assert Path(test) in check.matching_tests([Path(changed)])


def test_a_renamed_file_affects_the_tests_of_both_names(tree):
    git(tree, "mv", "core/means.py", "core/averages.py")
    assert check.changed_files("HEAD") == {Path("core/means.py"), Path("core/averages.py")}
    assert near(tree) == {"test_means": 1, "test_report": 2}


def test_a_conftest_affects_the_tests_below_it(tree):
    for name in ("tests/conftest.py", "tests/deep/conftest.py", "tests/deep/test_low.py"):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text("")
    git(tree, "add", ".")
    git(tree, "commit", "-qm", "more")
    (tree / "tests/deep/conftest.py").write_text("x = 1\n")
    assert near(tree) == {"test_low": 1}
    (tree / "tests/conftest.py").write_text("x = 1\n")
    assert len(near(tree)) == 6


def test_if_own_tests_take_too_long_the_quickest_run_and_the_rest_are_listed(tree):
    sums, means = Path("tests/test_sums.py"), Path("tests/test_means.py")
    (tree / sums).write_text("def test_a(): ...\ndef test_b(): ...\n@pytest.mark.slow\ndef test_c(): ...\n")
    (tree / "seconds").write_text(json.dumps({str(sums): 30.0, str(means): 3.0}))
    (tree / "seconds_of_tests").write_text(json.dumps({f"{sums}::test_a": 29.0, f"{sums}::test_b": 1.0}))
    assert check.select_required([sums, means], 100, 2) == ([str(means), str(sums)], [], 67)
    assert check.select_required([sums, means], 40, 2) == ([str(means), f"{sums}::test_b"], [f"{sums}::test_a"], 36)
    assert check.select_required([sums], 0, 2) == ([f"{sums}::test_b"], [f"{sums}::test_a"], -1)  # at least one


def test_a_test_that_has_not_run_is_assumed_to_take_its_share_of_the_file(tree):
    sums = Path("tests/test_sums.py")
    (tree / "seconds").write_text(json.dumps({str(sums): 30.0}))
    assert check.seconds_by_test(sums) == {f"{sums}::test_a": 15.0, f"{sums}::test_b": 15.0}


def test_no_changes_are_reported(tree, capsys):
    check.main(check.Args())
    assert capsys.readouterr().out == "no changes since HEAD\n"


def test_tests_that_did_not_run_are_listed(tree, monkeypatch, capsys):
    (tree / "train_x.py").write_text("x = 1\n")
    tests = Path("tests/test_train_x.py")
    (tree / tests).write_text("".join(f"def test_{i}(): ...\n" for i in range(5)))
    (tree / "seconds").write_text(json.dumps({str(tests): 1000.0}))
    (tree / "seconds_of_tests").write_text(json.dumps({f"{tests}::test_{i}": 100.0 * i for i in range(5)}))
    commands = []
    monkeypatch.setattr(check, "narrow_files", lambda root: [])
    check.python_files()
    monkeypatch.setattr(check, "changed_files", lambda since: {Path("train_x.py")})
    monkeypatch.setattr(check.subprocess, "Popen", lambda command, **settings: SimpleNamespace(wait=lambda: 0))
    done = SimpleNamespace(returncode=0)
    monkeypatch.setattr(check.subprocess, "run", lambda command, **settings: commands.append(command) or done)
    check.main(check.Args(seconds=13))
    (pytest_command,) = commands
    assert "-rfE" in pytest_command
    assert [part for part in pytest_command if "::" in part] == ["tests/test_train_x.py::test_0"]
    assert capsys.readouterr().out.endswith(
        "not run, out of time: 4 tests in tests/test_train_x.py: test_1, test_2, test_3, test_4\n"
    )


def test_a_failure_sets_the_exit_status(tree, monkeypatch, capsys):
    (tree / "core/sums.py").write_text("add = 1\n")
    commands = []

    class Done:
        returncode = 1

        def __init__(self, command, **settings):
            commands.append([str(part) for part in command])

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(check, "changed_files", lambda since: {Path("core/sums.py")})
    monkeypatch.setattr(check, "chosen", lambda near, seconds: [Path("tests/test_sums.py")])
    check.python_files()
    monkeypatch.setattr(check.subprocess, "Popen", Done)
    monkeypatch.setattr(check.subprocess, "run", Done)
    with pytest.raises(SystemExit) as stop:
        check.main(check.Args())
    assert stop.value.code
    tools = [command[2] for command in commands]
    assert tools == ["ruff", "ruff", "mypy", "pytest"] and "tests/test_sums.py" in commands[-1]
    said = capsys.readouterr().out
    assert "1 changed files affect 3 test files; ran 1 of them" in said
    assert said.endswith("\nfailed: the tests\n")


def test_a_script_is_formatted_only_at_100_columns(tree, monkeypatch, capsys):
    """A line of 105 columns is wrapped at 100 and would be joined at 120."""
    (tree / "pyproject.toml").write_text('[tool.ruff]\nline-length = 120\nformat.exclude = ["train_*.py"]\n')
    (tree / "train_x.py").write_text(f"x = sum(\n    {'1' * 46}, {'2' * 46}\n)\n")
    monkeypatch.setattr(check, "narrow_files", lambda root: [tree / "train_x.py"])
    start = subprocess.Popen
    monkeypatch.setattr(
        check.subprocess,
        "Popen",
        lambda command, **settings: start(["true"] if "mypy" in command else command, **settings),
    )
    check.main(check.Args())
    (tree / "train_x.py").write_text(f"x = sum({'1' * 46}, {'2' * 46})\n")
    with pytest.raises(SystemExit):
        check.main(check.Args())
    assert capsys.readouterr().out.endswith("\nfailed: ruff format, 100 columns\n")


def test_a_run_keeps_the_seconds_of_each_file_but_not_of_slow_tests():
    def report(nodeid: str, seconds: float, *keywords: str) -> pytest.TestReport:
        return pytest.TestReport(nodeid, ("", 0, ""), dict.fromkeys(keywords, 1), "passed", None, "call", (), seconds)

    reports = [report("tests/a.py::x", 1.0), report("tests/a.py::y", 2.0), report("tests/b.py::z", 9.0, "slow")]
    kept = {"tests/a.py": 100.0, "tests/c.py": 5.0}
    cache = SimpleNamespace(get=lambda name, default: kept, set=lambda name, value: kept.update(value))
    terminal = SimpleNamespace(stats={"passed": reports, "warnings": [object()]})
    conftest.pytest_terminal_summary(terminal, SimpleNamespace(cache=cache))
    assert kept == {"tests/a.py": 3.0, "tests/c.py": 5.0}
