"""The figure of `kvtwin describe`: when requests come, how unevenly, and how long they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from sim.plots.bins import Floats, Ints
from sim.plots.style import INK, WINE, label_log_axis, new_figure, write_footnote, write_title
from workloads.statistics.arrivals import FEWEST_WINDOWS

if TYPE_CHECKING:
    from workloads.description import Description

MOST_CORNERS = 2000  # of a curve; more cannot be told apart
DAY_S, HOUR_S = 86_400.0, 3600.0
LENGTH_LOOKS = {"prompt": (INK, "-"), "output": (WINE, "--"), "total": ("#999999", ":")}


def description_figure(description: Description, summary: dict[str, Any]) -> Figure:
    """Draws the workload; `summary` is what `kvtwin describe` writes of it."""
    figure = new_figure(10, 6.4)
    ((rate, dispersion), (lengths, gaps)) = figure.subplots(2, 2)
    _draw_rate(rate, description, summary["request_rate"])
    _draw_dispersion(dispersion, summary["dispersion"])
    _draw_lengths(lengths, description)
    _draw_gaps(gaps, description, summary["gaps"])
    setting = f"{summary['workload']}: {summary['requests']:,} requests"
    write_title(figure, "When do requests come, and how long are they?", setting)
    write_footnote(
        figure,
        [
            f"Rate in bins of {summary['rate_over_time']['bin_s']:,g} s; the last one, in which the trace ends, is "
            f"left out. Windows of which the trace has fewer than {FEWEST_WINDOWS} are left out too.",
        ],
    )
    return figure


def _draw_rate(ax: Axes, description: Description, mean: float | None) -> None:
    counts, bin_s = description.rate.counts(), description.rate.bin_s
    edges = np.arange(len(counts) + 1) * bin_s
    scale, unit = next((s, u) for s, u in ((DAY_S, "days"), (HOUR_S, "h"), (0.0, "s")) if edges[-1] >= 2 * s)
    ax.stairs(counts / bin_s, edges / (scale or 1.0), fill=True, color=INK, alpha=0.75)
    said = ""
    if mean is not None:
        ax.axhline(mean, color=WINE, linestyle="--", linewidth=1.2)
        said = f"; dashed: mean {mean:,.3g}/s"
    ax.set_title(f"Requests over time{said}", loc="left")
    ax.set_xlabel(f"time since the first arrival ({unit})")
    ax.set_ylabel("requests/s")
    ax.set_xlim(0, edges[-1] / (scale or 1.0))
    ax.set_ylim(bottom=0)


def _draw_dispersion(ax: Axes, windows: list[dict[str, Any]]) -> None:
    shown = [(window["window_s"], window["index"]) for window in windows if window["index"]]
    ax.set_title("Index of dispersion of the counts", loc="left")
    if not shown:
        _write_nothing(ax, "too few windows")
        return
    lengths, indices = zip(*shown, strict=True)
    ax.plot(lengths, indices, "o-", color=INK, label="this workload")
    ax.axhline(1, color=WINE, linestyle="--", linewidth=1.2, label="Poisson")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xticks(lengths, [f"{length:g}" for length in lengths], minor=False)
    ax.set_xticks([], minor=True)
    ax.set_ylim(min(0.5, *indices) / 1.3, max(2.0, *indices) * 1.3)
    label_log_axis(ax.yaxis, min(1.0, *indices), max(1.0, *indices))
    ax.set_xlabel("length of the windows (s, log scale)")
    ax.set_ylabel("variance / mean (log scale)")
    ax.legend(loc="best")


def _draw_lengths(ax: Axes, description: Description) -> None:
    longest = 1
    shortest = 2**62
    for name, (colour, line) in LENGTH_LOOKS.items():
        values, ranks = description.lengths[name].distribution()
        shares = ranks / description.num_requests
        corners = _corners(len(values))
        x, y = values[corners], shares[corners]
        ax.step([x[0], *x], [0.0, *y], where="post", color=colour, linestyle=line, label=name)
        longest, shortest = max(longest, int(values[-1])), min(shortest, int(values[0]))
    ax.set_title("Lengths", loc="left")
    ax.set_xscale("log")
    label_log_axis(ax.xaxis, shortest, longest)
    ax.set_xlim(0.8 * shortest, 1.25 * longest)
    ax.set_xlabel("tokens (log scale)")
    ax.set_ylabel("share of requests up to it")
    _share_axis(ax)
    ax.legend(loc="upper left")


def _draw_gaps(ax: Axes, description: Description, gaps: dict[str, Any]) -> None:
    ax.set_title("Gaps between arrivals", loc="left")
    lengths, shares = description.gaps.distribution()
    if not gaps["mean_s"]:
        _write_nothing(ax, "all arrive at once")
        return
    ax.step(lengths, shares, where="post", color=INK, label=f"this workload, CV {gaps['cv']:.2f}")
    around: Floats = gaps["mean_s"] * 10.0 ** np.linspace(-3.5, 1.2, 200)
    ax.plot(around, -np.expm1(-around / gaps["mean_s"]), color=WINE, linestyle="--", label="exponential, same mean")
    lowest = gaps["mean_s"] / 3000  # an exponential has 0.03 % of its gaps below
    ax.set_xscale("log")
    label_log_axis(ax.xaxis, lowest, float(lengths[-1]))
    ax.set_xlim(lowest, 1.5 * max(float(lengths[-1]), 3 * gaps["mean_s"]))
    zero = f"; {gaps['zero_share']:.1%} are 0" if gaps["zero_share"] else ""
    ax.set_xlabel(f"gap (s, log scale{zero})")
    ax.set_ylabel("share of gaps up to it")
    _share_axis(ax)
    ax.legend(loc="best")


def _corners(count: int) -> Ints:
    """Which of `count` corners to draw, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(MOST_CORNERS, count)).round().astype(np.int64))


def _share_axis(ax: Axes) -> None:
    ax.set_ylim(0, 1.02)
    ax.yaxis.set_major_formatter(PercentFormatter(xmax=1))


def _write_nothing(ax: Axes, why: str) -> None:
    ax.text(0.5, 0.5, why, ha="center", transform=ax.transAxes)
    ax.set_xticks([])
    ax.set_yticks([])
