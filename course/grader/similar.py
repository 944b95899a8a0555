"""Which submissions are alike: the functions of an exercise, compared as syntax trees, without what all have in common.

Names of local variables, layout, comments and the order of imports make no difference. The text of a function becomes
its tokens in the order of the syntax tree; every five in a row are a shingle. Shingles that more than a third of the
class has written are what the exercise asks for, and the grader's own solution's count as such: they say nothing. What
is left of two submissions is compared: shared shingles per shingle of the shorter one.

A number is a reason to read both, not a verdict: two who think alike, or a book that both have read, look the same.
"""

import ast
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from course.copies import ROOT
from course.edit import Function
from course.exercises import Exercise
from course.grader.allowed import Refused
from course.grader.submission import bodies_of
from course.start import body_of

LENGTH = 5  # tokens of a shingle
FEWEST = 8  # shingles of one's own: fewer are too little to compare
COMMON = 1 / 3  # share of the class that makes a shingle common

Shingles = frozenset[tuple[str, ...]]


@dataclass(frozen=True)
class Pair:
    exercise: str
    one: str
    other: str
    similarity: float
    """shared shingles per shingle of the shorter submission, common ones left out: 0 to 1"""
    shared: int
    names: float
    """share of the local names that both use, of those that either uses: 0 to 1"""


def tokens(node: ast.AST, local: Mapping[str, str]) -> Iterator[str]:
    """The syntax tree as words; a local variable is the number of its first appearance."""
    yield type(node).__name__
    for name, value in ast.iter_fields(node):
        if name in ("ctx", "annotation", "returns", "type_comment"):
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                yield from tokens(part, local)
            elif part is not None:
                yield local.get(part, part) if isinstance(part, str) else repr(part)


def locals_of(function: Function) -> list[str]:
    """Names that the body binds, in the order of their first appearance."""
    names: dict[str, None] = {}
    for statement in function.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names[node.id] = None
            elif isinstance(node, Function):
                names[node.name] = None
    return list(names)


def shingles(functions: Sequence[Function]) -> Shingles:
    found: set[tuple[str, ...]] = set()
    for function in functions:
        local = {name: f"local {number}" for number, name in enumerate(locals_of(function))}
        body = function.body[ast.get_docstring(function) is not None :]
        words = [word for statement in body for word in tokens(statement, local)]
        found.update(tuple(words[i : i + LENGTH]) for i in range(len(words) - LENGTH + 1))
    return frozenset(found)


def written(directory: Path, exercise: Exercise) -> list[Function]:
    """What a student has written of an exercise; [] where nothing, or nothing that can be read."""
    try:
        found = bodies_of(directory, exercise)
    except Refused:
        return []
    given = ast.dump(ast.parse(body_of(exercise)[-1]).body[0])
    return [
        function
        for functions in found.values()
        for function in functions.values()
        if ast.dump(function.body[-1]) != given
    ]


def pairs_of(submissions: Sequence[Path], exercise: Exercise, threshold: float) -> list[Pair]:
    """The pairs of an exercise that are at least so similar, the most similar first."""
    functions = {path.name: found for path in submissions if (found := written(path, exercise))}
    texts = {name: shingles(found) for name, found in functions.items()}
    counts = Counter(shingle for text in texts.values() for shingle in text)
    most = max(2, COMMON * len(texts))  # in a class of three, what two share is not common
    common = {shingle for shingle, count in counts.items() if count > most} | shingles(written(ROOT, exercise))
    found = []
    for one, other in combinations(sorted(texts), 2):
        ours, theirs = texts[one] - common, texts[other] - common
        fewer = min(len(ours), len(theirs))
        if fewer >= FEWEST and len(ours & theirs) >= threshold * fewer:
            names = [{name for function in functions[who] for name in locals_of(function)} for who in (one, other)]
            either = len(names[0] | names[1])
            share = len(names[0] & names[1]) / either if either else 0.0
            found.append(Pair(exercise.name, one, other, len(ours & theirs) / fewer, len(ours & theirs), share))
    return sorted(found, key=lambda pair: (-pair.similarity, -pair.shared, pair.one, pair.other))


def table(pairs: Sequence[Pair]) -> str:
    """One line per pair."""
    if not pairs:
        return "No two submissions are alike in what few have written."
    lines = [f"{'exercise':18} {'alike':>5} {'shared':>6} {'names':>5}  submissions"]
    lines += [
        f"{pair.exercise:18} {pair.similarity:5.0%} {pair.shared:6} {pair.names:5.0%}  {pair.one}, {pair.other}"
        for pair in pairs
    ]
    return "\n".join([*lines, "Alike is a reason to read both, not a verdict."])
