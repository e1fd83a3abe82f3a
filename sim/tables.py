"""Result files that are written whole or not at all, and Parquet tables that grow row by row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from workloads.errors import UserError

ROWS_PER_GROUP = 65_536


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yields a temporary name beside `path` to write to, and renames it to `path` if all went well.

    Raises:
        UserError: the folder cannot be written to, or the disk is full.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise cannot_write(path, error) from None
    finally:
        temporary.unlink(missing_ok=True)


def cannot_write(path: Path, error: OSError) -> UserError:
    """The one line for a file that cannot be written."""
    return UserError(
        f"cannot write {path}: {error.strerror or error}; free some space or choose another folder with hydra.run.dir=."
    )


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes `content` with its keys in order; floats keep every digit."""
    with whole(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def write_text(path: Path, content: str) -> None:
    """Writes `content` as UTF-8."""
    with whole(path) as temporary:
        temporary.write_text(content, encoding="utf-8")


class Table:
    """A Parquet file that takes rows one at a time and keeps at most `ROWS_PER_GROUP` of them in memory.

    The file appears under its name when the table is closed.

    Args:
        path: where to.
        schema: columns, in order.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.part")
        self._schema = schema
        self._rows: list[tuple[Any, ...]] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(self._temporary, schema, compression="zstd")
        except OSError as error:
            raise cannot_write(path, error) from None

    def add(self, row: tuple[Any, ...]) -> None:
        """Adds a row: one value a column, in the schema's order."""
        self._rows.append(row)
        if len(self._rows) == ROWS_PER_GROUP:
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
