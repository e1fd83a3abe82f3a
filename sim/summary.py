"""The tables that a run and a sweep print on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from sim.metrics import SHARES

if TYPE_CHECKING:
    import pandas as pd

    from sim.claims import Finding

PUBLISHED_SHARES = ("used", "reserved", "internal", "others")
WATERMARK = "memory.watermark"
LATENCIES = (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("E2E", "e2el"))


def print_run(summary: dict[str, Any]) -> None:
    """The figures of one run."""
    console = _console()
    title = f"{summary['engine']}: {summary['model']} on {summary['hardware']}, {summary['workload']}"
    figures = Table(title=title, title_justify="left")
    figures.add_column("figure")
    figures.add_column("value", justify="right")
    for name, value in (
        ("requests finished", f"{summary['completed']:,}"),
        ("requests rejected", f"{summary['failed'] - summary['aborted']:,}"),
        *([("requests aborted, pool full", f"{summary['aborted']:,}")] if summary["aborted"] else []),
        *([("turns never sent", f"{summary['never_sent']:,}")] if summary["never_sent"] else []),
        ("requests cut off at the model limit", f"{summary['cut_off']:,}"),
        ("prompt tokens", f"{summary['total_input_tokens']:,}"),
        ("output tokens", f"{summary['total_output_tokens']:,}"),
        ("duration", _number(summary["duration"], "s", ",.1f")),
        ("request throughput", _number(summary["request_throughput"], "requests/s", ",.2f")),
        *_goodput(summary),
        ("output throughput", _number(summary["output_throughput"], "token/s", ",.1f")),
        ("steps", f"{summary['steps']:,}"),
        ("preemptions", f"{summary['preemptions']:,}"),
        ("tokens recomputed", f"{summary['tokens_recomputed']:,}"),
        *_moves(summary),
        ("running requests, mean", _number(summary["mean_running"], "", ",.2f")),
        ("running requests, while others wait", _number(summary["mean_running_saturated"], "", ",.2f")),
        ("waiting requests, mean", _number(summary["mean_waiting"], "", ",.2f")),
    ):
        figures.add_row(name, value)
    if "trace_format" in summary:
        figures.add_row("trace taken for", summary["trace_format"])
    if "rows_read" in summary:
        figures.add_row("trace rows read", f"{summary['rows_read']:,}")
    first = summary.get("rows_first_dropped", {})
    for cause, rows in summary.get("rows_dropped", {}).items():
        where = f" (first: {first[cause]})" if cause in first else ""
        figures.add_row(f"rows dropped: {cause}{where}", f"{rows:,}")
    console.print(figures)

    latencies = Table(title="latency, ms", title_justify="left")
    for column in ("", "mean", "p50", "p90", "p95", "p99"):
        latencies.add_column(column, justify="right" if column else "left")
    for label, key in LATENCIES:
        cells = (_number(summary[f"{what}_{key}_ms"], "", ",.1f") for what in ("mean", "p50", "p90", "p95", "p99"))
        latencies.add_row(label, *cells)
    console.print(latencies)

    waste = Table(
        title=f"pool of {summary['pool_blocks']:,} blocks of {summary['block_size']} = {summary['pool_slots']:,} slots",
        title_justify="left",
    )
    for column in ("", *SHARES):
        waste.add_column(column, justify="right" if column else "left")
    for label, prefix in (("whole run", ""), ("while requests wait", "saturated_")):
        waste.add_row(label, *(_percent(summary[f"{prefix}share_{name}"]) for name in SHARES))
    console.print(waste)


def _goodput(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """What was served as well as promised, if anything was, also by class."""
    by_class = {f"request goodput, {name}": one for name, one in summary.get("classes", {}).items()}
    return [
        (name, _number(figures["request_goodput"], "requests/s", ",.2f"))
        for name, figures in {"request goodput": summary, **by_class}.items()
        if figures["request_goodput"] is not None
    ]


def _moves(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Swaps, a host cache, copies and sharing, where there were any."""
    rows = []
    if summary["swap_outs"]:
        rows.append(("requests swapped out", f"{summary['swap_outs']:,}"))
        rows.append(("swapped out", f"{summary['swapped_out_bytes'] / 1e9:,.2f} GB"))
        rows.append(("time spent on swaps", _number(summary["swap_s"], "s", ",.1f")))
    if summary["offloaded_bytes"]:
        rows.append(("prompt tokens found on the host", f"{summary['host_hit_tokens']:,}"))
        rows.append(("evicted to the host", f"{summary['offloaded_bytes'] / 1e9:,.2f} GB"))
        rows.append(("brought back", f"{summary['onboarded_bytes'] / 1e9:,.2f} GB"))
        rows.append(("time spent on that", _number(summary["swap_s"], "s", ",.1f")))
    if summary["blocks_copied"]:
        rows.append(("blocks copied on write", f"{summary['blocks_copied']:,}"))
    if summary["blocks_moved"]:
        rows.append(("blocks moved by defragmentation", f"{summary['blocks_moved']:,}"))
    if summary["saved_by_sharing"]:
        rows.append(("blocks saved by sharing", _percent(summary["saved_by_sharing"])))
    return rows


