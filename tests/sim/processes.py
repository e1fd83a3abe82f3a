"""`kvtwin sim` in processes of its own, that a test may signal and kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import gated

PATIENCE_S = 120.0
# Figures are not what these tests are about, and cost most of a small sweep's time. Nothing is imported before it is
# in the command itself.
CODE = """
import sys, types
sys.modules["sim.plots.sweep"] = types.SimpleNamespace(draw_sweep=lambda *_: [])
from sim.cli import main
sys.exit(main())
"""
SMALL = ["workload=synthetic", "workload.num_requests=6", "workload.prompt_lengths.tokens=40", "timing=constant"]


class Kvtwin:
    """A `kvtwin sim` that runs in a session of its own.

    Args:
        arguments: what follows `sim`.
        prepare: called in the process before it starts.
    """

    def __init__(self, *arguments: str, prepare: Callable[[], object] = lambda: None) -> None:
        def start() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests that run in the background ignore it
            prepare()

        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-c", CODE, "sim", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,
            preexec_fn=start,
        )
        self.pid = self._process.pid

    def wait_until(self, condition: Callable[[], object]) -> bool:
        """Waits for a condition; False if the process ended without."""
        until = time.monotonic() + PATIENCE_S
        while not condition():
            if self._process.poll() is not None:
                return bool(condition())
            assert time.monotonic() < until, "waited in vain"
            time.sleep(0.01)
        return True

    def signal(self, number: int) -> None:
        """Signals this process alone."""
        os.kill(self.pid, number)

    def signal_all(self, number: int) -> None:
        """Signals the process and all that it has started, as a terminal does at Ctrl-C."""
        os.killpg(self.pid, number)

    def end(self) -> tuple[int, str, str]:
        """Waits for the end; returns the exit code, and what was written to stdout and stderr."""
        out, err = self._process.communicate(timeout=PATIENCE_S)
        return self._process.returncode, out, err

    def kill(self) -> None:
        """Kills this process alone, and waits until it is gone. What it has started may run on."""
        self._process.kill()
        self._process.wait(PATIENCE_S)

    def wait_for_all(self) -> None:
        """Waits until nothing that it has started is left."""
        until = time.monotonic() + PATIENCE_S
        while orphans := _session(self.pid):
            assert time.monotonic() < until, f"orphans: {orphans}"
            time.sleep(0.05)

    def destroy(self) -> None:
        """Leaves nothing behind."""
        for pid in _session(self.pid):
            os.kill(pid, signal.SIGKILL)
        self._process.communicate()


@contextmanager
def kvtwin(*arguments: str, prepare: Callable[[], object] = lambda: None) -> Iterator[Kvtwin]:
    """`kvtwin sim` with these arguments, which does not outlive the context."""
    process = Kvtwin(*arguments, prepare=prepare)
    try:
        yield process
    finally:
        process.destroy()


def gated_configs(folder: Path) -> list[str]:
    """Makes the workload `gated` known to Hydra; returns the arguments that choose it."""
    (folder / "workload").mkdir(parents=True)
    (folder / "workload" / "gated.yaml").write_text(gated.CONFIG)
    return [f"--config-dir={folder}", "workload=gated", "timing=constant"]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a sweep folder by its path, but not what Hydra notes of the folder itself."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.name != "multirun.yaml"}


def _session(leader: int) -> list[int]:
    """Processes of a session, without zombies; Linux only."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue  # it has just ended
        if int(session) == leader and state != "Z":
            found.append(int(stat.parent.name))
    return found
