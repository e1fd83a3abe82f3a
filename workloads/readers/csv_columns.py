"""Columns of a CSV file by name, streamed in blocks of whole lines, so that every row's line number is known.

A block that Arrow's parser reads as exactly one row for each line is handed over as columns. Any other block
(blank lines, a wrong number of fields, a stray quote, bytes that are no UTF-8) is for the caller to read line by line,
which is some fifty times slower and finds out which line is to blame. What the fields mean is the caller's business.

Accepts LF and CRLF, a byte order mark, quoted fields and a missing last line end. A field cannot span lines.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.csv

from workloads.errors import UserError
from workloads.readers.bad_rows import BadRow
from workloads.readers.source_file import open_source, source_file
from workloads.readers.token_counts import shown

_BLOCK_BYTES = 4 << 20  # large enough that the cost of a block is its rows, small enough to stay in a cache
_LINE_BYTES = 1 << 20  # a longer line means that this is no such file; without a bound we would read it all
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class CsvBlock:
    """Some whole lines of the file.

    Args:
        first_line: number of the first line in the file, from 1.
        data: the lines as they stand.
    """

    first_line: int
    data: bytes

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Number and text, without its end, of each line that is not blank."""
        for line, text in enumerate(self.data.split(b"\n"), self.first_line):
            if text.strip():
                yield line, text.removesuffix(b"\r")

    @property
    def num_lines(self) -> int:
        """How many lines there are, blank ones included."""
        return self.data.count(b"\n") + (not self.data.endswith(b"\n"))


class CsvColumns:
    """The columns `names` of the CSV file at `path`; columns may stand in any order and others are ignored.

    Whatever is asked for comes in the order of `names`.

    Raises:
        UserError: there is no such file, or its first line does not name each of the columns exactly once.
    """

    def __init__(self, path: str, names: tuple[str, ...]) -> None:
        self._path = path
        self._file = source_file(path)
        with open_source(self._file) as stream:
            header = self._header(stream.readline(_LINE_BYTES))
        if any(header.count(name) != 1 for name in names):
            raise UserError(
                f"{path}, line 1: the header is {shown(','.join(header), quoted=repr)}; expected the column names "
                f"{','.join(names)}, each once, in any order. Check that this is the right file and reader."
            )
        self._num_fields = len(header)
        self._wanted = [header.index(name) for name in names]

    def _header(self, first_line: bytes) -> list[str]:
        try:
            return _fields(first_line.removeprefix(_BYTE_ORDER_MARK).rstrip(b"\r\n"))
        except BadRow as problem:
            raise UserError(
                f"{self._path}, line 1: the header {problem}. Check that this is a CSV file in UTF-8."
            ) from problem

    def blocks(self) -> Iterator[CsvBlock]:
        """The lines after the header, in order; one block is in memory at a time."""
        first_line = 2
        with open_source(self._file) as stream:
            stream.readline(_LINE_BYTES)
            while data := stream.read(_BLOCK_BYTES):
                rest = stream.readline(_LINE_BYTES)
                if len(rest) == _LINE_BYTES and not rest.endswith(b"\n"):
                    line = first_line + data.count(b"\n")
                    raise UserError(f"{self._path}, line {line} is over {_LINE_BYTES} bytes long. Check the file.")
                block = CsvBlock(first_line, data + rest)
                if len(data) == _BLOCK_BYTES and data.isspace():
                    raise UserError(f"{self._path}, line {first_line}: nothing but blank lines follow. Check the file.")
                yield block
                first_line += block.num_lines

    def columns(self, block: CsvBlock) -> list[Any] | None:
        """One Arrow array of strings for each name, one element a line; None if the lines are not that plain."""
        names = [str(number) for number in range(self._num_fields)]
        wanted = [names[number] for number in self._wanted]
        try:
            if not block.data.isascii():
                block.data.decode()
            table = pyarrow.csv.read_csv(
                pa.BufferReader(block.data),
                # A block size above the data's gives one chunk for each column.
                pyarrow.csv.ReadOptions(use_threads=False, block_size=len(block.data) + 1, column_names=names),
                convert_options=pyarrow.csv.ConvertOptions(
                    include_columns=wanted, column_types=dict.fromkeys(wanted, pa.string())
                ),
            )
        except (pa.ArrowInvalid, UnicodeDecodeError):
            return None
        if table.num_rows != block.num_lines:
            return None
        return [column.combine_chunks() for column in table.columns]

    def fields(self, text: bytes) -> list[str]:
        """The fields of one line, one for each of the names. Raises BadRow."""
        fields = _fields(text)
        if len(fields) != self._num_fields:
            raise BadRow(
                "wrong number of fields",
                f"{len(fields)} {'field' if len(fields) == 1 else 'fields'}; expected {self._num_fields} as in line 1",
            )
        return [fields[number] for number in self._wanted]


def _fields(text: bytes) -> list[str]:
    """The fields of one CSV line. Raises BadRow with a message that goes on from 'the row' or 'the header'."""
    try:
        return next(csv.reader([text.decode()], strict=True), [])
    except UnicodeDecodeError as error:
        raise BadRow("not UTF-8", f"has the byte 0x{text[error.start]:02x}, which is not UTF-8") from error
    except csv.Error as error:
        raise BadRow("broken quoting", f"cannot be split into fields ({error})") from error
