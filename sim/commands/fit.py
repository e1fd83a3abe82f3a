"""Fit a step-time model to a replay's steps, or to the request times of a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from workloads.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from sim.plan import StepTimer
    from sim.served import Served
    from sim.timing.nonnegative import Floats
    from sim.timing.step_model import StepFit


def main(argv: list[str]) -> int:
    """`kvtwin fit measured=RUN [options]`: arguments are Hydra's."""
    if {"-m", "--multirun"} & set(argv):
        raise UserError("kvtwin fit takes one run at a time; leave out -m and --multirun.")

    from sim.config import run_command
    from sim.recorded_settings import with_settings

    return run_command("fit", _fit, with_settings(argv))


def _fit(config: DictConfig) -> None:
    from hydra.core.hydra_config import HydraConfig

    from sim.config import typed
    from sim.fitting import fit_steps
    from sim.point import MEASURED
    from sim.timing.step_model import write_fit
    from sim.timing_table import print_fit

    measured = Path(typed(config.measured, str, "measured")).expanduser()
    folder = Path(HydraConfig.get().runtime.output_dir)
    fit = fit_steps(measured) if (measured / MEASURED).exists() else _fit_requests(config, measured, folder)
    write_fit(folder / "fit.json", fit)
    print_fit(fit)
    print(f"written to {folder / 'fit.json'}; use it with timing=fitted timing.path={folder / 'fit.json'}")


def _fit_requests(config: DictConfig, measured: Path, folder: Path) -> StepFit:
    import numpy as np
    import pyarrow.parquet as pq
    from hydra.core.hydra_config import HydraConfig

    from sim.fitting import fit_requests
    from sim.run import assemble, simulate
    from sim.served import read_served

    choices = HydraConfig.get().runtime.choices
    if choices["workload"] != "recorded_run":
        raise UserError(f"{measured} is neither a replay (measured.parquet) nor a recorded run (meta.json); give one.")
    facts = {group: choices[group] for group in ("engine", "model", "hardware", "workload")}

    def rehearse(timer: StepTimer) -> tuple[Served, Floats]:
        simulate(config, folder / "rehearsal", facts, timer=timer)
        steps = pq.read_table(folder / "rehearsal" / "steps.parquet", columns=["start_s", "duration_s", "num_tokens"])
        start, duration, tokens = (column.to_numpy() for column in steps.columns)
        served = read_served(folder / "rehearsal")
        return served, (start + duration)[np.asarray(tokens) > 0] - start[0]

    return fit_requests(read_served(measured), assemble(config).timer, rehearse, str(choices["hardware"]))
