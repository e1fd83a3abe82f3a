"""How many turns a conversation has, and how long its client thinks between an answer and the next turn."""

import math
from typing import Protocol

import numpy as np

from workloads.errors import UserError


class TurnCount(Protocol):
    """How many turns conversations have."""

    def draw(self, generator: np.random.Generator) -> int:
        """The turns of the next one, at least 1; takes random numbers from `generator` only."""


class FixedTurns:
    """Every conversation has the same number of turns.

    Args:
        turns: at least 1.
    """

    def __init__(self, turns: int) -> None:
        if turns < 1:
            raise UserError(f"workload.turns.turns is {turns}; expected a whole number of at least 1.")
        self._turns = turns

    def draw(self, generator: np.random.Generator) -> int:
        return self._turns


class UniformTurns:
    """Every number of turns from `low` to `high`, both included, is as likely as any other.

    Args:
        low: at least 1.
        high: at least `low`.
    """

    def __init__(self, low: int, high: int) -> None:
        if not 1 <= low <= high:
            raise UserError(f"workload.turns has low={low} and high={high}; expected 1 <= low <= high.")
        self._low = low
        self._high = high

    def draw(self, generator: np.random.Generator) -> int:
        return int(generator.integers(self._low, self._high, endpoint=True))


class GeometricTurns:
    """After each turn, a client goes on with the same chance.

    Args:
        mean: turns, at least 1; the chance to go on is 1 - 1/mean.
    """

    def __init__(self, mean: float) -> None:
        if not (mean >= 1 and math.isfinite(mean)):
            raise UserError(f"workload.turns.mean is {mean}; expected a finite number of at least 1.")
        self._mean = mean

    def draw(self, generator: np.random.Generator) -> int:
        return int(generator.geometric(1 / self._mean))


class ThinkTime(Protocol):
    """How long clients think."""

    def draw(self, generator: np.random.Generator) -> float:
        """Seconds before the next turn, at least 0; takes random numbers from `generator` only."""


class FixedThinkTime:
    """Everybody thinks as long: 0 for an agent that goes on at once.

    Args:
        seconds: at least 0.
    """

    def __init__(self, seconds: float) -> None:
        if not 0 <= seconds < math.inf:
            raise UserError(f"workload.think.seconds is {seconds}; expected a finite number of at least 0.")
        self._seconds = seconds

    def draw(self, generator: np.random.Generator) -> float:
        return self._seconds


class ExponentialThinkTime:
    """Think times without memory.

    Args:
        mean: seconds; above 0.
    """

    def __init__(self, mean: float) -> None:
        _check_mean(mean)
        self._mean = mean

    def draw(self, generator: np.random.Generator) -> float:
        return float(generator.exponential(self._mean))


class LognormalThinkTime:
    """Think times of which some are very long.

    Args:
        mean: seconds; above 0.
        sigma: standard deviation of their natural logarithm; above 0.
    """

    def __init__(self, mean: float, sigma: float) -> None:
        _check_mean(mean)
        if not 0 < sigma <= 10:
            raise UserError(f"workload.think.sigma is {sigma}; expected above 0 and at most 10.")
        self._location = math.log(mean) - sigma**2 / 2  # the mean of a lognormal is exp(location + sigma² / 2)
        self._sigma = sigma

    def draw(self, generator: np.random.Generator) -> float:
        return float(generator.lognormal(self._location, self._sigma))


def _check_mean(mean: float) -> None:
    if not (mean > 0 and math.isfinite(mean)):
        raise UserError(f"workload.think.mean is {mean}; expected a finite number of seconds above 0.")
