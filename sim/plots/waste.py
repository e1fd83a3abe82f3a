"""The waste figure of a sweep: what became of every slot of the pool, one stacked bar for each policy and setting.

Each bar is the time-weighted mean share of the pool in each state, and sums to 1. Two panels where the tables have
both: the whole run, which includes the hours when memory was not short, and the time while requests waited, which is
what Kwon et al., SOSP 2023, Fig. 2 measures. Published shares stand beside ours, outlined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import PercentFormatter

from sim.plots.points import AXIS_LABELS, Points, spell_value, split_keys
from sim.plots.style import INK, STATE_LOOKS, STATES, StateLook, new_figure, write_footnote, write_title

PANELS = {"share_": "over the whole run", "saturated_share_": "while requests wait"}
COLUMNS = tuple(f"share_{state}" for state in STATES)
MOST_BARS = 100  # more would not fit a page
NARROWEST_LABELLED = 0.07

Shares = Mapping[str, float]

# What a paper does not split any further: external fragmentation and everything else but the three before it.
OTHERS = StateLook(INK, "")
PUBLISHED_LOOKS = {state: STATE_LOOKS[state] for state in ("used", "reserved", "internal")} | {"others": OTHERS}


@dataclass(frozen=True)
class Bar:
    """One stacked bar.

    Args:
        policy: its policy.
        label: its setting, beside the policy's name; empty if the policy has but one.
        rows: the points it stands for; None for a published bar.
        published: the published shares; None for a bar of ours.
        y: height of its middle, in bar steps from the top.
    """

    policy: str
    label: str
    rows: pd.DataFrame | None
    published: Shares | None
    y: float


def waste_figure(points: Points, published: Mapping[str, Shares] | None = None) -> Figure:
    """Draws the shares of all `points` (at least one).

    Args:
        published: by policy, shares from 0 to 1 under `used`, `reserved`, `internal` and `others` (all the rest); a
            missing one was not published. Policies without points are passed over.

    Raises:
        ValueError: if published shares have another name, are negative or sum to more than 1.
    """
    published = published or {}
    for policy, shares in published.items():
        _check_published(policy, shares)
    split = split_keys(points, None, MOST_BARS // max(1, len(points.policies)))
    bars = _place_bars(points, split.by, published)
    panels = {prefix: text for prefix, text in PANELS.items() if _has(points.rows, prefix)}

    figure = new_figure(2.9 + 3.5 * len(panels), 1.5 + (0.27 if len(bars) <= 40 else 0.2) * (bars[-1].y + 1))
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    spreads = []
    for ax, (prefix, text) in zip(axes, panels.items(), strict=True):
        spreads += [_draw_bar(ax, bar, prefix) for bar in bars]
        ax.set_title(text, loc="left")
        ax.set_xlim(0, 1)
        ax.xaxis.set_major_formatter(PercentFormatter(xmax=1))
        ax.set_xlabel("time-weighted share of the pool")
        ax.grid(False, axis="y")
        ax.tick_params(axis="y", which="both", length=0)
    _label_bars(axes[0], bars, split.by)
    occurring = [state for state in STATES if any((points.rows[f"{prefix}{state}"] > 0).any() for prefix in panels)]
    _add_legend(figure, occurring, [bar.published for bar in bars if bar.published is not None], any(spreads))
    write_title(figure, "What does each policy do with the slots of the KV pool?", points.setting)
    over = f"Bars are means over points that differ in {', '.join(split.pooled)}." if split.pooled else ""
    write_footnote(figure, [over, points.left_out])
    return figure


def _check_published(policy: str, shares: Shares) -> None:
    unknown = sorted(shares.keys() - PUBLISHED_LOOKS.keys())
    if unknown:
        raise ValueError(
            f"published shares of {policy}: no such share as {unknown[0]}; use {', '.join(PUBLISHED_LOOKS)}"
        )
    if min(shares.values(), default=0) < 0 or sum(shares.values()) > 1.005:  # printed to 0.1 %, four may round up
        raise ValueError(f"published shares of {policy} must be 0 or more and sum to at most 1: {dict(shares)}")


def _has(rows: pd.DataFrame, prefix: str) -> bool:
    """Whether any point has the shares whose columns start with `prefix`."""
    columns = [f"{prefix}{state}" for state in STATES]
    return set(columns) <= set(rows.columns) and bool(rows[columns].notna().all(axis=1).any())


def _place_bars(points: Points, by: Sequence[str], published: Mapping[str, Shares]) -> list[Bar]:
    """One bar for each policy and combination of `by`, then the published one; half a step between policies."""
    bars: list[Bar] = []
    y = 0.0
    for policy in points.policies:
        own = points.rows[points.rows["engine"] == policy]
        groups = own.groupby(list(by), dropna=False) if by else [((), own)]
        for values, rows in groups:
            label = " · ".join(filter(None, map(spell_value, by, values)))
            bars.append(Bar(policy, label, rows, None, y))
            y += 1
        if policy in published:
            bars.append(Bar(policy, "published", None, published[policy], y))
            y += 1
        y += 0.5
    return bars


def _draw_bar(ax: Axes, bar: Bar, prefix: str) -> bool:
    """Draws one bar; says whether its points differ so much in `used` that a range was drawn."""
    if bar.published is not None:
        _draw_published(ax, bar.published, bar.y)
        return False
    assert bar.rows is not None
    shares = bar.rows[[f"{prefix}{state}" for state in STATES]].dropna().astype(float)
    if shares.empty:
        ax.text(0.01, bar.y, "no request ever waited", va="center", fontsize=7.5, color=INK)
        return False
    left = 0.0
    for state, share in zip(STATES, shares.mean(), strict=True):
        look = STATE_LOOKS[state]
        ax.barh(bar.y, share, 0.8, left, **look.style)
        _write_share(ax, left, share, bar.y)
        left += share
    lowest, highest = shares.iloc[:, 0].min(), shares.iloc[:, 0].max()
    if highest - lowest < 0.001:
        return False
    ax.plot([lowest, highest], [bar.y, bar.y], "|-", color="black", linewidth=1.2, markersize=7)
    return True


def _draw_published(ax: Axes, shares: Shares, y: float) -> None:
    left = 0.0
    for name, look in PUBLISHED_LOOKS.items():
        share = shares.get(name, 0.0)
        if share > 0:
            ax.barh(y, share, 0.62, left, facecolor="white", hatch=look.hatch, edgecolor=look.colour, linewidth=1.2)
            _write_share(ax, left, share, y)
        left += share


def _write_share(ax: Axes, left: float, share: float, y: float) -> None:
    """The share in per cent inside its segment, if there is room; the outline keeps it legible on any hatch."""
    if share >= NARROWEST_LABELLED:
        halo = [withStroke(linewidth=2.2, foreground="white")]
        text = f"{100 * share:.1f}"
        ax.text(left + share / 2, y, text, ha="center", va="center", fontsize=7, path_effects=halo)


def _label_bars(ax: Axes, bars: Sequence[Bar], by: Sequence[str]) -> None:
    """Settings beside the bars, and further out each policy's name once, at the middle of its bars."""
    ax.set_ylim(bars[-1].y + 0.6, -0.6)
    ax.set_yticks([bar.y for bar in bars], [bar.label for bar in bars])
    ax.yaxis.remove_overlapping_locs = False  # a name may well stand at the height of a bar
    heights = pd.Series([bar.y for bar in bars]).groupby([bar.policy for bar in bars], sort=False).mean()
    ax.set_yticks(heights.to_list(), [str(name) for name in heights.index], minor=True, weight="bold")
    widest = max(len(bar.label) for bar in bars)
    ax.tick_params(axis="y", which="minor", labelsize=8.5, pad=6 + 5.0 * widest)
    ax.tick_params(axis="y", which="major", labelsize=8)
    named = " ·\n".join(AXIS_LABELS.get(key, key) for key in by)  # across, above the labels: few bars leave no height
    ax.annotate(named, (0, 1), (-4, 6), xycoords="axes fraction", textcoords="offset points", ha="right", fontsize=8)


def _add_legend(figure: Figure, states: Sequence[str], published: Sequence[Shares], has_range: bool) -> None:
    handles: list[Artist] = [Patch(**STATE_LOOKS[state].style, label=state) for state in states]
    if has_range:
        handles.append(Line2D([], [], color="black", marker="|", linewidth=1.2, label="used: lowest to highest"))
    if published:
        handles.append(Patch(facecolor="white", edgecolor="black", linewidth=1.2, label="published (outlined)"))
        if any("others" in shares for shares in published):
            label = "published: external\nand others"
            handles.append(Patch(facecolor="white", edgecolor=OTHERS.colour, linewidth=1.2, label=label))
    figure.legend(handles=handles, loc="outside right center", handlelength=2.2, handleheight=1.2)
