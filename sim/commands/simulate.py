"""Predict one run of a workload, or sweep over many (-m)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main(argv: list[str]) -> int:
    """`kvtwin sim …`: arguments are Hydra's."""
    from sim.config import run_command

    return run_command("sim", _task, argv)


def _task(config: DictConfig) -> None:
    """One run. As a point of a sweep, a failure is written down and the sweep goes on."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from sim.config import typed
    from sim.run import simulate

    draws = typed(config.plots, bool, "plots")
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    facts = {group: hydra.runtime.choices[group] for group in ("engine", "model", "hardware", "workload")}
    facts["request_rate"] = config.workload.get("rate")
    if hydra.mode == RunMode.MULTIRUN:
        from sim.sweep import run_point

        run_point(lambda: simulate(config, folder, facts), folder, facts)
        return
    summary = simulate(config, folder, facts)
    figures = _draw(folder) if draws else []
    _print(summary, folder, figures)


def _draw(folder: Path) -> list[Path]:
    from sim.plots.run import draw_run

    return draw_run(folder)


def _print(summary: dict[str, Any], folder: Path, figures: list[Path]) -> None:
    from sim.summary import print_run

    print_run(summary)
    print(f"written to {folder}: summary.json, requests, steps and events as Parquet, {len(figures)} figures")
