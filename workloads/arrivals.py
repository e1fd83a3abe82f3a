"""When requests come: the gaps between arrivals at a given mean rate.

A process says how regular arrivals are; how many come per second is the generator's knob (`generate.py`), so that a
sweep over rates is one over a single number.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import accumulate, repeat
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from workloads.errors import UserError

_CHUNK = 4096  # gaps drawn at once; a different number would give different workloads


class ArrivalProcess(Protocol):
    """How arrivals follow one another."""

    def times(self, generator: np.random.Generator, rate: float) -> Iterator[float]:
        """Times of arrival in seconds, without end, each at least the one before, for a mean rate in requests/s.

        Takes random numbers from `generator` only.
        """


class Renewal(ABC):
    """Gaps that do not depend on the time, nor on one another. The first request comes one gap after time 0."""

    @abstractmethod
    def gaps(self, generator: np.random.Generator, rate: float, num_gaps: int) -> NDArray[np.float64]:
        """The next `num_gaps` times between arrivals in seconds, each at least 0, for a mean rate in requests/s."""

    def times(self, generator: np.random.Generator, rate: float) -> Iterator[float]:
        """Times of arrival, as `ArrivalProcess` has them."""
        now_s = 0.0
        while True:
            times_s: list[float] = (now_s + np.cumsum(self.gaps(generator, rate, _CHUNK))).tolist()
            now_s = times_s[-1]
            yield from times_s


class Poisson(Renewal):
    """Independent arrivals: exponential gaps."""

    def gaps(self, generator: np.random.Generator, rate: float, num_gaps: int) -> NDArray[np.float64]:
        return generator.exponential(1 / rate, num_gaps)


class Gamma(Renewal):
    """Gamma-distributed gaps, as `vllm bench serve --burstiness` makes them.

    Args:
        burstiness: the shape of the distribution, above 0; the squared coefficient of variation of the gaps is its
            inverse. 1 is Poisson, less comes in bursts, more is steadier.

    Raises:
        UserError: `burstiness` is not above 0 and finite.
    """

    def __init__(self, burstiness: float) -> None:
        if not (burstiness > 0 and math.isfinite(burstiness)):
            raise UserError(
                f"workload.arrivals.burstiness is {burstiness}; expected a finite number above 0 (1 is Poisson)."
            )
        self._burstiness = burstiness

    def gaps(self, generator: np.random.Generator, rate: float, num_gaps: int) -> NDArray[np.float64]:
        return generator.gamma(self._burstiness, 1 / (rate * self._burstiness), num_gaps)


class OnOff(Renewal):
    """Bursts with silence between them: the interrupted Poisson process (Kuczura, Bell System Technical Journal 52,
    1973).

    Periods are exponential. While on, arrivals are Poisson, at the mean rate times `(on_s + off_s) / on_s`; while off,
    nobody comes. The squared coefficient of variation of the gaps is `1 + 2 λ on_s off_s² / (on_s + off_s)²`, λ being
    the rate while on.

    Args:
        on_s: mean seconds of a burst; above 0.
        off_s: mean seconds of a silence; above 0.

    Raises:
        UserError: a mean that is not above 0 and finite.
    """

    def __init__(self, on_s: float, off_s: float) -> None:
        for name, value in (("on_s", on_s), ("off_s", off_s)):
            _check_positive(name, value, "seconds")
        self._on_s = on_s
        self._off_s = off_s

    def gaps(self, generator: np.random.Generator, rate: float, num_gaps: int) -> NDArray[np.float64]:
        busy = rate * (self._on_s + self._off_s) / self._on_s
        either = busy + 1 / self._on_s  # rate at which there is an arrival or the end of the burst
        silences = generator.geometric(busy / either, num_gaps) - 1  # until the next arrival
        on = generator.standard_gamma(silences + 1.0) / either
        return on + generator.standard_gamma(silences.astype(np.float64)) * self._off_s


class RateCurve:
    """Poisson arrivals at a rate that changes with the time of day, say: the same curve again and again.

    Args:
        period_s: seconds of the curve; above 0. 86400 is a day.
        weights: relative rates in parts of the period of the same length, at least 0, and one above. Only their
            proportions count: over a period, the mean is the workload's rate.

    Raises:
        UserError: an argument out of its range.
    """

    def __init__(self, period_s: float, weights: list[float]) -> None:
        _check_positive("period_s", period_s, "seconds")
        if not weights or not all(0 <= weight < math.inf for weight in weights) or not any(weights):
            raise UserError(
                f"workload.arrivals.weights is {weights}; expected finite numbers of at least 0, one of them above."
            )
        self._period_s = period_s
        self._starts_s = np.linspace(0.0, period_s, len(weights) + 1)
        self._shares = np.concatenate(([0.0], np.cumsum(weights) / np.sum(weights)))  # of a period's arrivals, before

    def times(self, generator: np.random.Generator, rate: float) -> Iterator[float]:
        """Times of arrival, as `ArrivalProcess` has them: a Poisson process on a clock that runs as fast as the curve
        is high (Çinlar, 1975).
        """
        per_period = rate * self._period_s
        expected = 0.0  # arrivals by now, in the mean
        while True:
            upto = expected + np.cumsum(generator.exponential(1.0, _CHUNK))
            expected = float(upto[-1])
            periods, rest = np.divmod(upto / per_period, 1.0)
            yield from (periods * self._period_s + np.interp(rest, self._shares, self._starts_s)).tolist()


class Replayed:
    """The gaps of a trace, in its order and again from its start when they are used up, at the workload's rate.

    So bursts are where the trace has them, whatever the rate. Nothing is random.

    Args:
        gaps_s: seconds between the requests of the trace; at least 0, one of them above.
    """

    def __init__(self, gaps_s: list[float]) -> None:
        if not gaps_s or not all(0 <= gap < math.inf for gap in gaps_s) or not any(gaps_s):
            raise UserError(
                "the gaps to be replayed are all 0, or there are none; expected a trace with requests at two times "
                "or more."
            )
        mean_s = sum(gaps_s) / len(gaps_s)
        self._gaps = [gap / mean_s for gap in gaps_s]  # with a mean of 1

    def times(self, generator: np.random.Generator, rate: float) -> Iterator[float]:
        """Times of arrival, as `ArrivalProcess` has them; the first comes at 0."""
        gaps = (gap / rate for _ in repeat(None) for gap in self._gaps)
        return accumulate(gaps, initial=0.0)


class Constant(Renewal):
    """Arrivals like clockwork: every gap is 1 / rate."""

    def gaps(self, generator: np.random.Generator, rate: float, num_gaps: int) -> NDArray[np.float64]:
        return np.full(num_gaps, 1 / rate)


class AllAtOnce(Renewal):
    """Everything arrives at time 0, whatever the rate: an offline batch, `--request-rate inf` of `vllm bench serve`."""

    def gaps(self, generator: np.random.Generator, rate: float, num_gaps: int) -> NDArray[np.float64]:
        return np.zeros(num_gaps)


def _check_positive(name: str, value: float, unit: str) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise UserError(f"workload.arrivals.{name} is {value}; expected a finite number of {unit} above 0.")
