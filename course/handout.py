"""Hand-outs: an exercise or a week on paper, without an answer; the answers and how to mark them apart.

Everything comes from the table of exercises, the functions and their tests, so a hand-out can't fall behind the code.
"""

import ast
import csv
import inspect
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from course.bugs import BUGS
from course.copies import ROOT, check_new, place_of
from course.edit import Function, find_function
from course.exercises import Exercise
from course.grader.worker import in_words
from course.sessions import SESSIONS, Session
from nanorlhf.errors import InputError

LEVELS = {1: "a formula in code", 2: "care with shapes and masks", 3: "an algorithm"}
MINUTES = {1: 10, 2: 15, 3: 20}  # a point of each level
ESTIMATE = "an estimate by level and points, not a measurement"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# code of 120 columns fits; a page ends neither with a heading, nor between a signature and what it says, nor with
# the words above a list
STYLE = (
    "@page { size: A4; margin: 1.5cm 1.2cm; } body { font: 11pt/1.5 Georgia, serif; margin: 0; } "
    "pre { font: 7.1pt/1.4 monospace; background: #f4f4f2; padding: .6em; white-space: pre-wrap; } "
    "code { font-size: 90%; overflow-wrap: anywhere; } li code { font-size: 80%; } pre code { font-size: 100%; } "
    "p { max-width: 17cm; } p, pre, ul { break-inside: avoid; } "
    "h1, h2, h3, p:not(:has(+ h2)), pre:has(+ pre) { break-after: avoid; }"
)


def points(exercise: Exercise) -> str:
    return f"{exercise.points} point{'s' * (exercise.points > 1)}"


def minutes(exercise: Exercise) -> int:
    return MINUTES[exercise.level] * exercise.points


def measured() -> dict[str, tuple[int, int]]:
    """Exercise -> seconds that a language model took, and how often it asked the grader; course/README.md says how."""
    with (ROOT / "course/times.csv").open(newline="", encoding="utf-8") as stream:
        return {row["exercise"]: (int(row["seconds"]), int(row["attempts"])) for row in csv.DictReader(stream)}


def functions_of(exercise: Exercise) -> list[tuple[str, Function]]:
    """(module:name, the function as it is here) of each that is to be written."""
    found = []
    for where in exercise.functions:
        path, name = place_of(where)
        found.append((where, find_function((ROOT / path).read_text(encoding="utf-8"), name)))
    return found


def signature(function: Function) -> str:
    lines = ast.unparse(function).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(("def ", "async def ")))
    return "\n".join(lines[: start + 1])


def class_of(path: Path, method: str) -> list[str]:
    """The lines of a method's class that are no method: its docstring and its fields."""
    source = (ROOT / path).read_text(encoding="utf-8")
    [node] = [x for x in ast.parse(source).body if isinstance(x, ast.ClassDef) and x.name == method.partition(".")[0]]
    kept = [part for part in node.body if not isinstance(part, Function)]
    return [line for part in kept for line in source.splitlines()[part.lineno - 1 : part.end_lineno]]


# ------------------------------------------------------------------------------------------------- 1. what is given out
def exercise_page(exercise: Exercise) -> str:
    """Markdown: what to write, what must be known before, where to read. Nothing of a body."""
    lines = [f"# {exercise.name}", ""]
    lines += [f"{points(exercise)}. Level {exercise.level}: {LEVELS[exercise.level]}.", ""]
    lines += [f"About {minutes(exercise)} minutes ({ESTIMATE}).", ""]
    lines += [
        f"**Before it:** {', '.join(exercise.needs) or 'no other exercise'}.",
        "",
        f"**Read:** {exercise.read}.",
        "",
    ]
    for where, function in functions_of(exercise):
        path, name = place_of(where)
        lines += [f"## `{name}`, in {path}", "", "```python", signature(function), "```", ""]
        text = ast.get_docstring(function)
        if text:
            lines += ["```text", inspect.cleandoc(text), "```", ""]
        if "." in name:
            lines += [f"Its class, {name.partition('.')[0]}:", "", "```python", *class_of(path, name), "```", ""]
    lines += [f"**Hint:** {exercise.hint}", "", "**It is solved when** these hold:", ""]
    lines += [f"- {in_words(test)}" for test in exercise.tests]
    lines += ["", "The tests are part of the task: read them where a claim is not clear. An error's words stand there."]
    return "\n".join([*lines, ""])


