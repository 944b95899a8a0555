"""Find similar submissions: compare the functions of an exercise as syntax trees, without the code that many share.

Names of local variables, layout, comments and the order of imports make no difference. Each function becomes a list of
tokens in the order of the syntax tree, and every five consecutive tokens form a shingle. Shingles that more than a
third of the class has written, or that are in our solution, follow from the exercise itself and are ignored. The
similarity of two submissions is the number of remaining shingles they share, divided by the shorter one's number.

A high number is a reason to read both, not proof: two students who think alike, or read the same book, look the same.
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
from course.grader.submission import Refused, student_functions
from course.start import stub_lines

LENGTH = 5  # tokens per shingle
FEWEST = 8  # minimum number of remaining shingles for a comparison
COMMON = 1 / 3  # a shingle in more than this share of the class is common

Shingles = frozenset[tuple[str, ...]]


@dataclass(frozen=True)
class Pair:
    exercise: str
    one: str
    other: str
    similarity: float
    """shared shingles / shingles of the shorter submission, without common ones: 0 to 1"""
    shared: int
    names: float
    """local names that both use / local names that either uses: 0 to 1"""


def tokens(node: ast.AST, local: Mapping[str, str]) -> Iterator[str]:
    """Yield the tokens of a syntax tree; a local variable is numbered by its first appearance."""
    yield type(node).__name__
    for name, value in ast.iter_fields(node):
        if name in ("ctx", "annotation", "returns", "type_comment"):
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                yield from tokens(part, local)
            elif part is not None:
                yield local.get(part, part) if isinstance(part, str) else repr(part)


def local_names(function: Function) -> list[str]:
    """Return the names that a function's body binds, in order of first appearance."""
    names: dict[str, None] = {}
    for statement in function.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names[node.id] = None
            elif isinstance(node, Function):
                names[node.name] = None
    return list(names)


def shingles(functions: Sequence[Function]) -> Shingles:
    result: set[tuple[str, ...]] = set()
    for function in functions:
        local = {name: f"local {number}" for number, name in enumerate(local_names(function))}
        body = function.body[ast.get_docstring(function) is not None :]
        words = [word for statement in body for word in tokens(statement, local)]
        result.update(tuple(words[i : i + LENGTH]) for i in range(len(words) - LENGTH + 1))
    return frozenset(result)


def written(directory: Path, exercise: Exercise) -> list[Function]:
    """Return the functions of an exercise that a student has written; [] if there are none or they can't be read."""
    try:
        bodies = student_functions(directory, exercise)
    except Refused:
        return []
    stub = ast.dump(ast.parse(stub_lines(exercise)[-1]).body[0])
    return [
        function
        for functions in bodies.values()
        for function in functions.values()
        if ast.dump(function.body[-1]) != stub
    ]


def similar_pairs(submissions: Sequence[Path], exercise: Exercise, threshold: float) -> list[Pair]:
    """Return the pairs of submissions with at least this similarity, most similar first."""
    functions = {path.name: solution for path in submissions if (solution := written(path, exercise))}
    texts = {name: shingles(solution) for name, solution in functions.items()}
    counts = Counter(shingle for text in texts.values() for shingle in text)
    most = max(2, COMMON * len(texts))  # in a class of three, two aren't enough to make it common
    common = {shingle for shingle, count in counts.items() if count > most} | shingles(written(ROOT, exercise))
    pairs = []
    for one, other in combinations(sorted(texts), 2):
        ours, theirs = texts[one] - common, texts[other] - common
        fewer = min(len(ours), len(theirs))
        if fewer >= FEWEST and len(ours & theirs) >= threshold * fewer:
            names = [{name for function in functions[who] for name in local_names(function)} for who in (one, other)]
            either = len(names[0] | names[1])
            share = len(names[0] & names[1]) / either if either else 0.0
            pairs.append(Pair(exercise.name, one, other, len(ours & theirs) / fewer, len(ours & theirs), share))
    return sorted(pairs, key=lambda pair: (-pair.similarity, -pair.shared, pair.one, pair.other))


def table(pairs: Sequence[Pair]) -> str:
    """Return one line per pair."""
    if not pairs:
        return "No similar submissions found."
    lines = [f"{'exercise':18} {'alike':>5} {'shared':>6} {'names':>5}  submissions"]
    lines += [
        f"{pair.exercise:18} {pair.similarity:5.0%} {pair.shared:6} {pair.names:5.0%}  {pair.one}, {pair.other}"
        for pair in pairs
    ]
    return "\n".join([*lines, "High similarity is a reason to read both, not proof of copying."])
