"""The tables that `kvtwin describe` prints."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table


def print_description(summary: dict[str, Any]) -> None:
    """What `workloads.description.Description.summary` says, with the rows' fate."""
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    figures = Table(title=summary["workload"], title_justify="left")
    figures.add_column("figure")
    figures.add_column("value", justify="right")
    for section in (_rows(summary), _rates(summary), _burstiness(summary), _reuse(summary), _concurrency(summary)):
        for name, value in section:
            figures.add_row(name, value)
        figures.add_section()
    console.print(figures)
    lengths = Table(title="tokens of a request", title_justify="left")
    for column in ("", "mean", "min", "p50", "p90", "p99", "max", "total"):
        lengths.add_column(column, justify="right" if column else "left")
    for name, row in summary["lengths"].items():
        mean, *others = row.values()
        lengths.add_row(name, f"{mean:,.1f}", *(f"{value:,}" for value in others))
    console.print(lengths)
    for note in _notes(summary):
        console.print(note, soft_wrap=True)


def _rows(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if "trace_format" in summary:
        yield "trace taken for", summary["trace_format"]
    yield "rows read", f"{summary['rows_read']:,}"
    for cause, rows in summary["rows_dropped"].items():
        yield f"rows dropped: {cause}", f"{rows:,}"
    yield "requests", f"{summary['requests']:,}"


def _rates(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "first to last arrival", f"{summary['span_s']:,.2f} s"
    yield "request rate", _number(summary["request_rate"], ",.4g", "requests/s")
    yield "prompt tokens", _number(summary["input_token_rate"], ",.1f", "token/s")
    yield "output tokens", _number(summary["output_token_rate"], ",.1f", "token/s")


def _burstiness(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    gaps = summary["gaps"]
    yield "gaps, coefficient of variation", _number(gaps["cv"], ".2f")
    yield "gaps of zero", _number(gaps["zero_share"], ".1%")
    yield "longest gap", _number(gaps["max_s"], ",.2f", "s")
    for window in summary["dispersion"]:
        if window["index"] is not None:
            yield f"counts in {window['window_s']:g} s, index of dispersion", f"{window['index']:,.2f}"
    yield "prompt and output, correlation", _number(summary["prompt_output_correlation"], ".2f")


def _reuse(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    reuse = summary["prefix_reuse"]
    if reuse is None:
        yield "prefix reuse", "prompts are not known"
        return
    yield "prompt blocks, an infinite pool's hits", _number(reuse["hit_block_share"], ".1%")
    yield "prompt tokens, an infinite pool's hits", _number(reuse["hit_token_share"], ".1%")
    yield "distinct blocks", f"{reuse['distinct_blocks']:,}"


def _concurrency(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    concurrency = summary["concurrency"]
    yield "requests in flight, mean estimate", _number(concurrency["mean"], ",.1f")
    yield "requests in flight, peak estimate", f"{concurrency['peak']:,}"
    yield "tokens in flight, peak estimate", f"{concurrency['peak_tokens']:,}"


def _notes(summary: dict[str, Any]) -> Iterator[str]:
    per_token_s = summary["concurrency"]["seconds_per_output_token"]
    yield (
        f"Estimates of concurrency: nobody waits, and a request stays {per_token_s:g} s for each output token "
        "(seconds_per_output_token=). Poisson arrivals have a coefficient of variation and indices of 1."
    )
    if (reuse := summary["prefix_reuse"]) is not None:
        known = "" if reuse["requests_known"] == summary["requests"] else f" of {reuse['requests_known']:,} requests"
        yield (
            f"Prefix reuse{known}: nothing is evicted, and a block is there once its request has arrived. Counting "
            f"took about {reuse['counting_bytes'] / 1e6:,.1f} MB."
        )


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}} {unit}".rstrip()
