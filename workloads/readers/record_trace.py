"""Traces with one record a request: a format says what a record means, and here is what becomes of it.

A record is a JSON object, of a line or of an array, or a row of a Parquet file. Those that cannot be used end the run
or are counted; those out of order are an error.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet

from workloads.errors import UserError
from workloads.readers import token_counts
from workloads.readers.bad_rows import BadRow, BadRows, Fate, LeftOut, OnBadRow
from workloads.readers.conversations import Conversations, Turn
from workloads.readers.json_lines import as_object, json_array, json_lines, json_object
from workloads.readers.sample import first_line
from workloads.readers.source_file import seekable, source_file
from workloads.request import HashIds, Request, TokenIds

Record = dict[str, Any]
_BATCH_ROWS = 1024  # of Parquet; rows with long lists take megabytes as Python objects


class Arrival(NamedTuple):
    """What a record says of a request.

    Args:
        time_ns: when it comes, in nanoseconds.
        prompt_tokens: at least 1.
        output_tokens: at least 1.
        prompt: what the prompt says, if that is known.
        priority: smaller goes first.
        max_tokens: the client's limit, if the record has one.
        turn: its place in a conversation, if the record tells; only a closed loop asks.
    """

    time_ns: int
    prompt_tokens: int
    output_tokens: int
    prompt: TokenIds | HashIds | None = None
    priority: int = 0
    max_tokens: int | None = None
    turn: Turn | None = None


class RecordTrace:
    """A workload from a file of records, which are read, and checked, as the iteration reaches them.

    Args:
        path: the file: JSON Lines or a JSON array, perhaps compressed, or Parquet.
        arrival: what a record says; raises BadRow for one that cannot be used, and LeftOut for one that is no request
            by the format's own rules, such as a span of another kind.
        on_bad_row: "error" ends at the first record that cannot be used; "drop" leaves such records out and counts them
            in `dropped`. Records out of order are no fault of one record, and always an error.
        from_first: arrivals count from the first record instead of the trace's zero.
        any_order: the format promises no order, so records are sorted by time; all of them are in memory then.
        parts: of a format whose records hold several requests, those, each with its place within; raises BadRow.
        source: place and record, one after another, where the file is not simply made of records.
        closed_loop: a turn waits for the end of the one that it follows (`conversations.py`).

    Raises:
        UserError: no such file. Iterating raises it for records: it names the place and the remedy.
    """

    def __init__(
        self,
        path: str,
        arrival: Callable[[Record], Arrival],
        on_bad_row: OnBadRow = "error",
        *,
        from_first: bool = False,
        any_order: bool = False,
        parts: Callable[[Record], Iterable[tuple[str, Record]]] | None = None,
        source: Callable[[Path], Iterator[tuple[str, bytes | object]]] | None = None,
        closed_loop: bool = False,
    ) -> None:
        self._path = path
        self._file = source_file(path)
        self._arrival = arrival
        self._bad_rows = BadRows(path, on_bad_row)
        self._from_first = from_first
        self._any_order = any_order
        self._parts = parts
        self._source = source or records
        self._closed_loop = closed_loop

    @property
    def num_requests(self) -> int | None:
        """None: only reading the file would tell."""
        return None

    @property
    def fate(self) -> Fate:
        """Of the records read so far in the latest iteration."""
        return self._bad_rows.fate

    @property
    def dropped(self) -> Mapping[str, int]:
        """Records dropped so far in the latest iteration, by cause."""
        return self.fate.dropped

    def __iter__(self) -> Iterator[Request]:
        arrivals: Iterator[Arrival] = self._arrivals()
        if self._any_order:
            arrivals = iter(sorted(arrivals, key=lambda arrival: arrival.time_ns))
        zero_ns: int | None = None if self._from_first else 0
        conversations = Conversations(self._path) if self._closed_loop else None
        for request_id, arrival in enumerate(arrivals):
            time_ns, prompt_tokens, output_tokens, prompt, priority, max_tokens, turn = arrival
            if zero_ns is None:
                zero_ns = time_ns
            request = Request(
                request_id,
                (time_ns - zero_ns) / 1e9,
                prompt_tokens,
                output_tokens,
                priority,
                prompt,
                max_tokens=max_tokens,
            )
            if conversations is not None and turn is not None:
                request = request._replace(after=conversations.follows(turn, request_id), think_s=turn.think_ns / 1e9)
            yield request

    def _reader(self) -> Callable[[Record], Arrival]:
        """What says of each record what it is, for one pass; a format that remembers earlier records has a new one."""
        return self._arrival

    def _arrivals(self) -> Iterator[Arrival]:
        """Of the records that can be used, in the order of the file."""
        self._bad_rows.begin()
        latest_ns = 0
        arrival_of = self._reader()
        for place, record in self._single():
            try:
                arrival = arrival_of(record)
            except BadRow as bad_row:
                self._bad_rows.meet(place, bad_row)
                continue
            except LeftOut as left_out:
                self._bad_rows.leave_out(left_out.cause, place)
                continue
            if arrival.time_ns < latest_ns and not self._any_order:
                raise UserError(
                    f"{self._path}, {place}: its time, {arrival.time_ns / 1e9:.15g} s, is earlier than that of the one "
                    "before; expected requests in order of time. Sort the file by time."
                )
            latest_ns = arrival.time_ns
            self._bad_rows.keep()
            yield arrival
        self._bad_rows.end()

    def _single(self) -> Iterator[tuple[str, Record]]:
        """Place and content of what may be a request each."""
        for place, content in self._source(self._file):
            try:
                record = json_object(content) if isinstance(content, bytes) else as_object(content)
                if self._parts is None:
                    yield place, record
                else:
                    for within, part in self._parts(record):
                        yield f"{place}, {within}", part
            except BadRow as bad_row:
                self._bad_rows.meet(place, bad_row)


def records(file: Path) -> Iterator[tuple[str, bytes | object]]:
    """Place and record, one after another; of JSON Lines the text, which is not parsed yet.

    Raises:
        UserError: a damaged file.
    """
    first = first_line(str(file), file)
    if first.startswith(b"PAR1"):
        yield from _parquet_rows(file)
    elif first.startswith(b"["):
        for number, element in json_array(file):
            yield f"element {number}", element
    else:
        for number, text in json_lines(file):
            yield f"line {number}", text


def _parquet_rows(file: Path) -> Iterator[tuple[str, Record]]:
    try:
        number = 0
        with seekable(file) as stream:
            for batch in pyarrow.parquet.ParquetFile(stream).iter_batches(_BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        reason = token_counts.shown(error)
        raise UserError(f"{file} is no whole Parquet file ({reason}); fetch or write it again.") from error
