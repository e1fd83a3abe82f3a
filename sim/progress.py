"""The progress bar of a run: requests done, simulated time, speed. Silent unless stderr is a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType

REFRESH_S = 0.1


class Progress:
    """A context in which `update` moves the bar.

    Args:
        total: requests that will come, or None if that is not known.
    """

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._shown_at = self._started_at = time.perf_counter()
        self._visible = sys.stderr.isatty()

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
        """Shows that so many requests have ended by `now`, in simulated seconds."""
        if not self._visible or (clock := time.perf_counter()) - self._shown_at < REFRESH_S:
            return
        self._shown_at = clock
        speed = requests / (clock - self._started_at)
        self._bar.update(self._task, completed=requests, description=f"{now:,.0f} s simulated, {speed:,.0f} requests/s")
        self._bar.refresh()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._visible:
            self._bar.stop()
