"""The latency figure of a run: the share of requests that were served within a given time.

The three latencies are those of `vllm bench serve`: TTFT from arrival to the first token, TPOT the mean time of each
token after the first (so only for requests of two or more that do not come all at once), E2E from arrival to the last
token.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from sim.plots.bins import Floats
from sim.plots.style import INK, label_log_axis, new_figure, write_footnote, write_title

COLUMNS = ("arrival_s", "status", "first_token_s", "finish_s", "generated_tokens")
MOST_CORNERS = 2000  # of a curve; more cannot be told apart
MARKED = (0.50, 0.90, 0.99)


def latency_figure(requests: pd.DataFrame, setting: str) -> Figure:
    """Draws the finished ones of `requests` (at least one)."""
    finished = requests[requests["status"] == "finished"]
    figure = new_figure(10, 3.7)
    axes = figure.subplots(1, 3, sharey=True)
    for ax, (name, values) in zip(axes, latencies(finished).items(), strict=True):
        _draw_distribution(ax, name, values)
    axes[0].set_ylim(0, 1.02)
    axes[0].yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes[0].set_ylabel("share of requests served within")
    write_title(figure, "How long do requests take?", setting)
    others = requests.loc[requests["status"] != "finished", "status"].value_counts().sort_index()
    counts = " and ".join(f"{count:,} {status}" for status, count in others.items() if count)
    write_footnote(figure, [f"{len(finished):,} finished requests.", f"Left out: {counts}." if counts else ""])
    return figure


def latencies(finished: pd.DataFrame) -> dict[str, Floats]:
    """TTFT, TPOT and E2E latency in seconds, one value a request that has one, by title."""
    arrival, first, finish = (finished[key].to_numpy(np.float64) for key in ("arrival_s", "first_token_s", "finish_s"))
    further = finished["generated_tokens"].to_numpy(np.int64) - 1
    several = (further > 0) & (finish > first)  # where all come at once, no token is later than the first
    return {
        "TTFT: to the first token": first - arrival,
        "TPOT: for each further token": (finish - first)[several] / further[several],
        "E2E: to the last token": finish - arrival,
    }


def cumulative(values: Floats, most: int) -> tuple[Floats, Floats]:
    """At most `most` corners of the distribution function: values, and the share of all values up to each.

    Every corner is a corner of the whole function, its first and its last among them; nothing is interpolated.
    """
    ordered = np.sort(values)
    ranks = np.unique(np.linspace(0, len(ordered) - 1, min(most, len(ordered))).round().astype(np.int64))
    return ordered[ranks], (ranks + 1) / len(ordered)


def _draw_distribution(ax: Axes, name: str, values: Floats) -> None:
    if not len(values):
        ax.set_title(name, loc="left")
        ax.text(0.5, 0.5, "no request has any", ha="center", transform=ax.transAxes)
        ax.set_xticks([])
        return
    scale, unit = (1e3, "ms") if np.median(values) < 0.5 else (1.0, "s")
    values = values * scale
    times, shares = cumulative(values, MOST_CORNERS)
    ax.step([times[0], *times], [0.0, *shares], where="post", color=INK)
    marks = np.quantile(values, MARKED, method="inverted_cdf")
    ax.plot(marks, MARKED, "o", color=INK, markersize=4.5)
    spelled = [f"p{100 * share:.0f} {_three_digits(mark)} {unit}" for share, mark in zip(MARKED, marks, strict=True)]
    ax.set_title(f"{name}\n{', '.join(spelled)}", loc="left")
    if times[0] > 0 and times[-1] > 10 * times[0]:
        ax.set_xscale("log")
        label_log_axis(ax.xaxis, times[0], times[-1])
        ax.set_xlabel(f"time ({unit}, log scale)")
    else:
        ax.set_xlim(left=0)
        ax.set_xlabel(f"time ({unit})")


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
