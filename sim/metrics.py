"""The figures of a run: latencies of requests, throughput, and time averages of the queues and of the pool.

Names and units are those of `vllm bench serve` where it has the figure. Averages of the pool are weighted by time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.memory.interface import Occupancy
from sim.samples import Intervals, Samples

MEAN_NORMALIZED = "mean_normalized_latency_ms"
SHARES = Occupancy._fields[:6]  # the largest free run is part of one of them
_USED, _RESERVED, _INTERNAL, _CACHED, _EXTERNAL, _IDLE = range(len(SHARES))
_ROWS_AT_ONCE = 8192


class Moved(NamedTuple):
    """Slots that changed their name within a stretch, each times the seconds that were left of it then."""

    reserved_to_used: float = 0.0
    idle_to_reserved: float = 0.0
    reserved_to_internal: float = 0.0
    cached_to_idle: float = 0.0


UNMOVED = Moved()
# A stretch is a row: seconds, the occupancy, running, waiting, moved.
_FIRST_SHARE, _RUNNING, _WAITING, _FIRST_MOVED = (
    1,
    1 + len(Occupancy._fields),
    2 + len(Occupancy._fields),
    -len(UNMOVED),
)
_SAVED = 1 + Occupancy._fields.index("saved")
_WIDTH = _WAITING + 1 + len(UNMOVED)


@dataclass(slots=True)
class TimeAverage:
    """Integrals over time of the pool's shares and of the queue lengths.

    Args:
        seconds: time integrated over.
        slots: shape (6,), slot-seconds of each waste name, in the order of `SHARES`.
        saved: slot-seconds that sharing has saved.
    """

    seconds: float = 0.0
    slots: NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(SHARES)))
    saved: float = 0.0
    running: float = 0.0
    waiting: float = 0.0

    def add(self, rows: NDArray[np.float64]) -> None:
        """Adds stretches, one a row."""
        seconds = rows[:, 0]
        slots = (rows[:, _FIRST_SHARE : _FIRST_SHARE + len(SHARES)] * seconds[:, None]).sum(axis=0)
        moved = Moved(*rows[:, _FIRST_MOVED:].sum(axis=0).tolist())
        for source, target, slot_seconds in (
            (_RESERVED, _USED, moved.reserved_to_used),
            (_IDLE, _RESERVED, moved.idle_to_reserved),
            (_RESERVED, _INTERNAL, moved.reserved_to_internal),
            (_CACHED, _IDLE, moved.cached_to_idle),
        ):
            slots[source] -= slot_seconds
            slots[target] += slot_seconds
        self.slots += slots
        self.seconds += float(seconds.sum())
        self.saved += float((rows[:, _SAVED] * seconds).sum())
        self.running += float((rows[:, _RUNNING] * seconds).sum())
        self.waiting += float((rows[:, _WAITING] * seconds).sum())

    def means(self, num_slots: int, prefix: str = "") -> dict[str, float | None]:
        """Time averages, None if no time has passed.

        Args:
            num_slots: slots in the pool, for the shares.
            prefix: put before `share_<name>`.
        """
        if not self.seconds:
            return dict.fromkeys((f"{prefix}share_{name}" for name in SHARES), None)
        whole = self.seconds * num_slots
        return {f"{prefix}share_{name}": total / whole for name, total in zip(SHARES, self.slots.tolist(), strict=True)}

    def saved_by_sharing(self) -> float | None:
        """Blocks saved by sharing over blocks needed without, averaged over time (Kwon et al., Fig. 15).

        It is the average of the one over the average of the other, None if nobody held anything.
        """
        held = float(self.slots[_USED] + self.slots[_RESERVED] + self.slots[_INTERNAL])
        return self.saved / (held + self.saved) if held else None


class Stretches:
    """What held for how long. Stretches are integrated many at a time.

    Attributes:
        whole: averages over all of them, once `integrate` has been called.
        saturated: over those in which at least one request waited.
        max_running: most requests that ran in any of them.
    """

    def __init__(self) -> None:
        self.whole = TimeAverage()
        self.saturated = TimeAverage()
        self.max_running = 0
        self._rows: list[float] = []  # one after another; a list takes numbers faster than an array does

    def add(self, seconds: float, occupancy: Occupancy, running: int, waiting: int, moved: Moved = UNMOVED) -> None:
        """Time that has passed with the queues as given, and the pool as it was at the beginning but for `moved`."""
        self._rows += (seconds, *occupancy, running, waiting, *moved)
        if len(self._rows) >= _ROWS_AT_ONCE * _WIDTH:
            self.integrate()

    def integrate(self) -> None:
        """Brings the averages up to date."""
        rows = np.array(self._rows, dtype=np.float64).reshape(-1, _WIDTH)
        self._rows.clear()
        if len(rows):
            self.max_running = max(self.max_running, int(rows[:, _RUNNING].max()))
            self.whole.add(rows)
            self.saturated.add(rows[rows[:, _WAITING] > 0])


@dataclass(slots=True)
class Totals:
    """What has happened so far."""

    completed: int = 0
    good: int = 0  # completed within the limits of goodput
    rejected: int = 0
    aborted: int = 0
    never_sent: int = 0  # turns of conversations that broke off before them; they are no failed requests
    cut_off: int = 0  # completed at the model limit, with fewer tokens than asked for
    input_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    scheduled_tokens: int = 0
    preemptions: int = 0
    tokens_recomputed: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    resume_hit_tokens: int = 0  # found again by sequences that come back after a preemption
    swap_outs: int = 0  # preemptions by swap: requests, each with all its sequences
    swap_ins: int = 0
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0
    swap_s: float = 0.0  # time that steps waited for the link, a host cache included
    host_hit_tokens: int = 0  # of the prefix hits at first admissions, what lay in a host cache
    blocks_offloaded: int = 0  # evicted to a host cache
    blocks_onboarded: int = 0  # hit there
    blocks_copied: int = 0  # on write
    blocks_moved: int = 0  # by defragmentation


@dataclass(slots=True)
class ClassTotals:
    """What has happened so far to the requests of one class."""

    completed: int = 0
    good: int = 0  # within the limits of goodput


@dataclass(slots=True)
class Metrics:
    """Everything that `summary.json` says of the run."""

    num_slots: int
    block_bytes: int = 0  # of KV in a block, over all GPUs
    counts_good: bool = False  # there are limits that a request may miss
    totals: Totals = field(default_factory=Totals)
    classes: dict[str, ClassTotals] = field(default_factory=dict)  # of a workload that has several
    stretches: Stretches = field(default_factory=Stretches)
    ttft: Samples = field(default_factory=Samples)
    tpot: Samples = field(default_factory=Samples)
    itl: Intervals = field(default_factory=Intervals)
    e2el: Samples = field(default_factory=Samples)
    normalized: Samples = field(default_factory=Samples)
    first_arrival_s: float | None = None
    last_finish_s: float = 0.0

    @property
    def num_ended(self) -> int:
        """Requests that have finished, were rejected or aborted."""
        return self.totals.completed + self.totals.rejected + self.totals.aborted

    def class_finished(self, name: str, good: bool) -> None:
        """A request of this class has finished."""
        totals = self.classes.setdefault(name, ClassTotals())
        totals.completed += 1
        totals.good += good

    def summary(self) -> dict[str, Any]:
        """The figures; latencies in milliseconds, everything else in SI units."""
        totals = self.totals
        self.stretches.integrate()
        whole, saturated = self.stretches.whole, self.stretches.saturated
        duration = max(0.0, self.last_finish_s - (self.first_arrival_s or 0.0)) if totals.completed else 0.0

        def rate(count: int) -> float | None:
            return count / duration if duration else None

        latencies: dict[str, float | None] = {}
        for name in ("ttft", "tpot", "itl", "e2el"):
            latencies |= getattr(self, name).statistics(name)
        classes = {
            name: {
                "completed": one.completed,
                "request_throughput": rate(one.completed),
                "request_goodput": rate(one.good) if self.counts_good else None,
            }
            for name, one in sorted(self.classes.items())
        }
        return {
            "completed": totals.completed,
            "failed": totals.rejected + totals.aborted,
            "aborted": totals.aborted,
            "never_sent": totals.never_sent,
            "cut_off": totals.cut_off,
            "total_input_tokens": totals.input_tokens,
            "total_output_tokens": totals.output_tokens,
            "duration": duration,
            "request_throughput": rate(totals.completed),
            "request_goodput": rate(totals.good) if self.counts_good else None,
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
            "host_hit_tokens": totals.host_hit_tokens,
            "offloaded_bytes": totals.blocks_offloaded * self.block_bytes,
            "onboarded_bytes": totals.blocks_onboarded * self.block_bytes,
            "blocks_copied": totals.blocks_copied,
            "copied_bytes": totals.blocks_copied * self.block_bytes,
            "blocks_moved": totals.blocks_moved,
            "moved_bytes": totals.blocks_moved * self.block_bytes,
            "saved_by_sharing": whole.saved_by_sharing(),
            "max_running": self.stretches.max_running,
            "mean_running": whole.running / whole.seconds if whole.seconds else None,
            "mean_waiting": whole.waiting / whole.seconds if whole.seconds else None,
            "pool_slots": self.num_slots,
            **whole.means(self.num_slots),
            "saturated_s": saturated.seconds,
            "mean_running_saturated": saturated.running / saturated.seconds if saturated.seconds else None,
            **saturated.means(self.num_slots, "saturated_"),
            **({"classes": classes} if classes else {}),
        }
