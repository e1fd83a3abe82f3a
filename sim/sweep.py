"""Sweeps: one table of all points, its curves, and a line for each failed point; also of a sweep that is cut short.

Hydra calls `SweepTable` before the first point and after the last. What a point is and leaves behind is said in
`point.py`, how a sweep is stopped in `stopping.py`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing import resource_tracker
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Literal

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from sim.claims import examine, write_findings
from sim.config import resolved, typed
from sim.files import cannot_write, whole
from sim.point import MARK, SUMMARY, finished, keep_point, run_point, status
from sim.progress import SweepProgress
from sim.stopping import Claim, working_for
from workloads.errors import UserError

Direction = Literal["maximize", "minimize"]


class Sweep:
    """A sweep in progress, in the process that started it.

    Args:
        folder: holds one sub-folder a point.
        marks: what each point's mark will say, in their order; a search does not know that beforehand.
        total: how many points there will be.
        resume: whether what the folder holds of these points is kept.

    Raises:
        UserError: another sweep is at work in the folder, or it holds points that are not to be kept.
        OSError: the folder cannot be written to.
    """

    current: ClassVar[Sweep | None] = None  # a process runs one at most; its workers run none

    def __init__(self, folder: Path, marks: list[dict[str, Any]], total: int, *, resume: bool) -> None:
        self.folder = folder
        self._total = total
        folder.mkdir(parents=True, exist_ok=True)
        self._claim = Claim(folder)
        try:
            _adopt(folder, marks, resume=resume)
        except BaseException:
            self._claim.drop()
            raise
        self._progress = SweepProgress(folder, self._total)
        self._progress.start()
        self._signals: set[signal.Signals] = set()  # those that this thread has blocked
        Sweep.current = self

    def hear_for_workers(self) -> None:
        """Has the progress thread take Ctrl-C and SIGTERM for this one, so that processes started here hear neither.

        A terminal signals the workers too, and one without a point in progress would die of it and take the others with
        it. They inherit what is blocked in the thread that starts them.
        """
        resource_tracker.ensure_running()  # started with the first worker, it would unblock them
        self._signals = {signal.SIGINT, signal.SIGTERM} - signal.pthread_sigmask(signal.SIG_BLOCK, set())
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)

    def finish(self, config: DictConfig) -> int:
        """Gathers the points into the table and the figures; returns how many are not complete.

        Args:
            config: the sweep's.
        """
        self._progress.stop()
        published: Any = OmegaConf.to_container(config.published, resolve=True)
        table = write_table(self.folder)
        figures = _draw(table, self.folder, published) if config.plots else []
        _report(table, published)
        if config.objective is not None:
            print(best_point(table, config.objective, config.direction))
        claims: Any = OmegaConf.to_container(config.claims, resolve=True)
        if findings := examine(claims, table):
            from sim.summary import print_findings

            write_findings(findings, self.folder)
            if config.plots:
                from sim.plots.sweep import draw_claims

                figures += draw_claims(findings, self.folder)
            print_findings(findings)
        print(f"written to {self.folder}: sweep.parquet, sweep.csv, {len(figures)} figures, one folder a point")
        lost = self._total - len(table)
        if lost:
            print(f"kvtwin: {lost} points have left no results; resume=true runs them again", file=sys.stderr)
        return lost + int((table["status"] != "complete").sum())

    def cut_short(self) -> None:
        """Writes the table of what there is, without figures, and says how to go on."""
        self._progress.stop()
        if not any(self.folder.glob(f"*/{MARK}")):
            return
        table = write_table(self.folder)
        _report(table, {})
        complete = int((table["status"] == "complete").sum())
        print(f"{complete} of {self._total} points are complete, written to {self.folder}: sweep.parquet, sweep.csv")
        print(f"to go on, add resume=true hydra.sweep.dir={self.folder} to the command")

    def stop_workers(self) -> None:
        """Has the workers wind up what they have in progress, and waits for it."""
        self._claim.stop_workers()

    def leave(self) -> None:
        """Ends the sweep in this process, however it went."""
        Sweep.current = None
        self._progress.stop()
        self._claim.drop()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)


class SweepTable(Callback):
    """Hydra's callback around a sweep. Hydra only warns of an exception in a callback, so it exits instead."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Takes the folder; exits with a line if it cannot have it."""
        folder = Path(config.hydra.sweep.dir)
        with _exiting(folder):
            resume = typed(config.resume, bool, "resume")
            typed(config.plots, bool, "plots")
            typed(config.direction, Direction, "direction")
            unresolved: Any = OmegaConf.to_container(config.hydra.sweep, resolve=False)
            if resume and "${now" in unresolved["dir"]:
                raise UserError("resume=true needs the folder of the sweep: hydra.sweep.dir=FOLDER.")
            launcher = config.hydra.launcher._target_.rpartition(".")[2]
            if launcher == "SlurmLauncher" and shutil.which("srun") is None:
                raise UserError("hydra/launcher=submitit_slurm needs Slurm: srun is not on the path of this machine.")
            try:
                marks, total = _points_to_come(config)
            except HydraException:
                return  # the sweeper is about to find the same
            sweep = Sweep(folder, marks, total, resume=resume)
            if launcher == "JoblibLauncher":
                sweep.hear_for_workers()
            elif launcher == "RayLauncher":
                _keep_ray_small(config)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Exits with 1 if a point is not complete, with a line if the table cannot be written."""
        sweep = Sweep.current
        assert sweep is not None
        with _exiting(sweep.folder):
            failed = sweep.finish(config)
        if failed:
            raise SystemExit(1)


@contextmanager
def sweeping() -> Iterator[None]:
    """Within, a sweep may run: whatever cuts it short, the table of what there is gets written."""
    try:
        yield
    except BaseException as error:
        if Sweep.current is not None:
            try:
                Sweep.current.cut_short()
            except UserError as another:
                if not isinstance(error, UserError):  # else one line is enough: it is the same disk
                    print(f"kvtwin: {another}", file=sys.stderr)
        raise
    finally:
        if Sweep.current is not None:
            Sweep.current.leave()


def stop_workers() -> None:
    """Has the workers of the sweep in this process, if there is one, wind up what they have in progress."""
    if Sweep.current is not None:
        Sweep.current.stop_workers()


def take_turn(simulate: Callable[[], object], config: DictConfig, facts: dict[str, Any], *, resume: bool) -> None:
    """Runs the point whose turn it is, in the sweep's process or in a worker's, or keeps it if it is finished.

    Args:
        simulate: does the run.
        config: what the run is made from.
        facts: what its summary says of it if it fails before it could start.
        resume: whether a finished point is kept.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    mark = point_mark(hydra.job.num, list(hydra.overrides.task))
    if resume and finished(folder, resolved(config)):
        keep_point(folder, mark)
        return
    sweep_folder = Path(hydra.runtime.cwd) / hydra.sweep.dir
    with nullcontext() if Sweep.current is not None else working_for(sweep_folder):
        run_point(simulate, folder, mark, facts)


