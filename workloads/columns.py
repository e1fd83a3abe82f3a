"""A workload as columns, many requests at a time, for what counts requests instead of serving them.

A trace that is read as columns anyway is handed on as such, without an object a request; the others are gathered.
Whatever the way, the numbers are those of the requests that iterating gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from workloads.asked_limit import AskedLimit
from workloads.limit import FirstRequests
from workloads.readers.csv_trace import CsvTrace
from workloads.readers.trace import Trace
from workloads.request import HashIds, Request, TokenIds, Workload
from workloads.several_outputs import SeveralOutputs
from workloads.time_scale import ScaledTime

BATCH = 65_536  # requests gathered into one set of columns


@dataclass(frozen=True, slots=True)
class Columns:
    """Consecutive requests, at least one, as columns of equal length.

    Args:
        arrival_s: float64 seconds, never decreasing.
        prompt_tokens: int64.
        output_tokens: int64, of each output.
        num_outputs: int64.
        prompts: what the prompts say; None if that is known of none of them.
    """

    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    num_outputs: NDArray[np.int64]
    prompts: Sequence[TokenIds | HashIds | None] | None = None

    def __len__(self) -> int:
        return len(self.arrival_s)

    def first(self, count: int) -> Columns:
        """The first `count` of them."""
        return Columns(
            self.arrival_s[:count],
            self.prompt_tokens[:count],
            self.output_tokens[:count],
            self.num_outputs[:count],
            None if self.prompts is None else self.prompts[:count],
        )


def columns_of(workload: Workload) -> Iterator[Columns]:
    """All requests of `workload`, in order. Raises UserError as iterating over it does."""
    return _read(workload) if _has_columns(workload) else _gathered(iter(workload))


def _has_columns(workload: Workload) -> bool:
    while isinstance(workload, (AskedLimit, FirstRequests, ScaledTime, SeveralOutputs)):
        workload = workload.workload
    return isinstance(_reader(workload), CsvTrace)


def _reader(workload: Workload) -> Workload:
    """What reads the trace, where `workload` is one of whatever format and changes nothing."""
    return (workload.unchanged or workload) if isinstance(workload, Trace) else workload


def _read(workload: Workload) -> Iterator[Columns]:
    """Of a CSV trace, or of one with other arrivals, outputs or an end of its own."""
    workload = _reader(workload)
    if isinstance(workload, CsvTrace):
        yield from _csv_columns(workload)
    elif isinstance(workload, FirstRequests):
        left = workload.limit
        for columns in _read(workload.workload):
            yield columns.first(left)
            left -= len(columns)
            if left <= 0:
                return
    elif isinstance(workload, ScaledTime):
        for columns in _read(workload.workload):
            yield replace(columns, arrival_s=columns.arrival_s * workload.factor)
    elif isinstance(workload, SeveralOutputs):
        for columns in _read(workload.workload):
            yield replace(columns, num_outputs=np.full(len(columns), workload.sampling.num_outputs))
    else:
        assert isinstance(workload, AskedLimit)
        yield from _read(workload.workload)


def _csv_columns(trace: CsvTrace) -> Iterator[Columns]:
    for arrival_s, rows in trace.timed_rows():
        yield Columns(arrival_s, rows.prompt_tokens, rows.output_tokens, np.ones(len(arrival_s), np.int64))


def _gathered(requests: Iterator[Request]) -> Iterator[Columns]:
    while batch := list(islice(requests, BATCH)):
        count = len(batch)
        several = any(map(attrgetter("sampling"), batch))
        prompts = list(map(attrgetter("prompt"), batch))
        yield Columns(
            np.fromiter(map(attrgetter("arrival_s"), batch), np.float64, count),
            np.fromiter(map(attrgetter("prompt_tokens"), batch), np.int64, count),
            np.fromiter(map(attrgetter("output_tokens"), batch), np.int64, count),
            np.fromiter(map(attrgetter("num_outputs"), batch), np.int64, count)
            if several
            else np.ones(count, np.int64),
            prompts if any(prompts) else None,
        )
