"""Handouts: an exercise or a week on paper, without answers; and a separate key with answers and marking guide.

Everything is generated from the table of exercises, the functions and their tests, so a handout can't get outdated.
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
from course.copies import ROOT, check_new, path_and_name
from course.edit import Function, find_function
from course.examples import EXAMPLES, MODELS
from course.exercises import Exercise
from course.grader.worker import in_words
from course.sessions import SESSIONS, Session
from nanorlhf.errors import InputError

LEVELS = {1: "a formula in code", 2: "care with shapes and masks", 3: "an algorithm"}
MINUTES = {1: 10, 2: 15, 3: 20}  # per point, by level
ESTIMATE = "estimated from level and points, not measured"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# 120 columns of code fit; no page break after a heading, between a signature and its docstring, or between a list and
# the line above it
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
    """Return each exercise's seconds and number of grader runs of a language model, described in course/README.md."""
    with (ROOT / "course/times.csv").open(newline="", encoding="utf-8") as stream:
        return {row["exercise"]: (int(row["seconds"]), int(row["attempts"])) for row in csv.DictReader(stream)}


def exercise_functions(exercise: Exercise) -> list[tuple[str, Function]]:
    """Return (module:name, function in this repository) for each function of the exercise."""
    functions = []
    for where in exercise.functions:
        path, name = path_and_name(where)
        functions.append((where, find_function((ROOT / path).read_text(encoding="utf-8"), name)))
    return functions


def signature(function: Function) -> str:
    lines = ast.unparse(function).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(("def ", "async def ")))
    return "\n".join(lines[: start + 1])


def module_docstring(path: Path) -> str | None:
    """Return the docstring of a file: a kernel's file begins with its formulas."""
    return ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8")))


def class_lines(path: Path, method: str) -> list[str]:
    """Return the lines of a method's class outside of methods: its docstring and fields."""
    source = (ROOT / path).read_text(encoding="utf-8")
    [node] = [x for x in ast.parse(source).body if isinstance(x, ast.ClassDef) and x.name == method.partition(".")[0]]
    kept = [part for part in node.body if not isinstance(part, Function)]
    return [line for part in kept for line in source.splitlines()[part.lineno - 1 : part.end_lineno]]


# ------------------------------------------------------------------------------------------------------- 1. the handout
def exercise_page(exercise: Exercise) -> str:
    """Return the handout as Markdown: what to write, which exercises come first, what to read; no solutions."""
    lines = [f"# {exercise.name}", ""]
    lines += [f"{points(exercise)}. Level {exercise.level}: {LEVELS[exercise.level]}.", ""]
    lines += [f"About {minutes(exercise)} minutes ({ESTIMATE}).", ""]
    lines += [
        f"**Solve first:** {', '.join(exercise.needs) or 'no other exercise'}.",
        "",
        f"**Read:** {exercise.read}.",
        "",
    ]
    for where, function in exercise_functions(exercise):
        path, name = path_and_name(where)
        lines += [f"## `{name}`, in {path}", "", "```python", signature(function), "```", ""]
        formulas = module_docstring(path) if path.parts[0] == "kernels" else None
        for text in filter(None, (formulas, ast.get_docstring(function))):
            lines += ["```text", inspect.cleandoc(text), "```", ""]
        if "." in name:
            lines += [f"Its class, {name.partition('.')[0]}:", "", "```python", *class_lines(path, name), "```", ""]
    example, mistake = EXAMPLES[exercise.name]
    models = " ".join(text for name, text in MODELS.items() if name in example)
    lines += ["## Example", "", "```python", example.rstrip("\n"), "```", ""]
    lines += [f"{models} **A common mistake:** {mistake}".strip(), "", f"**Hint:** {exercise.hint}", ""]
    lines += ["**It is solved when** these tests pass:", ""]
    lines += [f"- {in_words(test)}" for test in exercise.tests]
    lines += ["", "The tests are part of the task: read them if a name isn't clear, and for the text of errors."]
    return "\n".join([*lines, ""])


def week_page(number: int, sessions: Sequence[Session], pages: Sequence[str]) -> str:
    lines = [f"# Week {number}", ""]
    for session in sessions:
        lines += [f"**{session.title}.** Read {session.read}. Run {session.run}.", ""]
    return "\n".join(lines) + "".join(f"\n{page}".replace("\n#", "\n##") for page in pages)


# ----------------------------------------------------------------------------------------------------------- 2. the key
def key_page(exercise: Exercise) -> str:
    """Return the key as Markdown: the solution, its tests, bugs that public code has had, and what to ask in person."""
    seconds, attempts = measured()[exercise.name]
    lines = [f"# {exercise.name}: key", "", f"{points(exercise)}, all or nothing: graded by the tests.", ""]
    lines += [
        f"About {minutes(exercise)} minutes ({ESTIMATE}). A language model with the copy and the handout took "
        f"{seconds} seconds and ran the grader {attempts} time{'s' * (attempts > 1)}.",
        "",
    ]
    for where, function in exercise_functions(exercise):
        path, name = path_and_name(where)
        source = (ROOT / path).read_text(encoding="utf-8").splitlines()
        body = "\n".join(source[function.lineno - 1 : function.end_lineno])
        lines += [f"## `{name}`", "", "```python", inspect.cleandoc("\n" + body), "```", ""]
    lines += ["**Tests**", ""]
    lines += [f"- {in_words(test)} (`{test}`)" for test in exercise.tests]
    slips = [bug for bug in BUGS if bug.where in exercise.functions]
    if slips:
        lines += ["", "**Common mistakes**", ""]
        lines += [f"- {bug.cause} Symptom: {bug.symptom} (`{bug.new or 'the statement is missing'}`)" for bug in slips]
    lines += [
        "",
        "**In person:** let the student explain what each line computes on the docstring's example or on two rows of",
    ]
    lines += ["their choice, and how the first test above would fail without that line. Whoever wrote the code can."]
    return "\n".join([*lines, ""])


# ----------------------------------------------------------------------------------------------------------- 3. writing
def write_handouts(
    out: Path, exercises: Sequence[Exercise], key: bool, pdf: bool, on_done: Callable[[], None]
) -> list[Path]:
    """Write a page per exercise, and one per week with the pages of its exercises; call `on_done` after each file."""
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
        on_done()
    return written


def browser_here() -> str:
    """Return the browser that prints PDFs. Raises InputError without one."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise InputError("--pdf needs Chromium on the PATH: install it, or print the Markdown.")
    return browser


def as_pdf(page: Path, browser: str) -> Path:
    """Print the page with a browser and write the PDF next to it."""
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
    """Print a page as a PDF. Raises InputError if the browser fails."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer", f"--user-data-dir={profile}"]
    done = subprocess.run([browser, *flags, f"--print-to-pdf={file}", address], capture_output=True, text=True)
    if done.returncode != 0 or not file.is_file():
        message = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        raise InputError(f"{browser} did not print {file}: {message[0]}")
