"""A student's copy lacks the exercises' bodies and nothing else."""

import ast
from pathlib import Path

import pytest

from course.copies import ANSWERS, ROOT, list_files, path_and_name, read_mark, source_path
from course.edit import find_function
from course.exercises import EXERCISES, chosen
from course.start import start
from nanorlhf.errors import InputError


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    directory = tmp_path_factory.mktemp("course") / "copy"
    start(directory, EXERCISES)
    return directory


def test_only_the_files_of_exercises_differ(copy) -> None:
    edited = {source_path(function) for exercise in EXERCISES for function in exercise.functions}
    files = {path for path in list_files(ROOT) if not any(path.is_relative_to(name) for name in ANSWERS)}
    differ = {path for path in files if (copy / path).read_bytes() != (ROOT / path).read_bytes()}
    assert differ == edited | {Path("docs/nano.md")}  # the page quotes nano.py
    assert len(files) == sum(path.is_file() for path in copy.rglob("*")) - 1  # the mark
    assert not {".git", ".venv", "runs"} & {path.name for path in copy.iterdir()}


def test_only_the_listed_functions_are_empty(copy) -> None:
    """Without the emptied bodies, the trees are equal."""
    for module in {function.partition(":")[0] for exercise in EXERCISES for function in exercise.functions}:
        names = [
            function.partition(":")[2]
            for exercise in EXERCISES
            for function in exercise.functions
            if function.startswith(f"{module}:")
        ]
        whole, empty = ((root / source_path(module)).read_text() for root in (ROOT, copy))
        ours, theirs = ast.parse(whole), ast.parse(empty)
        for name in names:
            full, hollow = find_function(whole, name), find_function(empty, name)
            assert ast.get_docstring(full) == ast.get_docstring(hollow)
            assert ast.dump(full.args) == ast.dump(hollow.args)
            raised = hollow.body[-1]
            assert isinstance(raised, ast.Raise) and "NotImplementedError" in ast.unparse(raised)
            assert len(hollow.body) == 1 + (ast.get_docstring(full) is not None)
            for tree, line in ((ours, full.lineno), (theirs, hollow.lineno)):
                for node in ast.walk(tree):
                    if isinstance(node, ast.FunctionDef) and node.lineno == line:
                        node.body = []
        assert ast.dump(ours) == ast.dump(theirs), module


def test_no_page_of_the_copy_contains_a_solution(copy) -> None:
    pages = {path: path.read_text() for path in (*copy.rglob("*.md"), *copy.rglob("*.ipynb"))}
    leaks = []
    for exercise in EXERCISES:
        for file, name in map(path_and_name, exercise.functions):
            source = (ROOT / file).read_text()
            function = find_function(source, name)
            first = function.body[ast.get_docstring(function) is not None].lineno
            lines = [line.strip() for line in source.splitlines()[first - 1 : function.end_lineno]]
            lines = [line for line in lines if len(line) > 12]
            for path, text in pages.items():
                if len(lines) > 1 and 2 * sum(line in text for line in lines) >= len(lines):
                    leaks.append((exercise.name, name, str(path.relative_to(copy))))
    assert not leaks


def test_answers_and_equivalent_mutants_are_not_in_the_copy(copy) -> None:
    assert all((ROOT / name).exists() and not (copy / name).exists() for name in ANSWERS)
    assert "cumsum" in (ROOT / "tools/mutants/equivalent.py").read_text()


def test_an_empty_function_says_what_to_read(copy) -> None:
    source = (copy / "nanorlhf/ppo.py").read_text()
    assert 'raise NotImplementedError("exercise whitening: write this function")' in source
    assert "    # Exercise whitening, 2 point(s). Read docs/lecture.md, 3.3." in source


def test_a_copy_knows_its_exercises(tmp_path) -> None:
    start(tmp_path / "copy", chosen(["whitening", "padding"]))
    assert read_mark(tmp_path / "copy") == {"exercises": ["padding", "whitening"]}
    assert (tmp_path / "copy/train_ppo.py").read_bytes() == (ROOT / "train_ppo.py").read_bytes()


def test_a_directory_that_is_not_empty_is_refused(tmp_path) -> None:
    (tmp_path / "mine.txt").touch()
    with pytest.raises(InputError, match="is not empty: choose a new directory"):
        start(tmp_path, EXERCISES)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_without_git_the_known_folders_are_copied_without_caches(tmp_path) -> None:
    for path in ("nanorlhf/a.py", "nanorlhf/__pycache__/a.pyc", "runs/x", ".venv/y", "train_ppo.py", "notes.txt"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert [str(path) for path in list_files(tmp_path)] == ["nanorlhf/a.py", "train_ppo.py"]
