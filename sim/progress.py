"""Progress of a run (requests done, simulated time, speed) or of a sweep. Silent unless stderr is a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from sim.point import MARK, status

REFRESH_S = 0.1
LOOK_S = 0.5  # how often a sweep's folder is looked at


class Progress:
    """A context in which `update` moves the bar. A point of a sweep has none: the line is the sweep's.

    Args:
        total: requests that will come, or None if that is not known.
        what: becomes of the seconds that go by.
    """

    def __init__(self, total: int | None, what: str = "simulated") -> None:
        self._total = total
        self._what = what
        self._shown_at = self._started_at = time.perf_counter()
        self._visible = sys.stderr.isatty() and not _in_a_sweep()

    def __enter__(self) -> Progress:
        if self._visible:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("requests"), TextColumn("{task.description}"))
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
            self._task = self._bar.add_task("", total=self._total)
            self._bar.start()
        return self

    def update(self, requests: int, now: float) -> None:
        """Shows that so many requests are done by `now`, in seconds of the run or of the workload."""
        if not self._visible or (clock := time.perf_counter()) - self._shown_at < REFRESH_S:
            return
        self._shown_at = clock
        speed = requests / (clock - self._started_at)
        self._bar.update(
            self._task, completed=requests, description=f"{now:,.0f} s {self._what}, {speed:,.0f} requests/s"
        )
        self._bar.refresh()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._visible:
            self._bar.stop()


@contextmanager
def counting(what: str, first: str = "") -> Iterator[Callable[[int, int], None]]:
    """A bar for work that is counted.

    Args:
        what: is counted.
        first: what the bar says before anything is.

    Yields:
        To be called with how many are done, and of how many.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(first, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total, description=what)


class SweepProgress(threading.Thread):
    """A thread that shows how far a sweep is, whoever runs its points: it counts their marks in the sweep folder.

    Args:
        folder: the sweep folder, with one sub-folder a point.
        total: points of the sweep.
    """

    def __init__(self, folder: Path, total: int) -> None:
        super().__init__(name="sweep progress", daemon=True)
        self._folder = folder
        self._total = total
        self._over = threading.Event()
        self._ended: dict[Path, bool] = {}  # mark of a point -> whether the point is complete
        self._last_end_s = 0.0
        self.look(0.0)
        self._kept = len(self._ended)

    def run(self) -> None:
        """Looks and shows until `stop`."""
        if not sys.stderr.isatty():
            self._over.wait()
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("points{task.description}"))
        started_at = time.perf_counter()
        with Bar(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
            task = bar.add_task("", total=self._total)
            over = False
            while not over:
                over = self._over.wait(LOOK_S)
                elapsed_s = time.perf_counter() - started_at
                self.look(elapsed_s)
                bar.update(task, completed=len(self._ended), description=self.describe(elapsed_s))
                bar.refresh()

    def stop(self) -> None:
        """Takes the line away; harmless if it is gone already."""
        self._over.set()
        self.join()

    def look(self, elapsed_s: float) -> None:
        """Takes note of the points that have ended since it last looked.

        Args:
            elapsed_s: since the sweep began, in seconds.
        """
        for mark in self._folder.glob(f"*/{MARK}"):
            if mark not in self._ended:
                self._ended[mark] = status(mark.parent) == "complete"
                self._last_end_s = elapsed_s

    def describe(self, elapsed_s: float) -> str:
        """How many points failed, and how long the rest takes if it is like those that have ended here so far.

        Args:
            elapsed_s: since the sweep began, in seconds.
        """
        failed = sum(not complete for complete in self._ended.values())
        said = f", {failed} failed" if failed else ""
        ended_here, rest = len(self._ended) - self._kept, self._total - len(self._ended)
        if ended_here and rest:
            left_s = self._last_end_s * (ended_here + rest) / ended_here - elapsed_s
            said += f", {_duration(max(left_s, 1.0))} left"
        return said


def _in_a_sweep() -> bool:
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def _duration(seconds: float) -> str:
    """As a person would say it."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
