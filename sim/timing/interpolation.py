"""Linear interpolation in measured tables, on the axes as they are: a kernel's time is linear in the bytes it moves.

Beyond the last point of an axis the last segment is continued, below the first one the first; who asks is told so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Curve:
    """A function of one quantity, by its values at some points.

    Args:
        points: position -> value; at least one.
    """

    def __init__(self, points: Mapping[float, float]) -> None:
        self.positions = sorted(points)
        self._values = [points[position] for position in self.positions]

    @property
    def last(self) -> float:
        """The greatest position measured."""
        return self.positions[-1]

    def __call__(self, position: float) -> float:
        """The value at `position`; a curve of one point is constant."""
        if len(self.positions) == 1:
            return self._values[0]
        at, share = locate(self.positions, position)
        low, high = self._values[at], self._values[at + 1]
        return low + (high - low) * share


class Grid:
    """A function of several quantities, by its values at all combinations of some positions of each.

    Args:
        axes: ascending positions of each quantity, at least one.
        values: shape (len(axes[0]), len(axes[1]), …).
    """

    def __init__(self, axes: Sequence[Sequence[float]], values: Floats) -> None:
        self.axes = [[float(position) for position in axis] for axis in axes]
        self._values = values

    def __call__(self, *position: float) -> float:
        """The multilinear value at `position`."""
        corner = self._values
        for axis, place in zip(self.axes, position, strict=True):
            if len(axis) == 1:
                corner = corner[0]
                continue
            at, share = locate(axis, place)
            corner = corner[at] + (corner[at + 1] - corner[at]) * share if share else corner[at]
        return float(corner)

    @property
    def num_points(self) -> int:
        """Combinations measured."""
        return int(self._values.size)

    def spans(self, *position: float) -> int:
        """Of how many of its quantities the position lies between measured ones."""
        return sum(axis[0] <= place <= axis[-1] for axis, place in zip(self.axes, position, strict=True))

    def clamped(self, *position: float) -> float:
        """The value at the nearest position that the axes span."""
        inside = (min(max(place, axis[0]), axis[-1]) for axis, place in zip(self.axes, position, strict=True))
        return self(*inside)


class Patches:
    """A function of several quantities by several grids, which may overlap.

    Args:
        grids: at least one.
    """

    def __init__(self, grids: Sequence[Grid]) -> None:
        self.grids = sorted(grids, key=lambda grid: -grid.num_points)

    @property
    def lasts(self) -> list[float]:
        """The greatest measured position of each quantity."""
        return [max(grid.axes[axis][-1] for grid in self.grids) for axis in range(len(self.grids[0].axes))]

    def __call__(self, *position: float) -> float:
        """The value at `position`, by the largest of the grids that span it, else of those that nearly do."""
        return max(self.grids, key=lambda grid: grid.spans(*position))(*position)


def patches(points: Mapping[tuple[float, ...], float]) -> Patches | None:
    """The grids that `points` are made of: positions of the first quantity that were measured with the same others.

    A table may be the union of two measurement plans. What is on no full grid is left out.

    Returns:
        The grids, or None if there is none.
    """
    others: dict[float, set[tuple[float, ...]]] = {}
    for first, *rest in points:
        others.setdefault(first, set()).add(tuple(rest))
    plans = {frozenset(rests) for rests in others.values()}
    found: dict[tuple[tuple[float, ...], ...], Grid] = {}
    for plan in plans:
        firsts = {first for first, rests in others.items() if rests >= plan}
        grid = full_grid({place: value for place, value in points.items() if place[0] in firsts and place[1:] in plan})
        if grid is not None:
            found.setdefault(tuple(map(tuple, grid.axes)), grid)
    return Patches([found[axes] for axes in sorted(found)]) if found else None


def full_grid(points: Mapping[tuple[float, ...], float]) -> Grid | None:
    """The grid of all positions that occur in `points`, less those positions that lack a combination.

    Positions are dropped, the one that lacks most first, until every combination is there.

    Returns:
        The grid, or None if nothing is left.
    """
    num_axes = len(next(iter(points), ()))
    axes = [sorted({place[axis] for place in points}) for axis in range(num_axes)]
    while num_axes and all(axes):
        where = [{position: i for i, position in enumerate(axis)} for axis in axes]
        values = np.full([len(axis) for axis in axes], np.nan)
        for place, value in points.items():
            if all(position in places for position, places in zip(place, where, strict=True)):
                values[tuple(places[position] for position, places in zip(place, where, strict=True))] = value
        missing = np.isnan(values)
        if not missing.any():
            return Grid(axes, values)
        shares = [missing.mean(axis=tuple(range(axis)) + tuple(range(axis + 1, num_axes))) for axis in range(num_axes)]
        worst = max(range(num_axes), key=lambda axis: float(shares[axis].max()))
        del axes[worst][int(shares[worst].argmax())]
    return None


def locate(axis: Sequence[float], position: float) -> tuple[int, float]:
    """The segment of `axis` (at least two positions) that `position` is in, and how far along, 0 to 1 within it."""
    at = min(max(bisect_right(axis, position) - 1, 0), len(axis) - 2)
    low = axis[at]
    return at, (position - low) / (axis[at + 1] - low)


def averaged(rows: Iterable[tuple[tuple[float, ...], float]]) -> dict[tuple[float, ...], float]:
    """One value a position: the mean of those measured there."""
    sums: dict[tuple[float, ...], tuple[float, int]] = {}
    for place, value in rows:
        total, count = sums.get(place, (0.0, 0))
        sums[place] = total + value, count + 1
    return {place: total / count for place, (total, count) in sums.items()}
