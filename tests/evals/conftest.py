"""Fixtures shared by the tests of evaluations."""

import pytest

from nanorlhf.metrics import length_control


@pytest.fixture(scope="module", autouse=True)
def without_pictures(undrawn):
    pass


@pytest.fixture(scope="module", autouse=True)
def few_resamples():
    """Resample less: regressions would take most of the time, and other tests cover their intervals."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(length_control, "NUM_RESAMPLES", 10)
        yield
