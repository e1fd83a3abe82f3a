"""The figures of a run: latencies of requests, throughput, and time averages of the queues and of the pool.

Names and units are those of `vllm bench serve` where it has the figure. Averages of the pool are weighted by time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sim.memory.interface import Occupancy
from sim.samples import Intervals, Samples

MEAN_NORMALIZED = "mean_normalized_latency_ms"
SHARES = Occupancy._fields[:6]  # the largest free run is part of one of them
USED, RESERVED, INTERNAL, CACHED, EXTERNAL, IDLE = range(len(SHARES))


@dataclass(slots=True)
class TimeAverage:
    """Integrals over time of the pool's shares and of the queue lengths.

    Args:
        seconds: time integrated over.
        slots: slot-seconds of each waste name, in the order of `SHARES`.
        saved: slot-seconds that sharing has saved.
    """

    seconds: float = 0.0
    slots: list[float] = field(default_factory=lambda: [0.0] * len(SHARES))
    saved: float = 0.0
    running: float = 0.0
    waiting: float = 0.0

    def add(self, seconds: float, occupancy: Occupancy, running: int, waiting: int) -> None:
        """A stretch of `seconds` in which all of this held."""
        self.seconds += seconds
        slots = self.slots
        used, reserved, internal, cached, external, idle, _, saved = occupancy
        if saved:
            self.saved += saved * seconds
        slots[USED] += used * seconds
        slots[RESERVED] += reserved * seconds
        slots[INTERNAL] += internal * seconds
        slots[CACHED] += cached * seconds
        slots[EXTERNAL] += external * seconds
        slots[IDLE] += idle * seconds
        self.running += running * seconds
        self.waiting += waiting * seconds

    def move(self, source: int, target: int, slot_seconds: float) -> None:
        """Slots that changed their name within a stretch.

        Args:
            source: index in `SHARES` of what they were at its beginning.
            target: index of what they became.
            slot_seconds: how many of them, times the seconds that were left of the stretch.
        """
        self.slots[source] -= slot_seconds
        self.slots[target] += slot_seconds

    def means(self, num_slots: int, prefix: str = "") -> dict[str, float | None]:
        """Time averages, None if no time has passed.

        Args:
            num_slots: slots in the pool, for the shares.
            prefix: put before `share_<name>`.
        """
        if not self.seconds:
            return dict.fromkeys((f"{prefix}share_{name}" for name in SHARES), None)
        whole = self.seconds * num_slots
        return {f"{prefix}share_{name}": total / whole for name, total in zip(SHARES, self.slots, strict=True)}

    def saved_by_sharing(self) -> float | None:
        """Blocks saved by sharing over blocks needed without, averaged over time (Kwon et al., Fig. 15).

        It is the average of the one over the average of the other, None if nobody held anything.
        """
        held = self.slots[USED] + self.slots[RESERVED] + self.slots[INTERNAL]
        return self.saved / (held + self.saved) if held else None


@dataclass(slots=True)
class Totals:
    """What has happened so far."""

    completed: int = 0
    rejected: int = 0
    cut_off: int = 0  # completed at the model limit, with fewer tokens than asked for
    input_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    scheduled_tokens: int = 0
    preemptions: int = 0
    tokens_recomputed: int = 0
    max_running: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    resume_hit_tokens: int = 0  # found again by sequences that come back after a preemption
    swap_outs: int = 0  # preemptions by swap: requests, each with all its sequences
    swap_ins: int = 0
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0
    swap_s: float = 0.0  # time that steps waited for the link
    blocks_copied: int = 0  # on write


@dataclass(slots=True)
class Metrics:
    """Everything that `summary.json` says of the run."""

    num_slots: int
    block_bytes: int = 0  # of KV in a block, over all GPUs
    totals: Totals = field(default_factory=Totals)
    whole: TimeAverage = field(default_factory=TimeAverage)
    saturated: TimeAverage = field(default_factory=TimeAverage)  # while at least one request waits
    ttft: Samples = field(default_factory=Samples)
    tpot: Samples = field(default_factory=Samples)
    itl: Intervals = field(default_factory=Intervals)
    e2el: Samples = field(default_factory=Samples)
    normalized: Samples = field(default_factory=Samples)
    first_arrival_s: float | None = None
    last_finish_s: float = 0.0

    @property
    def num_ended(self) -> int:
        """Requests that have finished or were rejected."""
        return self.totals.completed + self.totals.rejected

    def stretch(self, seconds: float, occupancy: Occupancy, running: int, waiting: int) -> None:
        """Time that has passed with the pool and the queues as given."""
        self.whole.add(seconds, occupancy, running, waiting)
        if waiting:
            self.saturated.add(seconds, occupancy, running, waiting)
        if running > self.totals.max_running:
            self.totals.max_running = running

    def move(self, source: int, target: int, slot_seconds: float, waiting: int) -> None:
        """Slots that changed their name within the last stretch, during which so many requests waited."""
        self.whole.move(source, target, slot_seconds)
        if waiting:
            self.saturated.move(source, target, slot_seconds)

    def summary(self) -> dict[str, Any]:
        """The figures; latencies in milliseconds, everything else in SI units."""
        totals = self.totals
        duration = max(0.0, self.last_finish_s - (self.first_arrival_s or 0.0)) if totals.completed else 0.0

        def rate(count: int) -> float | None:
            return count / duration if duration else None

        latencies: dict[str, float | None] = {}
        for name in ("ttft", "tpot", "itl", "e2el"):
            latencies |= getattr(self, name).statistics(name)
        return {
            "completed": totals.completed,
            "failed": totals.rejected,
            "cut_off": totals.cut_off,
            "total_input_tokens": totals.input_tokens,
            "total_output_tokens": totals.output_tokens,
            "duration": duration,
            "request_throughput": rate(totals.completed),
            "output_throughput": rate(totals.output_tokens),
            "total_token_throughput": rate(totals.input_tokens + totals.output_tokens),
            **latencies,
            MEAN_NORMALIZED: self.normalized.statistics("normalized_latency")[MEAN_NORMALIZED],
            "largest_percentile_error": max(
                samples.largest_error for samples in (self.ttft, self.tpot, self.itl, self.e2el)
            ),
            "steps": totals.steps,
            "scheduled_tokens": totals.scheduled_tokens,
            "preemptions": totals.preemptions,
            "tokens_recomputed": totals.tokens_recomputed,
            "prefix_queried_tokens": totals.prefix_queried_tokens,
            "prefix_hit_tokens": totals.prefix_hit_tokens,
            "resume_hit_tokens": totals.resume_hit_tokens,
            "swap_outs": totals.swap_outs,
            "swap_ins": totals.swap_ins,
            "swapped_out_bytes": totals.blocks_swapped_out * self.block_bytes,
            "swapped_in_bytes": totals.blocks_swapped_in * self.block_bytes,
            "swap_s": totals.swap_s,
            "blocks_copied": totals.blocks_copied,
            "copied_bytes": totals.blocks_copied * self.block_bytes,
            "saved_by_sharing": self.whole.saved_by_sharing(),
            "max_running": totals.max_running,
            "mean_running": self.whole.running / self.whole.seconds if self.whole.seconds else None,
            "mean_waiting": self.whole.waiting / self.whole.seconds if self.whole.seconds else None,
            "pool_slots": self.num_slots,
            **self.whole.means(self.num_slots),
            "saturated_s": self.saturated.seconds,
            "mean_running_saturated": (
                self.saturated.running / self.saturated.seconds if self.saturated.seconds else None
            ),
            **self.saturated.means(self.num_slots, "saturated_"),
        }
