"""Predict one run of a workload, or sweep over many (-m)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig


Run = Callable[["DictConfig", Path, dict[str, Any]], dict[str, Any]]


def main(argv: list[str]) -> int:
    """`kvtwin sim …`: arguments are Hydra's."""
    return run_or_sweep("sim", _simulate, argv)


def _simulate(config: DictConfig, folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    from sim.run import simulate

    return simulate(config, folder, facts)


def run_or_sweep(name: str, run: Run, argv: list[str]) -> int:
    """One run of `conf/<name>.yaml`, or with -m one for each combination of comma lists.

    Args:
        name: of the command and of its config.
        run: makes a run: config, folder and what the summary should say first in, summary out.
        argv: what follows the command.
    """
    from concurrent.futures import BrokenExecutor

    from sim.config import run_command
    from sim.stopping import Terminated, unwinding
    from sim.sweep import stop_workers, sweeping

    with unwinding(stop_workers):
        try:
            with sweeping():
                return run_command(name, partial(_task, run), argv)
        except Terminated:
            print("kvtwin: terminated", file=sys.stderr)
            return 143
        except BrokenExecutor:
            raise UserError(
                "a worker process of the sweep was killed, perhaps for want of memory. resume=true goes on; "
                "hydra.launcher.n_jobs= sets the number of workers."
            ) from None


def _task(run: Run, config: DictConfig) -> float | None:
    """One run. As a point of a sweep, a failure is written down and the sweep goes on.

    Returns:
        What the point is worth to a search; None if it failed, or is no point of a sweep.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import open_dict

    from sim.config import typed
    from sim.point import disk_error, remove_parts

    resume = typed(config.resume, bool, "resume")
    objective = typed(config.objective, str | None, "objective")
    with open_dict(config):
        for key in ("resume", "objective", "direction"):  # of a sweep, and nothing that a run is made from
            del config[key]
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    facts = {group: hydra.runtime.choices[group] for group in ("engine", "model", "hardware", "workload")}
    facts["request_rate"] = config.workload.get("rate")
    if hydra.mode == RunMode.MULTIRUN:
        from sim.point import worth
        from sim.sweep import take_turn

        take_turn(lambda: run(config, folder, facts), config, facts, resume=resume)
        return worth(folder, objective)
    if resume:
        raise UserError("resume=true is for sweeps; a single run (without -m) starts anew.")
    draws = typed(config.plots, bool, "plots")
    try:
        summary = run(config, folder, facts)
    except BaseException as error:
        remove_parts(folder)
        if line := disk_error(error, folder):
            raise line from None
        raise
    figures = _draw(folder) if draws else []
    _print(summary, folder, figures)
    return None


def _draw(folder: Path) -> list[Path]:
    from sim.plots.run import draw_run

    return draw_run(folder)


def _print(summary: dict[str, Any], folder: Path, figures: list[Path]) -> None:
    from sim.summary import print_run

    print_run(summary)
    for notice in summary.get("timing_notices", ()):
        print(f"note: {notice}")
    print(f"written to {folder}: summary.json, requests, steps and events as Parquet, {len(figures)} figures")
