"""Traces as CSV with one request a row, found by column names, and read as columns where nothing is wrong.

Accepted in any of them: CRLF, no end of the last line, blank lines, columns in any order and others between them. The
files hold up to 16.8 million rows, so they are streamed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from workloads.errors import UserError
from workloads.readers import token_counts
from workloads.readers.bad_rows import BadRow, BadRows, Fate, OnBadRow
from workloads.readers.csv_columns import CsvBlock, CsvColumns
from workloads.readers.time_columns import TimeColumn
from workloads.request import Request


@dataclass(frozen=True, slots=True)
class Outcome:
    """A column that says how a request ended.

    Args:
        column: its name.
        served: what it holds for a request that was served.
    """

    column: str
    served: str
    cause: ClassVar[str] = "failed"

    def check(self, value: object) -> None:
        """Raises BadRow unless `value` says that the request was served."""
        if value != self.served:
            raise BadRow(self.cause, f"{self.column} is {token_counts.shown(value, quoted=repr)}: the request failed")


@dataclass(frozen=True, slots=True)
class CsvLayout:
    """Which columns of a format say what.

    Args:
        time: when a request arrives; None: the format does not say, and all arrive at 0.
        prompt: tokens of its prompt.
        output: tokens it generates.
        zero_output: what a 0 there means in this format, as a cause of dropped rows; None: nothing of its own.
        outcome: how it ended, if the format says that.
        from_first: arrivals count from the first row that is kept, instead of from the trace's zero.
    """

    time: TimeColumn | None
    prompt: str
    output: str
    zero_output: str | None = None
    outcome: Outcome | None = None
    from_first: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """Their names: time, prompt, output, outcome, as far as there are any."""
        time = () if self.time is None else (self.time.name,)
        outcome = () if self.outcome is None else (self.outcome.column,)
        return (*time, self.prompt, self.output, *outcome)

    def check_output(self, output: object) -> None:
        """Raises BadRow for a 0 where that has a meaning of its own."""
        if self.zero_output is not None and (
            output == 0 or (isinstance(output, str) and output.strip("0") == "" != output)
        ):
            raise BadRow(self.zero_output, f"{self.output} is 0: {self.zero_output}")


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of the trace as columns of equal length.

    Args:
        time_ns: nanoseconds, int64, never decreasing.
        prompt_tokens: int64, each at least 1.
        output_tokens: int64, each at least 1.
    """

    time_ns: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]


