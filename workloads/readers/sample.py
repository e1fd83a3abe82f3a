"""What the beginning of a trace shows: the kind of file it is, and the names in it. The file's name says nothing."""

import csv
from pathlib import Path
from typing import Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet

from workloads.errors import UserError
from workloads.readers.json_lines import MAX_BYTES, MAX_KEYS, first_keys, json_array
from workloads.readers.source_file import open_source, seekable, source_file
from workloads.readers.token_counts import shown

Container = Literal["csv", "json", "parquet"]
_SPACE = b" \t\r\n"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Sample(NamedTuple):
    """What the beginning of a file shows.

    Args:
        container: json is JSON Lines, an array or a single object.
        keys: column names, or the keys of the first object.
    """

    container: Container
    keys: frozenset[str]


def first_line(path: str, file: Path) -> bytes:
    """The first line that is not blank, or as much of it as a line may have, after at most some MiB of blank lines.

    Raises:
        UserError: there is none.
    """
    with open_source(file) as stream:
        blank = 0
        while (line := stream.readline(MAX_BYTES)) and blank <= MAX_BYTES:
            blank += len(line)
            if text := line.removeprefix(_BYTE_ORDER_MARK).strip(_SPACE):
                return text
    raise UserError(f"{path} {'begins with' if line else 'holds'} nothing but space; expected a trace.")


def container_of(path: str) -> Container:
    """Which kind of file is at `path`, by its first characters.

    Raises:
        UserError: no such file, or nothing in it.
    """
    return _container(first_line(path, source_file(path)))


def sample_of(path: str) -> Sample:
    """What the beginning of the file at `path` shows.

    Raises:
        UserError: no such file, or a beginning that is neither CSV nor JSON nor Parquet.
    """
    file = source_file(path)
    line = first_line(path, file)
    container = _container(line)
    if container == "parquet":
        return Sample(container, _names(path, _parquet_columns(file)))
    if container == "csv":
        return Sample(container, _names(path, _header(path, line)))
    if line.startswith(b"{"):
        return Sample(container, first_keys(file))
    for _, element in json_array(file):
        if not isinstance(element, dict):
            raise UserError(f"{path} begins with {shown(element, quoted=repr)}; expected a JSON object a request.")
        return Sample(container, frozenset(element))
    raise UserError(f"{path} is an empty array; expected requests.")


def _container(line: bytes) -> Container:
    if line.startswith(b"PAR1"):
        return "parquet"
    return "json" if line.startswith((b"[", b"{")) else "csv"


def _header(path: str, line: bytes) -> list[str]:
    try:
        return next(csv.reader([line.decode()], strict=True), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is neither JSON nor Parquet nor CSV in UTF-8 ({shown(error)}).") from None


def _parquet_columns(file: Path) -> list[str]:
    try:
        with seekable(file) as stream:
            names: list[str] = pyarrow.parquet.read_schema(stream).names
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # also of names
        raise UserError(f"{file} is no whole Parquet file ({shown(error)}); fetch or write it again.") from None
    return names


def _names(path: str, names: list[str]) -> frozenset[str]:
    if len(names) > MAX_KEYS:
        raise UserError(f"{path} has {len(names)} columns; expected a trace with a request a row.")
    return frozenset(names)
