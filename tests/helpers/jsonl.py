"""Read back what a program wrote."""

from pathlib import Path

from nanorlhf.dataset import field, iter_jsonl


def read_jsonl(path: Path, fields: dict[str, type]) -> list[dict]:
    """All rows of a file; those `fields` must have these types."""
    rows = []
    for where, record in iter_jsonl(path):
        for name, kind in fields.items():
            field(record, name, kind, where)
        rows.append(record)
    return rows
