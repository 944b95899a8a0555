"""The array shared by metrics of several answers per question: scores (questions, n)."""

import numpy as np
from numpy.typing import ArrayLike


def score_table(values: ArrayLike) -> np.ndarray:
    """Return `values` as floats (questions, n): n answers per question, in the order of generation.

    Raises ValueError for other shapes, an empty array, NaN or infinity.
    """
    array = np.asarray(values, dtype=float)
    if array.ndim != 2 or array.size == 0:
        raise ValueError(f"scores have shape {array.shape}: expected (questions, n), at least one of each")
    if not np.isfinite(array).all():
        raise ValueError("scores contain NaN or infinity: each answer needs a finite number")
    return array
