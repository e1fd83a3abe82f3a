"""When requests come: the gaps between arrivals at a given mean rate.

A process says how regular arrivals are; how many come per second is the generator's knob (`generate.py`), so that a
sweep over rates is one over a single number.
"""

import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from workloads.errors import UserError


class ArrivalProcess(Protocol):
    """How arrivals follow one another."""

    def gaps(self, generator: np.random.Generator, rate: float, num_gaps: int) -> NDArray[np.float64]:
        """The next `num_gaps` times between arrivals in seconds, each at least 0, for a mean rate in requests/s.

        Takes random numbers from `generator` only.
        """


class Poisson:
    """Independent arrivals: exponential gaps."""

    def gaps(self, generator: np.random.Generator, rate: float, num_gaps: int) -> NDArray[np.float64]:
        return generator.exponential(1 / rate, num_gaps)


class Gamma:
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


class Constant:
    """Arrivals like clockwork: every gap is 1 / rate."""

    def gaps(self, generator: np.random.Generator, rate: float, num_gaps: int) -> NDArray[np.float64]:
        return np.full(num_gaps, 1 / rate)


class AllAtOnce:
    """Everything arrives at time 0, whatever the rate: an offline batch, `--request-rate inf` of `vllm bench serve`."""

    def gaps(self, generator: np.random.Generator, rate: float, num_gaps: int) -> NDArray[np.float64]:
        return np.zeros(num_gaps)
