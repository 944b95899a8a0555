"""What the evaluations' tests share."""

import pytest

from nanorlhf.metrics import length_control


@pytest.fixture(scope="module", autouse=True)
def without_pictures(undrawn):
    pass


@pytest.fixture(scope="module", autouse=True)
def few_resamples():
    """Regressions would take most of the time; their intervals are tested where they are made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(length_control, "NUM_RESAMPLES", 10)
        yield
