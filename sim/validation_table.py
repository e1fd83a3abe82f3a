"""The table that `kvtwin validate` prints: predicted, measured and error of each figure."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from sim.validation import LATENCIES, STATISTICS, Figure

UNITS = {"ttft": (1.0, "s"), "tpot": (1e3, "ms"), "itl": (1e3, "ms"), "e2e": (1.0, "s")}
RATES = {
    "duration": "s",
    "request_throughput": "requests/s",
    "output_throughput": "token/s",
    "total_token_throughput": "token/s",
}
BOUNDED = {
    "output_throughput": ("output throughput (token/s)", 1.0),
    "median_tpot": ("median TPOT (ms)", 1e3),
    "p99_ttft": ("p99 TTFT (s)", 1.0),
}


def print_comparison(comparison: dict[str, Any]) -> None:
    """What `sim.validation.compare` returned."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(title=f"{comparison['requests']:,} requests, predicted against measured", title_justify="left")
    for column in ("", "", "predicted", "measured", "error"):
        table.add_column(column, justify="right" if column else "left")
    for name in LATENCIES:
        scale, unit = UNITS[name]
        for which in STATISTICS:
            entry = comparison["metrics"][name][which]
            if entry["predicted"] is not None or entry["measured"] is not None:
                table.add_row(f"{name.upper()} ({unit})", which, *_cells(entry, scale))
    table.add_section()
    for name, unit in RATES.items():
        table.add_row(f"{name.replace('_', ' ')} ({unit})", "", *_cells(comparison["throughput"][name]))
    table.add_row("preemptions", "", *_cells(comparison["preemptions"]))
    for name, entry in (comparison["series"] or {}).items():
        if entry is not None:
            table.add_row(f"{name.replace('_', ' ')}, mean over time", "", *_cells(entry))
            difference = entry["mean_abs_error_pct"]
            table.add_row("", "mean difference", "", "", "–" if difference is None else f"{difference:.2f} %")
    console.print(table)
    if comparison["requests_of_one_only"]:
        console.print(f"{comparison['requests_of_one_only']:,} requests were served in one of the runs only.")


def print_repetitions(comparison: dict[str, Any]) -> None:
    """How a loop's repetitions (`gpu/loop.py`) lie apart, and whether their decisions were the predicted ones."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    repetitions = comparison["repetitions"]
    table = Table(title=f"{len(repetitions)} replays", title_justify="left")
    for column in ("", "predicted", "measured: min", "median", "max", "error of the median", "bound", "lie apart by"):
        table.add_column(column, justify="right" if column else "left")
    for name, (label, scale) in BOUNDED.items():
        entry = comparison["spread"][name]
        measured, error = entry["measured"], entry["error_pct"]["of_median"]
        values = (entry["predicted"], measured["min"], measured["median"], measured["max"])
        table.add_row(
            label,
            *(_number(value, scale) for value in values),
            f"{error:+.2f} %",
            f"{entry['bound_pct']:g} % {'kept' if entry['within'] else 'BROKEN'}",
            f"{entry['range_pct']:.2f} %",
        )
    console.print(table)
    steps = repetitions[0]["decisions"]["predicted"]["steps"]
    console.print(f"steps: {steps['predicted']:,} predicted, {steps['measured']:,} measured")
    for kind, label in (("predicted", "as predicted"), ("with_measured_times", "as with the measured times")):
        unequal = [one for one in repetitions if not one["decisions"][kind]["equal"]]
        said = "equal in every step and block"
        if unequal:
            at = min(one["decisions"][kind]["first_difference"] for one in unequal)
            said = f"DIFFERENT in {len(unequal)} of {len(repetitions)} replays, first in step {at:,}"
        console.print(f"decisions {label}: {said}")


def _cells(entry: Figure, scale: float = 1.0) -> tuple[str, str, str]:
    error = entry["error_pct"]
    return (
        _number(entry["predicted"], scale),
        _number(entry["measured"], scale),
        "–" if error is None else f"{error:+.2f} %",
    )


def _number(value: float | None, scale: float) -> str:
    return "–" if value is None else f"{value * scale:,.5g}" if abs(value * scale) < 1000 else f"{value * scale:,.0f}"
