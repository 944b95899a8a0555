"""Lines stay within 100 columns, and tools/house.py counts correctly."""

import ast
import textwrap
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

import train_grpo
import train_ppo
from tools import house

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("file", house.narrow_files(ROOT), ids=lambda file: str(file.relative_to(ROOT)))
def test_scripts_core_and_kernels_are_100_columns_wide(file) -> None:
    assert not house.long_lines(file), "shorten these lines, or run `make format`"


def test_local_names_and_imports_inside_functions_are_counted() -> None:
    tree = ast.parse(
        "def main(args):\n    from kernels import gae\n    x = [y for y in args]\n    def write(): z = 1\n"
    )
    assert house.local_names(house.main_function(tree)) == {"args", "x", "y", "z"}
    assert house.imported(tree) == ({"kernels"}, {"gae"})


@pytest.mark.parametrize("script", [train_ppo, train_grpo])
def test_the_number_of_flags_matches_help(script) -> None:
    def leaves(settings) -> int:
        values = [getattr(settings, field.name) for field in fields(settings)]
        return sum(leaves(value) if is_dataclass(value) else 1 for value in values)

    assert house.flags(ROOT, Path(script.__file__)) == leaves(script.Args())


def test_every_line_is_counted_in_one_folder() -> None:
    lines = house.lines_per_folder(ROOT)
    assert {"scripts", "nanorlhf", "nanorlhf/training", "kernels", "data", "tests", "tools"} <= set(lines)
    assert lines["kernels"] == sum(len(file.read_text().splitlines()) for file in (ROOT / "kernels").glob("*.py"))


def test_transitive_imports_are_counted(tmp_path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").write_text("\n\n")
    (tmp_path / "kernels/gae.py").write_text("import json\n")
    (tmp_path / "kernels/unused.py").write_text("\n")
    (tmp_path / "train_ppo.py").write_text("import kernels.gae\nx = 1\n")
    assert house.loaded(tmp_path, "train_ppo") == (3, 2 + 1 + 2)


def test_only_tuples_that_hide_a_signature_are_counted() -> None:
    body = "a = 1, 2\nb = g()\nf(*a)\nf(0, *a, 3)\nf(*b)\nf(*c)\nf(*h(*g()))\nx = [*a]\nf(**a)\n"
    within = f"class C:\n  def m(self, *c):\n{textwrap.indent(body, '    ')}"
    assert house.hidden_signatures(ast.parse(within)) == 2
    assert house.hidden_signatures(ast.parse(f"def outer():\n{textwrap.indent(within, '  ')}")) == 2
    assert house.hidden_signatures(ast.parse(body)) == 0  # module-level tuples don't count


def test_long_methods_are_counted() -> None:
    tree = ast.parse("class C:\n    def f(self):\n        g(1)\n")
    assert (house.long_functions(tree, 2), house.long_functions(tree, 1)) == (0, 1)
