"""Blocks that training scripts repeat on purpose are marked and equal.

# NAME (the same in train_rm.py, train_dpo.py)
... up to the next empty line
"""

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# a section number isn't part of the name
MARK = re.compile(r" *# (?:[\d.]+ )?(?P<name>.+) \(the same in (?P<files>.+)\)")


def blocks(text: str) -> dict[str, tuple[set[str], str]]:
    """Map each block's name to the other files named by its mark, and its text without indentation."""
    marked: dict[str, tuple[set[str], str]] = {}
    for block in re.split(r"\n\s*\n", text):
        lines = block.splitlines()
        marks = [(number, mark) for number, line in enumerate(lines) if (mark := MARK.fullmatch(line))]
        assert len(marks) <= 1, f"{marks[1][1]['name']} begins within {marks[0][1]['name']}"
        for number, mark in marks:
            assert mark["name"] not in marked, f"a second block {mark['name']}"
            files = set(mark["files"].split(", "))
            marked[mark["name"]] = files, textwrap.dedent("\n".join(lines[number + 1 :]))
        assert block.count("(the same in") == len(marks), f"no mark: {block}"
    return marked


def check(sources: dict[str, str]) -> dict[str, set[str]]:
    """Map each block's name to its files; AssertionError if two differ or a mark names the wrong files."""
    blocks_by_file = {file: blocks(text) for file, text in sources.items()}
    holders: dict[str, set[str]] = {}
    for file, file_blocks in blocks_by_file.items():
        for name in file_blocks:
            holders.setdefault(name, set()).add(file)
    for name, files in holders.items():
        assert len(files) > 1, f"{name} is only in {files}"
        assert len({blocks_by_file[file][name][1] for file in files}) == 1, f"{name} differs between {sorted(files)}"
        for file in files:
            named = blocks_by_file[file][name][0]
            assert named == files - {file}, f"{file}: the mark of {name} names {named}, it is in {files - {file}}"
    return holders


def test_shared_blocks_are_equal_and_name_the_files_that_contain_them():
    files = [*ROOT.glob("train_*.py"), *ROOT.glob("nanorlhf/rlcf/train_*.py")]
    holders = check({file.relative_to(ROOT).as_posix(): file.read_text() for file in files})
    assert holders["optimizer step"] == {"train_sft.py", "train_rm.py", "train_dpo.py"}
    assert holders["K epochs of clipped steps over the frozen rollout"] == {"train_ppo.py", "train_rlcf.py"}


def source(other_files: str, body: str, name: str = "step", indent: str = "") -> str:
    return "x = 0\n\n" + textwrap.indent(f"# {name} (the same in {other_files})\n{body}\n\n", indent)


def test_equal_blocks_may_differ_in_indentation_and_section_number():
    a, b = source("b", "if x:\n    y()", name="2.3 step"), source("a", "if x:\n    y()", indent="        ")
    assert check({"a": a, "b": b, "c": "y()"}) == {"step": {"a", "b"}}


@pytest.mark.parametrize(
    ("sources", "sentence"),
    [
        ({"a": source("b", "x = 1"), "b": source("a", "x = 2")}, "step differs"),
        ({"a": source("b", "x = 1"), "b": source("a", "x = 1") + "y = 1"}, None),
        ({"a": source("b", "x = 1"), "b": source("a", "x = 1").rstrip() + "\ny = 1"}, "step differs"),
        ({"a": source("b", "x = 1")}, "step is only in {'a'}"),
        ({"a": source("b, c", "x = 1"), "b": source("a", "x = 1")}, "a: the mark of step names"),
        ({n: source("ab".replace(n, ""), "x = 1") for n in "ab"} | {"c": source("a, b", "x = 1")}, "the mark of step"),
        ({"a": "# step (the same in b)\n# stop (the same in b)\nx = 1\n"}, "stop begins within step"),
        ({"a": "x = 1  # (the same in b)\n"}, "no mark"),
        ({"a": source("b", "x = 1") * 2}, "a second block step"),
    ],
)
def test_errors_name_the_block(sources, sentence):
    if sentence is None:
        check(sources)
    else:
        with pytest.raises(AssertionError, match=re.escape(sentence)):
            check(sources)
