"""Count phrases and names that make our English sound translated.

    python -m tools.prose                      # hits and words per directory
    python -m tools.prose docs nanorlhf/rules --show      # every hit in these paths

Reads the tracked Markdown and Python files: prose outside code blocks, docstrings, comments, messages, assigned names
and the names of tests. A hit is a hint: some are right. tests/tools/test_prose.py keeps a ceiling per directory.
"""

import argparse
import ast
import collections
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PHRASES = {
    "is, appears": r"\b(?:stands?|stood)\b(?! for\b)|\b(?:lies|lay)\b",
    "only": r"\balone\b",
    "isn't a, has no": r"\b(?:is|are|was|were) no\b",
    "fix": r"\bmend(?:s|ed|ing)?\b",
    "again, continue": r"\banew\b|\bonce more\b|\bgo(?:es)? on\b",
    "repeat the noun, or use a possessive": r"\b(?:that|those) of\b",
    "this much, enough, few": r"\bso (?:many|much|few|little)\b",
    "next to, along with": r"\bbeside\b",
    "print, report, show (of programs)": r"\b(?:says?|said|tells?|told)\b",
    "if, when": r"\bwhere (?:there|it|they|that|none|no)\b",
    "start a new sentence": r"\b(?:of|to|by|from|in|on|with) which\b",
    "has, contains, is true, excludes 0": r"\bholds?\b|\bleaves? out 0\b",
    "with an error, silently": r"\bin (?:a|one) sentence\b|\bwithout a word\b|\bby decree\b",
    "name the thing": r"(?:^|[.:;] )What (?:is|was|becomes|comes|stands|lies)\b",
    "matmul": r"\bmatrix products?\b|\ba product of\b|\bproducts of (?:a|the)\b",
    "my, your, separate": r"\bof (?:yours|ours|theirs|its own|his own|your own)\b",
    "everything, the noun": r"\ball that (?:is|was|the|it|we|a)\b",
    "exploits, degenerate, accurate": r"\b(?:pleas(?:es|ed)|gladness|speechless|honest(?:ly)?|yardstick)\b",
    "no one, anyone": r"\b(?:nobody|whoever)\b",
}
"""what to write instead -> what it replaces, in prose and in the names of tests"""

OPENINGS = r"(?:Of|What|How|Whether|With|That|As) [a-z]"
"""A docstring starts with an imperative verb or a noun phrase."""

NAMES = {"place", "places", "mine", "given", "found", "others", "own", "said", "told", "blank", "truth"}
NAMES |= {"thing", "things"}
"""words that don't name what a variable, parameter or function is"""


@dataclass(frozen=True)
class Hit:
    line: int
    instead: str
    text: str


def markdown_lines(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines outside code blocks."""
    in_block = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_block = not in_block
        elif not in_block and not line.startswith("    "):
            yield number, line


def python_lines(text: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Comments, and the lines of strings of at least three words."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#: ")
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") >= 2:
            for offset, line in enumerate(node.value.splitlines()):
                yield node.lineno + offset, line


def assigned_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Variables, parameters, fields and functions, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def docstring_starts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text.split("\n", 1)[0]


def hits(path: Path) -> tuple[list[Hit], int]:
    """The hits in one file, and how many words of prose it has."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text) if path.suffix == ".py" else ast.Module([], [])
    lines = list(python_lines(text, tree) if path.suffix == ".py" else markdown_lines(text))
    names = list(assigned_names(tree))
    tests = [(number, name.replace("_", " ")) for number, name in names if name.startswith("test_")]
    all_hits = [
        Hit(number, instead, line.strip())
        for number, line in [*lines, *tests]
        for instead, pattern in PHRASES.items()
        for _ in re.finditer(pattern, line.strip(), re.IGNORECASE)
    ]
    all_hits += [
        Hit(number, "start with a verb or a noun", line)
        for number, line in docstring_starts(tree)
        if re.match(OPENINGS, line)
    ]
    all_hits += [Hit(number, "name what it is", name) for number, name in names if name.strip("_") in NAMES]
    return all_hits, sum(len(line.split()) for _, line in lines)


def directory(path: Path) -> str:
    """The group that a file is counted in: its first directory, or the first two in nanorlhf and tests."""
    parts = path.parent.parts
    return "/".join(parts[:2] if parts[:1] in (("nanorlhf",), ("tests",)) else parts[:1]) or "."


def tracked(paths: list[str]) -> list[Path]:
    """The tracked Markdown and Python files in these directories, without deleted ones."""
    listed = subprocess.run(["git", "ls-files", "--", *paths], cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(name) for name in listed.stdout.split() if name.endswith((".md", ".py")) and (ROOT / name).is_file()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Count phrases and names that make English sound translated.")
    parser.add_argument("paths", nargs="*", default=["."], help="directories or files; default: everything tracked")
    parser.add_argument("--show", action="store_true", help="print every hit")
    args = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    words: collections.Counter[str] = collections.Counter()
    for path in tracked(args.paths):
        file_hits, num_words = hits(ROOT / path)
        counts[directory(path)] += len(file_hits)
        words[directory(path)] += num_words
        if args.show:
            for hit in file_hits:
                print(f"{path}:{hit.line}: {hit.text[:100]!r}: {hit.instead}")
    for name in sorted(counts):
        rate = 1000 * counts[name] / max(1, words[name])
        print(f"{name:28}{counts[name]:6} hits{words[name]:8,} words{rate:8.1f} per 1,000")
    print(f"{'total':28}{counts.total():6} hits{words.total():8,} words")


if __name__ == "__main__":
    main()
