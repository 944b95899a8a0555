"""Prose, names and the names of tests: the odd phrases in a directory may only become fewer."""

import collections
import subprocess
import sys
from pathlib import Path

import pytest

from tools import prose

CEILINGS = {
    ".": 2,
    "course": 21,
    "data": 13,
    "docs": 3,
    "experiments": 6,
    "kernels": 2,
    "nanorlhf": 11,
    "nanorlhf/doctor": 3,
    "nanorlhf/evals": 2,
    "nanorlhf/metrics": 5,
    "nanorlhf/pretrained": 1,
    "nanorlhf/recipes": 1,
    "nanorlhf/report": 11,
    "nanorlhf/rewards": 1,
    "nanorlhf/rlcf": 5,
    "nanorlhf/rules": 7,
    "nanorlhf/sandbox": 9,
    "nanorlhf/selfrank": 2,
    "nanorlhf/stackoverflow": 1,
    "nanorlhf/training": 6,
    "tests": 38,
    "tests/course": 10,
    "tests/data": 26,
    "tests/doctor": 2,
    "tests/evals": 19,
    "tests/experiments": 26,
    "tests/helpers": 2,
    "tests/kernels": 1,
    "tests/metrics": 15,
    "tests/others": 2,
    "tests/plan": 4,
    "tests/pretrained": 13,
    "tests/report": 26,
    "tests/rewards": 13,
    "tests/rlcf": 19,
    "tests/rules": 1,
    "tests/sandbox": 14,
    "tests/selfrank": 8,
    "tests/stackoverflow": 3,
    "tests/tools": 38,
    "tests/training": 30,
    "tools": 14,
}
"""hits per directory; `python -m tools.prose` prints the current ones"""


def test_no_directory_has_more_odd_phrases_than_its_ceiling_or_a_ceiling_that_is_too_high():
    counts: collections.Counter[str] = collections.Counter()
    for path in prose.tracked(["."]):
        counts[prose.directory(path)] += len(prose.hits(prose.ROOT / path)[0])
    more = {name: count for name, count in counts.items() if count > CEILINGS.get(name, 0)}
    assert not more, f"rewrite these (python -m tools.prose DIRECTORY --show): {more}"
    fewer = {name: counts[name] for name, ceiling in CEILINGS.items() if counts[name] < ceiling}
    assert not fewer, f"lower the ceilings in {Path(__file__).name} to {fewer}"


@pytest.mark.parametrize(
    "text",
    [
        "The value head stands above the trunk.",
        "The reward alone decides.",
        "A gain counts where it holds.",
        "The script says which flag is wrong.",
        "There is a file beside it, of which the loader reads a line.",
        "What is left is padding.",
        "It is no reward model.",
    ],
)
def test_an_odd_phrase_is_found_in_every_kind_of_text(text, tmp_path):
    files = {
        "page.md": f"# A page\n\n{text}\n",
        "docstring.py": f'def f():\n    """Return one.\n\n    {text}\n    """\n',
        "comment.py": f"x = 1\n# {text}\n",
        "message.py": f'y = 0\nraise ValueError(f"{{y}}: {text}")\n',
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        [hits, _] = prose.hits(tmp_path / name)
        assert hits, (name, text)
        assert all(text in hit.text for hit in hits), (name, hits)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ('def f():\n    """Of every run."""\n', 2),
        ('"""How far a ratio may be."""\n', 1),
        ("def f(mine):\n    return mine\n", 1),
        ("x = 1\nplace = 2\n", 2),
        ("def test_the_value_alone_decides():\n    pass\n", 1),
    ],
)
def test_a_docstring_a_name_and_a_test_name_are_found_at_their_line(source, line, tmp_path):
    (tmp_path / "code.py").write_text(source)
    [[hit], _] = prose.hits(tmp_path / "code.py")
    assert hit.line == line


def test_plain_text_code_blocks_and_code_have_no_hits(tmp_path):
    (tmp_path / "page.md").write_text(
        "Masks are positive. None stands for a missing value.\n\n```sh\n# it stands alone\n```\n\n    it holds\n"
    )
    (tmp_path / "code.py").write_text(
        '"""Return the mask."""\n\nalone = {"says": 1}  # the only key\nholds = alone["says"]\n'
    )
    assert prose.hits(tmp_path / "page.md")[0] == []
    assert prose.hits(tmp_path / "code.py")[0] == []


def test_the_command_prints_hits_with_file_and_line():
    run = subprocess.run(
        [sys.executable, "-m", "tools.prose", "tools/prose.py", "--show"],
        capture_output=True,
        text=True,
        cwd=prose.ROOT,
    )
    assert run.returncode == 0, run.stderr
    assert "tools/prose.py:" in run.stdout
    assert run.stdout.splitlines()[-1].startswith("total")
