"""How often each length occurs in one column of a CSV, JSON Lines or Parquet file.

Files are streamed; only the different lengths stay in memory.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from workloads.errors import UserError
from workloads.readers import token_counts
from workloads.readers.bad_rows import BadRow
from workloads.readers.csv_columns import CsvBlock, CsvColumns
from workloads.readers.json_lines import json_lines, json_object, required
from workloads.readers.source_file import source_file

Occurrences = Counter[int]
"""Rows for each length in tokens."""


def count_lengths(path: str, column: str) -> Occurrences:
    """The lengths in `column` of the file at `path`, which ends in .csv, .jsonl or .parquet.

    Raises:
        UserError: no such file or column, another kind of file, or a value that is no whole number of at least 1.
    """
    readers = {".csv": _count_csv, ".jsonl": _count_jsonl, ".parquet": _count_parquet}
    file = source_file(path)
    reader = readers.get(file.suffix.lower())
    if reader is None:
        raise UserError(
            f"{path} is no file that lengths can be taken from; expected one ending in {', '.join(readers)}."
        )
    occurrences = reader(path, file, column)
    if not occurrences:
        raise UserError(f"{path} has no rows; expected at least one length in {column}. Check the file.")
    return occurrences


def _count_csv(path: str, file: Path, column: str) -> Occurrences:
    table = CsvColumns(path, (column,))
    occurrences: Occurrences = Counter()
    for block in table.blocks():
        columns = table.columns(block)
        lengths = None if columns is None else token_counts.from_column(columns[0])
        if lengths is None:
            occurrences.update(_csv_lengths(path, table, block, column))
        else:
            _add(occurrences, lengths)
    return occurrences


def _csv_lengths(path: str, table: CsvColumns, block: CsvBlock, column: str) -> list[int]:
    lengths = []
    for line, text in block.lines():
        try:
            lengths.append(token_counts.from_text(column, table.fields(text)[0]))
        except BadRow as bad_row:
            raise _no_length(f"{path}, line {line}", bad_row) from bad_row
    return lengths


def _count_jsonl(path: str, file: Path, column: str) -> Occurrences:
    occurrences: Occurrences = Counter()
    for line, text in json_lines(file):
        try:
            occurrences[token_counts.from_json(column, required(json_object(text), column))] += 1
        except BadRow as bad_row:
            raise _no_length(f"{path}, line {line}", bad_row) from bad_row
    return occurrences


def _count_parquet(path: str, file: Path, column: str) -> Occurrences:
    try:
        table = pyarrow.parquet.ParquetFile(file)
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no Parquet file. Check that it was fetched or written in full.") from error
    schema = table.schema_arrow
    if column not in schema.names:
        raise UserError(f"{path} has no column {column!r}; it has {token_counts.shown(', '.join(schema.names))}.")
    if not pa.types.is_integer(schema.field(column).type):
        raise UserError(f"{path}: column {column} holds {schema.field(column).type}; expected whole numbers.")
    occurrences: Occurrences = Counter()
    first_row = 1
    for batch in table.iter_batches(columns=[column]):
        lengths = token_counts.from_column(batch.column(0))
        if lengths is None:
            raise _first_bad_row(path, column, batch.column(0).to_pylist(), first_row)
        _add(occurrences, lengths)
        first_row += len(lengths)
    return occurrences


def _first_bad_row(path: str, column: str, values: list[object], first_row: int) -> UserError:
    for row, value in enumerate(values, first_row):
        try:
            token_counts.from_json(column, value)
        except BadRow as bad_row:
            return _no_length(f"{path}, row {row}", bad_row)
    raise AssertionError("a column without a bad row was refused")


def _no_length(place: str, bad_row: BadRow) -> UserError:
    return UserError(f"{place}: {bad_row}. Take such rows out of the file first.")


def _add(occurrences: Occurrences, lengths: NDArray[np.int64]) -> None:
    for length, rows in zip(*(found.tolist() for found in np.unique(lengths, return_counts=True)), strict=True):
        occurrences[length] += rows
