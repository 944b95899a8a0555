"""The details index in a report: rows become links that lead from the report to the source."""

import re
from pathlib import Path

from nanorlhf.report.details_index import ROOT
from nanorlhf.report.page import details_section

INDEX = """# The details index

| detail | what | where | proved by |
|---|---|---|---|
| N+ 3 | No space after `TL;DR:` & so on | [`nanorlhf/dataset.py:1`](../nanorlhf/dataset.py#L1) | `tests/test_dataset.py::test_a` |
| SO eq 2 | Another paper's detail | [`nanorlhf/ppo.py:2`](../nanorlhf/ppo.py#L2) | `tests/test_ppo.py::test_b` |
"""  # noqa: E501


def test_each_numbered_detail_links_to_its_line_and_its_test(tmp_path) -> None:
    (tmp_path / "details.md").write_text(INDEX)
    page = details_section(tmp_path / "runs" / "report.html", tmp_path / "details.md")
    assert "<b>N+ 3</b> No space after <code>TL;DR:</code> &amp; so on" in page and "SO eq 2" not in page
    links = re.findall(r'href="([^"#]+)(#L1)?"', page)
    assert [line for _, line in links] == ["#L1", ""] and "<code>test_a</code>" in page
    files = [(tmp_path / "runs" / link).resolve() for link, _ in links]
    assert files == [ROOT / "nanorlhf/dataset.py", ROOT / "tests/test_dataset.py"]


def test_without_an_index_the_section_is_empty(tmp_path: Path) -> None:
    assert details_section(tmp_path / "report.html", tmp_path / "details.md") == ""
