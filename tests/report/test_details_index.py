"""The details index in a report: rows become links from the report to the source."""

import re
from pathlib import Path

from nanorlhf.report.details_index import ROOT, line_of, with_lines
from nanorlhf.report.summary_report import details_section

INDEX = """# The details index

| detail | what | where | proved by |
|---|---|---|---|
| N+ 3 | Space: `TL;DR:` & so on | [`nanorlhf/dataset.py`](../nanorlhf/dataset.py) | `tests/test_dataset.py::test_a` |
| SO eq 2 | Another paper's detail | [`nanorlhf/ppo.py`](../nanorlhf/ppo.py) | `tests/test_ppo.py::test_b` |
"""


def test_each_numbered_detail_links_to_its_line_and_its_test(tmp_path) -> None:
    (tmp_path / "details.md").write_text(INDEX)
    page = details_section(tmp_path / "runs" / "report.html", tmp_path / "details.md")
    assert "<b>N+ 3</b> Space: <code>TL;DR:</code> &amp; so on" in page and "SO eq 2" not in page
    line = line_of("N+ 3", (ROOT / "nanorlhf" / "dataset.py").read_text())
    links = re.findall(r'href="([^"#]+)(#L\d+)?"', page)
    assert [anchor for _, anchor in links] == [f"#L{line}", ""] and "<code>test_a</code>" in page
    files = [(tmp_path / "runs" / link).resolve() for link, _ in links]
    assert files == [ROOT / "nanorlhf/dataset.py", ROOT / "tests/test_dataset.py"]


def test_without_an_index_the_section_is_empty(tmp_path: Path) -> None:
    assert details_section(tmp_path / "report.html", tmp_path / "details.md") == ""


def test_the_line_is_the_last_that_carries_the_tag() -> None:
    source = "x\n# [N+ 1]\ny\n# [N+ 1, 2]\n"
    assert [line_of(tag, source) for tag in ("N+ 1", "N+ 2", "N+ 12")] == [4, 4, None]


def test_the_site_shows_the_lines_that_the_page_leaves_out() -> None:
    line = line_of("N+ 3", (ROOT / "nanorlhf" / "dataset.py").read_text())
    [row] = [row for row in with_lines(INDEX).splitlines() if row.startswith("| N+ 3 ")]
    assert f"[`nanorlhf/dataset.py:{line}`](../nanorlhf/dataset.py#L{line})" in row
    assert re.sub(r":\d+`|#L\d+", lambda match: "`" * match[0].endswith("`"), row) in INDEX
