"""How many requests are in flight at once if nobody waits: an estimate, before any engine is chosen.

Each request stays for its output tokens times a stated time per output token; prefill and queueing take nothing. So
this is what the trace asks for, not what an engine makes of it. The mean is Little's law: rate times mean stay.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Concurrency:
    """Counts requests in flight. Memory grows with how many there are at once.

    Args:
        seconds_per_output_token: how long a request stays for each token of its output.
    """

    def __init__(self, seconds_per_output_token: float) -> None:
        self._per_token_s = seconds_per_output_token
        self._ends: Floats = np.zeros(0)  # of those in flight, ascending
        self._held: Ints = np.zeros(0, np.int64)  # tokens of each at its end
        self._stay_s = 0.0
        self._peak = self._peak_tokens = 0

    def add(self, arrival_s: Floats, output_tokens: Ints, held_tokens: Ints) -> None:
        """Takes in further requests.

        Args:
            arrival_s: when they come; never decreasing.
            output_tokens: of each output.
            held_tokens: prompt and outputs together.
        """
        stays = output_tokens * self._per_token_s
        self._stay_s += float(stays.sum())
        earlier, earlier_tokens = len(self._ends), int(self._held.sum())
        ends, held = np.concatenate([self._ends, arrival_s + stays]), np.concatenate([self._held, held_tokens])
        order = np.argsort(ends, kind="stable")
        ends, held = ends[order], held[order]
        # Whoever arrives later also ends later than this arrival, so all ends up to it are of requests that had come.
        ended = np.searchsorted(ends, arrival_s, side="right")
        freed = np.concatenate([np.zeros(1, np.int64), np.cumsum(held)])[ended]
        in_flight = earlier + np.arange(1, len(arrival_s) + 1) - ended
        self._peak = max(self._peak, int(in_flight.max()))
        self._peak_tokens = max(self._peak_tokens, int((earlier_tokens + np.cumsum(held_tokens) - freed).max()))
        self._ends, self._held = ends[ended[-1] :], held[ended[-1] :]

    def summary(self, span_s: float) -> dict[str, float | None]:
        """Mean and peak of requests in flight, and the most tokens of prompts and whole outputs that these have.

        Args:
            span_s: from the first arrival to the last, in seconds; there is no mean if it is 0.
        """
        return {
            "seconds_per_output_token": self._per_token_s,
            "mean": self._stay_s / span_s if span_s else None,
            "peak": self._peak,
            "peak_tokens": self._peak_tokens,
        }
