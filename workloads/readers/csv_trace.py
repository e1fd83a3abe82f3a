"""Traces as CSV with one request a row, found by column names, and read as columns where nothing is wrong.

Accepted in any of them: CRLF, no end of the last line, blank lines, columns in any order and others between them. The
files hold up to 16.8 million rows, so they are streamed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from workloads.errors import UserError
from workloads.readers import token_counts
from workloads.readers.bad_rows import BadRow, BadRows, OnBadRow
from workloads.readers.csv_columns import CsvBlock, CsvColumns
from workloads.readers.time_columns import TimeColumn
from workloads.request import Request


@dataclass(frozen=True, slots=True)
class CsvLayout:
    """Which columns of a format say what.

    Args:
        time: when a request arrives.
        prompt: tokens of its prompt.
        output: tokens it generates.
        zero_output: what a 0 there means in this format, as a cause of dropped rows; None: nothing of its own.
    """

    time: TimeColumn
    prompt: str
    output: str
    zero_output: str | None = None

    @property
    def columns(self) -> tuple[str, str, str]:
        """Their names: time, prompt, output."""
        return self.time.name, self.prompt, self.output


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
    def dropped(self) -> Mapping[str, int]:
        """Rows dropped so far in the latest iteration, by cause."""
        return self._bad_rows.dropped

    def __iter__(self) -> Iterator[Request]:
        request_ids = count()
        zero_ns: int | None = None if self._layout.time.counts_from_first else 0
        for rows in self.rows():
            if zero_ns is None:
                zero_ns = int(rows.time_ns[0])
            arrivals_s = (rows.time_ns - zero_ns) / 1e9  # the difference is exact, so only the division rounds
            columns = (arrivals_s, rows.prompt_tokens, rows.output_tokens)
            yield from map(Request, request_ids, *(column.tolist() for column in columns))

    def rows(self) -> Iterator[Rows]:
        """The trace as columns, many rows at a time and never none. Raises UserError as iterating does."""
        self._bad_rows.begin()
        num_kept = 0
        latest_ns = -(2**63)
        for block in self._csv.blocks():
            rows = self._all_at_once(block, latest_ns)
            if rows is None:
                rows = self._line_by_line(block, latest_ns)
            if len(rows.time_ns):
                latest_ns = int(rows.time_ns[-1])
                num_kept += len(rows.time_ns)
                yield rows
        self._bad_rows.end(num_kept)

    def _all_at_once(self, block: CsvBlock, latest_ns: int) -> Rows | None:
        """The rows of a block in which nothing is wrong but outputs of 0 that are to be dropped; None for any other."""
        columns = self._csv.columns(block)
        if columns is None:
            return None
        time_ns = self._layout.time.from_column(columns[0])
        prompt_tokens = token_counts.from_column(columns[1], least=0)
        output_tokens = token_counts.from_column(columns[2], least=0)
        if time_ns is None or prompt_tokens is None or output_tokens is None:
            return None
        num_rows = len(time_ns)
        if not output_tokens.all():
            if self._layout.zero_output is None or not self._bad_rows.drops:
                return None
            kept = output_tokens > 0
            time_ns, prompt_tokens, output_tokens = time_ns[kept], prompt_tokens[kept], output_tokens[kept]
        if not prompt_tokens.all() or not _in_order(time_ns, latest_ns):
            return None
        self._bad_rows.drop(self._layout.zero_output, num_rows - len(time_ns))
        return Rows(time_ns, prompt_tokens, output_tokens)

    def _line_by_line(self, block: CsvBlock, latest_ns: int) -> Rows:
        """The good rows of any block; the bad ones are met in the order of the file."""
        rows: list[tuple[int, int, int]] = []
        for line, text in block.lines():
            try:
                time, prompt, output = self._csv.fields(text)
                row = self._row(time, prompt, output)
            except BadRow as bad_row:
                self._bad_rows.meet(f"line {line}", bad_row)
                continue
            if row[0] < latest_ns:
                name = self._layout.time.name
                raise UserError(
                    f"{self._path}, line {line}: {name} {time} is earlier than the row before; "
                    f"expected rows in order of time. Sort the file by {name}."
                )
            latest_ns = row[0]
            rows.append(row)
        return Rows(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)

    def _row(self, time: str, prompt: str, output: str) -> tuple[int, int, int]:
        layout = self._layout
        time_ns = layout.time.from_text(time)
        if layout.zero_output is not None and output.strip("0") == "" and output:
            raise BadRow(layout.zero_output, f"{layout.output} is 0: {layout.zero_output}")
        return time_ns, token_counts.from_text(layout.prompt, prompt), token_counts.from_text(layout.output, output)


def _in_order(time_ns: NDArray[np.int64], latest_ns: int) -> bool:
    return not len(time_ns) or bool(time_ns[0] >= latest_ns and (time_ns[1:] >= time_ns[:-1]).all())
