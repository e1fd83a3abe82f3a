"""The table that `kvtwin validate` prints of a pool sweep: a row a workload, with the errors over its pools."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from sim.pool_sweep import COUNTS, abs_errors, workloads_of


def print_sweep_comparison(comparison: dict[str, Any]) -> None:
    """What `sim.pool_sweep.compare_runs` returned."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    runs = comparison["runs"]
    table = Table(title=f"{len(runs)} runs, predicted against counted: absolute errors", title_justify="left")
    for column in ("model", "prompt + output", "runs", "pools (blocks)"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name in COUNTS:
        table.add_column(f"{name.replace('_', ' ')}: exact", justify="right")
        table.add_column("mean", justify="right")
        table.add_column("worst", justify="right")
    for (model, prompt, output), group in workloads_of(runs).items():
        pools = [run["num_gpu_blocks"] for run in group]
        table.add_row(
            model, f"{prompt} + {output}", str(len(group)), f"{min(pools):,} to {max(pools):,}", *_cells(group)
        )
    table.add_section()
    table.add_row("all", "", str(len(runs)), "", *_cells(runs))
    console.print(table)
    below = sum(run["max_running"]["predicted"] < run["max_running"]["measured_at_least"] for run in runs)
    console.print(f"fewer requests run at once than were seen running: in {below} of {len(runs)} runs")


def _cells(runs: list[dict[str, Any]]) -> list[str]:
    cells = []
    for name in COUNTS:
        errors = abs_errors(runs, name)
        exact = sum(run[name]["predicted"] == run[name]["measured"] for run in runs)
        cells += [str(exact), *(f"{value:.2f} %" for value in (sum(errors) / len(errors), max(errors)) if errors)]
    return cells
