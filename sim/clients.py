"""Clients that keep so many requests in flight and no more: `workload.concurrency=N` (a closed loop).

As `vllm bench serve --max-concurrency` does: a request is sent when its own time has come and a place is free, in the
order of the workload; it counts as arrived when it is sent. Its place is free again when it has finished or was turned
away. What a request asks for is the workload's business, when it joins after its arrival the engine's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heappop, heappush

from sim.engine import Arrivals
from workloads.errors import UserError
from workloads.request import Request


class ClosedLoop(Arrivals):
    """The requests still to be sent, of which at most `concurrency` are in the system at any time.

    Args:
        requests: a stream, sorted by arrival.
        concurrency: places; at least 1.

    Attributes:
        next_s: when the next request is sent, in seconds; infinity if there is none, or if all places are taken.

    Raises:
        UserError: `concurrency` is below 1.
    """

    def __init__(self, requests: Iterator[Request], concurrency: int) -> None:
        if concurrency < 1:
            raise UserError(
                f"workload.concurrency is {concurrency}; expected a whole number of at least 1, or null for clients "
                "that wait for nobody."
            )
        self._free_since = [0.0] * concurrency  # a heap: whoever is next takes the place that has been free longest
        super().__init__(requests)

    def ended(self, num_requests: int, now: float) -> None:
        """Their places are free from `now` on."""
        for _ in range(num_requests):
            heappush(self._free_since, now)
        if self.next_s == math.inf:
            self._send()

    def _read(self) -> None:
        self._next = next(self._requests, None)
        self.next_s = math.inf
        self._send()

    def _send(self) -> None:
        """Gives the next request a place, if there are both."""
        if self._next is not None and self._free_since:
            self.next_s = max(self._next.arrival_s, heappop(self._free_since))
            self._next = self._next._replace(arrival_s=self.next_s)
