"""Which steps a calibration measures: a few that span those which the workload really has.

The steps of a run depend on how long they take, which is what is to be found out. So the workload is looked at under
either extreme load: every request alone, and all at once; what any load makes of it lies between. Of the steps under
each, of decodes only, of prefills only and mixed, an equal share is taken: half at even ranks, so that what happens
often is met, half where the distance to those taken is largest, so that what happens seldom is too.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, fields
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from sim.plan import StepPlan, StepWork

LOADS = {"alone": 1e-9, "at once": 1e9}  # seconds that a step seems to take: nobody comes during it, or everybody
AXES = ("num_tokens", "prefill_tokens", "prefill_pairs", "num_sequences", "decode_context")
_amounts = attrgetter(*AXES)
_all_sums = attrgetter(*(field.name for field in fields(StepWork)))


@dataclass(frozen=True, slots=True)
class GridPoint:
    """A step of the workload.

    Args:
        load: a key of `LOADS`.
        step: its number under that load, from 0; steps in which nothing is done do not count.
        work: its sums.
    """

    load: str
    step: int
    work: StepWork


class Listing:
    """A timer that takes no time to speak of, and lists the steps that it is asked for.

    Args:
        load: a key of `LOADS`.

    Attributes:
        points: the steps that compute something and move no blocks, so that their time is the model's.
    """

    def __init__(self, load: str) -> None:
        self._load = load
        self._next = 0
        self.points: list[GridPoint] = []

    def durations(self, plan: StepPlan) -> list[float]:
        """What the load has a step seem to take."""
        if plan.work.num_tokens and not (plan.swap_outs or plan.swap_ins or plan.copies):
            self.points.append(GridPoint(self._load, self._next, copy(plan.work)))
        self._next += 1
        return [LOADS[self._load]]


def choose(candidates: list[GridPoint], num_points: int) -> list[GridPoint]:
    """The grid; the same for the same candidates, in their order.

    Args:
        candidates: all steps, load by load.
        num_points: at most so many.
    """
    strata = [stratum for stratum in _strata(candidates) if stratum]
    chosen: list[GridPoint] = []
    strata.sort(key=len)  # what a small one does not need goes to the others
    for place, stratum in enumerate(strata):
        share = (num_points - len(chosen)) // (len(strata) - place)
        chosen += (stratum[i] for i in _spread(np.array([_amounts(point.work) for point in stratum]), share))
    order = {load: place for place, load in enumerate(LOADS)}
    return sorted(chosen, key=lambda point: (order[point.load], point.step))


def _strata(candidates: list[GridPoint]) -> Iterator[list[GridPoint]]:
    """By load and kind, each step that differs once."""
    seen: set[tuple[int, ...]] = set()
    strata: dict[tuple[str, bool, bool], list[GridPoint]] = {}
    for point in candidates:
        work = point.work
        if (sums := _all_sums(work)) in seen:
            continue
        seen.add(sums)
        strata.setdefault((point.load, work.prefill_tokens > 0, work.decode_sequences > 0), []).append(point)
    yield from strata.values()


def _spread(amounts: NDArray[np.int64], count: int) -> list[int]:
    """Rows of `amounts`, shape (n, axes): at most `count`, each once."""
    if count < 1:
        return []
    if len(amounts) <= count:
        return list(range(len(amounts)))
    by_rank = np.lexsort(amounts.T[::-1])
    chosen = list(dict.fromkeys(by_rank[np.linspace(0, len(amounts) - 1, (count + 1) // 2).astype(int)].tolist()))
    places = np.log1p(amounts)
    places /= np.maximum(places.max(axis=0) - places.min(axis=0), 1e-9)
    distance = np.full(len(places), np.inf)
    for row in chosen:
        distance = np.minimum(distance, np.linalg.norm(places - places[row], axis=1))
    while len(chosen) < count and distance.max() > 0:
        row = int(distance.argmax())
        chosen.append(row)
        distance = np.minimum(distance, np.linalg.norm(places - places[row], axis=1))
    return chosen
