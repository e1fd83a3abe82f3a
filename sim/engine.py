"""The engine: a SimPy process that lets a scheduler plan steps, a timer price them, and a recorder write them down.

Requests that arrive during a step join at its end. Times are the running sum of the durations in step order; SimPy's
clock moves with them but is not read back, so that they do not depend on how many events a stretch of time took: a
leap over many steps gives the same times, bit for bit, as the steps one by one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator
from itertools import accumulate
from typing import Any

import simpy

from sim.memory.interface import KVMemory
from sim.plan import StepPlan, StepTimer
from sim.recorder import Recorder
from sim.scheduler.continuous import ContinuousBatching
from workloads.errors import UserError
from workloads.request import Request

LONGEST_LEAP = 256  # steps; it only bounds the work that is lost when an arrival cuts a leap short
NO_PROGRESS_POOLS = 4  # a run that computes this many pools full of tokens without one new token goes in circles


class NoProgress(UserError):
    """Requests are left, but none of them will ever gain a token."""


class Arrivals:
    """The requests still to come, in order of arrival.

    Args:
        requests: a stream, sorted by arrival.
    """

    def __init__(self, requests: Iterator[Request]) -> None:
        self._requests = requests
        self._next = next(requests, None)

    @property
    def next_s(self) -> float | None:
        """When the next request comes, in seconds; None if there is none."""
        return self._next.arrival_s if self._next is not None else None

    def until(self, now: float) -> Iterator[Request]:
        """Takes out the requests that have come by `now`."""
        while self._next is not None and self._next.arrival_s <= now:
            request, self._next = self._next, next(self._requests, None)
            yield request


class Engine:
    """One replica.

    Args:
        env: the clock.
        arrivals: requests to come.
        scheduler: plans the steps.
        timer: says how long each takes.
        recorder: writes them down.
        report: called with requests ended and simulated seconds after each step.
    """

    def __init__(
        self,
        env: simpy.Environment,
        arrivals: Arrivals,
        scheduler: ContinuousBatching,
        timer: StepTimer,
        recorder: Recorder,
        report: Callable[[int, float], None],
    ) -> None:
        self.env = env
        self.now = 0.0
        self.arrivals = arrivals
        self.scheduler = scheduler
        self.timer = timer
        self.recorder = recorder
        self._memory: KVMemory = scheduler.memory
        self._report = report
        self._last_step_s = 0.0
        self._fruitless_tokens = 0  # computed since a sequence last gained a token

    def serve(self) -> Generator[simpy.Event, Any, None]:
        """The process: serves until no request is left.

        Raises:
            NoProgress: says who waits for what.
        """
        scheduler, recorder = self.scheduler, self.recorder
        while True:
            for request in self.arrivals.until(self.now):
                recorder.arrived(*scheduler.arrive(request))
            if scheduler.idle:
                if self.arrivals.next_s is None:
                    return
                yield from self._wait_for_arrival()
                continue
            plan = scheduler.schedule(self._steps_to_plan())
            if plan.work.num_tokens:
                yield from self._execute(plan)
            elif plan.preemptions:
                self._record(plan, [self.now, self.now])
            elif self.arrivals.next_s is not None:
                yield from self._wait_for_arrival()
            else:
                raise NoProgress(
                    f"nothing can be scheduled any more: {scheduler.explain_stall()}. Take a larger pool or "
                    "scheduler.reject_oversize=true."
                )
            self._check_progress(plan)
            self._report(recorder.metrics.totals.completed + recorder.metrics.totals.rejected, self.now)

    def _wait_for_arrival(self) -> Generator[simpy.Event, Any, None]:
        arrival = self.arrivals.next_s
        assert arrival is not None
        if arrival > self.env.now:
            yield self.env.timeout(arrival - self.env.now)
        if (
            self.recorder.metrics.first_arrival_s is not None
        ):  # the time before the first request is not part of the run
            waiting = self.scheduler.waiting
            occupancy = self._memory.occupancy(waiting.head() if waiting else None)
            self.recorder.idle(arrival - self.now, occupancy, len(waiting))
        self.now = arrival

    def _steps_to_plan(self) -> int:
        """Steps until an arrival or a sample is due, if they take as long as the last: an estimate to save work."""
        due = min(self.arrivals.next_s or math.inf, self.recorder.next_sample_s) - self.now
        return int(min(due / self._last_step_s + 2, LONGEST_LEAP)) if self._last_step_s else 1

    def _execute(self, plan: StepPlan) -> Generator[simpy.Event, Any, None]:
        times = list(accumulate(self.timer.durations(plan), initial=self.now))
        if plan.needs:
            # An arrival or a sample ends the leap at the first boundary between steps at or after it.
            due = min(self.arrivals.next_s or math.inf, self.recorder.next_sample_s)
            plan.cut(bisect_left(times, due, 1, plan.repeat))
            del times[plan.repeat + 1 :]
        end = times[-1]
        self._last_step_s = end - times[-2]
        yield self.env.timeout(end - self.now)
        self._record(plan, times)
        self.now = end
        finished = self.scheduler.commit(plan)
        self.recorder.committed(plan, times)
        for sequence in finished:
            self.recorder.finished(sequence, end)

    def _record(self, plan: StepPlan, times: list[float]) -> None:
        waiting = self.scheduler.waiting
        occupancy = self._memory.occupancy(waiting.head() if waiting else None)
        self.recorder.step(plan, times, occupancy, len(self.scheduler.running), len(waiting))

    def _check_progress(self, plan: StepPlan) -> None:
        if plan.work.num_generated:
            self._fruitless_tokens = 0
            return
        self._fruitless_tokens += max(1, plan.work.num_tokens)
        if self._fruitless_tokens > NO_PROGRESS_POOLS * self._memory.num_slots:
            raise NoProgress(
                f"{self._fruitless_tokens} tokens were computed and none was gained, so this would go on for ever: "
                f"{self.scheduler.explain_stall()}. Take a larger pool or scheduler.scheduler_reserve_full_isl=true."
            )
