"""Workloads that `kvtwin convert` wrote: Parquet in one schema, which holds all that a request says.

`SCHEMA` is what docs/workload_schema.md describes. Its version stands in the file's metadata; a file of a later version
than this is refused. Nothing is rounded: what is read back equals what was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from workloads.errors import UserError
from workloads.readers.bad_rows import BadRow, BadRows, Fate, OnBadRow
from workloads.readers.format import Format
from workloads.readers.source_file import source_file
from workloads.readers.token_counts import MAX_TOKENS, shown
from workloads.request import HashIds, Request, TokenIds
from workloads.sampling import BeamSearch, ParallelSampling, Sampling

VERSION = 1
VERSION_KEY = b"kvtwin_workload_schema"
COLUMNS: tuple[tuple[str, pa.DataType, bool], ...] = (  # name, type, whether it may be null
    ("request_id", pa.int64(), False),
    ("arrival_s", pa.float64(), False),
    ("prompt_tokens", pa.int64(), False),
    ("output_tokens", pa.int64(), False),
    ("priority", pa.int64(), False),
    ("max_tokens", pa.int64(), True),
    ("block_size", pa.int64(), True),
    ("hash_ids", pa.list_(pa.int64()), True),
    ("token_ids", pa.list_(pa.int64()), True),
    ("parallel_n", pa.int64(), True),
    ("beam_width", pa.int64(), True),
    ("beam_concentration", pa.float64(), True),
    ("beam_seed", pa.int64(), True),
    ("after", pa.int64(), True),
    ("think_s", pa.float64(), False),
    ("traffic_class", pa.string(), True),
)
SCHEMA = pa.schema(
    [pa.field(name, kind, nullable) for name, kind, nullable in COLUMNS], {VERSION_KEY: str(VERSION).encode()}
)
_ROWS = 16_384  # read at once


def row_of(request: Request) -> tuple[Any, ...]:
    """A row of the schema that says all of `request` but what it was promised, which is the run's business."""
    prompt, sampling = request.prompt, request.sampling
    hashed, tokens = isinstance(prompt, HashIds), isinstance(prompt, TokenIds)
    beams = sampling if isinstance(sampling, BeamSearch) else None
    return (
        request.request_id,
        request.arrival_s,
        request.prompt_tokens,
        request.output_tokens,
        request.priority,
        request.max_tokens,
        prompt.block_size if isinstance(prompt, HashIds) else None,
        prompt.ids if prompt is not None and hashed else None,
        prompt.ids if prompt is not None and tokens else None,
        sampling.n if isinstance(sampling, ParallelSampling) else None,
        beams and beams.width,
        beams and beams.concentration,
        beams and beams.seed,
        request.after,
        request.think_s,
        request.traffic_class,
    )


