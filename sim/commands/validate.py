"""Compare a predicted run with a measured one, request by request, or a sweep of pools by what was counted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main(argv: list[str]) -> int:
    """`kvtwin validate measured=RUN [predicted=RUN | options]` or `experiment=cpu_loop`: arguments are Hydra's."""
    if {"-m", "--multirun"} & set(argv):
        raise UserError("kvtwin validate compares one run at a time; leave out -m and --multirun.")

    from sim.config import run_command
    from sim.recorded_settings import with_settings

    return run_command("validate", _validate, with_settings(argv))


def _validate(config: DictConfig) -> None:
    from hydra.core.hydra_config import HydraConfig

    from sim.config import typed
    from sim.files import write_json
    from sim.recorded_settings import is_pool_sweep
    from sim.served import read_served
    from sim.validation import compare

    folder = Path(HydraConfig.get().runtime.output_dir)
    if config.get("loop") is not None:
        _loop(config, folder)
        return
    path = Path(typed(config.measured, str, "measured")).expanduser()
    given = typed(config.predicted, str | None, "predicted")
    if is_pool_sweep(path):
        if given is not None:
            raise UserError("measured= is a pool sweep, of which every run is predicted here; leave out predicted=.")
        _validate_sweep(config, folder, path)
        return
    measured = read_served(path)
    predicted = read_served(_predict(config, folder) if given is None else Path(given).expanduser())
    comparison = compare(predicted, measured)
    write_json(folder / "validation.json", comparison)
    figures = _draw(config, folder, predicted, measured)
    _print(comparison, folder, figures)


def _loop(config: DictConfig, folder: Path) -> None:
    """Calibrates, predicts, replays and compares, as the config's `loop` does it."""
    from sim.config import build
    from sim.files import write_json
    from sim.served import read_served
    from sim.validation_table import print_repetitions

    comparison = build(config.loop, "loop").run(config, folder, _facts())
    write_json(folder / "validation.json", comparison)
    figures = _draw(config, folder, *(read_served(Path(comparison[side])) for side in ("predicted", "measured")))
    _print(comparison, folder, figures)
    print_repetitions(comparison)


def _facts() -> dict[str, Any]:
    from hydra.core.hydra_config import HydraConfig

    choices = HydraConfig.get().runtime.choices
    return {group: choices[group] for group in ("engine", "model", "hardware", "workload", "timing")}


def _validate_sweep(config: DictConfig, folder: Path, path: Path) -> None:
    """Predicts every run of a pool sweep and compares what was counted."""
    from sim.config import typed
    from sim.files import write_json
    from sim.pool_sweep import compare_runs, read_runs, simulate_runs
    from sim.pool_sweep_table import print_sweep_comparison

    runs = read_runs(path)
    comparison = compare_runs(path, runs, simulate_runs(config, runs))
    write_json(folder / "validation.json", comparison)
    figures: list[Path] = []
    if typed(config.plots, bool, "plots"):
        from sim.plots.pool_sweep import draw_pool_sweep

        figures = draw_pool_sweep(comparison, folder)
    print_sweep_comparison(comparison)
    print(f"written to {folder}: validation.json, {len(figures)} figures")


def _predict(config: DictConfig, folder: Path) -> Path:
    """Runs the prediction into a folder below `folder`."""
    from hydra.core.hydra_config import HydraConfig

    from sim.run import simulate

    choices = HydraConfig.get().runtime.choices
    if choices["workload"] != "recorded_run":
        raise UserError("measured= is no recorded run with settings of its own; give the prediction as predicted=RUN.")
    summary = simulate(config, folder / "predicted", _facts())
    for notice in summary.get("timing_notices", ()):
        print(f"note: {notice}")
    return folder / "predicted"


def _draw(config: DictConfig, folder: Path, predicted: Any, measured: Any) -> list[Path]:
    from sim.config import typed

    if not typed(config.plots, bool, "plots"):
        return []
    from sim.plots.validation import draw_validation

    return draw_validation(predicted, measured, folder)


def _print(comparison: dict[str, Any], folder: Path, figures: list[Path]) -> None:
    from sim.validation_table import print_comparison

    print_comparison(comparison)
    print(f"written to {folder}: validation.json, {len(figures)} figures")
