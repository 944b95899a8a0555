"""What the evaluations' tests share."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def without_pictures(undrawn):
    pass
