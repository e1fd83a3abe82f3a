"""Samples of a latency: exact statistics of a few million values, close ones of any number, in bounded memory.

Beyond `EXACT` values they are folded into bins: a float64's exponent and the first 12 bits of its fraction, so that a
percentile is off by at most one part in 8192. Mean and standard deviation use every value as it is.
"""

from __future__ import annotations

from itertools import repeat
from operator import sub

import numpy as np
from numpy.typing import NDArray

PERCENTILES = (50, 90, 95, 99)
EXACT = 2_000_000  # values kept as they are
CHUNK = 8192  # values packed together
_DROPPED_BITS = 40  # of the 52 bits of a float64's fraction
LARGEST_ERROR = 2.0 ** (_DROPPED_BITS - 53)  # of a folded value, relative

_Values = NDArray[np.float64]
_Counts = NDArray[np.int64]


class Samples:
    """Values above 0, each counted once."""

    def __init__(self) -> None:
        self.values: list[float] = []  # the latest; a list takes numbers faster than an array does
        self._kept: list[_Values] = []
        self._num_kept = 0
        self._bins: dict[int, int] = {}
        self._count = 0  # of the folded values, as are the two sums
        self._sum = 0.0
        self._sum_of_squares = 0.0

    def add(self, value: float) -> None:
        """One value more."""
        self.values.append(value)
        if len(self.values) >= CHUNK:
            self._keep()

    def _keep(self) -> None:
        """Packs the latest values; folds all that are kept if there are too many."""
        if self.values:
            self._kept.append(np.array(self.values))
            self._num_kept += len(self.values)
            self.values = []
        if self._num_kept >= EXACT:
            self._fold()

    @property
    def largest_error(self) -> float:
        """By how much a percentile may be off, relative: 0 until there are too many values to keep."""
        return LARGEST_ERROR if self._bins else 0.0

    def statistics(self, name: str) -> dict[str, float | None]:
        """Mean, median, standard deviation and percentiles in milliseconds, None without values.

        Args:
            name: such as `ttft`; the keys are those of `vllm bench serve`: `mean_ttft_ms` …
        """
        keys = [f"{what}_{name}_ms" for what in ("mean", "median", "std", *(f"p{p}" for p in PERCENTILES))]
        self._keep()
        if not self._kept and not self._bins:
            return dict.fromkeys(keys, None)
        values, counts = self._values(), self._counts()
        count = self._count + int(counts.sum())
        mean = (self._sum + float((values * counts).sum())) / count
        if self._bins:
            squares = self._sum_of_squares + float((values**2 * counts).sum())
            variance = max(0.0, squares / count - mean**2)
            self._fold()
            values, counts = self._folded()
        else:
            variance = float(np.average((values - mean) ** 2, weights=counts))
        order = np.argsort(values, kind="stable")
        values, upto = values[order], np.cumsum(counts[order])
        quantiles = [_quantile(values, upto, p / 100) for p in (50, *PERCENTILES)]
        figures = (mean, quantiles[0], variance**0.5, *quantiles[1:])
        return dict(zip(keys, (1000 * figure for figure in figures), strict=True))

    def _values(self) -> _Values:
        """The kept values, one after another."""
        return np.concatenate(self._kept) if self._kept else np.empty(0)

    def _counts(self) -> _Counts:
        """How often each of them counts."""
        return np.ones(self._num_kept, dtype=np.int64)

    def _fold(self) -> None:
        """Moves the kept values into bins."""
        values, counts = self._values(), self._counts()
        self._count += int(counts.sum())
        self._sum += float((values * counts).sum())
        self._sum_of_squares += float((values**2 * counts).sum())
        bins, index = np.unique(values.view(np.int64) >> _DROPPED_BITS, return_inverse=True)
        totals = np.bincount(index, weights=counts).astype(np.int64)
        for bin_, total in zip(bins.tolist(), totals.tolist(), strict=True):
            self._bins[bin_] = self._bins.get(bin_, 0) + total
        self._kept, self._num_kept = [], 0

    def _folded(self) -> tuple[_Values, _Counts]:
        """The middle of each bin, and how many values it holds."""
        bins = np.fromiter(self._bins, dtype=np.int64)
        middles = ((bins << _DROPPED_BITS) + (1 << (_DROPPED_BITS - 1))).view(np.float64)
        return middles, np.fromiter(self._bins.values(), dtype=np.int64)


class Intervals(Samples):
    """Times between tokens: many sequences share one."""

    def __init__(self) -> None:
        super().__init__()
        self._shared_by: list[int] = []  # how often each of the latest values counts
        self._kept_counts: list[_Counts] = []

    def add(self, value: float) -> None:
        """The interval of one sequence."""
        self._shared_by.append(1)
        super().add(value)

    def add_intervals(self, times: list[float], count: int) -> None:
        """The intervals between all of `times`, for `count` sequences."""
        if len(times) == 2:
            self.values.append(times[1] - times[0])
            self._shared_by.append(count)
        else:
            self.values += map(sub, times[1:], times)
            self._shared_by += repeat(count, len(times) - 1)
        if len(self.values) >= CHUNK:
            self._keep()

    def _keep(self) -> None:
        self._kept_counts.append(np.array(self._shared_by, dtype=np.int64))
        self._shared_by = []
        super()._keep()

    def _counts(self) -> _Counts:
        return np.concatenate(self._kept_counts) if self._kept_counts else np.empty(0, dtype=np.int64)

    def _fold(self) -> None:
        super()._fold()
        self._kept_counts = []


def _quantile(values: _Values, upto: _Counts, q: float) -> float:
    """Linear interpolation between order statistics, as `numpy.percentile` does it, over values with counts.

    Args:
        values: shape (n,), ascending.
        upto: shape (n,), how many samples there are up to and including each value.
        q: from 0 to 1.
    """
    position = q * (int(upto[-1]) - 1)
    below = int(position)
    low = values[np.searchsorted(upto, below, side="right")]
    high = values[np.searchsorted(upto, min(below + 1, int(upto[-1]) - 1), side="right")]
    return float(low + (high - low) * (position - below))
