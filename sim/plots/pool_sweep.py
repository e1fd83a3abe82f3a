"""The figure of a pool sweep: what was counted at each size of the pool, and what was predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from sim.plots.style import INK, WINE, label_log_axis, new_figure, save, settings, write_footnote, write_title
from sim.pool_sweep import COUNTS, workloads_of

LABELS = {"preemptions": "preemptions per request", "tokens_recomputed": "tokens computed again\nper request"}
MARKERS = "os^vD"  # one a model


def draw_pool_sweep(comparison: dict[str, Any], folder: Path) -> list[Path]:
    """Draws the figure into `folder` and returns its paths."""
    with settings():
        return save(pool_sweep_figure(comparison), folder, "validation_pool_sweep")


def pool_sweep_figure(comparison: dict[str, Any]) -> Figure:
    """Both counts over the number of requests, against the size of the pool; a column a pair of lengths."""
    groups = workloads_of(comparison["runs"])
    lengths = sorted({key[1:] for key in groups})
    models = sorted({key[0] for key in groups})
    figure = new_figure(1.5 + 3.1 * len(lengths), 5.6)
    axes = figure.subplots(len(COUNTS), len(lengths), sharex="col", squeeze=False)
    for (model, prompt, output), group in groups.items():
        pools = [run["num_gpu_blocks"] for run in group]
        marker, column = MARKERS[models.index(model) % len(MARKERS)], lengths.index((prompt, output))
        for row, count in enumerate(COUNTS):
            ax = axes[row, column]
            ours, theirs = (
                [run[count][side] / run["num_requests"] for run in group] for side in ("predicted", "measured")
            )
            ax.plot(pools, ours, color=INK, marker=marker, markersize=3.5, label=f"predicted, {model}")
            ax.plot(
                pools,
                theirs,
                color=WINE,
                marker=marker,
                linestyle="none",
                markersize=7,
                markerfacecolor="none",
                label=f"measured, {model}",
            )
    for column, (prompt, output) in enumerate(lengths):
        axes[0, column].set_title(f"{prompt} + {output} tokens", loc="left")
        lower = axes[-1, column]
        lower.set_xscale("log")
        lower.set_xlabel("pool (blocks, log scale)")
        label_log_axis(lower.xaxis, *lower.get_xlim())
        for row, count in enumerate(COUNTS):
            axes[row, column].set_ylim(0, 1.1 * max(line.get_ydata().max() for line in axes[row, column].lines))
            axes[row, 0].set_ylabel(LABELS[count])
    handles, labels = axes[0, 0].get_legend_handles_labels()
    axes[0, -1].legend(handles, labels, loc="best")
    write_title(
        figure,
        "Is the right number of requests preempted, whatever the size of the pool?",
        f"{len(comparison['runs'])} runs, all requests at once",
    )
    write_footnote(figure, ["Lines join predictions; between them the count goes up and down from block to block."])
    return figure
