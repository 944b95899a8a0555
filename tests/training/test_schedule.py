import pytest

from nanorlhf.training.schedule import lr_factor


def test_linear_is_the_papers_fraction():
    """PPO update u of U, counted from 1: 1 - (u - 1) / U. [N+ 20]"""
    assert [lr_factor("linear", u - 1, 4) for u in (1, 2, 3, 4)] == [1.0, 0.75, 0.5, 0.25]


def test_cosine_starts_at_one_is_half_way_in_the_middle_and_falls_to_zero():
    assert lr_factor("cosine", 0, 10) == 1.0
    assert lr_factor("cosine", 5, 10) == pytest.approx(0.5)
    assert lr_factor("cosine", 10, 10) == pytest.approx(0.0)


def test_warm_up_rises_in_a_straight_line_to_the_peak():
    assert [lr_factor("constant", step, 10, 4) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