def write_table(folder: Path) -> Any:
    """Gathers the points of a sweep folder into `sweep.parquet` and `sweep.csv`; returns the table.

    Raises:
        UserError: the folder has no points, or cannot be read or written to.
    """
    table = collect(folder)
    with whole(folder / "sweep.parquet") as temporary:
        table.to_parquet(temporary, index=False)
    with whole(folder / "sweep.csv") as temporary:
        table.to_csv(temporary, index=False)
    return table


def collect(folder: Path) -> Any:
    """One row a point, in their order: its overrides, the names of its parts, and the scalars of its summary.

    Returns:
        A pandas data frame.

    Raises:
        UserError: the folder has no points or cannot be read.
    """
    import pandas as pd

    try:
        rows = [_row(point, json.loads((point / SUMMARY).read_text(encoding="utf-8"))) for point in _points(folder)]
    except OSError as error:
        raise cannot_write(folder, error) from None
    if not rows:
        raise UserError(f"{folder} holds no points of a sweep; kvtwin sim -m makes such a folder.")
    return pd.DataFrame(sorted(rows, key=itemgetter("point")))  # the first row leads the columns


def point_mark(number: int, overrides: list[str]) -> dict[str, Any]:
    """What identifies a point: its place in the sweep, and the options it was given.

    How a sweep is carried on is no option of its points.
    """
    return {"point": number, "overrides": [word for word in overrides if not word.lstrip("+").startswith("resume=")]}


