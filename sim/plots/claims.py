"""The claims figure of a study: how far from what is published each figure comes out, measured by what is allowed."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from sim.claims import Finding
from sim.plots.style import BLUE, INK, PALE_GREY, VERMILLION, new_figure, write_footnote, write_title

FARTHEST = 3.0  # distances beyond are drawn there, as an arrow


def claims_figure(findings: Sequence[Finding]) -> Figure:
    """One row a claim: ours as a filled marker, what is published as an open one or an open bar.

    The horizontal distance from published to ours is in units of what the study allows, so claims of unlike units stand
    side by side and those that do not hold lie outside the grey band.

    Args:
        findings: at least one.
    """
    figure = new_figure(9.5, 1.3 + 0.32 * len(findings))
    ax = figure.subplots()
    ax.axvspan(-1, 1, color=PALE_GREY, linewidth=0)
    for row, finding in enumerate(findings):
        low, high = finding.claim.published
        middle, allowed = (low + high) / 2, finding.claim.within + (high - low) / 2 or 1e-12
        half = (high - low) / 2 / allowed
        ax.plot([-half, half] if half else [0], [row] * (2 if half else 1), "o-", color=INK, markerfacecolor="white")
        if finding.ours is not None:
            distance = (finding.ours - middle) / allowed
            colour = BLUE if finding.verdict == "holds" else VERMILLION
            far = abs(distance) > FARTHEST
            marker = "o" if not far else (">" if distance > 0 else "<")
            ax.plot([max(-FARTHEST, min(FARTHEST, distance))], [row], marker, color=colour, markersize=4.5)
        _, published, ours, _ = finding.cells
        ax.annotate(
            f"{ours}  /  {published}", (1, row), (8, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
            va="center", fontsize=8,
        )  # fmt: skip
    ax.annotate(
        "ours / published", (1, 1), (8, 4), xycoords="axes fraction", textcoords="offset points", fontsize=8, color=INK
    )
    ax.set_yticks(range(len(findings)), [finding.claim.claim for finding in findings], fontsize=8)
    ax.set_ylim(len(findings) - 0.4, -0.6)
    ax.set_xlim(-1.07 * FARTHEST, 1.07 * FARTHEST)
    ax.set_xlabel("distance of ours (filled) from what is published (open), in units of what is allowed (grey)")
    ax.grid(False, axis="y")
    write_title(figure, "Does what is published come out?", "")
    missing = sum(finding.ours is None for finding in findings)
    write_footnote(figure, [f"{missing} claims are about points that are not in this sweep." if missing else ""])
    return figure
