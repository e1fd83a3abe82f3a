"""The engine: a SimPy process that lets a scheduler plan steps, a timer price them, and a recorder write them down.

Requests that arrive during a step join at its end; under asynchronous scheduling the step after it is already planned
then, so they join at the end of that one. When they are sent, and whether that waits for the end of earlier ones, is
the clients' business (`clients.py`). Times are the running sum of the durations in step order; SimPy's clock moves with
them but is not read back, so that they do not depend on how many events a stretch of time took: a leap over many steps
gives the same times, bit for bit, as the steps one by one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Generator
from itertools import accumulate
from typing import Any

import simpy

from sim.clients import Arrivals
from sim.link import Link
from sim.memory.interface import KVMemory, Occupancy
from sim.plan import StepPlan, StepTimer
from sim.recorder import Recorder
from sim.scheduler.base import Scheduler
from workloads.errors import UserError

LONGEST_LEAP = 256  # steps; it only bounds the work that is lost when an arrival cuts a leap short
NO_PROGRESS_POOLS = 4  # a run that computes this many pools full of tokens without one new token goes in circles


class NoProgress(UserError):
    """Requests are left, but none of them will ever gain a token."""


class Engine:
    """One replica.

    Args:
        env: the clock.
        arrivals: requests to come.
        scheduler: plans the steps.
        timer: says how long each takes.
        recorder: writes them down.
        report: called with requests ended and simulated seconds whenever a request has finished.
        link: carries what a plan swaps, before its first step, whose duration includes it; None if the timer does that.
    """

    def __init__(
        self,
        env: simpy.Environment,
        arrivals: Arrivals,
        scheduler: Scheduler,
        timer: StepTimer,
        recorder: Recorder,
        report: Callable[[int, float], None],
        link: Link | None = None,
    ) -> None:
        self.env = env
        self.now = 0.0
        self._seen = 0.0  # whoever has come by then is known to the scheduler when it makes the next plan
        self._lag = int(scheduler.async_scheduling)  # steps that run while the next is planned
        self.arrivals = arrivals
        self.scheduler = scheduler
        self.timer = timer
        self.recorder = recorder
        self._memory: KVMemory = scheduler.memory
        self._report = report
        self._link = link
        self._last_step_s = 0.0
        self._fruitless_tokens = 0  # computed since a sequence last gained a token

    def serve(self) -> Generator[simpy.Event, Any, None]:
        """The process: serves until no request is left.

        Raises:
            NoProgress: says who waits for what.
        """
        scheduler, recorder, arrivals, timeout = self.scheduler, self.recorder, self.arrivals, self.env.timeout
        while True:
            if arrivals.next_s <= self._seen:
                for request in arrivals.until(self._seen):
                    sequence, reason = scheduler.arrive(request)
                    recorder.arrived(sequence, reason)
                    if reason is not None:
                        arrivals.failed([request], request.arrival_s)
            next_s, sample_s = arrivals.next_s, recorder.next_sample_s
            due = next_s if next_s < sample_s else sample_s
            plan = scheduler.schedule(self._steps_until(due))
            if plan.swap_outs or plan.swap_ins:
                yield from self._execute_with_swaps(plan)
            elif plan.work.num_tokens:
                times = list(accumulate(self.timer.durations(plan), initial=self.now))
                end = times[-1]
                if end > due and plan.needs:
                    steps = self._steps_before(times, next_s, sample_s)
                    plan.cut(steps)
                    del times[steps + 1 :]
                    end = times[-1]
                yield timeout(end - self.now)
                self._execute(plan, times)
            elif plan.preemptions:
                self._execute(plan, [self.now, self.now])
            elif self._seen < self.now:  # nothing runs any more while the next step is planned
                self._seen = self.now
            elif arrivals.next_s < math.inf:
                yield from self._wait_for_arrival()
            elif scheduler.idle:
                return
            else:
                raise NoProgress(
                    f"nothing can be scheduled any more: {scheduler.explain_stall()}. Take a larger pool or "
                    "scheduler.reject_oversize=true."
                )

    def _execute_with_swaps(self, plan: StepPlan) -> Generator[simpy.Event, Any, None]:
        """One step, which starts when what it swaps has arrived; or only the swaps, if nothing is left to compute."""
        swapped = 0.0
        if self._link is not None:
            swapped = yield from self._link.move(len(plan.swap_outs) + len(plan.swap_ins))
        executed = plan.work.num_tokens > 0 or self._link is None  # then the timer does the swaps too
        computed = self.timer.durations(plan)[0] if executed else 0.0
        yield self.env.timeout(computed)
        self.recorder.metrics.totals.swap_s += swapped
        self._execute(plan, [self.now, self.now + (swapped + computed)])

    def _steps_before(self, times: list[float], arrival: float, sample: float) -> int:
        """Steps of a leap until a decision is due: the first boundary between steps at or after what is to come.

        An arrival is known to whoever plans at that boundary, and if that is done a step ahead, one step later.
        """
        lag = self._lag
        return min(bisect_left(times, sample, 1), bisect_left(times, arrival, 1 - lag) + lag, len(times) - 1)

    def _steps_until(self, due: float) -> int:
        """Steps until the time `due`, if they take as long as the last one did: an estimate to save work."""
        if not self._last_step_s:
            return 1
        steps = (due - self.now) / self._last_step_s + 2
        return int(steps) if steps < LONGEST_LEAP else LONGEST_LEAP

    def _wait_for_arrival(self) -> Generator[simpy.Event, Any, None]:
        arrival = self.arrivals.next_s
        if arrival > self.env.now:
            yield self.env.timeout(arrival - self.env.now)
        if self.recorder.metrics.first_arrival_s is not None:  # the run begins with its first request
            self.recorder.idle(arrival - self.now, self._occupancy(), len(self.scheduler.waiting))
        self.now = self._seen = arrival

    def _execute(self, plan: StepPlan, times: list[float]) -> None:
        """Commits a plan whose time has passed, and writes it down."""
        scheduler, recorder, waiting = self.scheduler, self.recorder, self.scheduler.waiting
        num_running, num_waiting = len(scheduler.running), len(waiting)
        occupancy = self._memory.occupancy(waiting.head() if num_waiting else None)
        self.now = end = times[-1]
        self._seen = times[-1 - self._lag]
        self._last_step_s = end - times[-2]
        finished = scheduler.commit(plan)
        recorder.executed(plan, times, occupancy, num_running, num_waiting)
        if finished:
            for sequence in finished:
                recorder.finished(sequence, end)
            self.arrivals.ended((sequence.request for sequence in finished), end)
            self._report(recorder.metrics.num_ended, end)
        if plan.aborted:
            for sequence in plan.aborted:
                recorder.aborted(sequence, end)
            self.arrivals.failed((sequence.request for sequence in plan.aborted), end)
            self._report(recorder.metrics.num_ended, end)
        if plan.work.num_generated:
            self._fruitless_tokens = 0
        else:
            self._check_progress(plan)

    def _occupancy(self) -> Occupancy:
        waiting = self.scheduler.waiting
        return self._memory.occupancy(waiting.head() if waiting else None)

    def _check_progress(self, plan: StepPlan) -> None:
        self._fruitless_tokens += max(1, plan.work.num_tokens)
        if self._fruitless_tokens > NO_PROGRESS_POOLS * self._memory.num_slots:
            raise NoProgress(
                f"{self._fruitless_tokens} tokens were computed and none was gained, so this would go on for ever: "
                f"{self.scheduler.explain_stall()}. Take a larger pool or scheduler.scheduler_reserve_full_isl=true."
            )
