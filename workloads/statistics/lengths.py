"""How long requests are: counts of each length, so quantiles are exact and memory grows with distinct lengths only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

PERCENTILES = (50, 90, 99)


class LengthCounts:
    """How many requests have which length, in tokens."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, tokens: NDArray[np.int64]) -> None:
        """Counts some requests."""
        values, counts = np.unique(tokens, return_counts=True)
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            self._counts[value] += count

    @property
    def total(self) -> int:
        """Tokens of all requests."""
        return sum(value * count for value, count in self._counts.items())

    def distribution(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Each length that occurs, ascending, and the number of requests that are no longer."""
        values = sorted(self._counts)
        return np.array(values, np.int64), np.cumsum([self._counts[value] for value in values])

    def summary(self) -> dict[str, float]:
        """Mean, min, max, total and percentiles in tokens; a percentile is the shortest that covers its share."""
        values, ranks = self.distribution()
        count = self._counts.total()
        places = {percent: np.searchsorted(ranks, -(-percent * count // 100)) for percent in PERCENTILES}
        return {
            "mean": self.total / count,
            "min": int(values[0]),
            **{f"p{percent}": int(values[place]) for percent, place in places.items()},
            "max": int(values[-1]),
            "total": self.total,
        }


@dataclass(slots=True)
class Correlation:
    """Pearson's correlation of two columns, from their sums."""

    count: int = 0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    yy: float = 0.0
    xy: float = 0.0

    def add(self, x: NDArray[np.int64], y: NDArray[np.int64]) -> None:
        """Takes in some pairs."""
        a, b = x.astype(np.float64), y.astype(np.float64)
        self.count += len(a)
        self.x += float(a.sum())
        self.y += float(b.sum())
        self.xx += float((a * a).sum())
        self.yy += float((b * b).sum())
        self.xy += float((a * b).sum())

    @property
    def value(self) -> float | None:
        """From -1 to 1; None where a column does not vary."""
        if not self.count:
            return None
        mean_x, mean_y = self.x / self.count, self.y / self.count
        var_x, var_y = self.xx / self.count - mean_x**2, self.yy / self.count - mean_y**2
        if var_x <= 1e-12 * mean_x**2 or var_y <= 1e-12 * mean_y**2:  # the rounding of the sums
            return None
        return max(-1.0, min(1.0, (self.xy / self.count - mean_x * mean_y) / sqrt(var_x * var_y)))
