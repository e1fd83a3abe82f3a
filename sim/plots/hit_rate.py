"""The prefix-hit figure of a sweep over pool sizes: what share of all prompts is still there when it is needed again.

A request's hit is counted once, at its first admission, and against its whole prompt; so the tokens of a partial last
block, which no engine shares, count as missed. Published rates stand beside ours as open markers, with what sets them
apart in the footnote.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from sim.plots.lines import Panel, draw_lines
from sim.plots.points import Points
from sim.plots.style import policy_looks
from workloads.errors import UserError

POOL_SIZE = "memory.num_blocks"
COLUMNS = ("pool_blocks", "prefix_queried_tokens", "prefix_hit_tokens")
HIT_RATE = Panel("prefix_hit_rate", "prefix hit rate\n(share of prompt tokens)", if_wide="share")
PUBLISHED = "prefix_hits"
MOST_TICKS = 14  # on the axis; more would touch


@dataclass(frozen=True)
class PublishedHits:
    """Hit rates that others have published.

    Args:
        label: whose they are, in a few words.
        source: a sentence that says where they stand and how far they compare.
        block_size: tokens in a block; they stand only beside ours of the same size.
        rates: blocks in the pool, infinity included -> share of hits, from 0 to 1.
    """

    label: str
    source: str
    block_size: int
    rates: Mapping[float, float]

    @classmethod
    def of(cls, policy: str, figures: Any) -> PublishedHits:
        """The published figures of a policy under `prefix_hits`, checked.

        Raises:
            UserError: if they are not a mapping of these names, or no shares of positive numbers of blocks.
        """
        name = f"published.{policy}.{PUBLISHED}"
        if not isinstance(figures, Mapping) or set(figures) != {field.name for field in fields(cls)}:
            raise UserError(f"{name} is {figures!r}; expected label, source, block_size and rates, and nothing else.")
        rates = figures["rates"]
        if not isinstance(rates, Mapping) or not all(_is_rate(blocks, rate) for blocks, rate in rates.items()):
            raise UserError(f"{name}.rates is {rates!r}; expected shares from 0 to 1 by blocks of the pool, above 0.")
        return cls(**figures)


def _is_rate(blocks: object, rate: object) -> bool:
    numbers = isinstance(blocks, int | float) and isinstance(rate, int | float)
    return numbers and blocks > 0 and 0 <= rate <= 1  # type: ignore[operator]


def any_hit(points: Points) -> bool:
    """Whether any prompt of any point has hit anything; the table has `COLUMNS`."""
    return bool((points.rows["prefix_hit_tokens"] > 0).any())


def pool_size_figure(points: Points, published: Mapping[str, PublishedHits] | None = None) -> Figure:
    """Prefix hit rate against the size of the pool.

    Args:
        points: some of them have hit something.
        published: by policy; those without points of the same block size are passed over.
    """
    rows = points.rows
    published = {policy: hits for policy, hits in (published or {}).items() if len(_of_same_size(rows, policy, hits))}
    asked = pd.to_numeric(rows[POOL_SIZE]).fillna(rows["pool_blocks"])  # null takes what fits
    rate = rows["prefix_hit_tokens"] / rows["prefix_queried_tokens"].where(rows["prefix_queried_tokens"] > 0)
    rated = replace(points, rows=rows.assign(**{POOL_SIZE: asked, HIT_RATE.column: rate}))
    sizes = sorted({*asked, *(blocks for hits in published.values() for blocks in hits.rates)})
    label = _axis_label(rows)
    drawn = draw_lines(rated, POOL_SIZE, [HIT_RATE], lambda ax, _: _scale_pool_size(ax, sizes, label), panel_width=5.2)
    for policy, hits in published.items():
        axes = zip(drawn.grid[:, 0], drawn.parts, strict=True)
        beside = [ax for ax, part in axes if len(_of_same_size(part, policy, hits))]
        markers = [_draw_published(ax, policy, hits, _place_of_infinity(sizes)) for ax in beside]
        drawn.handles.append(markers[0])
        drawn.sentences.append(f"Open markers: {hits.source}")
    return drawn.entitled("What share of the prompts does a pool of each size still hold?", points.setting)


def _of_same_size(rows: pd.DataFrame, policy: str, hits: PublishedHits) -> pd.DataFrame:
    return rows[(rows["engine"] == policy) & (rows["block_size"] == hits.block_size)]


def _draw_published(ax: Axes, policy: str, hits: PublishedHits, infinity: float) -> Line2D:
    look = policy_looks([policy])[policy]
    places = [min(blocks, infinity) for blocks in hits.rates]
    style = look.style | {"linestyle": "none", "markerfacecolor": "white"}
    (markers,) = ax.plot(places, list(hits.rates.values()), **style, label=hits.label)
    return markers


def _place_of_infinity(sizes: Sequence[float]) -> float:
    """Right of all others by a tenth of the axis, and at least a factor of 2."""
    finite = [size for size in sizes if size < math.inf]
    return float(max(finite) * max(2.0, (max(finite) / min(finite)) ** 0.1))


def _scale_pool_size(ax: Axes, sizes: Sequence[float], label: str) -> None:
    ax.set_xscale("log")
    ax.set_xlabel(label)
    infinity = _place_of_infinity(sizes)
    least = math.log(min(sizes[-1], infinity) / sizes[0]) / MOST_TICKS
    ticks: dict[float, str] = {}
    left = math.inf
    for size in reversed(sizes):  # those left of another with room between
        place = min(size, infinity)
        if math.log(left / place) >= least:
            ticks[place] = _short(size)
            left = place
    ax.set_xticks(list(ticks), list(ticks.values()))
    ax.xaxis.set_minor_locator(NullLocator())


def _short(size: float) -> str:
    """A number of blocks in few characters."""
    if size == math.inf:
        return "∞"
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if size >= unit and size % (unit / 10) == 0:
            return f"{size / unit:g}{name}"
    return f"{size:g}"


def _axis_label(rows: pd.DataFrame) -> str:
    common = rows["block_size"].dropna().unique()
    of = f" of {common[0]:g} tokens" if len(common) == 1 else ""
    return f"pool size (blocks{of}, log scale)"
