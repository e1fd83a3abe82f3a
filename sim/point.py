"""One point of a sweep: a run folder of its own, and at its end `point.json`, which says what the point was.

Whether a point is finished is read from its folder alone: complete tables, a summary that says so, and the very config
that the point would be run with now. So it does not matter which process ran it, when, or how that process ended.
"""

from __future__ import annotations

import difflib
import errno
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sim.files import cannot_write, write_json
from workloads.errors import UserError

MARK = "point.json"
CONFIG = "config.yaml"
SUMMARY = "summary.json"
TABLES = ("requests.parquet", "steps.parquet", "events.parquet")
MEASURED = "measured.parquet"  # of a replay
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}  # a disk's errors that only writing meets


def run_point(simulate: Callable[[], object], folder: Path, mark: dict[str, Any], facts: dict[str, Any]) -> None:
    """Runs one point of a sweep; if it fails, its folder says why and the sweep goes on.

    Args:
        simulate: does the run.
        folder: its run folder; what an earlier run has left there is removed.
        mark: what `point.json` says of it.
        facts: what its summary says of it if it fails before it could start.

    Raises:
        SystemExit: the disk is full or cannot be written to, which would befall every further point; with the line
            that says so.
    """
    with _ending_the_sweep(folder):
        clear(folder)
        try:
            simulate()
        except BaseException as error:
            remove_parts(folder)
            if line := disk_error(error, folder):
                raise line from None
            if status(folder) is None:
                write_json(folder / SUMMARY, {**_why(error), **facts})
            if not isinstance(error, Exception):
                raise  # a signal ends the sweep; whatever else it is, the other points are worth having
        finally:
            if status(folder) is not None:
                write_json(folder / MARK, mark)


def keep_point(folder: Path, mark: dict[str, Any]) -> None:
    """Makes a point that an earlier run has finished one of this sweep.

    Raises:
        SystemExit: as for `run_point`.
    """
    with _ending_the_sweep(folder):
        write_json(folder / MARK, mark)


def finished(folder: Path, config: str) -> bool:
    """Whether the folder holds the complete results of a run with this config, as YAML."""
    try:
        same = (folder / CONFIG).read_text(encoding="utf-8") == config
    except OSError:
        return False
    return same and status(folder) == "complete" and all((folder / name).is_file() for name in TABLES)


def status(folder: Path) -> str | None:
    """What the folder's summary says of the run; None if there is no summary, or none that can be read."""
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return str(summary.get("status")) if isinstance(summary, dict) else None


def worth(folder: Path, objective: str | None) -> float | None:
    """What the point in `folder` is worth to a search: that figure of its summary.

    None if it is not complete, or nothing is searched.

    Raises:
        SystemExit: there is no such figure, which would befall every further point; with the line that says so.
    """
    if objective is None or status(folder) != "complete":
        return None
    summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    value = summary.get(objective)
    if isinstance(value, int | float):
        return float(value)
    if objective == "request_goodput":
        raise SystemExit("objective=request_goodput needs a limit: give goodput.ttft=, goodput.tpot= or goodput.e2el=.")
    figures = [name for name, figure in summary.items() if isinstance(figure, int | float)]
    near = difflib.get_close_matches(objective, figures, n=1)
    raise SystemExit(
        f"objective is {objective}, which is no figure of summary.json"
        + (f"; did you mean {near[0]}?" if near else "; name one of its numbers.")
    )


def clear(folder: Path) -> None:
    """Removes what a run writes, whole or half-written; files of others stay.

    Raises:
        OSError: it cannot be removed.
    """
    for name in (MARK, SUMMARY, CONFIG, *TABLES, MEASURED):  # the mark first: without it the rest counts for nothing
        (folder / name).unlink(missing_ok=True)
    remove_parts(folder)


def remove_parts(folder: Path) -> None:
    """Removes half-written files."""
    for path in folder.glob(".*.part"):
        with suppress(OSError):
            path.unlink()


def disk_error(error: BaseException, folder: Path) -> UserError | None:
    """The line for a run into `folder` that the disk has ended; None if something else has."""
    chain = [error]
    while (before := chain[-1].__context__) is not None:  # the second error, of tidying up, hides the first
        chain.append(before)
    for cause in chain:
        if isinstance(cause, OSError) and cause.errno in DISK:
            lines = (line for line in chain if isinstance(line, UserError))
            return next(lines, None) or cannot_write(folder, cause)
    return None


def _why(error: BaseException) -> dict[str, str]:
    if not isinstance(error, Exception):
        return {"status": "interrupted", "error": str(error)}
    return {
        "status": "failed",
        "error": str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}",
    }


@contextmanager
def _ending_the_sweep(folder: Path) -> Iterator[None]:
    """Turns an error into an exit, which Hydra and its launchers let pass, with the line that says what is wrong."""
    try:
        yield
    except OSError as error:
        raise SystemExit(str(cannot_write(folder, error))) from None
    except UserError as error:
        raise SystemExit(str(error)) from None
