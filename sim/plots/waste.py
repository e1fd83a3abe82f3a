"""The waste figure of a sweep: what became of every slot of the pool, one stacked bar for each policy and setting.

Each bar is the time-weighted mean share of the pool in each state, and sums to 1. Two panels where the tables have
both: the whole run, which includes the hours when memory was not short, and the time while requests waited, which is
what Kwon et al., SOSP 2023, Fig. 2 measures. Beside them stands the mean number of running requests (their Fig. 13),
which is what the waste costs. Published figures stand below ours, outlined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import PercentFormatter

from sim.plots.points import AXIS_LABELS, Points, spell_value, split_keys
from sim.plots.style import INK, STATE_LOOKS, STATES, StateLook, new_figure, policy_looks, write_footnote, write_title
from workloads.errors import UserError

PANELS = {"share_": "over the whole run", "saturated_share_": "while requests wait"}
COLUMNS = tuple(f"{prefix}{state}" for prefix in PANELS for state in STATES)
MOST_BARS = 100  # more would not fit a page
NARROWEST_LABELLED = 0.07

RUNNING = "running"

Figures = Mapping[str, float]

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
        published: the published figures; None for a bar of ours.
        y: height of its middle, in bar steps from the top.
    """

    policy: str
    label: str
    rows: pd.DataFrame | None
    published: Figures | None
    y: float


