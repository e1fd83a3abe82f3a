"""Ctrl-C and SIGTERM: whatever runs is wound up, so that it keeps what it has; in a sweep the worker processes first.

A signal raises KeyboardInterrupt in the main thread. The workers of a sweep hear none, for the first that dies of one
takes the others with it: the sweep's own process leaves word in the sweep folder and waits until no point is in
progress. A worker whose sweep was killed ends itself.
"""

from __future__ import annotations

import _thread
import functools
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from workloads.errors import UserError

STOP = ".stop"  # the file that tells workers to stop
WATCH_S = 0.2  # how often a worker looks for it
SAME_S = 2.0  # a second signal so soon is the first one passed on by a wrapper, not a user who lost patience
CLAIM_S = 10.0  # how long workers of a killed sweep may take to notice
WINDUP_S = 60.0  # how long workers may take to write down what they have


class Terminated(KeyboardInterrupt):
    """SIGTERM, where KeyboardInterrupt itself is SIGINT."""


@contextmanager
def unwinding(before: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Within, SIGINT raises KeyboardInterrupt and SIGTERM raises Terminated; the first of them calls `before` first.

    A SIGINT that is ignored stays so, as in a job that a shell started in the background. Without effect outside the
    main thread, which is the only one that hears signals.
    """
    heard_at = -math.inf

    def hear(number: int, _: FrameType | None) -> None:
        nonlocal heard_at
        now, earlier = time.monotonic(), heard_at
        if now - earlier < SAME_S:
            return
        heard_at = now
        if earlier == -math.inf:
            before()
        raise (Terminated if number == signal.SIGTERM else KeyboardInterrupt)("stopped by a signal")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    heard = [number for number, handler in former.items() if handler is not signal.SIG_IGN]
    try:
        for number in heard:
            signal.signal(number, hear)
        yield
    finally:
        for number in heard:
            signal.signal(number, former[number])


class Claim:
    """A sweep's claim to its folder while it is at work: no other sweep may write there.

    The claim is a lock on the folder, which every worker shares while it has a point in progress and which the system
    drops when a process ends, however it ends. Where the file system has no locks nothing is claimed.

    Args:
        folder: the sweep folder; it exists.

    Raises:
        UserError: another sweep is at work in the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._stop = folder / STOP
        self._file = os.open(folder, os.O_RDONLY)
        if not self._alone(CLAIM_S):
            os.close(self._file)
            raise UserError(
                f"another sweep is at work in {folder}; wait for its end, or take another folder with hydra.sweep.dir=."
            )
        _lock(self._file, "shared")
        self._stop.unlink(missing_ok=True)

    def stop_workers(self) -> None:
        """Tells the workers to stop and waits until none has a point in progress."""
        with suppress(OSError):
            self._stop.touch()
        self._alone(WINDUP_S)

    def drop(self) -> None:
        """Gives the folder up. Word to stop stays for workers that come late; the next claim removes it."""
        os.close(self._file)

    def _alone(self, seconds: float) -> bool:
        """Waits until no other process holds the lock. False if one still does after so many seconds."""
        until = time.monotonic() + seconds
        while not _lock(self._file, "alone"):
            if time.monotonic() > until:
                return False
            time.sleep(WATCH_S / 4)
        return True


@contextmanager
def working_for(folder: Path) -> Iterator[None]:
    """A point's time in a worker process: KeyboardInterrupt once the sweep in `folder` is told to stop."""
    _end_with_parent()
    stop, over = folder / STOP, threading.Event()

    def watch() -> None:
        while not over.wait(WATCH_S):
            if stop.exists():
                _thread.interrupt_main(signal.SIGTERM)  # as if it had come; SIGINT may be ignored
                return

    file = os.open(folder, os.O_RDONLY)
    watcher = threading.Thread(target=watch, daemon=True)
    try:
        _lock(file, "shared")
        with unwinding():
            if stop.exists():
                raise KeyboardInterrupt("stopped by a signal")
            watcher.start()
            try:
                yield
            finally:
                over.set()
                watcher.join()
    finally:
        os.close(file)


@functools.cache
def _end_with_parent() -> None:
    """Ends this process as soon as its parent is gone. Workers of Ray and Slurm have no parent and go on."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        while os.getppid() == parent.pid:
            time.sleep(WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _lock(file: int, how: str) -> bool:
    """Locks a file *shared* with others, for which it waits, or *alone*; False if others have it now."""
    import fcntl  # only sweeps need it, and not every system has it

    try:
        fcntl.flock(file, fcntl.LOCK_SH if how == "shared" else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks
    return True
