"""Least squares with coefficients of at least 0 (Lawson and Hanson, *Solving Least Squares Problems*, 1974, ch. 23).

A time has no negative parts, so a fit of one may not have them either: unconstrained, two quantities that grow together
get large coefficients of opposite sign, and nonsense where they do not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
TOLERANCE = 1e-12  # of the gradient, over its largest part at 0


def nonnegative_least_squares(rows: Floats, values: Floats) -> Floats:
    """The coefficients x >= 0 that minimise |rows @ x - values|.

    Columns are scaled to length 1 meanwhile, so that their units do not matter.

    Args:
        rows: shape (n, k).
        values: shape (n,).

    Returns:
        Shape (k,); 0 for a column of zeros.
    """
    lengths = np.linalg.norm(rows, axis=0)
    scaled = rows / np.where(lengths > 0, lengths, 1.0)
    x = np.zeros(rows.shape[1])
    free = np.zeros(len(x), dtype=bool)
    gradient = scaled.T @ values
    least = TOLERANCE * float(np.abs(gradient).max(initial=0.0))
    for _ in range(10 * len(x)):
        candidates = np.where(free | (lengths == 0), -np.inf, gradient)
        if not len(x) or candidates.max() <= least:
            break
        free[int(candidates.argmax())] = True
        while free.any():
            solution = np.zeros(len(x))
            solution[free] = np.linalg.lstsq(scaled[:, free], values, rcond=None)[0]
            if (solution[free] > 0).all():
                x = solution
                break
            bad = free & (solution <= 0)
            step = float(np.min(x[bad] / np.maximum(x[bad] - solution[bad], np.finfo(float).tiny)))
            x = np.maximum(x + step * (solution - x), 0.0)
            free &= x > 0
        gradient = scaled.T @ (values - scaled @ x)
    return x / np.where(lengths > 0, lengths, 1.0)
