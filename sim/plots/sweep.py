"""The figures of a sweep: waste shares always, curves for what was swept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from sim.plots import lines, waste
from sim.plots.points import FIRST_RESULT, IDENTITY, select_complete
from sim.plots.style import save, settings
from sim.plots.tables import require_columns

TABLE = "sweep.parquet"
COLUMNS = tuple(dict.fromkeys((*(set(IDENTITY) - {"error"}), FIRST_RESULT, *waste.COLUMNS, *lines.COLUMNS)))


def draw_sweep(
    table: pd.DataFrame, folder: Path, published: Mapping[str, Mapping[str, float]] | None = None
) -> list[Path]:
    """Draws a sweep's figures into `folder` and returns their paths; none if no point is complete.

    Args:
        table: one row a point, as in sweep.parquet. The swept keys are the columns before `completed`.
        folder: where the figures go; it exists.
        published: by policy, shares of the pool from 0 to 1 under `used`, `reserved`, `internal` and `others`, drawn
            beside ours; for example those of Kwon et al., SOSP 2023, Fig. 2.

    Raises:
        UserError: if the table lacks a column.
        ValueError: if published shares cannot be shares of one pool.
    """
    require_columns(table, COLUMNS, folder / TABLE)
    points = select_complete(table)
    if not len(points.rows):
        return []
    with settings():
        paths = save(waste.waste_figure(points, published), folder, "waste_shares")
        if points.sweeps_within_a_policy("block_size"):
            paths += save(lines.block_size_figure(points), folder, "block_size")
        if points.sweeps_within_a_policy("request_rate"):
            paths += save(lines.request_rate_figure(points), folder, "request_rate")
    return paths
