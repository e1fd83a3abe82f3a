"""Measure what steps take on this device, and write a timing file (timing=fitted)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from workloads.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main(argv: list[str]) -> int:
    """`kvtwin calibrate …`: arguments are Hydra's."""
    if {"-m", "--multirun"} & set(argv):
        raise UserError("kvtwin calibrate measures one thing at a time; leave out -m and --multirun.")

    from sim.config import run_command
    from sim.stopping import Terminated, unwinding

    with unwinding():
        try:
            return run_command("calibrate", _calibrate, argv)
        except Terminated:
            print("kvtwin: terminated", file=sys.stderr)
            return 143


def _calibrate(config: DictConfig) -> None:
    from hydra.core.hydra_config import HydraConfig

    from gpu.commands.replay import real_engine
    from sim.progress import counting
    from sim.timing_table import print_fit

    make_replay = real_engine(config, "calibrate")
    from gpu.calibrate import TIMING, calibrate
    from gpu.calibration_file import POINTS

    folder = Path(HydraConfig.get().runtime.output_dir)
    with counting("points", "choosing steps") as progress:
        fit = calibrate(config, folder, make_replay, progress)
    print_fit(fit)
    print(f"written to {folder}: {TIMING}, {POINTS}; use it with timing=fitted timing.path={folder / TIMING}")
