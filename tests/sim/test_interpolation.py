"""Interpolation against hand sums: between points, beyond them, and in tables that are no full grid."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.timing.interpolation import Curve, Grid, averaged, full_grid, patches

AXES = [[0.0, 2.0, 10.0], [1.0, 3.0]]


def product(*axes):
    return {(x, y): 10 * x + y for x in axes[0] for y in axes[1]}


def test_a_curve_is_linear_between_its_points_and_goes_on_as_its_last_segment_does():
    curve = Curve({10: 5.0, 0: 1.0, 20: 7.0})
    # 1 to 5 over 10, then 5 to 7 over 10: slopes 0.4 and 0.2.
    assert [curve(at) for at in (0, 5, 10, 15, 20, 30, -5)] == pytest.approx([1, 3, 5, 6, 7, 9, -1])
    assert curve.last == 20
    assert Curve({4: 2.5})(100) == 2.5


@given(st.floats(-5, 20), st.floats(-5, 20))
def test_a_grid_is_exact_on_a_bilinear_function_everywhere(x, y):
    values = np.array([[1 + 2 * a + 3 * b + 4 * a * b for b in AXES[1]] for a in AXES[0]])
    assert Grid(AXES, values)(x, y) == pytest.approx(1 + 2 * x + 3 * y + 4 * x * y, abs=1e-9)


def test_a_grid_can_be_asked_for_the_nearest_place_it_knows():
    grid = Grid(AXES, np.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]))
    assert grid.clamped(-7, 9) == 1.0  # (0, 3)
    assert grid.clamped(6, 1) == 3.0  # halfway from 2 to 4
    assert Grid([[5.0], [1.0, 3.0]], np.array([[1.0, 2.0]]))(99, 2) == 1.5


def test_positions_that_lack_a_combination_are_dropped_worst_first():
    points = product((1, 2, 3), (1, 2)) | {(9, 1): 0.0}
    grid = full_grid(points)
    assert grid is not None
    assert grid.axes == [[1, 2, 3], [1, 2]]
    assert full_grid({}) is None


def test_the_union_of_two_measurement_plans_is_read_as_both():
    # A coarse plan over all y and a fine one over large y only; x = 1 is in both.
    coarse, fine = product((1, 4), (0, 8)), product((1, 2, 3), (8, 9, 10))
    table = patches(coarse | fine)
    assert table is not None
    assert sorted((grid.axes[0], grid.axes[1]) for grid in table.grids) == [
        ([1], [0, 8, 9, 10]),
        ([1, 2, 3], [8, 9, 10]),
        ([1, 4], [0, 8]),
    ]
    assert table(2.5, 9) == pytest.approx(34)
    assert table(2, 4) == pytest.approx(24)
    assert table.lasts == [4, 10]


def test_what_was_measured_twice_counts_as_its_mean():
    assert averaged([((1.0,), 2.0), ((1.0,), 4.0), ((2.0,), 5.0)]) == {(1.0,): 3.0, (2.0,): 5.0}
