"""Brings a run's steps, of which there may be millions, down to what a page can show, without losing any time.

A value holds from the start of its plan to the end. A bin's mean is the exact integral over the bin divided by its
width, so the area under the drawn curve is the integral of the table; time in which no step ran counts as zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ROUNDING = 1e-9  # of the run: a gap this short is the rounding of start + duration


@dataclass(frozen=True)
class Spans:
    """When each plan ran, in seconds; sorted, and no two overlap."""

    start: Floats
    end: Floats

    @property
    def idle_s(self) -> float:
        """Seconds between the first start and the last end in which no step ran."""
        return float(self.end[-1] - self.start[0] - np.sum(self.end - self.start))


def spans(start: Floats, duration: Floats) -> Spans:
    """The spans of plans that start at `start` and take `duration` seconds each (at least one plan).

    Raises:
        ValueError: if a plan starts before the one before it has ended, by more than rounding; the message names
            the row (from 0).
    """
    end = start + duration
    rounding = ROUNDING * max(float(end.max() - start.min()), 1e-3)
    overlap = np.flatnonzero(start[1:] < end[:-1] - rounding)
    if len(overlap):
        row = int(overlap[0]) + 1
        raise ValueError(f"row {row}: starts at {start[row]:g} s, before the one before it ends ({end[row - 1]:g} s)")
    touching = np.abs(start[1:] - end[:-1]) <= rounding
    end[:-1][touching] = start[1:][touching]
    return Spans(start, end)


def bin_edges(plans: Spans, most_bins: int) -> Floats:
    """Edges of the bins: the plans' own if there are few enough, else `most_bins` equal ones; strictly increasing."""
    own: Floats = np.unique(np.concatenate([plans.start, plans.end]))
    if len(own) - 1 <= most_bins:
        return own
    return np.linspace(own[0], own[-1], most_bins + 1)


def integrate(plans: Spans, values: Floats, edges: Floats) -> Floats:
    """Integral of `values` over each bin, in units of the value times seconds."""
    corners = np.empty(2 * len(plans.start))
    corners[0::2], corners[1::2] = plans.start, plans.end
    total = np.zeros_like(corners)
    total[1::2] = np.cumsum(values * (plans.end - plans.start))
    total[2::2] = total[1:-1:2]
    result: Floats = np.diff(np.interp(edges, corners, total))
    return result


def extremes(plans: Spans, values: Floats, edges: Floats) -> tuple[Floats, Floats]:
    """Lowest and highest value in each bin; zero where no step ran."""
    first = np.searchsorted(plans.end, edges[:-1], side="right")
    beyond = np.searchsorted(plans.start, edges[1:], side="left")
    empty = first >= beyond
    bounds = np.column_stack([first, np.maximum(beyond, first + 1)]).ravel()
    padded = np.append(values, [0.0, 0.0])  # reduceat takes no bound past the end
    low, high = (reduce.reduceat(padded, bounds)[::2] for reduce in (np.minimum, np.maximum))
    return np.where(empty, 0.0, low), np.where(empty, 0.0, high)


def count_events(plans: Spans, counts: Ints, edges: Floats) -> Ints:
    """Events in each bin; those of a plan count at its start."""
    places = np.clip(np.searchsorted(edges, plans.start, side="right") - 1, 0, len(edges) - 2)
    result = np.zeros(len(edges) - 1, np.int64)
    np.add.at(result, places, counts)
    return result
