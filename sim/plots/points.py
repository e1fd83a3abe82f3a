"""Which points of a sweep belong together in a figure, and what to say of the others.

A figure compares policies along one axis. Whatever else was swept either splits the figure (few values, so that
unlike settings are never mixed) or is pooled (seeds, and keys of many values): pooled points are drawn as their middle
with the lowest and the highest beside it, and the figure says over which keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

NAMES = ("model", "hardware", "workload")
AXES = ("block_size", "request_rate")
IDENTITY = ("point", "status", "engine", *NAMES, *AXES)
FIRST_FACT = "status"  # the sweep's own keys stand before it

AXIS_LABELS = {
    "block_size": "block size (tokens)",
    "request_rate": "request rate (req/s)",
    "memory.num_blocks": "pool size (blocks)",
    "memory.watermark": "watermark\n(share of the pool)",
}


@dataclass(frozen=True)
class Points:
    """The complete points of a sweep.

    Args:
        rows: one row a complete point.
        keys: everything that was swept besides the policy, by column, without columns that say the same thing twice.
        left_out: a sentence that counts the points that are not complete; empty if there are none.
    """

    rows: pd.DataFrame
    keys: tuple[str, ...]
    left_out: str

    @property
    def policies(self) -> list[str]:
        """Names of the policies, in order of first appearance."""
        return [str(name) for name in self.rows["engine"].unique()]

    @property
    def setting(self) -> str:
        """What all points have in common, in one line."""
        common = [_spell(column, self.rows[column].iloc[0]) for column in (*NAMES, *AXES) if self._is_common(column)]
        return " · ".join(common)

    def _is_common(self, column: str) -> bool:
        return bool(self.rows[column].notna().all()) and self.rows[column].nunique() == 1

    def sweeps_within_a_policy(self, axis: str) -> bool:
        """Whether some policy has points at two or more values of `axis`."""
        if axis not in self.rows or self.rows.empty:
            return False
        return bool((self.rows.groupby("engine")[axis].nunique() > 1).any())


@dataclass(frozen=True)
class Split:
    """How the keys that are not on an axis are treated.

    Args:
        by: keys whose values are drawn apart.
        pooled: keys whose values are drawn as one.
    """

    by: tuple[str, ...]
    pooled: tuple[str, ...]


def select_complete(table: pd.DataFrame) -> Points:
    """The complete points of a sweep table, and what was swept."""
    complete = table["status"] == "complete"
    rows = table[complete].reset_index(drop=True)
    lost = table.loc[~complete, "status"].value_counts().sort_index()
    counts = " and ".join(f"{count} {status}" for status, count in lost.items())
    left_out = f"Left out of {len(table)} points: {counts}." if len(lost) else ""
    return Points(rows, tuple(_independent_keys(rows)), left_out)


def split_keys(points: Points, axis: str | None, most_parts: int) -> Split:
    """Splits a figure by every swept key but `axis` and the seeds, as long as there are at most `most_parts` parts.

    If there would be more, the key with most values is pooled first, and the block size last.
    """
    others = [key for key in points.keys if key != axis]
    pooled = [key for key in others if key.rpartition(".")[2] == "seed"]
    by = [key for key in others if key not in pooled]
    while by and len(parts(points.rows, by)) > most_parts:
        largest = max(by, key=lambda key: (key != "block_size", points.rows[key].nunique()))
        by.remove(largest)
        pooled.append(largest)
    return Split(tuple(by), tuple(pooled))


def parts(rows: pd.DataFrame, by: Sequence[str]) -> list[tuple[str, pd.DataFrame]]:
    """The rows of each combination of values of `by` with its name, in order of the values.

    A policy without any value for a key (it has no such knob) belongs to every part: it holds there too.
    """
    found = [("", rows)]
    for key in by:
        without = rows[key].groupby(rows["engine"]).transform("count") == 0
        labels = rows[key].map(lambda value, key=key: _spell(key, value))
        values = rows.assign(label=labels)[~without].sort_values(key)["label"].unique()  # no value comes last
        found = [
            (f"{name} · {value}".removeprefix(" · "), part[(labels == value)[part.index] | without[part.index]])
            for name, part in found
            for value in values
        ]
    return [(name, part) for name, part in found if len(part)]


def spell_value(key: str, value: object) -> str:
    """A swept value as a label beside an axis that already names the key."""
    if pd.isna(value):  # type: ignore[call-overload]
        return "null"
    return f"{value:g}" if key in AXES or isinstance(value, float) else str(value)


def _spell(key: str, value: object) -> str:
    """A swept value with its key, as it stands alone in a title."""
    spelled = spell_value(key, value)
    if key in NAMES:
        return spelled
    return {"block_size": f"block size {spelled}", "request_rate": f"{spelled} req/s"}.get(key, f"{key}={spelled}")


def _independent_keys(rows: pd.DataFrame) -> list[str]:
    """Columns that vary within a policy, leaving out each that follows from those before it."""
    kept: list[str] = []
    for key in (*AXES, *NAMES, *_override_columns(rows)):
        spelled = rows[key].map(repr)  # no value is a value too, which pandas would pass over
        groups = [rows["engine"], *(rows[other].map(repr) for other in kept)]
        if len(rows) and (spelled.groupby(groups).nunique() > 1).any():
            kept.append(key)
    return kept


def _override_columns(rows: pd.DataFrame) -> list[str]:
    """The sweep's own keys, but for the block size, whose column says what was in force and not what was asked for."""
    columns = [str(column) for column in rows.columns]
    before = columns[: columns.index(FIRST_FACT)]
    return [key for key in before if key not in (*IDENTITY, "overrides") and key.rpartition(".")[2] != "block_size"]
