"""Run a workload on the real engine, or sweep over many (-m)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from gpu.replay import Replay


def main(argv: list[str]) -> int:
    """`kvtwin replay …`: arguments are Hydra's."""
    from sim.commands.simulate import run_or_sweep

    return run_or_sweep("replay", _replay, argv)


def _replay(config: DictConfig, folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    from sim.config import typed
    from sim.run import simulate

    clock = typed(config.replay.clock, str, "replay.clock")
    if clock not in ("virtual", "wall"):
        raise UserError(f"replay.clock is {clock}; expected virtual or wall.")
    for option, kind in (("limit", int), ("time_scale", float)):
        value = typed(config.replay[option], kind | None, f"replay.{option}")
        if value is not None:
            config.workload[option] = value
    make_replay = real_engine(config, "replay", in_real_time=clock == "wall")
    return simulate(config, folder, facts, make_replay(folder))


def real_engine(config: DictConfig, command: str, **options: Any) -> Callable[[Path], Replay]:
    """Makes the real engine that a config asks for, given the folder of a run.

    Args:
        config: has `gpu` (`conf/real_engine.yaml`), `model` and `seed`.
        command: who asks.
        options: further ones of `Replay`.

    Raises:
        UserError: torch is missing, or an option is wrong.
    """
    from omegaconf import OmegaConf

    from sim.config import build, whole_number

    try:
        from gpu.replay import GpuOptions, Replay
    except ImportError as error:
        raise UserError(
            f"kvtwin {command} needs torch and transformers ({error}); install them with the gpu extra: kvtwin[gpu]."
        ) from None
    target = f"{GpuOptions.__module__}.{GpuOptions.__qualname__}"
    chosen: GpuOptions = build(OmegaConf.create({"_target_": target, **config.gpu}), "gpu")
    shape = None if chosen.weights is not None else build(config.model, "model")
    seed = whole_number(config, "seed", 0)
    return lambda folder: Replay(chosen, shape, folder, seed, **options)
