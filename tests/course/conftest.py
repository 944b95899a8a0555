"""A copy of the repository, made once, and a process that runs tests in it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from course.copies import ROOT, copy_files
from course.grader.grade import Desk, desks
from course.grader.worker import Worker


@pytest.fixture(scope="session")
def worker() -> Iterator[Worker]:
    with Worker() as started:
        yield started


@pytest.fixture(scope="session")
def desk() -> Iterator[Desk]:
    with desks(1) as [made]:
        yield made


@pytest.fixture
def copy(tmp_path) -> Path:
    """Of the repository, with nothing taken out."""
    copy_files(ROOT, tmp_path / "copy")
    return tmp_path / "copy"
