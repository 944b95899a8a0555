"""The scripts stay short enough to be read on a wall."""

import ast
from pathlib import Path

import pytest

from tools import house

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("file", house.narrow_files(ROOT), ids=lambda file: str(file.relative_to(ROOT)))
def test_scripts_core_and_kernels_are_100_columns_wide(file) -> None:
    assert not house.long_lines(file), "shorten these lines, or run `make format`"


def test_ppo_fits_the_wall() -> None:
    source = (ROOT / "train_ppo.py").read_text()
    tree = ast.parse(source)
    main = house.main_function(tree)
    modules, names = house.imported(tree)
    assert len(source.splitlines()) <= 240
    assert main.end_lineno - main.lineno + 1 <= 110
    assert len(house.local_names(main)) <= 60
    assert len(modules) <= 12
    assert len(names) <= 35


def test_local_names_and_imports_are_counted_within_functions_too() -> None:
    tree = ast.parse(
        "def main(args):\n    from kernels import gae\n    x = [y for y in args]\n    def write(): z = 1\n"
    )
    assert house.local_names(house.main_function(tree)) == {"args", "x", "y", "z"}
    assert house.imported(tree) == ({"kernels"}, {"gae"})


def test_every_line_of_the_product_is_in_one_room() -> None:
    lines = house.lines_per_room(ROOT)
    assert {"scripts", "nanorlhf", "nanorlhf/training", "kernels", "data", "tests", "tools"} <= set(lines)
    assert lines["kernels"] == sum(len(file.read_text().splitlines()) for file in (ROOT / "kernels").glob("*.py"))
