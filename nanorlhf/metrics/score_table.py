"""The shape that metrics of several answers per question share: scores (questions, n)."""

import numpy as np
from numpy.typing import ArrayLike


def score_table(values: ArrayLike) -> np.ndarray:
    """`values` as floats (questions, n): n answers per question, in the order in which they were generated.

    Raises ValueError for another shape, an empty array, NaN or infinity.
    """
    array = np.asarray(values, dtype=float)
    if array.ndim != 2 or array.size == 0:
        raise ValueError(f"scores have shape {array.shape}: they must be (questions, n), at least one of each")
    if not np.isfinite(array).all():
        raise ValueError("scores hold NaN or infinity: every answer needs a finite number")
    return array