class ConvertedWorkload:
    """A workload that was converted before. Rows are read, and checked, some thousands at a time.

    Requests are numbered anew, so a file of which rows were taken out is a workload too.

    Args:
        path: the Parquet file.
        on_bad_row: "error" ends at the first row that no request can be; "drop" leaves such rows out and counts them.
            Rows out of order are no fault of one row, and always an error.

    Raises:
        UserError: no such file, or not of this schema. Iterating raises it for rows, and names the row.
    """

    def __init__(self, path: str, on_bad_row: OnBadRow = "error") -> None:
        self._path = path
        self._bad_rows = BadRows(path, on_bad_row)
        file = _opened(source_file(path))
        self._num_rows: int = file.metadata.num_rows
        self._has_turns = _has_any(file, "after")
        metadata: Mapping[bytes, bytes] = file.schema_arrow.metadata or {}
        version = metadata.get(VERSION_KEY, b"none")
        if version != str(VERSION).encode():
            raise UserError(
                f"{path} has the workload schema {shown(version.decode(errors='replace'))}; this kvtwin reads "
                f"{VERSION}. Convert the workload again, or use the kvtwin that wrote it."
            )
        for name, kind, _ in COLUMNS:
            fields = file.schema_arrow.get_all_field_indices(name)
            if len(fields) != 1 or file.schema_arrow.field(fields[0]).type != kind:
                raise UserError(f"{path} has no column {name} of type {kind}. Convert the workload again.")

    @property
    def num_requests(self) -> int | None:
        """Rows of the file; None where some of them may be dropped."""
        return None if self._bad_rows.drops else self._num_rows

    @property
    def fate(self) -> Fate:
        """Of the rows read so far in the latest iteration."""
        return self._bad_rows.fate

    @property
    def dropped(self) -> Mapping[str, int]:
        """Rows dropped so far in the latest iteration, by cause."""
        return self.fate.dropped

    def __iter__(self) -> Iterator[Request]:
        self._bad_rows.begin()
        request_ids = count()
        new_ids: dict[int, int] = {}  # of the requests so far, by those in the file; empty if nobody follows another
        latest_s = 0.0
        first_row = 1
        for batch in self._batches():
            kept = self._usable(batch, first_row)
            first_row += batch.num_rows
            batch = batch.filter(pa.array(kept))
            arrivals = np.concatenate([[latest_s], batch.column("arrival_s").to_numpy()])
            if (arrivals[1:] < arrivals[:-1]).any():
                raise UserError(
                    f"{self._path} has rows out of order; expected them sorted by arrival_s. Sort the file."
                )
            latest_s = float(arrivals[-1])
            self._bad_rows.keep(batch.num_rows)
            requests = self._requests(batch, request_ids)
            yield from self._numbered(requests, batch, new_ids) if self._has_turns else requests
        self._bad_rows.end()

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            yield from _opened(source_file(self._path)).iter_batches(_ROWS, columns=[name for name, *_ in COLUMNS])
        except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
            raise UserError(f"{self._path} is damaged ({shown(error)}). Convert the workload again.") from None

    def _usable(self, batch: pa.RecordBatch, first_row: int) -> np.ndarray:
        """Which rows a request can be; of the others the reading learns."""
        arrival_s = batch.column("arrival_s")
        good = {
            "unreadable time": pc.and_(pc.is_finite(arrival_s), pc.greater_equal(arrival_s, 0.0)),
            "unreadable token count": pc.and_(_counts(batch, "prompt_tokens"), _counts(batch, "output_tokens")),
            "no priority": batch.column("priority").is_valid(),
            "unreadable think time": pc.and_(
                pc.is_finite(batch.column("think_s")), pc.greater_equal(batch.column("think_s"), 0.0)
            ),
            "hash_ids without block_size, or the other way round": pc.equal(
                batch.column("hash_ids").is_valid(), pc.greater_equal(pc.fill_null(batch.column("block_size"), 0), 1)
            ),
        }
        kept = np.ones(batch.num_rows, np.bool_)
        for cause, column in good.items():
            fine = pc.fill_null(column, False).to_numpy(zero_copy_only=False)
            for row in np.flatnonzero(kept & ~fine).tolist():
                self._bad_rows.meet(f"row {first_row + row}", BadRow(cause, cause))
            kept &= fine
        return kept

    def _requests(self, batch: pa.RecordBatch, request_ids: Iterator[int]) -> Iterator[Request]:
        columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
        content = (columns["block_size"], columns["hash_ids"], columns["token_ids"])
        asked = (columns[name] for name in ("parallel_n", "beam_width", "beam_concentration", "beam_seed"))
        yield from map(
            Request,
            request_ids,
            columns["arrival_s"],
            columns["prompt_tokens"],
            columns["output_tokens"],
            columns["priority"],
            map(_prompt, *content),
            map(_sampling, *asked),
            columns["max_tokens"],
            columns["after"],
            columns["think_s"],
            columns["traffic_class"],
        )

    def _numbered(
        self, requests: Iterator[Request], batch: pa.RecordBatch, new_ids: dict[int, int]
    ) -> Iterator[Request]:
        """The requests, with the new numbers of those that they follow."""
        for old_id, request in zip(batch.column("request_id").to_pylist(), requests, strict=True):
            if request.after is not None:
                if request.after not in new_ids:
                    raise UserError(
                        f"{self._path}: request {old_id} follows {request.after}, which does not come before it. Take "
                        "out whole conversations only."
                    )
                request = request._replace(after=new_ids[request.after])
            new_ids[old_id] = request.request_id
            yield request


def _opened(file: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file)
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is no whole Parquet file ({shown(error)}). Convert the workload again.") from None


def _has_any(file: pq.ParquetFile, name: str) -> bool:
    """Whether a column may hold anything: writers count the nulls of each group of rows."""
    if name not in file.schema_arrow.names:
        return False
    metadata = file.metadata
    at = next(i for i in range(metadata.num_columns) if metadata.schema.column(i).path.split(".")[0] == name)
    groups = [metadata.row_group(number).column(at) for number in range(metadata.num_row_groups)]
    return any(not group.is_stats_set or group.statistics.null_count < group.num_values for group in groups)


def _counts(batch: pa.RecordBatch, name: str) -> Any:
    column = batch.column(name)
    return pc.and_(pc.greater_equal(column, 1), pc.less_equal(column, MAX_TOKENS))


def _prompt(
    block_size: int | None, hash_ids: list[int] | None, token_ids: list[int] | None
) -> HashIds | TokenIds | None:
    if hash_ids is not None and block_size is not None:
        return HashIds(tuple(hash_ids), block_size)
    return None if token_ids is None else TokenIds(tuple(token_ids))


def _sampling(n: int | None, width: int | None, concentration: float | None, seed: int | None) -> Sampling | None:
    if n is not None:
        return ParallelSampling(n)
    if width is None or concentration is None:
        return None
    return BeamSearch(width, concentration, seed)


FORMATS = (
    Format(
        name="converted",
        title="what kvtwin convert writes",
        containers=("parquet",),
        keys=frozenset(name for name, *_ in COLUMNS),
        unit="s",
        drops="none; every row is a request",
        source="kvtwin convert",
        licence="that of the workload it was made from",
        open=lambda path, reading: ConvertedWorkload(path, reading.on_bad_row),
    ),
)
