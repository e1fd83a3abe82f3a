"""When a step begins and ends: the clock of a replay.

In virtual time a step lasts from the end of the one before to its own end, so that all host work in between counts,
and gaps between requests cost nothing. What belongs to no step (a lap that nobody counts) takes no time. In wall time
the engine's clock is the wall's, and all that passes counts towards one step or the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from simpy.rt import RealtimeEnvironment


class StepTime(Protocol):
    """Takes the time of steps, in seconds."""

    def begin(self) -> float:
        """A step begins; returns the seconds of host work before it that belong to it."""

    def lap(self) -> float:
        """Seconds since `begin` or the last call."""

    def end(self) -> None:
        """The step has ended, with the last `lap`."""


class VirtualTime:
    """Steps follow one another at once, whatever the engine's clock says.

    Args:
        clock: seconds; wall time, or on a machine that others use too the CPU time of this thread.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last: float | None = None
        self._ended: float | None = None

    def begin(self) -> float:
        now = self._last = self._clock()
        return 0.0 if self._ended is None else now - self._ended

    def lap(self) -> float:
        assert self._last is not None
        before, self._last = self._last, self._clock()
        return self._last - before

    def end(self) -> None:
        self._ended = self._last


class WallTime(VirtualTime):
    """The engine's clock is held to the wall's, so that requests arrive in real time.

    Args:
        env: the engine's; it sleeps until an event is due. Its time starts now.
    """

    def __init__(self, env: RealtimeEnvironment) -> None:
        super().__init__(time.monotonic)  # as `RealtimeEnvironment` has it
        self._env = env
        env.sync()
        self._present = env.real_start  # of the engine, by the wall

    def begin(self) -> float:
        """What has passed since the engine's present: its last step's end, or the arrival that it slept for."""
        super().begin()
        assert self._last is not None
        self._present = max(self._present, self._env.real_start + float(self._env.now))
        return max(0.0, self._last - self._present)

    def end(self) -> None:
        super().end()
        assert self._last is not None
        self._present = self._last
