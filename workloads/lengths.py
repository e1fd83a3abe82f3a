"""How long prompts and outputs are: distributions over whole numbers of tokens, 1 and up.

A distribution is what it is before the model's limit has a say. Pairs of prompt and output that exceed the limit
together are not generated; what remains is worked out in `length_pairs.py`, and it is there that a distribution which
asks for a mean (`Lognormal`, `Gamma`) gets its location: the logarithm of what its lengths are multiplied by.
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

    @property
    def lowest_location(self) -> float:
        """Where every length is 1."""
        return math.log(1.5) - 9.0 * self.sigma

    def highest_location(self, length: int) -> float:
        """Where all but a few in a million are longer than `length`."""
        return math.log(length) + 5.0 * self.sigma

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


class Gamma:
    """Lengths from a gamma distribution, rounded to whole tokens, at least 1. Its tail is lighter than a lognormal's.

    Args:
        mean: mean number of tokens of the lengths *that are generated*, as of `Lognormal`; at least 1.
        shape: of the distribution before rounding and limit, above 0 and at most 100: its variance is the mean squared
            over the shape. 1 is an exponential distribution, more is more even.
    """

    def __init__(self, mean: float, shape: float) -> None:
        if not (mean >= 1 and math.isfinite(mean)):
            raise UserError(f"a gamma length has mean={mean}; expected at least 1 token.")
        if not 0 < shape <= 100:
            raise UserError(f"a gamma length has shape={shape}; expected above 0 and at most 100.")
        self.mean = mean
        self.shape = shape
        self._end = shape + 10.0 * math.sqrt(shape) + 40.0  # scales within which all but 1 in 10^17 lengths lie

    def probabilities(self, limit: int, location: float) -> Probabilities:
        """The share of lengths at each number of tokens up to `limit`, if the scale is exp(location)."""
        edges = np.exp(_log_edges(limit) - location)
        below = np.ones(limit + 1)
        within = int(np.searchsorted(edges, self._end))
        below[:within] = _gamma_cdf(self.shape, edges[:within])
        below[0] = 0.0
        return np.diff(np.maximum.accumulate(below), prepend=0.0)  # rounding must not let it fall

    @property
    def lowest_location(self) -> float:
        """Where every length is 1."""
        return math.log(1.5 / self._end)

    def highest_location(self, length: int) -> float:
        """Where all but a few in a million are longer than `length`."""
        return math.log(length) + (13.0 - math.lgamma(self.shape + 1.0)) / self.shape  # P(x) < x ** k / gamma(k + 1)

    def __str__(self) -> str:
        return f"gamma with a mean of {self.mean:g} tokens and shape {self.shape:g}"


def _gamma_cdf(shape: float, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The regularized lower incomplete gamma function by its series, in which nothing cancels (DLMF 8.7.1)."""
    term = np.exp(shape * np.log(x) - x - math.lgamma(shape + 1.0))
    total, n = term.copy(), shape
    while term.size and (term > 1e-17).any():
        n += 1.0
        term *= x / n
        total += term
    return np.minimum(total, 1.0)


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


LengthDistribution = Fixed | Uniform | Lognormal | Gamma | Empirical
