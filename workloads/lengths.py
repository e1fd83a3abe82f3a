"""How long prompts and outputs are: distributions over whole numbers of tokens, 1 and up.

A distribution is what it is before the model's limit has a say. Pairs of prompt and output that exceed the limit
together are not generated; what remains is worked out in `length_pairs.py`, and it is there that a `Lognormal` gets its
location.
"""

import math
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from workloads.errors import UserError
from workloads.readers.length_column import count_lengths

Probabilities = NDArray[np.float64]
"""One number for each length from 0 to some limit, both included; the first is 0."""


class Fixed:
    """Every length is the same.

    Args:
        tokens: the length; at least 1.
    """

    def __init__(self, tokens: int) -> None:
        if tokens < 1:
            raise UserError(f"a fixed length is tokens={tokens}; expected a whole number of at least 1.")
        self._tokens = tokens

    def probabilities(self, limit: int) -> Probabilities:
        """The share of lengths at each number of tokens up to `limit`; what lies above is missing from the sum."""
        lengths = np.zeros(limit + 1)
        lengths[self._tokens : self._tokens + 1] = 1.0
        return lengths

    def __str__(self) -> str:
        return f"{self._tokens} tokens"


class Uniform:
    """Every length from `low` to `high`, both included, is as likely as any other.

    Args:
        low: tokens; at least 1.
        high: tokens; at least `low`.
    """

    def __init__(self, low: int, high: int) -> None:
        if not 1 <= low <= high:
            raise UserError(f"a uniform length has low={low} and high={high}; expected 1 <= low <= high.")
        self._low = low
        self._high = high

    def probabilities(self, limit: int) -> Probabilities:
        """The share of lengths at each number of tokens up to `limit`; what lies above is missing from the sum."""
        lengths = np.zeros(limit + 1)
        lengths[self._low : self._high + 1] = 1.0 / (self._high - self._low + 1)
        return lengths

    def __str__(self) -> str:
        return f"{self._low} to {self._high} tokens"


class Lognormal:
    """Lengths whose logarithm is normal, rounded to whole tokens, at least 1.

    Args:
        mean: mean number of tokens of the lengths *that are generated*: after rounding, and after pairs that exceed the
            model's limit are gone. It is at least 1. The distribution is shifted until its mean is this.
        sigma: standard deviation of the natural logarithm before rounding and limit; above 0. 1.0 is about what chat
            traces show.
    """

    def __init__(self, mean: float, sigma: float) -> None:
        if not (mean >= 1 and math.isfinite(mean)):
            raise UserError(f"a lognormal length has mean={mean}; expected at least 1 token.")
        if not 0 < sigma <= 10:
            raise UserError(
                f"a lognormal length has sigma={sigma}; expected above 0 and at most 10 (a fixed length is Fixed)."
            )
        self.mean = mean
        self.sigma = sigma

    def probabilities(self, limit: int, location: float) -> Probabilities:
        """The share of lengths at each number of tokens up to `limit`, if ln(length) has the mean `location`."""
        grid, normal_cdf = _normal_cdf()
        # All that rounds down to k tokens lies below k + 1/2; what lies below 1/2 counts as 1 token.
        below = np.interp((_log_edges(limit) - location) / self.sigma, grid, normal_cdf, left=0.0, right=1.0)
        below[0] = 0.0
        return np.diff(below, prepend=0.0)

    def __str__(self) -> str:
        return f"lognormal with a mean of {self.mean:g} tokens and sigma {self.sigma:g}"


@cache
def _normal_cdf() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The standard normal distribution function on a grid so fine that a straight line between points errs by 2e-9."""
    grid = np.linspace(-9.0, 9.0, 18 * 4096 + 1)
    return grid, np.array([math.erfc(-z / math.sqrt(2.0)) / 2.0 for z in grid.tolist()])


@lru_cache(maxsize=2)
def _log_edges(limit: int) -> NDArray[np.float64]:
    edges: NDArray[np.float64] = np.log(np.arange(limit + 1) + 0.5)
    return edges


class Empirical:
    """The lengths that a column of a file has, each as often as there.

    Prompts and outputs are drawn independently of one another, even if both come from one file.

    Args:
        path: a file ending in .csv (UTF-8, first line names the columns), .jsonl (one object a line) or .parquet.
        column: the column's name, or the objects' key. Every value has to be a whole number of at least 1.

    Raises:
        UserError: no such file or column, another kind of file, or a value that is no length (with its line or row).
    """

    def __init__(self, path: str, column: str) -> None:
        occurrences = count_lengths(path, column)
        num_rows = occurrences.total()
        self._share = {length: rows / num_rows for length, rows in sorted(occurrences.items())}
        self._name = f"{column} of {path}"

    def probabilities(self, limit: int) -> Probabilities:
        """The share of lengths at each number of tokens up to `limit`; what lies above is missing from the sum."""
        lengths = np.zeros(limit + 1)
        for length, share in self._share.items():
            if length <= limit:
                lengths[length] = share
        return lengths

    def __str__(self) -> str:
        return self._name


LengthDistribution = Fixed | Uniform | Lognormal | Empirical
