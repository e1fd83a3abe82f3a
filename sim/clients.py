"""When requests are sent: clients that follow the clock, turns of a conversation, and places that are few.

A request is sent at its own time; a turn of a conversation not before the turn before it has ended and the client has
thought (`Request.after`). Whichever way a turn ends without an answer, by being turned away or aborted, its
conversation is over, and the turns to come are never sent.

With `workload.concurrency=N`, as `vllm bench serve --max-concurrency` does, a request that is due also waits until a
place is free: at most N are in the system, and whoever has been due longest is next. A place is free again when its
request has finished or was turned away; nobody holds one while thinking.

A request counts as arrived when it is sent. What it asks for is the workload's business, when it joins after its
arrival the engine's.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush

from workloads.errors import UserError
from workloads.request import Request


class Arrivals:
    """The requests still to be sent, in the order in which they are due.

    Args:
        requests: a stream, sorted by arrival, in which each turn stands behind the one that it follows. No more of it
            is read than it takes to know who is next, but the turns that wait for others are kept.

    Attributes:
        next_s: when the next request is sent, in seconds; infinity if there is none, or if it waits for the end of
            another.
        num_never_sent: turns so far that were read and will not be sent.

    Raises:
        UserError: a turn follows one that does not stand before it; reading on raises it too.
    """

    def __init__(self, requests: Iterator[Request]) -> None:
        self._requests = requests
        self._read_s = -math.inf  # arrival of the last one that was read
        self._due: list[tuple[float, int, Request]] = []  # a heap: of those read, whose time is known
        self._turns: dict[int, list[Request]] = {}  # the others, by the request whose end they wait for
        self._ends_s = array("d")  # by request id: when it ended; not a number before, infinity if without an answer
        self.num_never_sent = 0
        self.next_s = math.inf
        self._read()

    def until(self, now: float) -> Iterator[Request]:
        """Takes out the requests that are sent by `now`, each with the time of that as its arrival."""
        while self.next_s <= now:
            yield self._send()

    def ended(self, requests: Iterable[Request], now: float) -> None:
        """They have finished at `now`, and who follows them thinks from then on."""
        for request in requests:
            self._note_end(request.request_id, now)
            for turn in self._turns.pop(request.request_id, ()):
                self._note_due(turn, now)
        self._read()

    def failed(self, requests: Iterable[Request], now: float) -> None:
        """They were turned away or aborted at `now`: whoever follows them is never sent."""
        for request in requests:
            self._abandon(request.request_id)
        self._read()

    def _send(self) -> Request:
        _, _, request = heappop(self._due)
        sent_s = self.next_s
        self._read()
        return request if request.arrival_s == sent_s else request._replace(arrival_s=sent_s)

    def _read(self) -> None:
        """Reads until nobody can be due before the one who is next by now."""
        due = self._due
        while not due or self._read_s < due[0][0]:
            request = next(self._requests, None)
            if request is None:
                break
            self._read_s = request.arrival_s
            if request.after is None:
                heappush(due, (request.arrival_s, request.request_id, request))
            else:
                self._follow(request, request.after)
        self.next_s = due[0][0] if due else math.inf

    def _follow(self, turn: Request, after: int) -> None:
        """Puts a turn that was read where it belongs."""
        if not 0 <= after < turn.request_id:
            raise UserError(
                f"request {turn.request_id} follows request {after}, which does not come before it; the turns of a "
                "conversation have to be in order. Correct the workload, or leave workload.closed_loop out."
            )
        end_s = self._ends_s[after] if after < len(self._ends_s) else math.nan
        if math.isnan(end_s):
            self._turns.setdefault(after, []).append(turn)
        elif end_s == math.inf:
            self.num_never_sent += 1
            self._abandon(turn.request_id)
        else:
            self._note_due(turn, end_s)

    def _note_due(self, turn: Request, end_s: float) -> None:
        heappush(self._due, (max(turn.arrival_s, end_s + turn.think_s), turn.request_id, turn))

    def _abandon(self, request_id: int) -> None:
        """Nobody who follows this request, directly or not, is sent."""
        abandoned = [request_id]
        while abandoned:
            request_id = abandoned.pop()
            self._note_end(request_id, math.inf)
            turns = self._turns.pop(request_id, ())
            self.num_never_sent += len(turns)
            abandoned += (turn.request_id for turn in turns)

    def _note_end(self, request_id: int, end_s: float) -> None:
        new = request_id + 1 - len(self._ends_s)
        if new > 0:
            self._ends_s.extend([math.nan] * new)
        self._ends_s[request_id] = end_s


class ClosedLoop(Arrivals):
    """The same, but at most `concurrency` of the requests are in the system at any time.

    Args:
        requests: as in `Arrivals`.
        concurrency: places; at least 1.

    Attributes:
        next_s: infinity if all places are taken, too.

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

    def ended(self, requests: Iterable[Request], now: float) -> None:
        """Their places are free from `now` on, too."""
        requests = list(requests)
        self._free(len(requests), now)
        super().ended(requests, now)

    def failed(self, requests: Iterable[Request], now: float) -> None:
        """Their places are free from `now` on, too."""
        requests = list(requests)
        self._free(len(requests), now)
        super().failed(requests, now)

    def _free(self, num_places: int, now: float) -> None:
        for _ in range(num_places):
            heappush(self._free_since, now)

    def _send(self) -> Request:
        heappop(self._free_since)
        return super()._send()

    def _read(self) -> None:
        super()._read()
        self.next_s = max(self.next_s, self._free_since[0]) if self._free_since else math.inf
