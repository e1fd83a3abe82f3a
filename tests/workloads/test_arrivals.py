"""Arrival processes against their closed forms, within standard errors of a fixed sample."""

import math
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from workloads.arrivals import AllAtOnce, ArrivalProcess, Constant, Gamma, OnOff, Poisson, RateCurve, Renewal, Replayed
from workloads.errors import UserError
from workloads.replayed import replayed

RATE = 4.0
NUM_GAPS = 40_000


def sample(process: Renewal) -> NDArray[np.float64]:
    return process.gaps(np.random.default_rng(7), RATE, NUM_GAPS)


# The shape is the burstiness; an exponential is a gamma of shape 1.
SHAPES = [(Poisson(), 1.0), (Gamma(1.0), 1.0), (Gamma(0.25), 0.25), (Gamma(4.0), 4.0)]


@pytest.mark.parametrize(("process", "shape"), SHAPES)
def test_mean_gap_is_one_over_the_rate(process: Renewal, shape: float) -> None:
    # Mean 1/rate; a gamma's standard deviation is its mean / sqrt(shape), the mean's standard error 1/sqrt(n) of that.
    standard_error = 1 / RATE / math.sqrt(shape * NUM_GAPS)
    assert sample(process).mean() == pytest.approx(1 / RATE, abs=4 * standard_error)


@pytest.mark.parametrize(("process", "shape"), SHAPES)
def test_burstiness_is_the_inverse_of_the_squared_coefficient_of_variation(process: Renewal, shape: float) -> None:
    # A gamma's excess kurtosis is 6/shape, so the variance of n gaps has the relative standard error
    # sqrt((2 + 6/shape)/n). Dividing by the known mean keeps the mean's own error out.
    squared_variation = ((sample(process) - 1 / RATE) ** 2).mean() * RATE**2
    assert squared_variation * shape == pytest.approx(1.0, abs=4 * math.sqrt((2 + 6 / shape) / NUM_GAPS))


def test_constant_gaps_are_all_one_over_the_rate() -> None:
    assert (sample(Constant()) == 0.25).all()


def test_all_at_once_has_no_gaps() -> None:
    assert not sample(AllAtOnce()).any()


def times(process: ArrivalProcess, num: int, rate: float = RATE, seed: int = 7) -> list[float]:
    return list(islice(process.times(np.random.default_rng(seed), rate), num))


# Means of bursts and silences, and the squared variation 1 + 2 λ on off² / (on + off)² with λ = 4 (on + off) / on.
# 1 and 3 s: λ = 16, 1 + 2 * 16 * 9 / 16 = 19. 2 and 2 s: λ = 8, 1 + 2 * 8 * 8 / 16 = 9. 0.5 and 0.1 s: λ = 4.8,
# 1 + 2 * 4.8 * 0.5 * 0.01 / 0.36 = 1.1333.
BURSTS = [(1.0, 3.0, 19.0), (2.0, 2.0, 9.0), (0.5, 0.1, 1 + 0.048 / 0.36)]


@pytest.mark.parametrize(("on_s", "off_s", "squared_variation"), BURSTS)
def test_bursts_have_the_mean_rate_and_the_burstiness_of_an_interrupted_poisson_process(
    on_s: float, off_s: float, squared_variation: float
) -> None:
    gaps = OnOff(on_s, off_s).gaps(np.random.default_rng(7), RATE, 1_000_000)
    # The mean's standard error is sqrt(squared variation / n) of it.
    assert gaps.mean() * RATE == pytest.approx(1.0, abs=4 * math.sqrt(squared_variation / 1e6))
    # That of the variance is sqrt((kurtosis - 1) / n). The gaps are a mixture of two exponentials; the sample's own
    # kurtosis stands in for its, with a factor of 1.5 for what that errs.
    variance = ((gaps - 1 / RATE) ** 2).mean()
    kurtosis = ((gaps - 1 / RATE) ** 4).mean() / variance**2
    assert variance * RATE**2 == pytest.approx(squared_variation, rel=1.5 * 4 * math.sqrt((kurtosis - 1) / 1e6))


def test_nobody_comes_while_a_burst_pauses() -> None:
    # Bursts of 1 s with 100 arrivals each, silences of 9 s: of the gaps, those that hold a silence are about 1 in 100.
    gaps = np.diff(times(OnOff(1.0, 9.0), 20_000, rate=10.0))
    assert (gaps > 0.5).mean() == pytest.approx(1 / 101 * math.exp(-0.5 / 9), rel=4 / math.sqrt(200))