def print_sweep(table: pd.DataFrame, published: dict[str, dict[str, Any]]) -> None:
    """One row a point: what differs between them, then the main figures; published shares in a table below.

    The prefix hit rate is among them if any point has hit anything.
    """
    console = _console()
    varying = _varying(table)
    done = table[table["status"] == "complete"]
    view = Table(title=f"sweep of {len(table)} points, {len(done)} complete", title_justify="left")
    columns = [
        ("requests/s", "request_throughput", ",.2f"),
        *([("goodput", "request_goodput", ",.2f")] if _any_given(table, "request_goodput") else []),
        ("token/s", "output_throughput", ",.0f"),
        ("norm. latency ms", "mean_normalized_latency_ms", ",.1f"),
        ("p99 TTFT ms", "p99_ttft_ms", ",.0f"),
        ("running", "mean_running", ",.2f"),
        ("preemptions", "preemptions", ",.0f"),
    ]
    if "prefix_hit_tokens" in table and (table["prefix_hit_tokens"] > 0).any():
        table = table.assign(prefix_hit_rate=table["prefix_hit_tokens"] / table["prefix_queried_tokens"])
        columns.append(("prefix hits", "prefix_hit_rate", ".1%"))
    for name in varying:
        view.add_column(name.rpartition(".")[2])
    for label, _, _ in columns:
        view.add_column(label, justify="right")
    for name in SHARES:
        view.add_column(name, justify="right")
    for _, row in table.iterrows():
        head = [f"{row[name]:.6g}" if isinstance(row[name], float) else str(row[name]) for name in varying]
        if row["status"] != "complete":
            view.add_row(*head, str(row["status"]))
            continue
        cells = (_number(row[key], "", form) for _, key, form in columns)
        view.add_row(*head, *cells, *(_percent(row[f"share_{name}"]) for name in SHARES))
    console.print(view)
    if any(set(PUBLISHED_SHARES) & set(figures) for figures in published.values()):
        console.print(_beside_published(done, published))
    for policy, figures in published.items():
        runs = done[done["engine"] == policy]
        if "watermarks" in figures and len(runs) and set(_varying(done)) <= {WATERMARK, "seed"} and WATERMARK in runs:
            console.print(_beside_published_watermarks(runs, figures["watermarks"]))


def print_findings(findings: Sequence[Finding]) -> None:
    """A study's claims, each with what is published, ours and the verdict."""
    view = Table(title="claims", title_justify="left")
    for column in ("claim", "published", "ours", "verdict"):
        view.add_column(column, justify="right" if column in ("published", "ours") else "left")
    for finding in findings:
        view.add_row(*finding.cells)
    _console().print(view)


def _beside_published(done: pd.DataFrame, published: dict[str, dict[str, Any]]) -> Table:
    """Ours while requests wait, where any did, and the published figure after a slash.

    The paper's *external fragmentation & others* is our external and idle slots together.
    """
    view = Table(title="ours / published (time average while requests wait, where any did)", title_justify="left")
    for column in ("engine", "block size", "used", "reserved", "internal", "others", "running requests"):
        view.add_column(column, justify="left" if column == "engine" else "right")
    for _, row in done.iterrows():
        theirs = published.get(str(row["engine"]))
        if theirs is None or not set(PUBLISHED_SHARES) & set(theirs):
            continue
        prefix = "saturated_" if _given(row["mean_running_saturated"]) else ""
        ours = {name: row[f"{prefix}share_{name}"] for name in SHARES}
        ours["others"] = ours["external"] + ours["idle"] + ours["cached"]
        running = row["mean_running_saturated" if prefix else "mean_running"]
        cells = (f"{_percent(ours[name])} / {_percent(theirs.get(name))}" for name in PUBLISHED_SHARES)
        beside = f"{_number(running, '', ',.2f')} / {_number(theirs.get('running'), '', ',.2f')}"
        view.add_row(str(row["engine"]), str(row["block_size"]), *cells, beside)
    return view


def _beside_published_watermarks(runs: pd.DataFrame, theirs: dict[str, Any]) -> Table:
    """Our mean over the seeds, lowest and highest in brackets, and the published figure after a slash."""
    seeds = int(runs.groupby(WATERMARK).size().max())
    view = Table(title=f"ours, mean over {seeds} seeds / {theirs['label']}", title_justify="left")
    columns = (
        ("preemptions", "preemptions", 1, ",.0f"),
        ("token/s", "output_throughput", 1, ",.0f"),
        ("p50 TTFT s", "median_ttft_ms", 1000, ",.2f"),
        ("p99 ITL ms", "p99_itl_ms", 1, ",.1f"),
    )
    view.add_column("watermark")
    for label, *_ in columns:
        view.add_column(label, justify="right")
    for watermark, ours in runs.groupby(WATERMARK):
        published = theirs["figures"].get(watermark, {})
        cells = []
        for _, key, unit, form in columns:
            values = ours[key] / unit
            mean, low, high = (f"{value:{form}}" for value in (values.mean(), values.min(), values.max()))
            beside = f"{published[key] / unit:{form}}" if key in published else "-"
            cells.append(f"{mean} ({low} to {high}) / {beside}")
        view.add_row(f"{watermark:g}", *cells)
    return view


def _varying(table: pd.DataFrame) -> list[str]:
    """Columns of the overrides that differ between points."""
    keys = list(table.columns[2 : list(table.columns).index("status")])
    names = [name for name in ("engine", "model", "hardware", "workload", *keys) if name in table.columns]
    return [name for name in dict.fromkeys(names) if table[name].astype(str).nunique() > 1] or ["engine"]


def _any_given(table: pd.DataFrame, name: str) -> bool:
    """Whether any point has the figure; if none was complete, there is no such column."""
    return name in table and bool(table[name].notna().any())


def _given(value: Any) -> bool:
    return value is not None and value == value  # NaN is not equal to itself


def _number(value: Any, unit: str, form: str) -> str:
    return f"{value:{form}} {unit}".rstrip() if _given(value) else "-"


def _percent(share: Any) -> str:
    return f"{100 * share:.1f} %" if _given(share) else "-"


def _console() -> Console:
    """As wide as the terminal; wide enough for every table where the output goes to a file."""
    return Console(width=None if sys.stdout.isatty() else 200)