class CsvTrace:
    """A workload from a CSV trace. Rows are read, and checked, as the iteration reaches them, some 4 MiB at a time.

    Args:
        path: the file; it may be compressed with gzip or zstd.
        layout: of its format.
        on_bad_row: "error" ends at the first row that cannot be used; "drop" leaves such rows out and counts them in
            `dropped`. Rows out of order are no fault of one row, and always an error.

    Raises:
        UserError: no such file, or not its header. Iterating raises it for rows: it names the line and the remedy.
    """

    def __init__(self, path: str, layout: CsvLayout, on_bad_row: OnBadRow = "error") -> None:
        self._path = path
        self._layout = layout
        self._csv = CsvColumns(path, layout.columns)
        self._bad_rows = BadRows(path, on_bad_row)

    @property
    def num_requests(self) -> int | None:
        """None: only reading the file would tell."""
        return None

    @property
    def fate(self) -> Fate:
        """Of the rows read so far in the latest iteration; a block of lines is read at once."""
        return self._bad_rows.fate

    @property
    def dropped(self) -> Mapping[str, int]:
        """Rows dropped so far in the latest iteration, by cause."""
        return self.fate.dropped

    def __iter__(self) -> Iterator[Request]:
        request_ids = count()
        for arrivals_s, rows in self.timed_rows():
            columns = (arrivals_s, rows.prompt_tokens, rows.output_tokens)
            yield from map(Request, request_ids, *(column.tolist() for column in columns))

    def timed_rows(self) -> Iterator[tuple[NDArray[np.float64], Rows]]:
        """The same as columns: arrivals in seconds, and the rows they are of. Raises UserError as iterating does."""
        zero_ns: int | None = None if self._layout.from_first else 0
        for rows in self.rows():
            if zero_ns is None:
                zero_ns = int(rows.time_ns[0])
            yield (rows.time_ns - zero_ns) / 1e9, rows  # the difference is exact, so only the division rounds

    def rows(self) -> Iterator[Rows]:
        """The trace as columns, many rows at a time and never none. Raises UserError as iterating does."""
        self._bad_rows.begin()
        latest_ns = -(2**63)
        for block in self._csv.blocks():
            rows = self._all_at_once(block, latest_ns)
            if rows is None:
                rows = self._line_by_line(block, latest_ns)
            if len(rows.time_ns):
                latest_ns = int(rows.time_ns[-1])
                self._bad_rows.keep(len(rows.time_ns))
                yield rows
        self._bad_rows.end()

    def _all_at_once(self, block: CsvBlock, latest_ns: int) -> Rows | None:
        """The rows of a block in which nothing is wrong but requests that failed and are to be dropped; None for any
        other.
        """
        columns = self._csv.columns(block)
        if columns is None:
            return None
        column = dict(zip(self._layout.columns, columns, strict=True))
        time = self._layout.time
        time_ns = np.zeros(len(columns[0]), np.int64) if time is None else time.from_column(column[time.name])
        prompt_tokens = token_counts.from_column(column[self._layout.prompt], least=0)
        output_tokens = token_counts.from_column(column[self._layout.output], least=0)
        if time_ns is None or prompt_tokens is None or output_tokens is None:
            return None
        failed = self._failed(column, output_tokens)
        kept = np.ones(len(time_ns), np.bool_)
        for _, rows in failed:
            kept &= ~rows
        if not kept.all():
            if not self._bad_rows.drops:
                return None
            time_ns, prompt_tokens, output_tokens = time_ns[kept], prompt_tokens[kept], output_tokens[kept]
        if not (prompt_tokens.all() and output_tokens.all() and _in_order(time_ns, latest_ns)):
            return None
        for cause, rows in failed:
            if rows.any():
                self._bad_rows.leave_out(cause, f"line {block.first_line + int(rows.argmax())}", int(rows.sum()))
        return Rows(time_ns, prompt_tokens, output_tokens)

    def _failed(self, column: dict[str, Any], output_tokens: NDArray[np.int64]) -> list[tuple[str, NDArray[np.bool_]]]:
        """Causes for which rows are left out as failed, and which rows; no row has two."""
        failed = []
        outcome = self._layout.outcome
        ended = np.zeros(len(output_tokens), np.bool_)
        if outcome is not None:
            served = pc.equal(column[outcome.column], pa.scalar(outcome.served))
            ended = ~np.asarray(served.fill_null(False).to_numpy(zero_copy_only=False), np.bool_)
            failed.append((outcome.cause, ended))
        if self._layout.zero_output is not None:
            failed.append((self._layout.zero_output, (output_tokens == 0) & ~ended))
        return failed

    def _line_by_line(self, block: CsvBlock, latest_ns: int) -> Rows:
        """The good rows of any block; the bad ones are met in the order of the file."""
        rows: list[tuple[int, int, int]] = []
        for line, text in block.lines():
            try:
                field = dict(zip(self._layout.columns, self._csv.fields(text), strict=True))
                row = self._row(field)
            except BadRow as bad_row:
                self._bad_rows.meet(f"line {line}", bad_row)
                continue
            if row[0] < latest_ns and self._layout.time is not None:
                name = self._layout.time.name
                raise UserError(
                    f"{self._path}, line {line}: {name} {field[name]} is earlier than the row before; "
                    f"expected rows in order of time. Sort the file by {name}."
                )
            latest_ns = row[0]
            rows.append(row)
        return Rows(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)

    def _row(self, field: Mapping[str, str]) -> tuple[int, int, int]:
        layout = self._layout
        if layout.outcome is not None:
            layout.outcome.check(field[layout.outcome.column])
        time_ns = 0 if layout.time is None else layout.time.from_text(field[layout.time.name])
        layout.check_output(field[layout.output])
        return (
            time_ns,
            token_counts.from_text(layout.prompt, field[layout.prompt]),
            token_counts.from_text(layout.output, field[layout.output]),
        )


def _in_order(time_ns: NDArray[np.int64], latest_ns: int) -> bool:
    return not len(time_ns) or bool(time_ns[0] >= latest_ns and (time_ns[1:] >= time_ns[:-1]).all())
