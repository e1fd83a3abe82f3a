"""Turns what happens in a run into its tables and figures: `requests`, `steps` and `events` as Parquet, `summary.json`.

The schema is the same for predicted and measured runs. Rows stream out; only live requests stay in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from sim.memory.interface import Occupancy
from sim.metrics import Metrics
from sim.plan import StepPlan
from sim.sequence import Sequence
from sim.tables import Table, write_json

Status = Literal["complete", "interrupted", "failed"]

REQUESTS = pa.schema(
    [
        ("request_id", pa.int64()),
        ("arrival_s", pa.float64()),
        ("prompt_tokens", pa.int64()),
        ("output_tokens", pa.int64()),  # asked for
        ("priority", pa.int64()),
        ("status", pa.string()),  # finished, rejected or unfinished
        ("finish_reason", pa.string()),  # stop: all output; length: cut off at the model limit; else why rejected
        ("first_scheduled_s", pa.float64()),
        ("first_token_s", pa.float64()),
        ("finish_s", pa.float64()),
        ("generated_tokens", pa.int64()),
        ("preemptions", pa.int64()),
        ("hit_tokens", pa.int64()),  # prefix-cache hit at the first admission
    ]
)
STEPS = pa.schema(
    [
        ("step", pa.int64()),
        ("repeat", pa.int64()),
        ("start_s", pa.float64()),
        ("duration_s", pa.float64()),
        ("num_tokens", pa.int64()),
        ("num_sequences", pa.int64()),  # in the batch
        ("running", pa.int64()),
        ("waiting", pa.int64()),
        ("preempted", pa.int64()),
        ("used", pa.int64()),  # slots, as are all from here on
        ("reserved", pa.int64()),
        ("internal", pa.int64()),
        ("cached", pa.int64()),
        ("external", pa.int64()),
        ("idle", pa.int64()),
        ("largest_free_run", pa.int64()),
    ]
)
EVENTS = pa.schema(
    [
        ("time_s", pa.float64()),
        ("step", pa.int64()),
        ("event", pa.string()),  # preemption or rejection
        ("request_id", pa.int64()),
        ("cause", pa.string()),
        ("because_of", pa.int64()),  # the request that needed the room
        ("blocks", pa.int64()),
        ("tokens", pa.int64()),
    ]
)


class Recorder:
    """Writes a run folder.

    Args:
        folder: where the files go; made if it is not there.
        num_slots: slots in the pool.
    """

    def __init__(self, folder: Path, num_slots: int) -> None:
        self.folder = folder
        self.metrics = Metrics(num_slots)
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
        self.metrics.stretch(seconds, occupancy, 0, waiting)

    def step(self, plan: StepPlan, start: float, end: float, occupancy: Occupancy, running: int, waiting: int) -> None:
        """A step has been executed but not yet committed.

        Args:
            plan: what it did.
            start: when it began, in seconds.
            end: when its tokens were there.
            occupancy: the pool while it ran.
            running: length of the running queue while it ran.
            waiting: length of the waiting queue while it ran.
        """
        metrics, totals = self.metrics, self.metrics.totals
        metrics.stretch(end - start, occupancy, running, waiting)
        for sequence in plan.admitted:
            sequence.first_scheduled_s = start
            totals.prefix_queried_tokens += sequence.known
            totals.prefix_hit_tokens += sequence.hit_tokens or 0
        for preemption in plan.preemptions:
            totals.tokens_recomputed += preemption.tokens
            cause = "itself" if preemption.victim is preemption.because else "growth of another request"
            self._events.add(
                (
                    start,
                    totals.steps,
                    "preemption",
                    preemption.victim.request.request_id,
                    cause,
                    preemption.because.request.request_id,
                    preemption.blocks,
                    preemption.tokens,
                )
            )
        self._token_times(plan, start, end)
        work = plan.work
        self._steps.add(
            (
                totals.steps,
                1,
                start,
                end - start,
                work.num_tokens,
                work.num_sequences,
                running,
                waiting,
                len(plan.preemptions),
                occupancy.used,
                occupancy.reserved,
                occupancy.internal,
                occupancy.cached,
                occupancy.external,
                occupancy.idle,
                occupancy.largest_free_run,
            )
        )
        totals.preemptions += len(plan.preemptions)
        totals.scheduled_tokens += work.num_tokens
        totals.steps += 1

    def finished(self, sequence: Sequence, now: float) -> None:
        """A request has got its last token."""
        request, metrics, totals = sequence.request, self.metrics, self.metrics.totals
        generated = sequence.generated
        assert sequence.first_token_s is not None
        metrics.ttft.add(sequence.first_token_s - request.arrival_s)
        metrics.e2el.add(now - request.arrival_s)
        metrics.normalized.add((now - request.arrival_s) / generated)
        if generated > 1:  # as in vllm bench serve: one token has no time per further token
            metrics.tpot.add((now - sequence.first_token_s) / (generated - 1))
        metrics.last_finish_s = now
        totals.completed += 1
        totals.input_tokens += request.prompt_tokens
        totals.output_tokens += generated
        cut_off = generated < request.output_tokens
        totals.cut_off += cut_off
        self._add_request(sequence, "finished", "length" if cut_off else "stop", now)

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

    def _token_times(self, plan: StepPlan, start: float, end: float) -> None:
        """Notes when each sequence got its token; most had one at the end of the step before, and share an interval."""
        itl = self.metrics.itl
        in_step = 0
        for sequence, _ in plan.batch:
            if sequence.computed == sequence.known:
                if sequence.last_token_s == start:
                    in_step += 1
                elif sequence.last_token_s is not None:
                    itl.add(end - sequence.last_token_s)
                else:
                    sequence.first_token_s = end
                sequence.last_token_s = end
        if in_step:
            itl.add(end - start, in_step)

    def _add_request(self, sequence: Sequence, status: str, reason: str | None, finish_s: float | None) -> None:
        request = sequence.request
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
                sequence.generated,
                sequence.preemptions,
                sequence.hit_tokens,
            )
        )
