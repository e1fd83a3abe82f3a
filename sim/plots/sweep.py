"""The figures of a sweep: waste shares always, curves for what was swept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from sim.claims import Finding
from sim.plots import hit_rate, lines, waste, watermark
from sim.plots.claims import claims_figure
from sim.plots.points import IDENTITY, select_complete
from sim.plots.style import save, settings
from sim.plots.tables import REDO, read_table, require_columns
from workloads.errors import UserError

TABLE = "sweep.parquet"
COLUMNS = (*IDENTITY, *waste.COLUMNS, *lines.COLUMNS, *hit_rate.COLUMNS, *watermark.COLUMNS)


def draw_sweep(
    table: pd.DataFrame, folder: Path, published: Mapping[str, Mapping[str, Any]] | None = None
) -> list[Path]:
    """Draws a sweep's figures into `folder` and returns their paths; none if no point is complete.

    Args:
        table: one row a point, as in sweep.parquet. The swept keys are the columns before `status`.
        folder: where the figures go; it exists.
        published: by policy, shares of the pool from 0 to 1 under `used`, `reserved`, `internal` and `others`, and the
            mean number of requests under `running`, drawn beside ours; for example those of Kwon et al., SOSP 2023,
            Fig. 2 and 13. Under `prefix_hits`, label, source, block_size and rates, as
            `hit_rate.PublishedHits` has them; under `watermarks`, label, source and figures, as
            `watermark.PublishedWatermarks` does.

    Raises:
        UserError: if the table lacks a column, or published figures are none of these or no shares of one pool.
    """
    require_columns(table, ["status"], folder / TABLE)
    if not (table["status"] == "complete").any():
        return []  # points that never started have no results, so there may be no columns for them
    require_columns(table, COLUMNS, folder / TABLE)
    points = select_complete(table)
    shares, hits, watermarks = _sorted_out(published or {})
    with settings():
        paths = save(waste.waste_figure(points, shares), folder, "waste_shares")
        if points.sweeps_within_a_policy("block_size"):
            paths += save(lines.block_size_figure(points), folder, "block_size")
        if points.sweeps_within_a_policy("request_rate"):
            paths += save(lines.request_rate_figure(points), folder, "request_rate")
        if points.sweeps_within_a_policy(hit_rate.POOL_SIZE) and hit_rate.any_hit(points):
            paths += save(hit_rate.pool_size_figure(points, hits), folder, "prefix_hit_rate")
        if points.sweeps_within_a_policy(watermark.WATERMARK):
            paths += save(watermark.watermark_figure(points, watermarks), folder, "watermark")
    return paths


def draw_claims(findings: Sequence[Finding], folder: Path) -> list[Path]:
    """Draws what became of a study's claims, at least one, into `folder`; returns the paths."""
    with settings():
        return save(claims_figure(findings), folder, "claims")


def _sorted_out(
    published: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, dict[str, float]], dict[str, hit_rate.PublishedHits], dict[str, watermark.PublishedWatermarks]]:
    """Published figures of the pool's slots, of prefix hits and of watermarks, each by the policies that have any."""
    shares: dict[str, dict[str, float]] = {}
    hits: dict[str, hit_rate.PublishedHits] = {}
    watermarks: dict[str, watermark.PublishedWatermarks] = {}
    apart = (hit_rate.PUBLISHED, watermark.PUBLISHED)
    for policy, figures in published.items():
        if rest := {name: value for name, value in figures.items() if name not in apart}:
            shares[policy] = rest
        if hit_rate.PUBLISHED in figures:
            hits[policy] = hit_rate.PublishedHits.of(policy, figures[hit_rate.PUBLISHED])
        if watermark.PUBLISHED in figures:
            watermarks[policy] = watermark.PublishedWatermarks.of(policy, figures[watermark.PUBLISHED])
    return shares, hits, watermarks


def redraw_sweep(folder: Path) -> list[Path]:
    """Draws a sweep's figures from its folder, with the published figures that its points were given.

    Raises:
        UserError: if the table is unreadable or lacks a column, or a point's config.yaml is unreadable.
    """
    return draw_sweep(read_table(folder / TABLE), folder, _published(folder))


def _published(folder: Path) -> dict[str, dict[str, float]]:
    """`published` of the first point that has a config; it is the same in all."""
    for path in sorted(folder.glob("*/config.yaml")):
        try:
            config = OmegaConf.to_container(OmegaConf.load(path))
        except Exception as error:  # the YAML parser's own errors come through
            raise UserError(f"{path}: not readable YAML ({str(error).partition(chr(10))[0]}). {REDO}") from None
        return (config.get("published") or {}) if isinstance(config, dict) else {}
    return {}
