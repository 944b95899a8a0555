import math

import pytest

from nanorlhf.errors import InputError
from nanorlhf.training.optimizer import check_warmup, lr_factor


def test_linear_is_the_papers_fraction():
    """1 - (u - 1) / U at PPO update u of U, counted from 1. [N+ 20]"""
    assert [lr_factor("linear", u - 1, 4) for u in (1, 2, 3, 4)] == [1.0, 0.75, 0.5, 0.25]


def test_cosine_starts_at_one_is_half_way_in_the_middle_and_falls_to_zero():
    assert lr_factor("cosine", 0, 10) == 1.0
    assert lr_factor("cosine", 5, 10) == pytest.approx(0.5)
    assert lr_factor("cosine", 10, 10) == pytest.approx(0.0)


def test_warm_up_rises_in_a_straight_line_to_the_peak():
    assert [lr_factor("constant", step, 10, 4) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_the_decay_begins_after_the_warm_up():
    """With 4 of 8 steps of warm-up, the remaining steps are 0, 1/4, 1/2 and 3/4 of the way down."""
    assert [lr_factor("linear", step, 8, 4) for step in range(4, 8)] == [1.0, 0.75, 0.5, 0.25]
    half = [0.5 * (1 + math.cos(math.pi * share)) for share in (0, 0.25, 0.5, 0.75)]
    assert [lr_factor("cosine", step, 8, 4) for step in range(4, 8)] == pytest.approx(half)


def test_a_warm_up_must_leave_a_step_at_the_peak():
    for num_steps in (4, 3):
        with pytest.raises(InputError, match=f"--warmup-steps 4 must be less than the {num_steps} steps"):
            check_warmup(4, num_steps)
    assert max(lr_factor("linear", step, 4, 4) for step in range(3)) < 1  # the refused schedule never peaks
    check_warmup(4, 5)
    assert max(lr_factor("linear", step, 5, 4) for step in range(5)) == 1
    check_warmup(0, 1)
    check_warmup(4, 0)  # a skipped stage