def test_a_rate_curve_shares_arrivals_out_by_its_weights() -> None:
    # A day of 24 s in three parts of weights 1, 0 and 3: a quarter of all come in the first, none in the second.
    day = [time_s % 24 for time_s in times(RateCurve(24.0, [1, 0, 3]), NUM_GAPS)]
    parts = np.histogram(day, [0, 8, 16, 24])[0] / NUM_GAPS
    assert parts[0] == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / NUM_GAPS))
    assert parts[1] == 0


def test_the_mean_of_a_rate_curve_is_the_rate() -> None:
    # The time of the n-th arrival of a Poisson process of rate r is n/r with the standard error sqrt(n)/r; a day of
    # 24 s more or less changes little.
    last = times(RateCurve(24.0, [1, 0, 3]), NUM_GAPS)[-1]
    assert last == pytest.approx(NUM_GAPS / RATE, abs=4 * math.sqrt(NUM_GAPS) / RATE + 24)


def test_a_flat_rate_curve_is_poisson() -> None:
    assert times(RateCurve(60.0, [2.0, 2.0]), 9000) == pytest.approx(times(Poisson(), 9000))


def test_replayed_gaps_keep_their_order_and_proportions_and_begin_again() -> None:
    # Gaps of 1, 0 and 5 s: 2 s in the mean. At 1 request/s they are 0.5, 0 and 2.5 s.
    assert times(Replayed([1, 0, 5]), 6, rate=1.0) == [0, 0.5, 0.5, 3.0, 3.5, 3.5]


def test_gaps_are_replayed_from_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n10,1,1\n11,1,1\n11,1,1\n16,1,1\n")
    assert times(replayed(str(path)), 4, rate=1.0) == [0, 0.5, 0.5, 3.0]
    assert times(replayed(str(path), limit=3), 4, rate=1.0) == [0, 2, 2, 4]  # gaps of 1 and 0 s
    with pytest.raises(UserError, match="the gaps to be replayed are all 0, or there are none"):
        replayed(str(path), limit=1)


processes = st.one_of(
    st.builds(Poisson),
    st.builds(Gamma, st.floats(0.1, 10.0)),
    st.builds(OnOff, st.floats(0.01, 100.0), st.floats(0.01, 100.0)),
    st.builds(RateCurve, st.floats(0.5, 1e5), st.lists(st.floats(0.0, 9.0), min_size=1, max_size=24).filter(any)),
    st.builds(Replayed, st.lists(st.just(0.0) | st.floats(1e-9, 50.0), min_size=1, max_size=9).filter(any)),
)


@settings(max_examples=50, deadline=None)
@given(processes, st.floats(0.01, 1000.0), st.integers(0, 99))
def test_arrivals_are_in_order_and_the_same_from_the_same_seed(process: ArrivalProcess, rate: float, seed: int) -> None:
    arrivals = times(process, 5000, rate, seed)
    assert all(0 <= before <= after < math.inf for before, after in pairwise(arrivals))
    assert arrivals == times(process, 5000, rate, seed)


@pytest.mark.parametrize(
    ("process", "arguments", "message"),
    [
        (OnOff, (0.0, 1.0), "workload.arrivals.on_s is 0.0; expected a finite number of seconds above 0."),
        (OnOff, (1.0, math.inf), "workload.arrivals.off_s is inf; expected a finite number of seconds above 0."),
        (RateCurve, (-1.0, [1.0]), "workload.arrivals.period_s is -1.0; expected a finite number of seconds above 0."),
        (RateCurve, (1.0, []), "workload.arrivals.weights is []; expected finite numbers of at least 0, one of them"),
        (RateCurve, (1.0, [0.0]), "workload.arrivals.weights is [0.0]; expected finite numbers of at least 0"),
        (RateCurve, (1.0, [1.0, -1.0]), "workload.arrivals.weights is [1.0, -1.0]; expected finite numbers"),
    ],
)
def test_an_impossible_process_is_refused(process: type, arguments: tuple, message: str) -> None:
    with pytest.raises(UserError) as error:
        process(*arguments)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("burstiness", [0.0, -1.0, math.inf, math.nan])
def test_an_impossible_burstiness_is_refused(burstiness: float) -> None:
    with pytest.raises(UserError) as error:
        Gamma(burstiness)
    assert str(error.value) == (
        f"workload.arrivals.burstiness is {burstiness}; expected a finite number above 0 (1 is Poisson)."
    )
