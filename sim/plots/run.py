"""The figures of one run: the pool over time, and the latencies of its requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sim.plots import latency, pool
from sim.plots.bins import spans
from sim.plots.style import save, settings
from sim.plots.tables import read_summary, read_table
from workloads.errors import UserError

STEPS, REQUESTS, SUMMARY = "steps.parquet", "requests.parquet", "summary.json"


def draw_run(folder: Path) -> list[Path]:
    """Draws a run's figures into its folder and returns their paths.

    A figure that would be empty, because no step was taken or no request finished, is not drawn.

    Raises:
        UserError: if a table is missing, unreadable or lacks a column, or its steps overlap in time.
    """
    setting = _describe(folder)
    steps = read_table(folder / STEPS, pool.COLUMNS)
    requests = read_table(folder / REQUESTS, latency.COLUMNS)
    paths: list[Path] = []
    with settings():
        if (steps["duration_s"] > 0).any():
            try:
                plans = spans(
                    steps["start_s"].to_numpy(np.float64, copy=True), steps["duration_s"].to_numpy(np.float64)
                )
            except ValueError as error:
                raise UserError(f"{folder / STEPS}, {error}. Run the simulation again.") from None
            paths += save(pool.pool_figure(steps, plans, setting), folder, "pool")
        if (requests["status"] == "finished").any():
            paths += save(latency.latency_figure(requests, setting), folder, "latency")
    return paths


def _describe(folder: Path) -> str:
    """What was run, as far as the summary says, and whether it ended as it should; at least the folder's name."""
    summary = read_summary(folder / SUMMARY)
    names = [str(summary[key]) for key in ("engine", "model", "hardware", "workload") if summary.get(key)]
    status = summary.get("status", "complete")
    return " · ".join([*(names or [folder.resolve().name]), *([] if status == "complete" else [f"run {status}"])])
