"""Reading result tables for drawing: what is missing or unreadable becomes the user's one line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet

from workloads.errors import UserError

REDO = "Run the simulation again, or give another folder."


def read_table(path: Path, columns: Iterable[str] | None = None) -> pd.DataFrame:
    """The named columns of a Parquet file, or all of them.

    Raises:
        UserError: if the file is missing or is not readable Parquet, or lacks a column.
    """
    try:
        schema = pyarrow.parquet.read_schema(path)
        if columns is not None:
            columns = list(columns)
            _require(schema.names, columns, path)
        return pd.read_parquet(path, columns=columns)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file. {REDO}") from None
    except (OSError, ValueError) as error:  # pyarrow's own errors are kinds of these two
        reason = str(error).partition("\n")[0].rstrip(".")
        raise UserError(f"{path}: not a readable Parquet file ({reason}). {REDO}") from None


def require_columns(table: pd.DataFrame, columns: Iterable[str], where: str | Path) -> None:
    """Raises UserError, naming `where` and the column, if `table` lacks one of `columns`."""
    _require([str(column) for column in table.columns], columns, where)


def read_summary(path: Path) -> dict[str, Any]:
    """The keys of summary.json; none if there is no such file.

    Raises:
        UserError: if the file is not a JSON object.
    """
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable JSON ({error}). {REDO}") from None
    if not isinstance(summary, dict):
        raise UserError(f"{path}: holds no JSON object. {REDO}")
    return summary


def _require(present: Iterable[str], columns: Iterable[str], where: str | Path) -> None:
    missing = sorted(set(columns) - set(present))
    if missing:
        one = f"column {missing[0]} is" if len(missing) == 1 else f"columns {', '.join(missing)} are"
        raise UserError(f"{where}: {one} missing. {REDO}")
