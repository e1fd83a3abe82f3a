"""Arrival processes against their closed forms, within standard errors of a fixed sample."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from workloads.arrivals import AllAtOnce, ArrivalProcess, Constant, Gamma, Poisson
from workloads.errors import UserError

RATE = 4.0
NUM_GAPS = 40_000


def sample(process: ArrivalProcess) -> NDArray[np.float64]:
    return process.gaps(np.random.default_rng(7), RATE, NUM_GAPS)


# The shape is the burstiness; an exponential is a gamma of shape 1.
SHAPES = [(Poisson(), 1.0), (Gamma(1.0), 1.0), (Gamma(0.25), 0.25), (Gamma(4.0), 4.0)]


@pytest.mark.parametrize(("process", "shape"), SHAPES)
def test_mean_gap_is_one_over_the_rate(process: ArrivalProcess, shape: float) -> None:
    # Mean 1/rate; a gamma's standard deviation is its mean / sqrt(shape), the mean's standard error 1/sqrt(n) of that.
    standard_error = 1 / RATE / math.sqrt(shape * NUM_GAPS)
    assert sample(process).mean() == pytest.approx(1 / RATE, abs=4 * standard_error)


@pytest.mark.parametrize(("process", "shape"), SHAPES)
def test_burstiness_is_the_inverse_of_the_squared_coefficient_of_variation(
    process: ArrivalProcess, shape: float
) -> None:
    # A gamma's excess kurtosis is 6/shape, so the variance of n gaps has the relative standard error
    # sqrt((2 + 6/shape)/n). Dividing by the known mean keeps the mean's own error out.
    squared_variation = ((sample(process) - 1 / RATE) ** 2).mean() * RATE**2
    assert squared_variation * shape == pytest.approx(1.0, abs=4 * math.sqrt((2 + 6 / shape) / NUM_GAPS))


def test_constant_gaps_are_all_one_over_the_rate() -> None:
    assert (sample(Constant()) == 0.25).all()


def test_all_at_once_has_no_gaps() -> None:
    assert not sample(AllAtOnce()).any()


@pytest.mark.parametrize("burstiness", [0.0, -1.0, math.inf, math.nan])
def test_an_impossible_burstiness_is_refused(burstiness: float) -> None:
    with pytest.raises(UserError) as error:
        Gamma(burstiness)
    assert str(error.value) == (
        f"workload.arrivals.burstiness is {burstiness}; expected a finite number above 0 (1 is Poisson)."
    )
