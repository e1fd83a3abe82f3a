"""Figures of a kernel benchmark: what share of the device's best each implementation reaches, along each axis.

Decode is compared with a copy on the device, prefill with a matrix product, both of the same run. Implementations are
neither policies nor states, so they are drawn in wine (ours) and ink (others') and told apart by marker and line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator, PercentFormatter

from sim.plots.style import INK, WINE, new_figure, save, settings, write_footnote, write_title

Entry = Mapping[str, Any]

OURS = "kvtwin"
MOST_COLUMNS = 4  # panels side by side
DODGE = 0.13  # of markers that would cover one another where an axis has no order
# (by, layout): name in the legend and how it is drawn
_IMPLEMENTATIONS: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    (OURS, "paged"): ("kvtwin, paged", {"color": WINE, "marker": "o", "linestyle": "-", "zorder": 3}),
    (OURS, "contiguous"): (
        "kvtwin, contiguous",
        {"color": WINE, "marker": "o", "linestyle": "--", "markerfacecolor": "white", "markersize": 9},  # a ring
    ),
    ("torch", "contiguous"): (
        "torch SDPA, contiguous",
        {"color": INK, "marker": "s", "linestyle": ":", "markerfacecolor": "white"},
    ),
    ("flashinfer", "paged"): ("FlashInfer, paged", {"color": INK, "marker": "^", "linestyle": "-."}),
    ("vllm", "paged"): (
        "vLLM's FlashAttention, paged",
        {"color": INK, "marker": "D", "linestyle": "-"},
    ),
}
_LABELS = {
    "context": "tokens per sequence (log scale)",
    "block_size": "block size (tokens, log scale)",
    "group": "query heads per KV head (log scale)",
    "head_dim": "head size (log scale)",
    "precision": "precision",
}


@dataclass(frozen=True)
class _Drawing:
    """What one kernel's figure asks and shows.

    Args:
        question: its title.
        share: the figure of a case that is drawn.
        label: of the vertical axis.
        batch_panels: whether contexts are drawn for each batch apart; otherwise batch goes with context.
    """

    question: str
    share: str
    label: str
    batch_panels: bool


_DRAWINGS = {
    "decode": _Drawing(
        "Does decode keep the memory as busy as a copy?", "share_of_copy", "bandwidth\n(of a copy)", True
    ),
    "prefill": _Drawing(
        "How near does prefill come to the matrix rate?", "share_of_matmul", "arithmetic rate\n(of a matmul)", False
    ),
}


@dataclass(frozen=True)
class _Panel:
    """One axis with all else as in the base case, or as `fixed` says."""

    axis: str
    title: str
    fixed: Entry


def draw_kernels(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes a figure, as PNG and SVG, of each attention kernel in a `bench.json`; returns the paths."""
    paths: list[Path] = []
    with settings():
        for kernel in _DRAWINGS:
            figure = kernel_figure(found, kernel)
            if figure is not None:
                paths += save(figure, folder, kernel)
    return paths


