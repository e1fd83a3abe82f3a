"""The watermark figure of a sweep: what room kept free at admission saves in preemptions, and what that costs.

Published figures stand beside ours as open markers, each at its watermark, in the units of our own columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sim.plots.lines import OUTPUT_TOKENS, Panel, draw_lines
from sim.plots.points import AXIS_LABELS, Points
from sim.plots.style import policy_looks
from workloads.errors import UserError

WATERMARK = "memory.watermark"
PANELS = (Panel("preemptions", "preemptions"), OUTPUT_TOKENS, Panel("median_ttft_ms", "median TTFT\n(ms)"))
COLUMNS = tuple(panel.column for panel in PANELS)
PUBLISHED = "watermarks"


@dataclass(frozen=True)
class PublishedWatermarks:
    """Results at several watermarks that others have published.

    Args:
        label: whose they are, in a few words.
        source: a sentence that says where they stand and how far they compare.
        figures: watermark -> column of the sweep's table -> value; not every column needs one.
    """

    label: str
    source: str
    figures: Mapping[float, Mapping[str, float]]

    @classmethod
    def of(cls, policy: str, figures: Any) -> PublishedWatermarks:
        """The published figures of a policy under `watermarks`, checked.

        Raises:
            UserError: if they are not a mapping of these names, or no numbers by watermark and column.
        """
        name = f"published.{policy}.{PUBLISHED}"
        if not isinstance(figures, Mapping) or set(figures) != {field.name for field in fields(cls)}:
            raise UserError(f"{name} is {figures!r}; expected label, source and figures, and nothing else.")
        given = figures["figures"]
        if not isinstance(given, Mapping) or not all(_is_at(*at) for at in given.items()):
            raise UserError(f"{name}.figures is {given!r}; expected numbers by watermark, from 0 to 1, and column.")
        return cls(**figures)


def _is_at(watermark: object, results: object) -> bool:
    if not isinstance(watermark, int | float) or not 0 <= watermark < 1 or not isinstance(results, Mapping):
        return False
    return all(isinstance(value, int | float) for value in results.values())


def watermark_figure(points: Points, published: Mapping[str, PublishedWatermarks] | None = None) -> Figure:
    """Preemptions, throughput and median TTFT against the watermark; every run is a dot.

    Args:
        points: some of them differ in the watermark.
        published: by policy; passed over if anything but the watermark and seeds was swept, for then it is not said
            which of ours they belong to.
    """
    drawn = draw_lines(points, WATERMARK, PANELS, _scale)
    looks = policy_looks(points.policies)
    for axes, rows in zip(drawn.grid, drawn.parts, strict=True):
        for policy, own in rows.groupby("engine"):
            dots = {"color": looks[str(policy)].colour, "marker": ".", "linestyle": "none", "alpha": 0.6}
            for ax, panel in zip(axes, PANELS, strict=True):
                ax.plot(own[WATERMARK], own[panel.column], **dots)
    if any(sentence.startswith("Line:") for sentence in drawn.sentences):
        drawn.sentences.append("Dots: single runs.")
    for policy, theirs in (published or {}).items():
        if policy not in looks or len(drawn.parts) > 1:
            continue
        style = looks[policy].style | {"linestyle": "none", "markerfacecolor": "white", "zorder": 3}
        for ax, panel in zip(drawn.grid[0], PANELS, strict=True):
            found = {at: results[panel.column] for at, results in theirs.figures.items() if panel.column in results}
            ax.plot(list(found), list(found.values()), **style)
            ax.autoscale(axis="y")
            ax.set_ylim(bottom=0)
        drawn.handles.append(Line2D([], [], **style, label=theirs.label))
        drawn.sentences.append(f"Open markers: {theirs.source}")
    return drawn.entitled("How many preemptions does a watermark avoid, and what does it cost?", points.setting)


def _scale(ax: Axes, watermarks: pd.Series) -> None:
    ticks = sorted(watermarks.dropna().unique())
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.set_xlabel(AXIS_LABELS[WATERMARK])
