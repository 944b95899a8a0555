"""What the reports of all studies share: reading evaluations, and tables as CSV and as Markdown."""

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nanorlhf.dataset import field
from nanorlhf.errors import InputError
from nanorlhf.files import read_object
from nanorlhf.report.page import Lines

Numbers = dict[str, float | None]


def evaluated(path: Path) -> dict[str, Any]:
    """The policies of an eval.json."""
    policies = part(read_object(path), str(path), "policies")
    if not isinstance(policies, dict) or not policies:
        raise InputError(f"{path}: it holds no policies: evaluate again with eval.py tiny.")
    return policies


def part(record: Any, where: str, *keys: str) -> Any:
    """`record[key][key]...`; InputError where a file lacks it."""
    for key in keys:
        if not isinstance(record, dict) or key not in record:
            raise InputError(f"{where}: {'.'.join(keys)} is missing: evaluate this setting again.")
        record = record[key]
    return record


def float_at(record: Any, where: str, *keys: str) -> float | None:
    """`part`, a number or None."""
    found = part(record, where, *keys)
    return None if found is None else field({keys[-1]: found}, keys[-1], float, where)


def csv_text(lines: Iterable[Iterable[object]]) -> str:
    """The lines of a table as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def markdown(table: Lines) -> str:
    """A table of a page in docs/."""
    head, *lines = (f"| {' | '.join(line)} |" for line in table)
    return "\n".join([head, "|" + " --- |" * len(table[0]), *lines])


def with_tables(page: str, where: Path, tables: str, marks: tuple[str, str]) -> str:
    """A page with the text between its marks replaced. Raises InputError where it lacks them."""
    before, begins, rest = page.partition(marks[0])
    _, ends, after = rest.partition(marks[1])
    if not begins or not ends:
        raise InputError(f"{where}: it must have the lines {marks[0]} and {marks[1]}, between which the tables stand.")
    return f"{before}{begins}\n\n{tables}\n\n{ends}{after}"
