"""A run of the benchmark: in which order things are measured, when time is up, and what is kept if it is stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Protocol

from gpu.bench.cases import OURS, BenchOptions, Case, Layout
from gpu.bench.results import Outcome, Rates, Record, Timing
from gpu.bench.tuning import (
    Launch,
    ProblemClass,
    fastest,
    figures,
    problem_class,
    representatives,
    table_launch,
)
from gpu.kernels.launch import Device

TUNING_SHARE = 0.5  # of the budget: the most that tuning may take


class Refused(Exception):
    """A case that cannot be measured here, with the reason; the others can."""


class Bench(Protocol):
    """Measures (`gpu/bench/device.py`)."""

    @property
    def device(self) -> Device:
        """What is measured."""

    @property
    def peers(self) -> Mapping[str, Layout]:
        """Peers that are installed, and the layout that each works on."""

    def rates(self) -> Rates:
        """The copy bandwidth and the matrix rate."""

    def measure(self, case: Case, launch: Launch | None) -> Timing:
        """Times a case with a launch configuration; None where the kernel has none.

        Raises:
            Refused: it cannot be measured, or what it computes is wrong.
        """


class Session:
    """One run.

    Args:
        options: what to measure.
        bench: measures it.
        progress: is told after each measurement how many are done and of how many, tuning not counted.
        clock: seconds, for the budget.

    Attributes:
        record: what has been found so far; complete or not, it can be written at any time.
        tuned: the launches found so far.
    """

    def __init__(
        self,
        options: BenchOptions,
        bench: Bench,
        progress: Callable[[int, int], None] = lambda done, total: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._bench = bench
        self._progress = progress
        self._clock = clock
        self._began = clock()
        self.record = Record(None, [], [], 0, "failed")
        self.tuned: dict[ProblemClass, Launch] = {}

    def run(self) -> None:
        """Measures everything, the rates first and the base cases next.

        Raises:
            KeyboardInterrupt: the run was stopped; `record` says so and keeps what there is.
        """
        cases = self._options.cases(dict(self._bench.peers))
        self.record.left_out = len(cases)
        try:
            self.record.rates = self._bench.rates()
            if self._options.tune:
                self._tune()
            for case in self._in_time(cases):
                self.record.outcomes.append(self._outcome(case, self._launch(case)))
                self.record.left_out -= 1
                self._progress(len(self.record.outcomes), len(cases))
        except KeyboardInterrupt:
            self.record.status = "interrupted"
            raise
        self.record.status = "complete"

    def _tune(self) -> None:
        for kind, problem in representatives(self._options.problems()).items():
            if self._spent(TUNING_SHARE):
                return
            start = table_launch(problem, self._bench.device)
            assert start is not None  # a problem with a class has an entry
            best = fastest(start, partial(self._try, Case(problem, "paged")))
            if best is not None:
                self.tuned[kind] = best

    def _try(self, case: Case, launch: Launch) -> float | None:
        """The time of a candidate; None if it is refused or there is no time left to try it."""
        if self._spent(TUNING_SHARE):
            return None
        outcome = self._outcome(case, launch)
        self.record.candidates.append(outcome)
        return None if outcome.timing is None else outcome.timing.median

    def _launch(self, case: Case) -> Launch | None:
        if case.by != OURS:
            return None
        kind = problem_class(case.problem)
        if kind in self.tuned:
            return self.tuned[kind]
        return table_launch(case.problem, self._bench.device)

    def _outcome(self, case: Case, launch: Launch | None) -> Outcome:
        said = None if launch is None else figures(launch)
        try:
            return Outcome(case, said, self._bench.measure(case, launch))
        except Refused as refused:
            return Outcome(case, said, None, str(refused))

    def _in_time(self, cases: Iterable[Case]) -> Iterable[Case]:
        for case in cases:
            if self._spent(1.0):
                return
            yield case

    def _spent(self, share: float) -> bool:
        """Whether that share of the budget is used up."""
        budget = self._options.budget
        return budget is not None and self._clock() - self._began >= share * budget
