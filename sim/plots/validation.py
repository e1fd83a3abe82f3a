"""The figures of a validation: is the prediction right for each request, for their distribution, and over time?

Predicted is a filled line or marker in ink, measured an open one in wine, in every figure.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from sim.plots.bins import Floats
from sim.plots.latency import MOST_CORNERS, cumulative
from sim.plots.style import INK, WINE, new_figure, save, settings, write_footnote, write_title
from sim.served import Series, Served
from sim.validation import Aligned, align, sampled

TITLES = {"ttft": "TTFT: to the first token", "tpot": "TPOT: for each further token", "e2e": "E2E: to the last token"}
MEASURED_STYLE: dict[str, Any] = {"color": WINE, "linestyle": "--"}
QUANTITIES = {"running": "running requests", "waiting": "waiting requests", "kv_use": "KV pool in use"}


def draw_validation(predicted: Served, measured: Served, folder: Path) -> list[Path]:
    """Draws the figures into `folder` and returns their paths; over time only if both runs have that."""
    aligned = align(predicted, measured)
    setting = f"{Path(measured.source).resolve().name} · {len(aligned.arrival_s):,} requests"
    paths: list[Path] = []
    with settings():
        paths += save(distribution_figure(aligned, setting), folder, "validation_distributions")
        paths += save(request_figure(aligned, setting), folder, "validation_requests")
        if predicted.series is not None and measured.series is not None:
            paths += save(series_figure(predicted.series, measured.series, setting), folder, "validation_series")
    return paths


def distribution_figure(aligned: Aligned, setting: str) -> Figure:
    """The distribution functions of the three latencies, one over the other."""
    figure = new_figure(10, 3.7)
    axes = figure.subplots(1, 3, sharey=True)
    for ax, name in zip(axes, TITLES, strict=True):
        ours, theirs = aligned.predicted[name], aligned.measured[name]
        scale, unit = _unit(theirs)
        for values, style, label in ((ours, {"color": INK}, "predicted"), (theirs, MEASURED_STYLE, "measured")):
            if len(values):
                times, shares = cumulative(values * scale, MOST_CORNERS)
                ax.step([times[0], *times], [0.0, *shares], where="post", label=label, **style)
        ax.set_title(TITLES[name], loc="left")
        ax.set_xlim(left=0)
        ax.set_xlabel(f"time ({unit})")
    axes[0].set_ylim(0, 1.02)
    axes[0].yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes[0].set_ylabel("share of requests served within")
    axes[0].legend(loc="lower right")
    write_title(figure, "Do predicted and measured latencies have the same distribution?", setting)
    return figure


def request_figure(aligned: Aligned, setting: str) -> Figure:
    """Above, each request's predicted against its measured latency; below, what is left, by measured latency."""
    figure = new_figure(10, 6.2)
    axes = figure.subplots(2, 3, height_ratios=(2, 1), sharex="col")
    for column, name in enumerate(TITLES):
        ours, theirs = aligned.predicted[name], aligned.measured[name]
        scale, unit = _unit(theirs)
        upper, lower = axes[0, column], axes[1, column]
        most = scale * max(float(ours.max(initial=0)), float(theirs.max(initial=0))) * 1.03 or 1.0
        upper.plot([0, most], [0, most], color=WINE, linewidth=1, linestyle="--")
        upper.plot(theirs * scale, ours * scale, "o", color=INK, markersize=3, alpha=0.5, markeredgewidth=0)
        upper.set(xlim=(0, most), ylim=(0, most), ylabel=f"predicted ({unit})")
        upper.set_title(TITLES[name], loc="left")
        lower.axhline(0, color=WINE, linewidth=1, linestyle="--")
        lower.plot(theirs * scale, (ours - theirs) * scale, "o", color=INK, markersize=3, alpha=0.5, markeredgewidth=0)
        lower.set(xlabel=f"measured ({unit})", ylabel=f"predicted − measured ({unit})")
    write_title(figure, "Is the prediction right for each request?", setting)
    write_footnote(figure, ["On the dashed line predicted and measured are equal."])
    return figure


def series_figure(predicted: Series, measured: Series, setting: str) -> Figure:
    """The queues and the pool over time, at the measured times."""
    ours, theirs = sampled(predicted, measured.time_s), sampled(measured, measured.time_s)
    shown = [name for name in QUANTITIES if ours[name] is not None and theirs[name] is not None]
    figure = new_figure(10, 1.1 + 1.7 * len(shown))
    axes = np.atleast_1d(figure.subplots(len(shown), 1, sharex=True))
    for ax, name in zip(axes, shown, strict=True):
        _draw_series(ax, measured.time_s, ours[name], theirs[name])
        ax.set_ylabel(QUANTITIES[name])
        if name == "kv_use":
            ax.set_ylim(0, 1.05)
            ax.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes[0].legend(loc="upper right", ncols=2)
    axes[-1].set_xlabel("time since the first request (s)")
    write_title(figure, "Does the engine look the same over time?", setting)
    return figure


def _draw_series(ax: Axes, times: Floats, ours: Floats | None, theirs: Floats | None) -> None:
    assert ours is not None and theirs is not None
    ax.step(times, ours, where="post", color=INK, linewidth=1.2, label="predicted")
    ax.step(times, theirs, where="post", linewidth=1.2, label="measured", **MEASURED_STYLE)
    ax.set_ylim(0, 1.25 * max(float(ours.max()), float(theirs.max())) or 1.0)
    ax.set_xlim(0, float(times[-1]))


def _unit(values: Floats) -> tuple[float, str]:
    return (1e3, "ms") if len(values) and np.median(values) < 0.5 else (1.0, "s")
