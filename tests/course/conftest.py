"""Fixtures: a copy of the repository, and processes that run tests in one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from course.copies import ROOT, copy_files
from course.grader.grade import Grader, graders
from course.grader.worker import Worker


@pytest.fixture(scope="session")
def worker() -> Iterator[Worker]:
    with Worker() as started:
        yield started


@pytest.fixture(scope="session")
def grader() -> Iterator[Grader]:
    with graders(1) as [made]:
        yield made


@pytest.fixture
def copy(tmp_path) -> Path:
    """Return a complete copy of the repository."""
    copy_files(ROOT, tmp_path / "copy")
    return tmp_path / "copy"
