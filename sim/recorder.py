"""Turns what happens in a run into its tables and figures: `requests`, `steps` and `events` as Parquet, `summary.json`.

The schema is the same for predicted and measured runs. Rows stream out; only live requests stay in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import mul
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from sim.files import write_json
from sim.goodput import NO_LIMITS, ServiceLevel
from sim.memory.interface import Occupancy
from sim.metrics import UNMOVED, Metrics, Moved
from sim.plan import Preemption, StepPlan
from sim.sequence import Sequence
from sim.tables import Table
from workloads.errors import UserError
from workloads.request import Promise

Status = Literal["complete", "interrupted", "failed"]
Rows = Literal["all", "sampled", "none"]


@dataclass(frozen=True, slots=True)
class Record:
    """Which rows a run keeps. Figures of the summary count everything, whatever is kept.

    Args:
        steps: rows of the steps table: every plan, the first plan in each `sample_interval_s`, or none.
        requests: rows of the requests table: every request, each `sample_every`-th by id, or none.
        sample_interval_s: simulated seconds; above 0.
        sample_every: at least 1.

    Raises:
        UserError: a number out of range.
    """

    steps: Rows = "all"
    requests: Rows = "all"
    sample_interval_s: float = 1.0
    sample_every: int = 100

    def __post_init__(self) -> None:
        if not self.sample_interval_s > 0:
            raise UserError(f"record.sample_interval_s is {self.sample_interval_s}; expected seconds, above 0.")
        if self.sample_every < 1:
            raise UserError(f"record.sample_every is {self.sample_every}; expected a whole number of at least 1.")


REQUESTS = pa.schema(
    [
        ("request_id", pa.int64()),
        ("arrival_s", pa.float64()),
        ("prompt_tokens", pa.int64()),
        ("output_tokens", pa.int64()),  # asked for, of each output
        ("priority", pa.int64()),
        ("status", pa.string()),  # finished, rejected, aborted or unfinished
        # stop: all output; length: cut off at the model limit; else why it was rejected or aborted
        ("finish_reason", pa.string()),
        ("first_scheduled_s", pa.float64()),
        ("first_token_s", pa.float64()),
        ("finish_s", pa.float64()),
        ("generated_tokens", pa.int64()),  # over all outputs
        ("preemptions", pa.int64()),
        ("hit_tokens", pa.int64()),  # prefix-cache hit at the first admission
        ("traffic_class", pa.string()),  # of a workload that has several
    ]
)
STEPS = pa.schema(
    [
        ("step", pa.int64()),
        ("repeat", pa.int64()),  # steps that the row stands for; each further one uses num_sequences slots more
        ("start_s", pa.float64()),
        ("duration_s", pa.float64()),
        ("num_tokens", pa.int64()),  # in each of the steps
        ("num_sequences", pa.int64()),  # in the batch
        ("running", pa.int64()),
        ("waiting", pa.int64()),
        ("preempted", pa.int64()),
        ("used", pa.int64()),  # slots in the first step, as are all from here on
        ("reserved", pa.int64()),
        ("internal", pa.int64()),
        ("cached", pa.int64()),
        ("external", pa.int64()),
        ("idle", pa.int64()),
        ("largest_free_run", pa.int64()),
        ("saved", pa.int64()),  # more slots that would be held if nobody shared
    ]
)
EVENTS = pa.schema(
    [
        ("time_s", pa.float64()),
        ("step", pa.int64()),
        # preemption; swap_out, right behind the preemption that it recovers from; swap_in; copy (of shared blocks that
        # one of the request's sequences writes to); move (of blocks to where neighbours are); rejection; abort
        ("event", pa.string()),
        ("request_id", pa.int64()),
        ("cause", pa.string()),
        ("because_of", pa.int64()),  # the request that needed the room
        ("blocks", pa.int64()),  # that were lost, moved or copied; one that several sequences share counts once
        # preemption: lost, to be computed again; swap_out: kept on the host; abort: generated before; else 0
        ("tokens", pa.int64()),
    ]
)


EVERYTHING = Record()
POOL_FULL = "no cell was free for its next token"


class Recorder:
    """Writes a run folder.

    Args:
        folder: where the files go; made if it is not there.
        num_slots: slots in the pool.
        block_size: slots in a block.
        record: which rows to keep.
        looks_up: whether prompts are looked up in a prefix cache, and so count as queried.
        promised: what a request must meet to count for goodput, unless it was promised something of its own.
        streams: whether a client gets each token when it is there. Otherwise all come with the last one: then that is
            the time of the first token too, and further tokens have no time of their own.

    Attributes:
        next_sample_s: when the next sampled row of the steps table is due; infinity if none is sampled.
    """

    def __init__(
        self,
        folder: Path,
        num_slots: int,
        block_size: int,
        record: Record = EVERYTHING,
        looks_up: bool = True,
        promised: ServiceLevel = NO_LIMITS,
        streams: bool = True,
    ) -> None:
        self.folder = folder
        self.metrics = Metrics(num_slots, counts_good=promised.promises)
        self._promised: Promise = promised
        self.next_sample_s = 0.0 if record.steps == "sampled" else math.inf
        self._next_row_s = -math.inf if record.steps == "all" else self.next_sample_s
        self._block_size = block_size
        self._looks_up = looks_up
        self._streams = streams
        self._sample_interval_s = record.sample_interval_s
        self._every = {"all": 1, "sampled": record.sample_every, "none": 0}[record.requests]
        self._paused: list[tuple[int, float]] = []  # how many steady sequences have had no token since when
        self._tables: list[Table] = []
        self._requests = self._open("requests", REQUESTS)
        self._steps = self._open("steps", STEPS)
        self._events = self._open("events", EVENTS)

    def arrived(self, sequence: Sequence, reason: str | None) -> None:
        """A request has come; `reason` says why it was turned away, if it was."""
        arrival = sequence.request.arrival_s
        if self.metrics.first_arrival_s is None:
            self.metrics.first_arrival_s = arrival
        if reason is not None:
            self.metrics.totals.rejected += 1
            self._add_request(sequence, "rejected", reason, None)
            request_id, step = sequence.request.request_id, self.metrics.totals.steps
            self._events.add((arrival, step, "rejection", request_id, reason, None, 0, 0))

    def idle(self, seconds: float, occupancy: Occupancy, waiting: int) -> None:
        """Time has passed in which nothing ran."""
        self.metrics.stretches.add(seconds, occupancy, 0, waiting)

    def executed(self, plan: StepPlan, times: list[float], occupancy: Occupancy, running: int, waiting: int) -> None:
        """A plan has been executed and committed.

        Args:
            plan: what it did.
            times: when its first step began and when each step's tokens were there, in seconds.
            occupancy: the pool in its first step.
            running: length of the running queue meanwhile.
            waiting: length of the waiting queue meanwhile.
        """
        metrics, work = self.metrics, plan.work
        start, end, repeat = times[0], times[-1], len(times) - 1
        moved = self._within_leap(plan, times) if repeat > 1 else UNMOVED
        metrics.stretches.add(end - start, occupancy, running, waiting, moved)
        if plan.paused:
            self._pause(plan.paused, start)
        if plan.steady and self._streams:
            if self._paused:
                self._go_on(plan.steady, times)
            else:  # they had their last token at the end of the step before
                metrics.itl.add_intervals(times, plan.steady)
        if plan.woken or plan.preemptions:
            self._disturbed(plan, start)
        if plan.batch:
            self._one_by_one(plan, start, end)
        if plan.offloaded or plan.onboarded:
            self._through_host_cache(plan)
        if start >= self._next_row_s:
            self._add_step(plan, times, occupancy, running, waiting)
        totals = metrics.totals
        totals.scheduled_tokens += work.num_tokens * repeat
        totals.steps += repeat

    def finished(self, sequence: Sequence, now: float) -> None:
        """A request has got its last token; of several outputs, all have, and times per token are those of one."""
        request, metrics, totals = sequence.request, self.metrics, self.metrics.totals
        generated = sequence.generated
        if not self._streams:
            sequence.first_token_s = now
        assert sequence.first_token_s is not None
        ttft, e2el, tpot = sequence.first_token_s - request.arrival_s, now - request.arrival_s, None
        metrics.ttft.add(ttft)
        metrics.e2el.add(e2el)
        metrics.normalized.add(e2el / generated)
        if generated > 1 and self._streams:  # as in vllm bench serve: one token has no time per further token
            tpot = (now - sequence.first_token_s) / (generated - 1)
            metrics.tpot.add(tpot)
        promised = self._promised
        if request.promised is not None:
            promised, metrics.counts_good = request.promised, True
        good = promised.met(ttft, tpot, e2el)
        totals.good += good
        if request.traffic_class is not None:
            metrics.class_finished(request.traffic_class, good)
        metrics.last_finish_s = now
        totals.completed += 1
        totals.input_tokens += request.prompt_tokens
        totals.output_tokens += generated * request.num_outputs
        cut_off = generated < request.output_tokens
        totals.cut_off += cut_off
        self._add_request(sequence, "finished", "length" if cut_off else "stop", now)

    def aborted(self, sequence: Sequence, now: float) -> None:
        """The engine has ended a request that it had no room for any more; it counts as failed."""
        self.metrics.totals.aborted += 1
        self._add_request(sequence, "aborted", POOL_FULL, now)
        request_id, step = sequence.request.request_id, self.metrics.totals.steps
        self._events.add((now, step, "abort", request_id, POOL_FULL, None, 0, sequence.generated))

    def unfinished(self, sequence: Sequence) -> None:
        """The run ends with this request still in the engine."""
        self._add_request(sequence, "unfinished", None, None)

    def close(self, status: Status, facts: dict[str, Any], error: str | None = None) -> dict[str, Any]:
        """Completes the folder; returns the summary.

        Args:
            status: how the run ended.
            facts: what else the summary should say of the run, first.
            error: what went wrong, if something did.
        """
        for table in self._tables:
            table.close()
        summary = {"status": status, "error": error, **facts, **self.metrics.summary()}
        write_json(self.folder / "summary.json", summary)
        return summary

    def discard(self) -> None:
        """Leaves no half-written table behind; harmless after `close`."""
        for table in self._tables:
            table.discard()

    def _open(self, name: str, schema: pa.Schema) -> Table:
        table = Table(self.folder / f"{name}.parquet", schema)
        self._tables.append(table)
        return table

    def _within_leap(self, plan: StepPlan, times: list[float]) -> Moved:
        """What changed in the pool between the steps of a plan, weighted by the time that was left of it then."""
        end, size = times[-1], self._block_size
        left = [end - time for time in times[1:-1]]  # of the plan, at the beginning of each further step
        taken = size * sum(map(mul, plan.needs, left), 0.0)
        cached, evicted = 0.0, plan.evicted
        if evicted == sum(plan.needs):
            cached = taken
        elif evicted:  # it was the last blocks that were taken
            for need, seconds in zip(reversed(plan.needs), reversed(left), strict=True):
                cached += min(need, evicted) * size * seconds
                evicted -= min(need, evicted)
        return Moved(
            # In each of them every sequence fills one slot that it had in reserve.
            reserved_to_used=plan.steady * sum(left, 0.0),
            idle_to_reserved=taken,
            reserved_to_internal=sum((slots * left[step] for step, slots in plan.unfilled), 0.0),
            cached_to_idle=cached,
        )

    def _pause(self, num_steady: int, start: float) -> None:
        """So many steady sequences get no token in a step: whoever has just had one, and whoever paused before."""
        newly = num_steady - sum(count for count, _ in self._paused)
        if newly:
            self._paused.append((newly, start))

    def _go_on(self, num_steady: int, times: list[float]) -> None:
        """Steady sequences decode again, some of which have paused."""
        itl, first = self.metrics.itl, times[1]
        newly = num_steady - sum(count for count, _ in self._paused)
        for count, since in (*self._paused, (newly, times[0])):
            if count:
                itl.add_intervals([since, first], count)
        if len(times) > 2:
            itl.add_intervals(times[1:], num_steady)
        self._paused.clear()

    def _disturbed(self, plan: StepPlan, start: float) -> None:
        """Sequences that decoded in every step so far, and those that lost their blocks."""
        if self._paused and plan.woken:
            since = self._paused[0][1]  # whoever has become steady since then has its own time
            for sequence in plan.woken:
                sequence.last_token_s = max(since, sequence.last_token_s or since)
            self._paused.clear()
        else:
            for sequence in plan.woken:
                sequence.last_token_s = start
        for preemption in plan.preemptions:
            self._preempted(preemption, start)

    def _one_by_one(self, plan: StepPlan, start: float, end: float) -> None:
        """Admissions, and the tokens of sequences that were planned one by one."""
        totals, itl = self.metrics.totals, self.metrics.itl
        for sequence in plan.admitted:
            sequence.first_scheduled_s = start
            if self._looks_up:
                totals.prefix_queried_tokens += sequence.request.prompt_tokens
                totals.prefix_hit_tokens += sequence.hit_tokens or 0
        if plan.resumed:
            totals.resume_hit_tokens += sum(hit for sequence, hit in plan.hits if sequence.preemptions)
        if plan.copied or plan.returned or plan.moved:
            self._moved(plan, start)
        for sequence in plan.gained if self._streams else ():
            if sequence.last_token_s is None:
                sequence.first_token_s = end
            else:
                itl.add(end - sequence.last_token_s)
            sequence.last_token_s = end

    def _preempted(self, preemption: Preemption, now: float) -> None:
        totals = self.metrics.totals
        swapped = preemption.recovery == "swap"
        totals.preemptions += 1
        victim, because = preemption.victim.request.request_id, preemption.because.request.request_id
        cause = "itself" if victim == because else "growth of another request"
        blocks, lost = preemption.blocks, 0 if swapped else preemption.tokens
        self._events.add((now, totals.steps, "preemption", victim, cause, because, blocks, lost))
        totals.tokens_recomputed += lost
        if swapped:
            totals.swap_outs += 1
            totals.blocks_swapped_out += blocks
            self._events.add((now, totals.steps, "swap_out", victim, cause, because, blocks, preemption.tokens))

    def _moved(self, plan: StepPlan, now: float) -> None:
        """Blocks that came back from the host, and those that were copied or moved."""
        totals = self.metrics.totals
        for sequence, blocks in plan.returned:
            totals.swap_ins += 1
            totals.blocks_swapped_in += blocks
            request_id = sequence.request.request_id
            self._events.add((now, totals.steps, "swap_in", request_id, "room again", None, blocks, 0))
        for sequence, blocks in plan.copied:
            totals.blocks_copied += blocks
            request_id = sequence.request.request_id
            self._events.add((now, totals.steps, "copy", request_id, "write to a shared block", None, blocks, 0))
        for sequence, blocks in plan.moved:
            totals.blocks_moved += blocks
            request_id = sequence.request.request_id
            self._events.add((now, totals.steps, "move", request_id, "defragmentation", None, blocks, 0))

    def _through_host_cache(self, plan: StepPlan) -> None:
        totals = self.metrics.totals
        totals.blocks_offloaded += plan.offloaded
        for sequence, blocks in plan.onboarded:
            totals.blocks_onboarded += blocks
            if not sequence.preemptions:
                totals.host_hit_tokens += blocks * self._block_size

    def _add_step(self, plan: StepPlan, times: list[float], occupancy: Occupancy, running: int, waiting: int) -> None:
        work, start = plan.work, times[0]
        self._steps.add(
            (
                self.metrics.totals.steps,
                len(times) - 1,
                start,
                times[-1] - start,
                work.num_tokens,
                work.num_sequences,
                running,
                waiting,
                len(plan.preemptions),
                *occupancy,
            )
        )
        if self._next_row_s > -math.inf:
            periods = math.floor(start / self._sample_interval_s) + 1
            self._next_row_s = self.next_sample_s = periods * self._sample_interval_s

    def _add_request(self, sequence: Sequence, status: str, reason: str | None, finish_s: float | None) -> None:
        request = sequence.request
        if not self._every or request.request_id % self._every:
            return
        self._requests.add(
            (
                request.request_id,
                request.arrival_s,
                request.prompt_tokens,
                request.output_tokens,
                request.priority,
                status,
                reason,
                sequence.first_scheduled_s,
                sequence.first_token_s,
                finish_s,
                sequence.generated_in_all,
                sequence.preemptions,
                sequence.hit_tokens,
                request.traffic_class,
            )
        )