def waste_figure(points: Points, published: Mapping[str, Figures] | None = None) -> Figure:
    """Draws the shares of all `points` (at least one).

    Args:
        published: by policy, shares from 0 to 1 under `used`, `reserved`, `internal` and `others` (all the rest), and
            the mean number of requests under `running`; a missing one was not published. Policies without points are
            passed over.

    Raises:
        UserError: if a published figure has another name, is negative, or the shares sum to more than 1.
    """
    published = published or {}
    for policy, shares in published.items():
        _check_published(policy, shares)
    split = split_keys(points, None, MOST_BARS // max(1, len(points.policies)))
    bars = _place_bars(points, split.by, published)
    panels = {prefix: text for prefix, text in PANELS.items() if _has(points.rows, prefix)}

    figure = new_figure(5.1 + 3.3 * len(panels), 1.5 + (0.27 if len(bars) <= 40 else 0.2) * (bars[-1].y + 1))
    *axes, last = figure.subplots(1, len(panels) + 1, sharey=True, width_ratios=[3.0] * len(panels) + [1.7])
    spreads = []
    for ax, (prefix, text) in zip(axes, panels.items(), strict=True):
        spreads += [_draw_bar(ax, bar, prefix) for bar in bars]
        ax.set_title(text, loc="left")
        ax.set_xlim(0, 1)
        ax.xaxis.set_major_formatter(PercentFormatter(xmax=1))
        ax.set_xlabel("time-weighted share of the pool")
    _draw_running(last, bars, list(panels)[-1])
    for ax in (*axes, last):
        ax.grid(False, axis="y")
        ax.tick_params(axis="y", which="both", length=0)
    _label_bars(axes[0], bars, split.by)
    occurring = [state for state in STATES if any((points.rows[f"{prefix}{state}"] > 0).any() for prefix in panels)]
    _add_legend(figure, occurring, [bar.published for bar in bars if bar.published is not None], any(spreads))
    write_title(
        figure,
        "What does each policy do with the slots of the KV pool, and how many requests does it run?",
        points.setting,
    )
    over = f"Bars are means over points that differ in {', '.join(split.pooled)}." if split.pooled else ""
    write_footnote(figure, [over, points.left_out])
    return figure


def _check_published(policy: str, figures: Figures) -> None:
    names = (*PUBLISHED_LOOKS, RUNNING)
    unknown = sorted(figures.keys() - set(names))
    if unknown:
        raise UserError(f"published.{policy}: no such figure as {unknown[0]}; there are {', '.join(names)}.")
    if not all(isinstance(value, int | float) for value in figures.values()):
        raise UserError(f"published.{policy}: {dict(figures)} are not all numbers; expected shares from 0 to 1.")
    whole = sum(figures.get(name, 0) for name in PUBLISHED_LOOKS)
    if min(figures.values(), default=0) < 0 or whole > 1.005:  # printed to 0.1 %, four shares may round up
        raise UserError(f"published.{policy}: shares sum to {whole:g}; expected none below 0 and a sum of at most 1.")


def _has(rows: pd.DataFrame, prefix: str) -> bool:
    """Whether any point has values in the shares whose columns start with `prefix`."""
    return bool(rows[[f"{prefix}{state}" for state in STATES]].notna().all(axis=1).any())


def _place_bars(points: Points, by: Sequence[str], published: Mapping[str, Figures]) -> list[Bar]:
    """One bar for each policy and combination of `by`, then the published one; half a step between policies."""
    bars: list[Bar] = []
    y = 0.0
    for policy in points.policies:
        own = points.rows[points.rows["engine"] == policy]
        groups = own.groupby(list(by), dropna=False) if by else [((), own)]
        for values, rows in groups:
            known = [own[key].notna().any() for key in by]  # a policy without such a knob has no label for it
            label = " · ".join(
                spell_value(key, value) for key, value, has in zip(by, values, known, strict=True) if has
            )
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
        _write_none_waited(ax, bar.y)
        return False
    left = 0.0
    for state, share in zip(STATES, shares.mean(), strict=True):
        look = STATE_LOOKS[state]
        ax.barh(bar.y, share, 0.8, left, **look.style)
        _write_share(ax, left, share, bar.y)
        left += share
    return _draw_range(ax, shares[f"{prefix}used"], bar.y, 0.001)


def _draw_published(ax: Axes, shares: Figures, y: float) -> None:
    left = 0.0
    for name, look in PUBLISHED_LOOKS.items():
        share = shares.get(name, 0.0)
        if share > 0:
            ax.barh(y, share, 0.62, left, facecolor="white", hatch=look.hatch, edgecolor=look.colour, linewidth=1.2)
            _write_share(ax, left, share, y)
        left += share


def _draw_running(ax: Axes, bars: Sequence[Bar], prefix: str) -> None:
    """Mean running requests of each bar, over the time that the panel of shares with `prefix` covers."""
    column = "mean_running" if prefix == "share_" else "mean_running_saturated"
    looks = policy_looks(bar.policy for bar in bars)
    for bar in bars:
        colour = looks[bar.policy].colour
        if bar.rows is None:
            running = pd.Series([(bar.published or {}).get(RUNNING)], dtype=float).dropna()
            style: dict[str, Any] = {"height": 0.62, "facecolor": "white", "edgecolor": colour, "linewidth": 1.2}
        else:
            running = bar.rows[column].dropna().astype(float)
            style = {"height": 0.8, "facecolor": colour}
            if running.empty:
                _write_none_waited(ax, bar.y)
        if len(running):
            drawn = ax.barh(bar.y, running.mean(), **style)
            _draw_range(ax, running, bar.y, 0.005 * running.mean())
            ax.bar_label(drawn, [f"{running.mean():.2f}"], padding=4, fontsize=7)
    ax.set_title(PANELS[prefix], loc="left")
    ax.set_xlabel("mean running requests")
    ax.set_xlim(0, 1.25 * ax.dataLim.x1 if ax.dataLim.x1 > 0 else 1)  # room for the numbers


def _draw_range(ax: Axes, values: pd.Series, y: float, visible: float) -> bool:
    """Draws lowest to highest of pooled `values` if they differ by at least `visible`; says whether it did."""
    if values.max() - values.min() < visible or len(values) < 2:
        return False
    ax.plot([values.min(), values.max()], [y, y], "|-", color="black", linewidth=1.2, markersize=7)
    return True


def _write_none_waited(ax: Axes, y: float) -> None:
    ax.annotate(
        "no request ever waited", (0, y), (3, 0), textcoords="offset points", va="center", fontsize=7, color=INK
    )


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
    ax.annotate(named, (0, 1), (-10, 6), xycoords="axes fraction", textcoords="offset points", ha="right", fontsize=8)


def _add_legend(figure: Figure, states: Sequence[str], published: Sequence[Figures], has_range: bool) -> None:
    handles: list[Artist] = [Patch(**STATE_LOOKS[state].style, label=state) for state in states]
    if has_range:
        handles.append(Line2D([], [], color="black", marker="|", linewidth=1.2, label="lowest to highest"))
    if published:
        handles.append(Patch(facecolor="white", edgecolor="black", linewidth=1.2, label="published (outlined)"))
        if any("others" in shares for shares in published):
            label = "published: external\nand others"
            handles.append(Patch(facecolor="white", edgecolor=OTHERS.colour, linewidth=1.2, label=label))
    figure.legend(handles=handles, loc="outside right center", handlelength=2.2, handleheight=1.2)
