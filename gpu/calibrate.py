"""Calibration: measures what steps take on this device, over a grid that a workload chooses, for `timing=fitted`.

The workload is simulated with the real scheduler, memory and recorder, and the steps of the grid
(`calibration_grid.py`) are done for real: block tables, batches and the host's work around them are those of a replay.
All other steps are passed over, which is what makes it a matter of minutes: how long a step takes does not depend on
what its context says.
Each step of the grid is repeated until its median stands, and all of them in several rounds, so that a machine that is
slow for a while does not bend the fit in one place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import simpy
from omegaconf import DictConfig

from gpu.calibration_file import POINTS, MeasuredPoint, PointFile
from gpu.calibration_grid import LOADS, GridPoint, Listing, choose
from gpu.executor import Executor
from gpu.replay import Replay
from gpu.step_log import MeasuredStep
from sim.config import fill, resolved_part
from sim.fitting import fit_points
from sim.hardware import Deployment
from sim.kv_layout import ModelSpec
from sim.plan import StepPlan, StepTimer
from sim.recorder import Record, Recorder
from sim.run import assemble, serve
from sim.scheduler.base import Scheduler
from sim.timing.step_model import StepFit, shape_of, write_fit
from workloads.errors import UserError

TIMING = "timing.json"
SETTINGS = ("workload", "memory", "scheduler", "gpu", "calibrate", "seed")  # on which points depend
FEWEST = 3  # repeats of a point


@dataclass(frozen=True)
class CalibrationOptions:
    """`calibrate` of `conf/calibrate.yaml`.

    Raises:
        UserError: a number out of range.
    """

    requests: int
    points: int
    rounds: int
    tolerance: float
    repeats: int

    def __post_init__(self) -> None:
        least = {"requests": 1, "points": 8, "rounds": 1, "repeats": FEWEST}
        for name, number in least.items():
            if getattr(self, name) < number:
                raise UserError(f"calibrate.{name} is {getattr(self, name)}; expected at least {number}.")
        if not self.tolerance > 0:
            raise UserError(f"calibrate.tolerance is {self.tolerance}; expected a share above 0.")


def calibrate(
    config: DictConfig, folder: Path, make_replay: Callable[[Path], Replay], progress: Callable[[int, int], None]
) -> StepFit:
    """Measures what `folder` does not hold yet, and writes the timing file.

    Args:
        config: a composed `conf/calibrate.yaml`, or one with all its options.
        folder: gets `points.jsonl`, point by point, and at the end `timing.json`.
        make_replay: makes the real engine; a folder for what it writes is given.
        progress: told how many points are measured, and of how many.

    Raises:
        UserError: the folder's points are of another device, model or setting; too few points; what a replay raises.
    """
    options = fill(CalibrationOptions, config.calibrate, "calibrate")
    config = config.copy()
    config.workload.limit = min(options.requests, config.workload.get("limit") or options.requests)
    with TemporaryDirectory() as scratch:
        replay = make_replay(Path(scratch))
        rehearsal = _Rehearsal(config, replay, Path(scratch))
        file = PointFile(folder / POINTS, _identity(config, replay))
        grid = choose(rehearsal.steps(), options.points)
        total = options.rounds * len(grid)
        progress(len(file.points), total)

        def measured(point: MeasuredPoint) -> None:
            file.add(point)
            progress(len(file.points), total)

        for number in range(options.rounds):
            for load in LOADS:
                missing = {
                    point.step: point
                    for point in grid
                    if point.load == load and (number, load, point.step) not in file.points
                }
                if missing:
                    rehearsal.measure(load, number, missing, options, measured)
        points = file.points.values()
        identity = replay.identity()
        fit = fit_points(
            [point.work for point in points],
            [point.duration_s for point in points],
            device=identity["hardware"],
            versions=identity["versions"],
            source=str(file.path),
            model=shape_of(replay.model),
        )
    write_fit(folder / TIMING, fit)
    return fit


def _identity(config: DictConfig, replay: Replay) -> dict[str, Any]:
    """What must be the same for points to stand in one file."""
    return {
        **replay.identity(),
        "model": shape_of(replay.model),
        **{name: resolved_part(config, name) for name in SETTINGS},
        "deployment": asdict(fill(Deployment, config)),
    }


class _Rehearsal:
    """Goes through the workload's steps under either load.

    Args:
        config: of the run.
        replay: the real engine.
        scratch: folder for tables that nobody reads.
    """

    def __init__(self, config: DictConfig, replay: Replay, scratch: Path) -> None:
        self._config = config
        self._replay = replay
        self._scratch = scratch
        self._num_blocks: int | None = None

    def steps(self) -> list[GridPoint]:
        """All that may be measured."""
        candidates: list[GridPoint] = []
        for load in LOADS:
            listing = Listing(load)
            self._serve(lambda *_, listing=listing: listing)
            candidates += listing.points
        return candidates

    def measure(
        self,
        load: str,
        number: int,
        missing: dict[int, GridPoint],
        options: CalibrationOptions,
        measured: Callable[[MeasuredPoint], None],
    ) -> None:
        """Measures steps of a load.

        Args:
            load: a key of `LOADS`.
            number: of the round.
            missing: the steps, by number.
            options: how long each is repeated.
            measured: given each point as soon as it is measured.
        """

        def sampled(*pool: Any) -> StepTimer:
            executor = self._replay.timer(*pool)
            executor.pool.blocks.zero_()  # nobody writes what is passed over, and not every number is equally fast
            return _Sampled(executor, load, number, missing, options, measured)

        self._serve(sampled)

    def _serve(self, timer: Callable[[Scheduler, int, int, Deployment], StepTimer]) -> None:
        parts = assemble(self._config, _Posing(self._replay, timer, self._pool_blocks))
        size = parts.memory.block_size
        recorder = Recorder(self._scratch, parts.memory.num_slots, size, Record(), parts.memory.caches_prefixes)
        try:
            serve(parts, recorder, simpy.Environment())
        finally:
            recorder.discard()

    def _pool_blocks(self, deployment: Deployment, block_size: int) -> int:
        """Asked for once: as soon as there is a pool, less memory is free."""
        if self._num_blocks is None:
            self._num_blocks = self._replay.pool_blocks(deployment, block_size)
        return self._num_blocks


@dataclass(frozen=True)
class _Posing:
    """The real engine as `assemble` sees it, with another timer (`sim.run.RealEngine`)."""

    replay: Replay
    timer: Callable[[Scheduler, int, int, Deployment], StepTimer]
    pool_blocks: Callable[[Deployment, int], int]

    @property
    def model(self) -> ModelSpec:
        return self.replay.model

    @property
    def env(self) -> simpy.Environment:
        return self.replay.env

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


class _Sampled:
    """A timer that does some steps and passes over the others."""

    def __init__(
        self,
        executor: Executor,
        load: str,
        number: int,
        missing: dict[int, GridPoint],
        options: CalibrationOptions,
        measured: Callable[[MeasuredPoint], None],
    ) -> None:
        self._executor = executor
        self._load = load
        self._round = number
        self._missing = missing
        self._options = options
        self._measured = measured
        self._next = 0

    def durations(self, plan: StepPlan) -> list[float]:
        """What the load has a step seem to take."""
        step, self._next = self._next, self._next + 1
        if step in self._missing:
            self._measured(self._point(step, plan))
        if step + 1 in self._missing:
            self._executor.durations(plan)  # the host's work behind it counts towards the next, in the caches it leaves
        return [LOADS[self._load]]

    def _point(self, step: int, plan: StepPlan) -> MeasuredPoint:
        if plan.work != self._missing[step].work:
            raise RuntimeError(f"step {step} computes something else than when it was chosen")
        runs: list[MeasuredStep] = []
        seconds: list[float] = []
        while not _settled(seconds, self._options):
            self._executor.durations(plan)
            assert self._executor.last is not None
            runs.append(self._executor.last)
            seconds.append(runs[-1].duration - runs[-1].between)
        low, middle, high = quantiles(seconds)
        on_device = [run.device for run in runs if run.device is not None]

        def part(name: str) -> float:
            return float(median(getattr(run, name) for run in runs))

        return MeasuredPoint(
            round=self._round,
            load=self._load,
            step=step,
            repeats=len(runs),
            spread=(high - low) / middle,
            duration_s=runs[0].between + middle,
            between_s=runs[0].between,
            move_s=part("move"),
            prepare_s=part("prepare"),
            model_s=part("model"),
            note_s=part("note"),
            device_s=median(on_device) if on_device else None,
            work=self._missing[step].work,
        )


def _settled(seconds: list[float], options: CalibrationOptions) -> bool:
    """Whether the median stands: of normal noise, its standard error is 1.25 standard deviations over the root of n,
    and an interquartile range is 1.35 of them."""
    if len(seconds) < FEWEST:
        return False
    low, middle, high = quantiles(seconds)
    error = 1.25 * (high - low) / 1.35 / len(seconds) ** 0.5
    return error <= options.tolerance * middle or len(seconds) >= options.repeats
