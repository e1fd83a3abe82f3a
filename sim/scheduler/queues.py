"""Who waits in which order, and who must go when the pool is full: vLLM's two scheduling policies (0.33).

Rule numbers are those of the vLLM conformance cases. Other choices of a victim are in `victims.py`.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Protocol

from sim.scheduler.victims import rank
from sim.sequence import Sequence


class QueuePolicy(Protocol):
    """The waiting queue and the choice of a victim."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]:
        """Front first."""

    def head(self) -> Sequence:
        """The sequence that is tried next."""

    def pop(self) -> Sequence:
        """Takes the head out."""

    def arrive(self, sequence: Sequence) -> None:
        """Queues a new sequence; calls come in order of arrival."""

    def return_preempted(self, sequence: Sequence) -> None:
        """Queues a sequence that has lost its blocks."""

    def victim(self, running: dict[Sequence, None]) -> Sequence:
        """The running sequence to preempt; `running` is in order of admission."""


class Fcfs(deque[Sequence]):
    """First come, first served; the last of the running queue goes first (rules 9, 11, 15)."""

    arrive = deque.append
    return_preempted = deque.appendleft
    pop = deque.popleft

    def __init__(self) -> None:
        super().__init__()

    def head(self) -> Sequence:
        return self[0]

    def victim(self, running: dict[Sequence, None]) -> Sequence:
        return next(reversed(running))


class Priority(list[Sequence]):
    """Smaller priority first, then earlier arrival; the worst running sequence by that order goes (rules 9, 15).

    The list holds the worst first, so that the head is taken from its end.
    """

    def __init__(self) -> None:
        super().__init__()

    def __iter__(self) -> Iterator[Sequence]:
        return reversed(self)

    def head(self) -> Sequence:
        return self[-1]

    def arrive(self, sequence: Sequence) -> None:
        bisect.insort(self, sequence, key=lambda other: tuple(-part for part in rank(other)))

    return_preempted = arrive

    def victim(self, running: dict[Sequence, None]) -> Sequence:
        return max(running, key=rank)


class Swapped(list[Sequence]):
    """Whoever was swapped out, each request by its first sequence, earlier arrivals first."""

    def __init__(self) -> None:
        super().__init__()

    def add(self, sequence: Sequence) -> None:
        """Queues a request whose blocks have gone to the host."""
        bisect.insort(self, sequence, key=lambda other: other.request.request_id)


class SwappedFirst:
    """A waiting queue in front of which those stand that are swapped out: nobody new comes in before them (vLLM v0).

    Args:
        policy: everyone else's queue.
        swapped: those in front, in their order.
    """

    def __init__(self, policy: QueuePolicy, swapped: Swapped) -> None:
        self._policy = policy
        self._swapped = swapped
        self.arrive = policy.arrive
        self.return_preempted = policy.return_preempted
        self.victim = policy.victim

    def __len__(self) -> int:
        return len(self._swapped) + len(self._policy)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._swapped, self._policy)

    def head(self) -> Sequence:
        return self._swapped[0] if self._swapped else self._policy.head()

    def pop(self) -> Sequence:
        return self._swapped.pop(0) if self._swapped else self._policy.pop()
