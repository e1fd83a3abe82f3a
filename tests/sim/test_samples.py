"""Statistics of samples against numpy's of the same values written out."""

from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim import samples as samples_module
from sim.samples import LARGEST_ERROR, PERCENTILES, Intervals, Samples

POSITIVE = st.floats(1e-4, 1e4)


def assert_are_numpys(got: dict[str, float | None], values: list[float], rel: float) -> None:
    expanded = np.array(values) * 1000
    # A deviation of equal values is the rounding of their mean.
    assert got["mean_x_ms"] == pytest.approx(expanded.mean(), rel=1e-9)
    assert got["std_x_ms"] == pytest.approx(expanded.std(ddof=0), rel=1e-6, abs=1e-6 * expanded.max())
    assert got["median_x_ms"] == pytest.approx(np.median(expanded), rel=rel)
    for p in PERCENTILES:
        assert got[f"p{p}_x_ms"] == pytest.approx(np.percentile(expanded, p), rel=rel)


@given(st.lists(POSITIVE, min_size=1, max_size=50))
def test_statistics_are_numpys(values: list[float]) -> None:
    samples = Samples()
    for value in values:
        samples.add(value)
    assert samples.largest_error == 0
    assert_are_numpys(samples.statistics("x"), values, rel=1e-9)


@given(st.lists(st.tuples(st.lists(POSITIVE, min_size=1, max_size=5), st.integers(1, 40)), min_size=1, max_size=20))
def test_shared_intervals_count_as_often_as_sequences_share_them(plans: list[tuple[list[float], int]]) -> None:
    intervals, values = Intervals(), []
    for durations, count in plans:
        times = list(accumulate(durations, initial=0.0))
        intervals.add_intervals(times, count)
        values += [after - before for before, after in pairwise(times) for _ in range(count)]
        intervals.add(durations[0])
        values.append(durations[0])
    assert_are_numpys(intervals.statistics("x"), values, rel=1e-9)


@given(st.lists(POSITIVE, min_size=1, max_size=60))
def test_folded_values_are_off_by_no_more_than_they_say(values: list[float]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples_module, "EXACT", 8)
        patch.setattr(samples_module, "CHUNK", 4)
        samples, intervals = Samples(), Intervals()
        for value in values:
            samples.add(value)
            intervals.add_intervals([0.0, value], 3)
        for one, weight in ((samples, 1), (intervals, 3)):
            assert (one.largest_error > 0) == (len(values) >= 8)
            rel = LARGEST_ERROR * 1.01 if one.largest_error else 1e-9
            assert_are_numpys(one.statistics("x"), values * weight, rel=rel)
            assert len(one.values) < 4


def test_a_bin_is_one_part_in_4096_wide() -> None:
    # 12 bits of the fraction are kept: a bin spans 2^-12 of its lower end, and its middle is at most 2^-13 away.
    assert LARGEST_ERROR == 1 / 8192


def test_no_samples_have_no_statistics() -> None:
    assert set(Samples().statistics("x").values()) == {None}