def _points_to_come(config: DictConfig) -> tuple[list[dict[str, Any]], int]:
    """The marks of all points of a sweep, as Hydra's sweeper will make them, and how many points there will be.

    A search makes each point from the ones before. With the same seed it makes the same ones again, so that one which
    goes on finds those that are finished; but which they are is known only when their turn comes.

    Raises:
        HydraException: an override that is no list of values.
        UserError: a sweeper whose points come in another way, or a search for nothing.
    """
    sweeper = config.hydra.sweeper._target_.rpartition(".")[2]
    if sweeper == "OptunaSweeper":
        if config.objective is None:
            raise UserError(
                "a search needs objective=NAME, a figure of summary.json, and direction=maximize or minimize."
            )
        from optuna.logging import set_verbosity

        set_verbosity(logging.WARNING)  # our progress line says it all
        with read_write(config.hydra):
            config.hydra.sweeper.direction = config.direction
        return [], config.hydra.sweeper.n_trials
    if sweeper != "BasicSweeper":
        raise UserError("kvtwin sweeps over comma lists or searches with hydra/sweeper=optuna; choose one of these.")
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    params = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    overrides = parser.parse_overrides([*params, *config.hydra.overrides.task])
    (jobs,) = BasicSweeper.split_arguments(overrides, None)
    marks = [point_mark(number, job) for number, job in enumerate(jobs)]
    return marks, len(marks)


def _adopt(folder: Path, marks: list[dict[str, Any]], *, resume: bool) -> None:
    """Takes the marks from all points in a folder but the complete ones of this sweep.

    Raises:
        UserError: there are points, but they are not to be kept.
    """
    points = _points(folder)
    if points and not resume:
        raise UserError(
            f"{folder} holds {len(points)} points of an earlier sweep; resume=true keeps those that are finished, "
            "hydra.sweep.dir= takes another folder."
        )
    for point in points:
        try:
            ours = json.loads((point / MARK).read_text(encoding="utf-8")) in marks
        except ValueError:
            ours = False
        if not (ours and status(point) == "complete"):
            (point / MARK).unlink()


def _points(folder: Path) -> list[Path]:
    return [path.parent for path in folder.glob(f"*/{MARK}")]


def _row(point: Path, summary: dict[str, Any]) -> dict[str, Any]:
    mark = json.loads((point / MARK).read_text(encoding="utf-8"))
    swept = {o.key_or_group: o.value() for o in OverridesParser.create().parse_overrides(mark["overrides"])}
    keys = {key: value for key, value in swept.items() if key not in summary and isinstance(value, str | int | float)}
    scalars = {key: value for key, value in summary.items() if not isinstance(value, dict)}
    return {"point": mark["point"], "overrides": " ".join(mark["overrides"]), **keys, **scalars}


def best_point(table: Any, objective: str, direction: Direction) -> str:
    """The line that says which complete point is best.

    Args:
        table: of `collect`.
        objective: the column to go by.
        direction: whether most of it is best or least.
    """
    done = table[table["status"] == "complete"]
    if done.empty:
        return f"no point is complete, so none has a {objective}"
    values = done[objective].astype(float)
    best = done.loc[values.idxmax() if direction == "maximize" else values.idxmin()]
    return f"best {objective} is {best[objective]:.6g}, of point {best['point']}: {best['overrides']}"


def _draw(table: Any, folder: Path, published: dict[str, dict[str, Any]]) -> list[Path]:
    from sim.plots.sweep import draw_sweep

    shares = {engine: {name: x for name, x in row.items() if name != "running"} for engine, row in published.items()}
    return draw_sweep(table, folder, shares or None)


def _report(table: Any, published: dict[str, dict[str, Any]]) -> None:
    """Prints the table, and on stderr a line for each point that failed."""
    from sim.summary import print_sweep

    print_sweep(table, published)
    failed = table[table["status"] == "failed"]
    for row in failed.to_dict("records"):
        print(f"kvtwin: point {row['point']} ({row['overrides']}) failed: {row['error']}", file=sys.stderr)


def _keep_ray_small(config: DictConfig) -> None:
    """Defaults for Ray where the user has none: alone, it is to run the points and nothing else.

    They have no YAML file because Hydra takes none beside the one that the launcher brings.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with read_write(config.hydra), open_dict(config.hydra):
        init = config.hydra.launcher.ray.init
        alone = {"include_dashboard": False, "logging_level": logging.ERROR}
        in_a_cluster = {"object_store_memory": None}  # the launcher's own default is refused there
        for key, value in (alone if init.get("address") is None else in_a_cluster).items():
            init.setdefault(key, value)


@contextmanager
def _exiting(folder: Path) -> Iterator[None]:
    """Turns what goes wrong into an exit, which Hydra lets pass: with the line of a user's error, else with 1."""
    try:
        yield
    except UserError as error:
        raise SystemExit(str(error)) from None
    except OSError as error:
        raise SystemExit(str(cannot_write(folder, error))) from None
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None
