"""Line figures of a sweep: results against one swept axis, one line a policy.

Where several points share policy and axis value, the line is their median and a band shows the lowest and the highest:
noise is never hidden by a mean. Keys of few values split the figure into rows of panels instead (`points.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator, PercentFormatter

from sim.plots.points import AXIS_LABELS, Points, parts, split_keys
from sim.plots.style import INK, PolicyLook, label_log_axis, new_figure, policy_looks, write_footnote, write_title

MOST_ROWS = 6  # of panels; more would not fit a page
WIDE_AXIS = 20.0  # ratio of largest to smallest rate from which a linear axis would crowd the small ones


@dataclass(frozen=True)
class Panel:
    """What one panel shows.

    Args:
        column: the sweep table's column.
        label: the axis label, with unit.
        if_wide: the scale when the values span more than a decade; otherwise linear from zero. A share is always
            drawn from 0 to 100 %.
    """

    column: str
    label: str
    if_wide: Literal["linear", "log", "share"] = "linear"


REQUESTS = Panel("request_throughput", "throughput\n(req/s)")
OUTPUT_TOKENS = Panel("output_throughput", "throughput\n(output token/s)")
LATENCY = Panel("mean_normalized_latency_ms", "mean normalized latency\n(ms per output token)", if_wide="log")
RUNNING = Panel("mean_running", "mean running requests\nover the whole run")
RUNNING_SATURATED = Panel("mean_running_saturated", "mean running requests\nwhile requests wait")
COLUMNS = tuple(panel.column for panel in (REQUESTS, OUTPUT_TOKENS, LATENCY, RUNNING, RUNNING_SATURATED))


@dataclass(frozen=True)
class Drawn:
    """A figure with its lines, still without a title.

    Args:
        figure: the figure.
        grid: its axes, shape (parts, panels).
        parts: the points drawn in each row of the grid.
        handles: what the legend explains; more may be added.
        sentences: what the footnote says; more may be added.
    """

    figure: Figure
    grid: np.ndarray
    parts: list[pd.DataFrame]
    handles: list[Artist]
    sentences: list[str]

    def entitled(self, question: str, setting: str) -> Figure:
        """The figure, complete with legend, title and footnote."""
        self.figure.legend(handles=self.handles, loc="outside right center", handlelength=3.4)
        write_title(self.figure, question, setting)
        write_footnote(self.figure, self.sentences)
        return self.figure


def block_size_figure(points: Points) -> Figure:
    """Throughput and batch against block size; a policy without blocks is a level line."""
    panels = [REQUESTS, OUTPUT_TOKENS, RUNNING]
    if points.rows[RUNNING_SATURATED.column].notna().any():
        panels.append(RUNNING_SATURATED)
    drawn = draw_lines(points, "block_size", panels, _scale_block_size)
    return drawn.entitled("What does the block size cost in throughput and in requests held?", points.setting)


def request_rate_figure(points: Points) -> Figure:
    """Normalized latency and throughput against the request rate, as Kwon et al., SOSP 2023, Fig. 12."""
    panels = [LATENCY, REQUESTS, OUTPUT_TOKENS]
    drawn = draw_lines(points, "request_rate", panels, _scale_rate)
    drawn.handles.append(_draw_offered(list(drawn.grid[:, panels.index(REQUESTS)]), points.rows["request_rate"]))
    return drawn.entitled("What request rate does each policy sustain, and at what latency?", points.setting)


def draw_lines(
    points: Points,
    axis: str,
    panels: Sequence[Panel],
    scale_x: Callable[[Axes, pd.Series], None],
    panel_width: float = 2.9,
) -> Drawn:
    """Draws the panels' columns against the column `axis`, one line a policy and one row of panels a part.

    Args:
        points: at least one.
        axis: a column of numbers.
        panels: from left to right.
        scale_x: scales and labels the axis, given all its values.
        panel_width: inches.
    """
    split = split_keys(points, axis, MOST_ROWS)
    rows_of_panels = parts(points.rows, split.by)
    looks = policy_looks(points.policies)
    figure = new_figure(panel_width * len(panels) + 2.6, 2.7 * len(rows_of_panels) + 1.1)
    grid = figure.subplots(len(rows_of_panels), len(panels), sharex=True, sharey="col", squeeze=False)
    has_bands = level = False
    for axes, (name, rows) in zip(grid, rows_of_panels, strict=True):
        axes[0].set_title(name, loc="left")
        for ax, panel in zip(axes, panels, strict=True):
            for policy, look in looks.items():
                series = _along(rows[rows["engine"] == policy], axis, panel.column, points.rows[axis])
                level |= bool(rows.loc[rows["engine"] == policy, axis].isna().any()) and axis == "block_size"
                has_bands |= _draw_series(ax, series, look)
    for column, panel in zip(grid.T, panels, strict=True):
        _scale_y(list(column), panel, points.rows)
    for ax in grid[-1]:
        scale_x(ax, points.rows[axis])
    which = f"that differ in {', '.join(split.pooled)}" if split.pooled else "of the same setting"
    pooled = f"Line: median, band: lowest to highest, over points {which}."
    without = "A policy without blocks is drawn level."
    sentences = [pooled if has_bands else "", without if level else "", points.left_out]
    handles: list[Artist] = [_sample(policy, look) for policy, look in looks.items()]
    return Drawn(figure, grid, [rows for _, rows in rows_of_panels], handles, sentences)


def _along(own: pd.DataFrame, axis: str, column: str, all_values: pd.Series) -> pd.DataFrame:
    """Median, min and max of `column` at each value of the axis; points that have no block size hold at every one."""
    results = own[[axis, column]].apply(pd.to_numeric)
    if axis == "block_size" and len(results) and results[axis].isna().all():
        values = pd.DataFrame({axis: sorted(all_values.dropna().unique())})
        results = values.merge(results[[column]], how="cross")
    groups = results.dropna().groupby(axis)[column]
    return pd.DataFrame({"median": groups.median(), "min": groups.min(), "max": groups.max()})


def _draw_series(ax: Axes, series: pd.DataFrame, look: PolicyLook) -> bool:
    """Draws one line; says whether it has a band."""
    if series.empty:
        return False
    ax.plot(series.index, series["median"], **look.style)
    if not (series["max"] > series["min"]).any():
        return False
    ax.fill_between(series.index, series["min"], series["max"], color=look.colour, alpha=0.18, linewidth=0)
    return True


def _draw_offered(axes: Sequence[Axes], rates: pd.Series) -> Artist:
    """Where throughput equals the rate: below it, requests pile up."""
    ends = [0.0, float(rates.max())]
    for ax in axes:
        ax.plot(ends, ends, color=INK, linewidth=1, zorder=1)
    return Line2D([], [], color=INK, linewidth=1, label="served = offered")


def _sample(policy: str, look: PolicyLook) -> Line2D:
    return Line2D([], [], **look.style, label=policy)


def _scale_y(column: Sequence[Axes], panel: Panel, rows: pd.DataFrame) -> None:
    """Scales and labels the panels of one column, which share their axis."""
    values = pd.to_numeric(rows[panel.column]).dropna()
    positive = len(values) > 0 and values.min() > 0
    label, first = panel.label, column[0]
    if panel.if_wide == "share":
        first.set_ylim(0, 1)
        first.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    elif panel.if_wide == "log" and positive and values.max() > 10 * values.min():
        first.set_yscale("log")
        label_log_axis(first.yaxis, values.min(), values.max())
        label = f"{panel.label.removesuffix(')')}, log scale)"
    else:
        first.set_ylim(bottom=0)
    for ax in column:
        ax.set_ylabel(label)


def _scale_block_size(ax: Axes, sizes: pd.Series) -> None:
    ticks = np.unique(sizes.dropna().astype(float))
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [f"{size:g}" for size in ticks])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel(f"{AXIS_LABELS['block_size'].removesuffix(')')}, log scale)")


def _scale_rate(ax: Axes, rates: pd.Series) -> None:
    positive = rates.dropna().astype(float)
    label = AXIS_LABELS["request_rate"]
    if positive.min() > 0 and positive.max() > WIDE_AXIS * positive.min():
        ticks = np.unique(positive)
        ax.set_xscale("log")
        ax.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_xlabel(f"{label.removesuffix(')')}, log scale)")
    else:
        ax.set_xlim(left=0)
        ax.set_xlabel(label)