def kernel_figure(found: Mapping[str, Any], kernel: str) -> Figure | None:
    """The figure of decode or prefill; None if no axis has two measured values.

    Args:
        found: the content of a `bench.json`.
        kernel: decode or prefill.
    """
    drawing = _DRAWINGS[kernel]
    entries = [entry for entry in found["cases"] if entry["kernel"] == kernel]
    measured = [entry for entry in entries if entry[drawing.share] is not None]
    base = next((entry for entry in measured if (entry["by"], entry["layout"]) == (OURS, "paged")), None)
    if base is None:
        return None
    panels = [panel for panel in _panels(measured, base, drawing) if len(_values(measured, panel)) > 1]
    if not panels:
        return None
    rows = -(-len(panels) // MOST_COLUMNS)
    columns = -(-len(panels) // rows)
    figure = new_figure(2.6 * columns + 2.5, 2.45 * rows + 1.3)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    drawn: dict[str, Line2D] = {}
    for ax, panel in zip(grid.flat, panels, strict=False):
        drawn |= _draw_panel(ax, panel, measured, drawing.share)
    for ax in list(grid.flat)[len(panels) :]:
        ax.remove()
    for ax in grid[:, 0]:
        ax.set_ylabel(drawing.label)
    grid[0, 0].set_ylim(bottom=0)
    grid[0, 0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    figure.legend(handles=list(drawn.values()), loc="outside right center", handlelength=3.4)
    write_title(figure, drawing.question, _setting(found, base))
    missing = len(entries) - len(measured)
    write_footnote(
        figure,
        [
            "Markers: medians of repeated launches with cold caches.",
            _reference(found, kernel),
            f"Not measured: {missing} cases." if missing else "",
        ],
    )
    return figure


def _panels(measured: Sequence[Entry], base: Entry, drawing: _Drawing) -> Iterable[_Panel]:
    fixed = {
        key: base[key] for key in ("batch", "context", "num_kv_heads", "block_size", "group", "head_dim", "precision")
    }
    if drawing.batch_panels:
        for batch in sorted({entry["batch"] for entry in measured}):
            others = {key: value for key, value in fixed.items() if key != "context"} | {"batch": batch}
            yield _Panel("context", f"batch {batch:,}", others)
    else:
        others = {key: value for key, value in fixed.items() if key not in ("context", "batch")}
        yield _Panel("context", f"{base['batch'] * base['context']:,} tokens in all", others)
    for axis in ("block_size", "group", "head_dim", "precision"):
        yield _Panel(axis, _base_title(base), {key: value for key, value in fixed.items() if key != axis})


def _base_title(base: Entry) -> str:
    return f"batch {base['batch']:,} of {base['context']:,} tokens"


def _of(measured: Iterable[Entry], panel: _Panel) -> list[Entry]:
    """The cases of a panel. A contiguous layout has no block size of its own, so it is in whatever that is."""
    return [
        entry
        for entry in measured
        if all(
            entry[key] == value
            for key, value in panel.fixed.items()
            if not (key == "block_size" and entry["layout"] == "contiguous")
        )
    ]


def _values(measured: Iterable[Entry], panel: _Panel) -> list[Any]:
    """The values along the axis, in order; precisions in the order in which they were measured."""
    own = [entry[panel.axis] for entry in _of(measured, panel) if entry["layout"] == "paged"]
    values = list(dict.fromkeys(own))
    return values if panel.axis == "precision" else sorted(values)


def _draw_panel(ax: Axes, panel: _Panel, measured: Sequence[Entry], share: str) -> dict[str, Line2D]:
    """Draws the panel's lines; returns one of each name."""
    values = _values(measured, panel)
    places = {value: float(i) if panel.axis == "precision" else float(value) for i, value in enumerate(values)}
    drawn: dict[str, Line2D] = {}
    for number, ((by, layout), (name, look)) in enumerate(_IMPLEMENTATIONS.items()):
        own = [entry for entry in _of(measured, panel) if (entry["by"], entry["layout"]) == (by, layout)]
        if not own:
            continue
        if panel.axis == "block_size" and layout == "contiguous":  # one figure, level over all block sizes
            points = [(place, own[0][share]) for place in places.values()]
        else:
            points = sorted((places[entry[panel.axis]], entry[share]) for entry in own if entry[panel.axis] in places)
        if panel.axis == "precision":  # in no order, so nothing lies between its values
            shift = DODGE * (number - (len(_IMPLEMENTATIONS) - 1) / 2)
            ax.plot([place + shift for place, _ in points], [value for _, value in points], **look | {"linestyle": ""})
        else:
            ax.plot(*zip(*points, strict=True), **look)
        drawn[name] = Line2D([], [], **look, label=name)
    ax.axhline(1.0, color=INK, linewidth=0.8)
    ax.set_title(panel.title, loc="left")
    ax.set_xlabel(_LABELS[panel.axis])
    if panel.axis != "precision":
        ax.set_xscale("log", base=2)
        ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks(list(places.values()), [_tick(value) for value in values])
    ax.margins(x=0.12)
    return drawn


def _tick(value: Any) -> str:
    if not isinstance(value, int):
        return str(value)
    return f"{value // 1024}k" if value >= 1024 and value % 1024 == 0 else f"{value}"


def _setting(found: Mapping[str, Any], base: Entry) -> str:
    return (
        f"{found['device']['name']}; where not varied: {base['num_kv_heads']} KV heads × {base['group']} query heads "
        f"of {base['head_dim']}, {base['precision']}, blocks of {base['block_size']}"
    )


def _reference(found: Mapping[str, Any], kernel: str) -> str:
    if kernel == "decode":
        return (
            f"100 % is what a copy of 1 GiB read and wrote in the same run: {found['copy_bandwidth'] / 1e9:,.0f} GB/s."
        )
    return f"100 % is a bfloat16 matmul in the same run: {found['matmul_rate'] / 1e12:,.1f} TFLOP/s."
