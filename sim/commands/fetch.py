"""Download a public trace from its publisher, checked; without a name, list them."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from workloads.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from workloads.fetching import Fetched, Report
    from workloads.published import Published


def main(argv: list[str]) -> int:
    """`kvtwin fetch [NAME]`, or `name=NAME`; other arguments are Hydra's."""
    from sim.bare_argument import quoted, split
    from sim.config import run_command

    bare, rest = split(argv)
    if len(bare) > 1:
        raise UserError(f"kvtwin fetch takes one trace at a time, not {' and '.join(bare)}.")
    return run_command("fetch", _fetch, [*(f"name={quoted(name)}" for name in bare), *rest])


def _fetch(config: DictConfig) -> None:
    from sim.bare_argument import on_command_line
    from sim.config import typed
    from workloads.fetching import cache_folder, fetch

    name: str | None = typed(config.name, str | None, "name")
    given: str | None = typed(config.fetch.dir, str | None, "fetch.dir")
    folder = cache_folder() if given is None else Path(given).expanduser()
    if name is None:
        _list(folder)
        return
    trace = _named(name)
    size = "" if trace.num_bytes is None else f", {trace.num_bytes:,} bytes"
    print(f"{trace.name}: {trace.title}{size}")
    print(f"licence {trace.licence}; cite {trace.citation}; {trace.page}")
    with _progress() as report:
        fetched = fetch(trace, folder, report)
    print(_checked(fetched))
    print(fetched.path)
    print(f"kvtwin sim workload=trace workload.path={on_command_line(fetched.path)} {trace.options}".rstrip())


def _named(name: str) -> Published:
    from workloads.published import PUBLISHED

    if name in PUBLISHED:
        return PUBLISHED[name]
    near = difflib.get_close_matches(name, PUBLISHED, n=1)
    hint = f"did you mean {near[0]}?" if near else "kvtwin fetch lists them."
    raise UserError(f"there is no trace named {name}; {hint}")


def _checked(fetched: Fetched) -> str:
    verdict = {
        "publisher": "as it should be",
        "first fetch": "as at the first fetch; not verified otherwise",
        "nothing": f"not verified: trusted as the first fetch, and noted in {fetched.path.name}.sha256",
    }[fetched.checked]
    return f"sha256 {fetched.sha256}, {verdict}" + ("" if fetched.downloaded else "; it was here already")


def _list(folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from workloads.published import PUBLISHED

    table = Table(title=f"traces that can be fetched, into {folder}", title_justify="left")
    for column in ("name", "what", "licence", "checksum", "here"):
        table.add_column(column)
    for trace in PUBLISHED.values():
        checksum = "first fetch" if trace.sha256 is None else "known"
        here = "yes" if (folder / trace.file_name).is_file() else ""
        table.add_row(trace.name, trace.title, trace.licence, checksum, here)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


@contextmanager
def _progress() -> Iterator[Report]:
    """What shows bytes, speed and time left; nothing unless stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
