"""The Azure LLM inference traces of 2023 (Splitwise, ISCA 2024) and 2024 (DynamoLLM, HPCA 2025).

CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens, found by their names. Both years' quirks are
accepted, also mixed in one file: CRLF, no end of the last line, blank lines, 7, 6 or no digits after the second, a UTC
offset or none (a time without one is taken as UTC). The files hold up to 16.8 million rows, so they are streamed.
"""

import calendar
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from workloads.errors import UserError
from workloads.readers import token_counts
from workloads.readers.bad_rows import BadRow, BadRows, OnBadRow
from workloads.readers.csv_columns import CsvBlock, CsvColumns
from workloads.request import Request

TIME, PROMPT, OUTPUT = COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

# The years are those that nanoseconds in an int64 can count. Arrow and Python both read these patterns.
_NAIVE = r"((?:19|20|21)[0-9]{2}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]{1,9}))?"
_OFFSET = r"(Z|[+-](?:[01][0-9]|2[0-3]):?[0-5][0-9])"
_TIME = re.compile(f"{_NAIVE}{_OFFSET}?")


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of the trace as columns of equal length.

    Args:
        time_ns: nanoseconds since 1970 UTC, int64, never decreasing.
        prompt_tokens: int64, each at least 1.
        output_tokens: int64, each at least 1.
    """

    time_ns: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]


class AzureTrace:
    """A workload from an Azure trace. Arrivals count in seconds from the first row that is not dropped.

    Rows are read as the iteration reaches them, some 4 MiB of the file at a time, and only then are they checked.

    Args:
        path: the CSV file.
        on_bad_row: "error" ends at the first row that cannot be used; "drop" leaves such rows out and counts them in
            `dropped`. Rows out of order are no fault of one row, and always an error.

    Raises:
        UserError: no such file, or not its header. Iterating raises it for rows: it names the line and the remedy.
    """

    def __init__(self, path: str, on_bad_row: OnBadRow = "error") -> None:
        self._path = path
        self._csv = CsvColumns(path, COLUMNS)
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
        first_ns: int | None = None
        for rows in self.rows():
            if first_ns is None:
                first_ns = int(rows.time_ns[0])
            arrivals_s = (rows.time_ns - first_ns) / 1e9  # the difference is exact, so only the division rounds
            columns = (arrivals_s, rows.prompt_tokens, rows.output_tokens)
            yield from map(Request, request_ids, *(column.tolist() for column in columns))

    def rows(self) -> Iterator[Rows]:
        """The trace as columns, many rows at a time and never none. Raises UserError as iterating does."""
        self._bad_rows.begin()
        num_kept = 0
        latest_ns = -(2**63)
        for block in self._csv.blocks():
            rows = self._all_at_once(block, latest_ns) or self._line_by_line(block, latest_ns)
            if len(rows.time_ns):
                latest_ns = int(rows.time_ns[-1])
                num_kept += len(rows.time_ns)
                yield rows
        self._bad_rows.end(num_kept)

    def _all_at_once(self, block: CsvBlock, latest_ns: int) -> Rows | None:
        """The rows of a block in which nothing is wrong; None for any other."""
        columns = self._csv.columns(block)
        if columns is None:
            return None
        time_ns = _times_ns(columns[0])
        prompt_tokens = token_counts.from_column(columns[1])
        output_tokens = token_counts.from_column(columns[2])
        if time_ns is None or prompt_tokens is None or output_tokens is None:
            return None
        if time_ns[0] < latest_ns or (time_ns[1:] < time_ns[:-1]).any():
            return None
        return Rows(time_ns, prompt_tokens, output_tokens)

    def _line_by_line(self, block: CsvBlock, latest_ns: int) -> Rows:
        """The good rows of any block; the bad ones are met in the order of the file."""
        rows: list[tuple[int, int, int]] = []
        for line, text in block.lines():
            try:
                time, prompt, output = self._csv.fields(text)
                row = _time_ns(time), token_counts.from_text(PROMPT, prompt), token_counts.from_text(OUTPUT, output)
            except BadRow as bad_row:
                self._bad_rows.meet(line, bad_row)
                continue
            if row[0] < latest_ns:
                raise UserError(
                    f"{self._path}, line {line}: {TIME} {time} is earlier than the row before; "
                    f"expected rows in order of time. Sort the file by {TIME}."
                )
            latest_ns = row[0]
            rows.append(row)
        return Rows(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)


def _times_ns(times: Any) -> NDArray[np.int64] | None:
    """`_time_ns` of each element of an Arrow array of strings, or None if any cannot be read."""
    zoned = pc.match_substring_regex(times, f"^{_NAIVE}{_OFFSET}$")
    if not pc.all(zoned).as_py():
        # Arrow wants an offset everywhere or nowhere.
        times = pc.if_else(zoned, times, pc.binary_join_element_wise(times, "Z", ""))
        if not pc.all(pc.match_substring_regex(times, f"^{_NAIVE}{_OFFSET}$")).as_py():
            return None
    try:
        nanoseconds: NDArray[np.int64] = times.cast(pa.timestamp("ns", "UTC")).cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid:  # the form is right, but there is no such day or hour
        return None
    return nanoseconds


def _time_ns(text: str) -> int:
    """Nanoseconds since 1970 UTC. Raises BadRow."""
    try:
        match = _TIME.fullmatch(text)
        if match is None:
            raise ValueError(text)
        seconds = calendar.timegm(datetime.fromisoformat(match[1]).timetuple())
    except ValueError as error:
        raise BadRow(
            "unreadable time",
            f"{TIME} is {token_counts.shown(text, quoted=repr)}; expected a time like 2023-11-16 18:15:46.6805900",
        ) from error
    return (seconds - _offset_s(match[3])) * 10**9 + int((match[2] or "").ljust(9, "0"))


def _offset_s(offset: str | None) -> int:
    """Seconds east of UTC of an offset such as +05:30; 0 for Z and for none."""
    if offset is None or offset == "Z":
        return 0
    seconds = int(offset[1:3]) * 3600 + int(offset[-2:]) * 60
    return -seconds if offset[0] == "-" else seconds