def week_page(number: int, sessions: Sequence[Session], pages: Sequence[str]) -> str:
    lines = [f"# Week {number}", ""]
    for session in sessions:
        lines += [f"**{session.title}.** Read {session.read}. Run {session.run}.", ""]
    return "\n".join(lines) + "".join(f"\n{page}".replace("\n#", "\n##") for page in pages)


# ------------------------------------------------------------------------------------------------ 2. what is kept apart
def key_page(exercise: Exercise) -> str:
    """Markdown: the solution, what the grader asks, slips that public code has had, and what to ask in person."""
    seconds, attempts = measured()[exercise.name]
    lines = [f"# {exercise.name}: key", "", f"{points(exercise)}, all or none: the tests decide.", ""]
    lines += [
        f"{minutes(exercise)} minutes is {ESTIMATE}. A language model with the copy and the hand-out took {seconds} "
        f"seconds and asked the grader {attempts} time{'s' * (attempts > 1)}.",
        "",
    ]
    for where, function in functions_of(exercise):
        path, name = place_of(where)
        source = (ROOT / path).read_text(encoding="utf-8").splitlines()
        body = "\n".join(source[function.lineno - 1 : function.end_lineno])
        lines += [f"## `{name}`", "", "```python", inspect.cleandoc("\n" + body), "```", ""]
    lines += ["**The grader asks**", ""]
    lines += [f"- {in_words(test)} (`{test}`)" for test in exercise.tests]
    slips = [bug for bug in BUGS if bug.where in exercise.functions]
    if slips:
        lines += ["", "**Slips to look for**", ""]
        lines += [
            f"- {bug.cause} It shows so: {bug.symptom} (`{bug.new or 'the statement is missing'}`)" for bug in slips
        ]
    lines += [
        "",
        "**In person:** let the student say what each line computes on the example of the docstring or on two",
    ]
    lines += ["rows of their own, and what the first claim above would say if that line were gone. Who wrote it, can."]
    return "\n".join([*lines, ""])


# ----------------------------------------------------------------------------------------------------------- 3. writing
def write_handouts(
    out: Path, exercises: Sequence[Exercise], key: bool, pdf: bool, tell: Callable[[], None]
) -> list[Path]:
    """A page per exercise, and one per week with those of its exercises; tell is called after each file."""
    check_new(out, "--out ")
    browser = browser_here() if pdf else ""
    pages = {exercise.name: (key_page if key else exercise_page)(exercise) for exercise in exercises}
    files = {f"{name}.md": page for name, page in pages.items()}
    for number in range(1, len(SESSIONS) // 2 + 1):
        sessions = SESSIONS[2 * number - 2 : 2 * number]
        names = [name for session in sessions for name in session.exercises if name in pages]
        if names:
            files[f"week-{number}.md"] = week_page(number, sessions, [pages[name] for name in names])
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in files.items():
        written.append(out / name)
        written[-1].write_text(text, encoding="utf-8")
        if pdf:
            written.append(as_pdf(written[-1], browser))
        tell()
    return written


def browser_here() -> str:
    """InputError where a PDF can't be made."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise InputError("--pdf needs Chromium on the PATH: install it, or print the Markdown.")
    return browser


def as_pdf(page: Path, browser: str) -> Path:
    """The page as a PDF beside it, printed by a browser."""
    try:
        import markdown
    except ImportError as error:
        raise InputError("--pdf needs a package: pip install markdown") from error

    text = markdown.markdown(page.read_text(encoding="utf-8"), extensions=["fenced_code", "tables"])
    file = page.with_suffix(".pdf").resolve()
    with tempfile.TemporaryDirectory() as name:
        html = Path(name) / "page.html"
        html.write_text(f"<!doctype html><meta charset=utf-8><title>{page.stem}</title><style>{STYLE}</style>{text}")
        print_page(html.as_uri(), file, browser, Path(name))
    return file


def print_page(address: str, file: Path, browser: str, profile: Path) -> None:
    """Print a page into a PDF; InputError if the browser makes none."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer", f"--user-data-dir={profile}"]
    done = subprocess.run([browser, *flags, f"--print-to-pdf={file}", address], capture_output=True, text=True)
    if done.returncode != 0 or not file.is_file():
        said = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        raise InputError(f"{browser} has printed no {file}: {said[0]}")
