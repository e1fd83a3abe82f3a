"""How requests arrive: gaps between them, counts per window, and the rate over time; in one pass and bounded memory.

Poisson arrivals have gaps with a coefficient of variation of 1, and counts whose variance is their mean, whatever the
window (index of dispersion 1; Cox and Lewis, 1966). Above 1 is burstier. An index that grows with the window says
that bursts, or a rate that changes, last about as long as that; gaps alone cannot show it.
"""

from __future__ import annotations

from math import sqrt

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

WINDOWS_S = (1.0, 10.0, 60.0, 600.0, 3600.0)
FEWEST_WINDOWS = 10  # that an index is computed from
MOST_BINS = 512  # of the rate over time
FINEST_BIN_S = 2.0**-10
# Gaps are counted in bins of equal width on a logarithmic scale: 100 a decade, so 2.3 % wide, from 1 ns to 10^9 s.
GAP_EDGES_S: Floats = 10.0 ** (np.arange(-900, 901) / 100)


class Gaps:
    """Seconds between one arrival and the next."""

    def __init__(self) -> None:
        self._latest: float | None = None
        self._num_gaps = self._num_zero = 0
        self._sum = self._squares = self._longest = 0.0
        self._counts: Ints = np.zeros(len(GAP_EDGES_S) + 1, np.int64)

    def add(self, arrival_s: Floats) -> None:
        """Takes in further arrivals."""
        gaps = np.diff(arrival_s) if self._latest is None else np.diff(arrival_s, prepend=self._latest)
        self._latest = float(arrival_s[-1])
        if not len(gaps):
            return
        self._num_gaps += len(gaps)
        self._num_zero += int((gaps == 0).sum())
        self._sum += float(gaps.sum())
        self._squares += float((gaps * gaps).sum())
        self._longest = max(self._longest, float(gaps.max()))
        self._counts += np.bincount(np.searchsorted(GAP_EDGES_S, gaps), minlength=len(self._counts))

    def summary(self) -> dict[str, float | None]:
        """Mean and longest gap in seconds, coefficient of variation, and share of gaps of 0; None where undefined."""
        if not self._num_gaps:
            return {"mean_s": None, "cv": None, "max_s": None, "zero_share": None}
        mean = self._sum / self._num_gaps
        variance = max(0.0, self._squares / self._num_gaps - mean**2)
        return {
            "mean_s": mean,
            "cv": sqrt(variance) / mean if mean else None,
            "max_s": self._longest,
            "zero_share": self._num_zero / self._num_gaps,
        }

    def distribution(self) -> tuple[Floats, Floats]:
        """Gap lengths in seconds, and the exact share of gaps no longer than each; from the shortest to the longest."""
        shares = np.cumsum(self._counts)[:-1] / max(1, self._num_gaps)
        some = np.flatnonzero(self._counts[:-1])
        if not len(some):
            return GAP_EDGES_S[:0], shares[:0]
        shown = slice(max(0, int(some[0]) - 1), int(some[-1]) + 1)
        return GAP_EDGES_S[shown], shares[shown]


class Dispersion:
    """Variance over mean of the number of arrivals in windows that follow one another from the first arrival on.

    The last window, which the trace may end in the middle of, is left out.

    Args:
        window_s: length of a window in seconds.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._zero: float | None = None
        self._open, self._open_count = 0, 0  # the window that may still get arrivals
        self._sum = self._squares = 0

    def add(self, arrival_s: Floats) -> None:
        """Takes in further arrivals."""
        if self._zero is None:
            self._zero = float(arrival_s[0])
        windows, counts = np.unique((arrival_s - self._zero) // self._window_s, return_counts=True)
        if windows[0] == self._open:
            counts[0] += self._open_count
        elif self._open_count:
            self._close(np.array([self._open_count]))
        self._open, self._open_count = int(windows[-1]), int(counts[-1])
        self._close(counts[:-1])

    def _close(self, counts: Ints) -> None:
        self._sum += int(counts.sum())
        self._squares += int((counts * counts).sum())

    def summary(self) -> dict[str, float | None]:
        """Whole windows, empty ones included, their mean count, and the index; None if there are too few windows."""
        mean = self._sum / self._open if self._open else None
        index = None
        if mean and self._open >= FEWEST_WINDOWS:
            index = (self._squares / self._open - mean**2) / mean
        return {"window_s": self._window_s, "windows": self._open, "mean": mean, "index": index}


class RateOverTime:
    """Arrivals in at most `MOST_BINS` bins of equal length, which doubles whenever they no longer reach.

    Attributes:
        bin_s: length of a bin in seconds.
        start_s: where the first begins: the first arrival.
    """

    def __init__(self) -> None:
        self.bin_s = FINEST_BIN_S
        self.start_s: float | None = None
        self._counts: Ints = np.zeros(MOST_BINS, np.int64)
        self._last = 0

    def add(self, arrival_s: Floats) -> None:
        """Takes in further arrivals."""
        if self.start_s is None:
            self.start_s = float(arrival_s[0])
        offsets = arrival_s - self.start_s
        while offsets[-1] >= MOST_BINS * self.bin_s:
            self._counts = np.concatenate([self._counts.reshape(-1, 2).sum(1), np.zeros(MOST_BINS // 2, np.int64)])
            self.bin_s *= 2
        bins = (offsets / self.bin_s).astype(np.int64)  # exact: a power of two
        self._last = int(bins[-1])
        self._counts += np.bincount(bins, minlength=MOST_BINS)

    def counts(self) -> Ints:
        """Arrivals in each bin. The last, in which the trace ends, is left out unless it is the only one."""
        return self._counts[: max(1, self._last)]
