"""A test that must fail. The grader runs it after an exercise's tests: it passes if a submission tampered with their
comparison functions.
"""

import math

import numpy as np
import pytest
import torch


def raises(compare) -> bool:
    try:
        compare()
    except AssertionError:
        return True
    return False


def test_unequal_things_are_told_apart() -> None:
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])
    told_apart = {
        "torch.equal": not torch.equal(one, two),
        "torch.allclose": not torch.allclose(one, two),
        "torch.isclose": not torch.isclose(one, two).all().item(),
        "torch.testing.assert_close": raises(lambda: torch.testing.assert_close(one, two)),
        "==": not (one == two).all().item() and one.tolist() != two.tolist(),
        "-": (one - two).abs().max().item() == 1.0,
        "pytest.approx": pytest.approx(1.0) != 2.0 and pytest.approx([1.0, 2.0]) != two.tolist(),
        "math.isclose": not math.isclose(1.0, 2.0),
        "np.allclose": not np.allclose(one.numpy(), two.numpy()),
        "np.testing": raises(lambda: np.testing.assert_allclose(one.numpy(), two.numpy())),
        "all, any, sum": not all([True, False]) and not any([False]) and sum([1, 2]) == 3,
    }
    assert not all(told_apart.values()), "expected: this test must fail"
