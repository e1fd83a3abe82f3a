"""Write a workload as Parquet, in one schema that holds all of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from workloads.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from workloads.request import Workload

ROWS_PER_GROUP = 8192  # rows hold lists of ids, so fewer of them at once than of a run's tables


def main(argv: list[str]) -> int:
    """`kvtwin convert [FILE] to=OUT`: FILE is `workload.path`; other arguments are Hydra's."""
    if {"-m", "--multirun"} & set(argv):
        raise UserError("kvtwin convert writes one workload at a time; leave out -m and --multirun.")

    from sim.bare_argument import with_path
    from sim.config import run_command

    return run_command("convert", _convert, with_path(argv))


def _convert(config: DictConfig) -> None:
    from sim.bare_argument import on_command_line
    from sim.config import build, fill, typed
    from sim.hardware import Deployment
    from sim.kv_layout import model_len
    from sim.run import trace_facts, workload_of

    limit = model_len(build(config.model, "model"), fill(Deployment, config))
    path = Path(typed(config.to, str, "to")).expanduser()
    workload = workload_of(config, limit)
    num_requests = write(workload, path)
    for cause, rows in trace_facts(workload)["rows_dropped"].items():
        print(f"rows dropped: {rows:,}, {cause}")
    print(f"{num_requests:,} requests written to {path}")
    print(f"kvtwin sim workload=trace workload.path={on_command_line(path)}")


def write(workload: Workload, path: Path) -> int:
    """Writes every request of `workload` to `path`, whole or not at all; returns how many there were.

    Raises:
        UserError: as iterating over the workload does; a number that takes more than 64 bits; a file that cannot be
            written.
    """
    import pyarrow as pa

    from sim.progress import Progress
    from sim.run import seldom_collected
    from sim.tables import Table
    from workloads.readers.converted import SCHEMA, row_of

    if path.is_dir():
        raise UserError(f"to={path} is a folder; give the name of a file in it.")
    num_requests = 0
    table = Table(path, SCHEMA, ROWS_PER_GROUP)
    try:
        with Progress(workload.num_requests, "converted") as progress, seldom_collected():
            for num_requests, request in enumerate(workload, 1):
                table.add(row_of(request))
                progress.update(num_requests, request.arrival_s)
        table.close()
    except (OverflowError, pa.ArrowInvalid) as error:
        raise UserError(
            f"requests up to number {num_requests} hold what the schema cannot ({error}); ids are whole numbers of at "
            "most 64 bits."
        ) from None
    finally:
        table.discard()
    return num_requests
