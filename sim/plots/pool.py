"""The pool figure of a run: who holds the slots over time, and how many requests run and wait meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from sim.plots.bins import Floats, Spans, bin_edges, count_events, extremes, integrate
from sim.plots.style import BLACK, INK, STATE_LOOKS, STATES, WINE, new_figure, write_footnote, write_title

COLUMNS = ("start_s", "duration_s", "running", "waiting", *STATES, "preempted")
MOST_BINS = 600  # two pixels each; narrower ones would only alias
QUEUE_LOOKS: dict[str, dict[str, Any]] = {
    "running": {"color": INK, "linestyle": "-", "linewidth": 1.2},
    "waiting": {"color": WINE, "linestyle": "--", "linewidth": 1.2},
}
VISIBLE = 0.001  # share of the run: less than a pixel


def pool_figure(steps: pd.DataFrame, plans: Spans, setting: str) -> Figure:
    """Draws the steps of a run (at least one), of which `plans` are the spans."""
    edges = bin_edges(plans, MOST_BINS)
    binned = len(edges) - 1 == MOST_BINS
    width = f"{(edges[-1] - edges[0]) / MOST_BINS:.3g} s"
    preempted = count_events(plans, steps["preempted"].to_numpy(np.int64), edges)

    figure = new_figure(10, 6.2 if preempted.any() else 5.3)
    heights = [3.0, 1.5, 0.7] if preempted.any() else [3.0, 1.5]
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    _draw_states(axes[0], steps, plans, edges)
    _draw_queues(axes[1], steps, plans, edges)
    if preempted.any():
        _draw_preemptions(axes[2], preempted, edges)
        axes[2].set_ylabel(f"preempted\nper {width}" if binned else "preempted\nper step")
    axes[-1].set_xlabel("time (s)")
    starts_late = edges[0] > 0.05 * edges[-1]  # only then is time zero better left out
    axes[-1].set_xlim(edges[0] if starts_late else 0.0, edges[-1])
    axes[-1].xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    figure.align_ylabels(axes)

    write_title(figure, "Who holds the KV pool over time, and who waits for it?", setting)
    means = f"Each of {MOST_BINS} bins of {width} shows the exact mean over its time; bands: lowest to highest in it."
    write_footnote(figure, [means if binned else "", _preemption_note(int(preempted.sum()))])
    return figure


def _preemption_note(count: int) -> str:
    return f"{count:,} preemption{'s' * (count != 1)} in all." if count else "No preemptions."


def _draw_states(ax: Axes, steps: pd.DataFrame, plans: Spans, edges: Floats) -> None:
    states = np.stack([steps[state].to_numpy(np.float64) for state in STATES])
    pool = float(states.sum(axis=0).max())
    layers = [integrate(plans, values, edges) / np.diff(edges) for values in states]
    bottom = np.zeros(len(edges) - 1)
    handles: list[Artist] = []
    for (state, look), layer in zip(STATE_LOOKS.items(), layers, strict=True):
        if layer.any():
            ax.stairs(bottom + layer, edges, baseline=bottom, fill=True, **look.style | {"linewidth": 0})
            handles.append(Patch(**look.style, label=state))
        bottom = bottom + layer
    ax.axhline(pool, color=BLACK, linewidth=1.4)
    handles.reverse()  # as they lie on each other
    if plans.idle_s > VISIBLE * (edges[-1] - edges[0]):
        handles.insert(0, Patch(facecolor="white", edgecolor=BLACK, linewidth=0.5, label="no step runs"))
    handles.insert(0, Line2D([], [], color=BLACK, linewidth=1.4, label=f"pool: {pool:,.0f} slots"))
    _legend_beside(ax, handles)
    ax.set_ylim(0, 1.04 * pool)
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.set_ylabel("slots (KV of one token)")


def _draw_queues(ax: Axes, steps: pd.DataFrame, plans: Spans, edges: Floats) -> None:
    handles: list[Artist] = []
    most = 1.0
    for column, look in QUEUE_LOOKS.items():
        values = steps[column].to_numpy(np.float64)
        low, high = extremes(plans, values, edges)
        mean = integrate(plans, values, edges) / np.diff(edges)
        ax.stairs(
            high,
            edges,
            baseline=np.minimum(low, mean),
            fill=True,
            color=look["color"],
            alpha=0.2,
            linewidth=0,
            zorder=1.5,
        )
        ax.stairs(mean, edges, baseline=None, **look)
        handles.append(Line2D([], [], **look, label=column))
        most = max(most, high.max())
    _legend_beside(ax, handles)
    ax.set_ylim(0, 1.05 * most)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_ylabel("requests")


def _draw_preemptions(ax: Axes, preempted: np.ndarray, edges: Floats) -> None:
    some = np.flatnonzero(preempted)
    ax.vlines(edges[some], 0, preempted[some], color=BLACK, linewidth=0.8)
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))


def _legend_beside(ax: Axes, handles: list[Artist]) -> None:
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0, handleheight=1.2)
