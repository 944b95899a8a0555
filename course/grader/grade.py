"""Grade exercises by running the project's own tests on the student's code."""

import compileall
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue

from course.copies import CODE, MARK, ROOT, check_copy, copy_files, read_mark, write_mark
from course.exercises import Exercise, chosen
from course.grader.submission import Refused, arranged, judging
from course.grader.worker import Outcome, Worker
from course.grader.worker_main import write
from nanorlhf.errors import InputError

# taken from the grader's repository, not from the student's copy
JUDGES = ("tests", "Makefile", "pyproject.toml")


@contextmanager
def temporary_tree(directory: Path) -> Iterator[Path]:
    """Make a temporary tree with the code of `directory` and the tests of this repository."""
    check_copy(directory)
    with tempfile.TemporaryDirectory(prefix="course-", ignore_cleanup_errors=True) as name:
        tree = Path(name).resolve()
        copy_files(directory, tree, CODE)
        copy_files(ROOT, tree, JUDGES)
        yield tree


class Grader:
    """A worker and two trees: one to run the tests in, and one with a student's functions, which the tests call."""

    def __init__(self, worker: Worker, tree: Path, student: Path):
        self.worker, self.tree, self.student = worker, tree, student
        self.written: dict[Path, str] = {}

    def judge(self, directory: Path, exercise: Exercise, limit: float) -> Outcome:
        try:
            files = arranged(directory, exercise)
        except Refused as refused:
            return Outcome(False, "the function can be graded", str(refused), 0.0)
        sources = {self.student / path: source for path, source in files.items()}
        sources |= {self.tree / path: source for path, source in judging(exercise).items()}
        for file, source in sources.items():
            if self.written.get(file) != source:
                write(file, source)
                self.written[file] = source
        return self.worker.run(self.tree, exercise.tests, limit, self.student)


@contextmanager
def graders(number: int) -> Iterator[list[Grader]]:
    """Start workers, each with separate trees. Their code is already compiled, because nothing writes to it later."""
    with temporary_tree(ROOT) as tree, ExitStack() as stack:
        workers = [stack.enter_context(Worker()) for _ in range(number)]  # they import while this compiles
        for name in CODE:
            is_script = name.endswith(".py")
            (compileall.compile_file if is_script else compileall.compile_dir)(tree / name, quiet=2)

        def copied(ignore: Callable | None) -> Path:
            other = stack.enter_context(tempfile.TemporaryDirectory(prefix="course-", ignore_cleanup_errors=True))
            return Path(shutil.copytree(tree, Path(other).resolve() / "tree", ignore=ignore))

        trees = [tree, *(copied(None) for _ in workers[1:])]
        students = [copied(shutil.ignore_patterns(*JUDGES)) for _ in workers]
        yield [Grader(*parts) for parts in zip(workers, trees, students, strict=True)]


def grade(
    directory: Path,
    exercises: Sequence[Exercise],
    limit: float,
    graders: Sequence[Grader],
    on_done: Callable[[], None] = lambda: None,
) -> dict[str, Outcome]:
    """Return the outcome of each exercise, by name. Each runs in a separate process, one per grader at a time.

    A process that takes longer than `limit` seconds fails only its own exercise. `on_done` is called after each.
    """
    check_copy(directory)
    idle: SimpleQueue[Grader] = SimpleQueue()
    for grader in graders:
        idle.put(grader)

    def judge(exercise: Exercise) -> Outcome:
        grader = idle.get()
        try:
            return grader.judge(directory, exercise, limit)
        finally:
            idle.put(grader)
            on_done()

    with ThreadPoolExecutor(len(graders)) as pool:
        outcomes = list(pool.map(judge, exercises))
    return {exercise.name: result for exercise, result in zip(exercises, outcomes, strict=True)}


def check_gradable(outcomes: dict[str, Outcome]) -> None:
    """Raise InputError if an exercise's tests can't run here: no submission could get its points."""
    for name, outcome in outcomes.items():
        if not outcome.gradable:
            raise InputError(f"{name} is {outcome.claim}: {outcome.reason}: run `pip install -e '.[test]'`.")


def assigned_exercises(directory: Path) -> list[Exercise]:
    """Return the exercises that `start` emptied in a student's copy, or all exercises if it wasn't made by `start`."""
    names = read_mark(directory).get("exercises") or []
    if not isinstance(names, list):
        raise InputError(f"{directory / MARK} can't be read: make the copy again.")
    return chosen(names)


def first_open(directory: Path, limit: float, grader: Grader) -> tuple[Exercise, Outcome] | None:
    """Return the first unsolved exercise with all its needs solved, and its outcome; None if all are solved.

    The copy's mark records which exercises have passed, so only those that changed since are tested again. Exercises
    whose tests can't run here are skipped.
    """
    solved: set[str] = set()
    mark = read_mark(directory)
    passed = mark.setdefault("passed", {})  # exercise -> digest of its files
    exercises = assigned_exercises(directory)
    names = {exercise.name for exercise in exercises}
    for exercise in exercises:
        if set(exercise.needs) & names <= solved:
            digest = hash_exercise(directory, exercise)
            if digest is None or passed.get(exercise.name) != digest:
                result = grader.judge(directory, exercise, limit)
                if result.gradable and not result.passed:
                    return exercise, result
                if result.passed:
                    passed[exercise.name] = digest
                    if "exercises" in mark:
                        write_mark(directory, mark)
            solved.add(exercise.name)
    return None


def hash_exercise(directory: Path, exercise: Exercise) -> str | None:
    """Return a hash of the files that an exercise is graded on, or None if it can't be graded."""
    with suppress(Refused):
        return hashlib.sha256(repr(sorted(arranged(directory, exercise).items())).encode()).hexdigest()
    return None
