"""Helpers shared by the reports of all studies: reading evaluations, and writing tables as CSV and Markdown."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from nanorlhf.dataset import field
from nanorlhf.errors import InputError
from nanorlhf.files import read_object, read_text
from nanorlhf.metrics import t_interval
from nanorlhf.report.page import Lines, number

Numbers = dict[str, float | None]


def evaluated(path: Path) -> dict[str, Any]:
    """Read the policies of an eval.json."""
    policies = part(read_object(path), str(path), "policies")
    if not isinstance(policies, dict) or not policies:
        raise InputError(f"{path} has no policies: evaluate again with eval.py tiny.")
    return policies


def part(record: Any, where: str, *keys: str) -> Any:
    """Return `record[key][key]...`. Raises InputError if it is missing."""
    for key in keys:
        if not isinstance(record, dict) or key not in record:
            raise InputError(f"{where}: {'.'.join(keys)} is missing: evaluate this setting again.")
        record = record[key]
    return record


def float_at(record: Any, where: str, *keys: str) -> float | None:
    """Return `part` as a number or None. Raises InputError for anything else."""
    value = part(record, where, *keys)
    return None if value is None else field({keys[-1]: value}, keys[-1], float, where)


def csv_text(lines: Iterable[Iterable[object]]) -> str:
    """Format the lines of a table as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


Line = dict[str, str]  # of a CSV


def read_csv(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, Line]]:
    """Yield the lines of a CSV, each after `path:line number`; none if the file doesn't exist.

    Raises InputError for other columns or a wrong number of cells.
    """
    if not path.exists():
        return
    lines = csv.reader(io.StringIO(read_text(path)))
    if tuple(next(lines, [])) != columns:
        raise InputError(f"{path}:1: the columns must be {','.join(columns)}.")
    for cells in lines:
        where = f"{path}:{lines.line_num}"
        if len(cells) != len(columns):
            raise InputError(f"{where}: expected {len(columns)} cells, got {len(cells)}.")
        yield where, dict(zip(columns, cells, strict=True))


def by_policy_and_seed(lines: Iterable[Line]) -> dict[str, dict[str, Line]]:
    """Group the lines of a CSV, policy -> seed -> line."""
    groups: dict[str, dict[str, Line]] = {}
    for line in lines:
        groups.setdefault(line["policy"], {})[line["seed"]] = line
    return groups


def mean_difference(values: Sequence[float], digits: int = 3) -> str:
    """Format the mean of differences and its 95% interval by Student's t; "-" without values."""
    return number(fmean(values) if values else None, t_interval(values), digits, "+")


def paired_difference(ours: dict[str, Line], theirs: dict[str, Line], column: str) -> str:
    """Format the mean difference over common seeds, with its 95% interval by Student's t.

    Seeds with an empty cell are skipped; "-" without any other.
    """
    pairs = [(ours[seed][column], theirs[seed][column]) for seed in ours if seed in theirs]
    values = [float(our) - float(their) for our, their in pairs if our and their]
    return mean_difference(values)


def markdown(table: Lines) -> str:
    """Format a table as Markdown."""
    head, *lines = (f"| {' | '.join(line)} |" for line in table)
    return "\n".join([head, "|" + " --- |" * len(table[0]), *lines])


def with_tables(page: str, where: Path, tables: str, marks: tuple[str, str]) -> str:
    """Replace the text between a page's marks. Raises InputError if they are missing."""
    before, begins, rest = page.partition(marks[0])
    _, ends, after = rest.partition(marks[1])
    if not begins or not ends:
        raise InputError(f"{where}: the lines {marks[0]} and {marks[1]} are missing; the tables go between them.")
    return f"{before}{begins}\n\n{tables}\n\n{ends}{after}"
