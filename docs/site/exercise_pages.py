"""Pages for the exercises: one per exercise, with the functions to write and the tests, and one that lists them."""

import re
import textwrap
from collections.abc import Iterator

from course.copies import ROOT
from course.edit import find_function, rewritten
from course.exercises import EXERCISES, Exercise
from course.grader.worker import in_words
from course.handout import LEVELS

FOLDER = "course/exercises"


def pages() -> Iterator[tuple[str, str]]:
    """Yield each page's path from the root and Markdown, starting with the list."""
    yield f"{FOLDER}/README.md", exercise_list()
    for exercise in EXERCISES:
        yield f"{FOLDER}/{exercise.name}.md", exercise_page(exercise)


def exercise_list() -> str:
    """Return the page that lists all exercises."""
    points = sum(exercise.points for exercise in EXERCISES)
    rows = [
        f"| [{e.name}]({e.name}.md) | {e.points} | {e.level} | {', '.join(f'`{name}`' for name in function_names(e))} |"
        for e in EXERCISES
    ]
    levels = ", ".join(f"{level} {description}" for level, description in LEVELS.items())
    return "\n".join(
        (
            "# The exercises",
            "",
            f"{len(EXERCISES)} functions and groups of functions, {points} points, in the order of the pipeline. "
            f"[The course](../README.md) explains how to begin. Levels: {levels}.",
            "",
            "| exercise | points | level | you write |",
            "|---|---|---|---|",
            *rows,
            "",
        )
    )


def exercise_page(exercise: Exercise) -> str:
    """Return the page of one exercise."""
    needs = ", ".join(f"[{name}]({name}.md)" for name in exercise.needs)
    about = f"{exercise.points} point{'s' * (exercise.points > 1)}, level {exercise.level}: {LEVELS[exercise.level]}."
    return "\n".join(
        (
            f"# {exercise.name}",
            "",
            about + (f" Comes after {needs}." if needs else ""),
            "",
            f"Read first: {linked(exercise.read)}.",
            "",
            "```sh",
            f"python -m course start hw --exercises {exercise.name}",
            "python -m course next hw",
            "```",
            "",
            "## Code to write",
            "",
            *(block for function in exercise.functions for block in statement(function)),
            '<details markdown="1">',
            "<summary>A hint</summary>",
            "",
            exercise.hint,
            "",
            "</details>",
            "",
            "## Tests",
            "",
            *(f"- {in_words(test)}" for test in exercise.tests),
            "",
            "`python -m course grade hw` runs them.",
            "",
        )
    )


def function_names(exercise: Exercise) -> list[str]:
    return [function.partition(":")[2] for function in exercise.functions]


def statement(function: str) -> tuple[str, ...]:
    """Return the signature and docstring of `module:name` as Markdown, without the body."""
    module, _, name = function.partition(":")
    path = f"{module.replace('.', '/')}.py"
    source = rewritten((ROOT / path).read_text(), {name: ["..."]})
    node = find_function(source, name)
    first = min(line.lineno for line in (node, *node.decorator_list))
    code = textwrap.dedent("\n".join(source.splitlines()[first - 1 : node.end_lineno]))
    return f"In `{path}`:", "", "```python", code, "```", ""


def linked(text: str) -> str:
    """Turn page names into links: docs/details.md -> [docs/details.md](../../docs/details.md)."""
    return re.sub(r"\bdocs/\w+\.md\b", lambda match: f"[{match[0]}](../../{match[0]})", text)
