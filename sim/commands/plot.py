"""Redraw the figures of a run or a sweep from its tables."""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import NoReturn

from workloads.errors import UserError

DESCRIPTION = """\
Redraws the figures of a run or of a sweep from the tables in its folder, as PNG and SVG, and prints their paths.

  a run    pool (slots by state, running, waiting, preemptions over time), latency (TTFT, TPOT, E2E)
  a sweep  waste_shares, and where they were swept block_size, request_rate, prefix_hit_rate (pool sizes) and watermark
"""
EXAMPLE = "example:\n  kvtwin plot results/2026-01-31/12-00-00"


class _Parser(ArgumentParser):
    """argparse, but what is wrong becomes one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"plot: {message}. See kvtwin plot --help.")


def main(argv: list[str]) -> int:
    """Draws, prints one path a line, and returns 0.

    Raises:
        UserError: if the folder is missing, holds neither a run nor a sweep, or its tables cannot be drawn.
    """
    parser = _Parser(
        prog="kvtwin plot", description=DESCRIPTION, epilog=EXAMPLE, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="the folder of the run or the sweep")
    folder: Path = parser.parse_args(argv).folder
    paths = _draw(folder)
    if not paths:
        raise UserError(f"{folder}: nothing to draw: no point or request is complete. Run the simulation to its end.")
    for path in paths:
        print(path)
    return 0


def _draw(folder: Path) -> list[Path]:
    """Draws what the folder holds; matplotlib and pandas are slow to import, so only once they are needed."""
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "no such folder"
        raise UserError(f"{folder}: {what}. Give the folder that kvtwin sim wrote.")
    try:
        if (folder / "sweep.parquet").exists():
            from sim.plots.sweep import redraw_sweep

            return redraw_sweep(folder)
        if (folder / "steps.parquet").exists() or (folder / "requests.parquet").exists():
            from sim.plots.run import draw_run

            return draw_run(folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot write the figures ({error.strerror}). Make the folder writable.") from None
    raise UserError(
        f"{folder}: neither a sweep (no sweep.parquet) nor a run (no steps.parquet). "
        "Give the folder that kvtwin sim wrote."
    )
