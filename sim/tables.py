"""Parquet tables that grow row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sim.files import cannot_write

ROWS_PER_GROUP = 65_536


class Table:
    """A Parquet file that takes rows one at a time and keeps at most a group of them in memory.

    The file appears under its name when the table is closed.

    Args:
        path: where to.
        schema: columns, in order.
        rows_per_group: rows written at once; None: `ROWS_PER_GROUP`.
    """

    def __init__(self, path: Path, schema: pa.Schema, rows_per_group: int | None = None) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.part")
        self._schema = schema
        self._rows_per_group = ROWS_PER_GROUP if rows_per_group is None else rows_per_group
        self._rows: list[tuple[Any, ...]] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(self._temporary, schema, compression="zstd")
        except OSError as error:
            raise cannot_write(path, error) from None

    def add(self, row: tuple[Any, ...]) -> None:
        """Adds a row: one value a column, in the schema's order."""
        self._rows.append(row)
        if len(self._rows) == self._rows_per_group:
            self._flush()

    def close(self) -> None:
        """Writes what is left and gives the file its name."""
        self._flush()
        try:
            self._writer.close()
            self._temporary.replace(self._path)
        except OSError as error:
            raise cannot_write(self._path, error) from None

    def discard(self) -> None:
        """Leaves no file behind; harmless after `close`."""
        self._writer.close()
        self._temporary.unlink(missing_ok=True)

    def _flush(self) -> None:
        if not self._rows:
            return
        columns = zip(*self._rows, strict=True)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        try:
            self._writer.write_batch(pa.record_batch(arrays, schema=self._schema))
        except OSError as error:
            raise cannot_write(self._path, error) from None
        self._rows.clear()
