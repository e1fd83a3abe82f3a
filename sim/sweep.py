"""Sweeps: each point is a run folder of its own; at the end one table, its curves, and a line for each failed point."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from sim.files import cannot_write, whole, write_json
from workloads.errors import UserError


def run_point(simulate: Callable[[], object], folder: Path, facts: dict[str, Any]) -> None:
    """Runs one point of a sweep; if it fails, its folder says why and the sweep goes on.

    Args:
        simulate: does the run.
        folder: its run folder.
        facts: what its summary says of it if it fails before it could start.
    """
    with suppress(OSError):
        (folder / "summary.json").unlink()  # of an earlier run into the same folder
    write_json(folder / "point.json", {"overrides": list(HydraConfig.get().overrides.task)})
    try:
        simulate()
    except Exception as error:  # whatever it is, the other points are worth having
        summary = folder / "summary.json"
        if not summary.exists():
            reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            write_json(summary, {"status": "failed", "error": reason, **facts})


class SweepTable(Callback):
    """Hydra's callback at the end of a sweep: writes `sweep.parquet`, `sweep.csv` and the figures, prints the table."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Exits with 1 if a point failed, with 2 if the table cannot be written: Hydra only warns of an exception."""
        folder = Path(config.hydra.sweep.dir)
        try:
            published: Any = OmegaConf.to_container(config.published, resolve=True)
            failed = finish(folder, published)
        except UserError as error:
            print(f"kvtwin: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        except Exception:
            traceback.print_exc()
            raise SystemExit(1) from None
        if failed:
            raise SystemExit(1)


def finish(folder: Path, published: dict[str, dict[str, float]]) -> int:
    """Gathers the points of a sweep folder into its table and figures; returns how many points failed.

    Args:
        folder: holds one sub-folder a point.
        published: figures of others to show beside ours: engine -> figure -> value.
    """
    from sim.plots.sweep import draw_sweep
    from sim.summary import print_sweep

    table = collect(folder)
    with whole(folder / "sweep.parquet") as temporary:
        table.to_parquet(temporary, index=False)
    with whole(folder / "sweep.csv") as temporary:
        table.to_csv(temporary, index=False)
    shares = {engine: {name: x for name, x in row.items() if name != "running"} for engine, row in published.items()}
    figures = draw_sweep(table, folder, shares or None)
    print_sweep(table, published)
    print(f"written to {folder}: sweep.parquet, sweep.csv, {len(figures)} figures, one folder a point")
    failed = table[table["status"] != "complete"]
    for _, row in failed.iterrows():
        print(f"kvtwin: point {row['point']} ({row['overrides']}) failed: {row['error']}", file=sys.stderr)
    return len(failed)


def collect(folder: Path) -> Any:
    """One row a point, in their order: its overrides, the names of its parts, and the scalars of its summary.

    Returns:
        A pandas data frame.

    Raises:
        UserError: the folder has no points or cannot be read.
    """
    import pandas as pd

    try:
        points = sorted((p.parent for p in folder.glob("*/point.json")), key=lambda p: (len(p.name), p.name))
        rows = [_row(number, point) for number, point in enumerate(points)]
    except OSError as error:
        raise cannot_write(folder, error) from None
    if not rows:
        raise UserError(f"{folder} holds no points of a sweep; kvtwin sim -m makes such a folder.")
    return pd.DataFrame(rows)


def _row(number: int, point: Path) -> dict[str, Any]:
    overrides = json.loads((point / "point.json").read_text(encoding="utf-8"))["overrides"]
    summary = json.loads((point / "summary.json").read_text(encoding="utf-8"))
    swept = {o.key_or_group: o.value() for o in OverridesParser.create().parse_overrides(overrides)}
    keys = {key: value for key, value in swept.items() if key not in summary and isinstance(value, str | int | float)}
    scalars = {key: value for key, value in summary.items() if not isinstance(value, dict)}
    return {"point": number, "overrides": " ".join(overrides), **keys, **scalars}
