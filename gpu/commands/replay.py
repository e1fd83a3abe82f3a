"""Run a workload on the real engine, or sweep over many (-m)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main(argv: list[str]) -> int:
    """`kvtwin replay …`: arguments are Hydra's."""
    from sim.commands.simulate import run_or_sweep

    return run_or_sweep("replay", _replay, argv)


def _replay(config: DictConfig, folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    from omegaconf import OmegaConf

    from sim.config import build, typed, whole_number
    from sim.run import simulate

    try:
        from gpu.replay import GpuOptions, Replay
    except ImportError as error:
        raise UserError(
            f"kvtwin replay needs torch and transformers ({error}); install them with the gpu extra: kvtwin[gpu]."
        ) from None
    clock = typed(config.replay.clock, str, "replay.clock")
    if clock not in ("virtual", "wall"):
        raise UserError(f"replay.clock is {clock}; expected virtual or wall.")
    for option, kind in (("limit", int), ("time_scale", float)):
        value = typed(config.replay[option], kind | None, f"replay.{option}")
        if value is not None:
            config.workload[option] = value
    target = f"{GpuOptions.__module__}.{GpuOptions.__qualname__}"
    options: GpuOptions = build(OmegaConf.create({"_target_": target, **config.gpu}), "gpu")
    shape = None if options.weights is not None else build(config.model, "model")
    replay = Replay(options, shape, folder, whole_number(config, "seed", 0), in_real_time=clock == "wall")
    return simulate(config, folder, facts, replay)
