"""What a run served, request by request, in one form whoever ran it: kvtwin, a recorded engine, or `vllm bench serve`.

Times count from the moment of the first arrival. A latency begins when the request reached the engine.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from sim.recorded_settings import META
from workloads.errors import UserError
from workloads.readers.bench_result import bench_columns
from workloads.readers.json_lines import NotJson
from workloads.readers.recorded_run import recorded_requests

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
ANY = "a kvtwin run (summary.json), a recorded run (meta.json), or a JSON file of vllm bench serve --save-result"


@dataclass(frozen=True, slots=True)
class Series:
    """The state of the engine over time; a figure that was not recorded is None.

    Args:
        time_s: shape (n,), ascending.
        running: requests that run, at each of the times.
        waiting: requests that wait.
        kv_use: share of the KV pool that live requests hold, 0 to 1.
    """

    time_s: Floats
    running: Floats
    waiting: Floats
    kv_use: Floats | None


@dataclass(frozen=True, slots=True)
class Served:
    """A run.

    Args:
        source: where it was read from.
        names: of the requests, in the order in which they were read.
        arrival_s: shape (n,), when each reached the engine.
        first_token_s: shape (n,), when it had its first token.
        last_token_s: shape (n,), when it had its last.
        input_tokens: shape (n,).
        output_tokens: shape (n,).
        itl_s: every time between two tokens of a request, or None.
        itl_figures: statistics of them in seconds where they are not kept one by one: `mean`, `p50` …
        series: the engine over time, or None.
        preemptions: how many, or None.
    """

    source: str
    names: list[str]
    arrival_s: Floats
    first_token_s: Floats
    last_token_s: Floats
    input_tokens: Integers
    output_tokens: Integers
    itl_s: Floats | None = None
    itl_figures: dict[str, float] = field(default_factory=dict)
    series: Series | None = None
    preemptions: int | None = None


def read_served(path: Path) -> Served:
    """The run that `path` leads to.

    Raises:
        UserError: it is none of the kinds, or a file of it is missing or malformed.
    """
    if path.is_dir() and (path / META).exists():
        return _recorded(path)
    if path.is_dir() and (path / "requests.parquet").exists():
        return _own(path)
    if path.is_file():
        return _bench(path)
    raise UserError(f"{path}: {'not a run' if path.exists() else 'no such run'}; give {ANY}.")


def _own(folder: Path) -> Served:
    """A run folder of `kvtwin sim` or `kvtwin replay`."""
    columns = ["request_id", "arrival_s", "prompt_tokens", "first_token_s", "finish_s", "generated_tokens", "status"]
    try:
        rows = pq.read_table(folder / "requests.parquet", columns=columns).to_pandas()
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        first_line = str(error).splitlines()[0].rstrip(".")
        raise UserError(f"{folder} is no complete run ({first_line}); run it again with record.requests=all.") from None
    rows = rows[rows["status"] == "finished"].sort_values("request_id")
    if not len(rows):
        raise UserError(f"{folder}: no request finished; there is nothing to compare.")
    start = float(rows["arrival_s"].min())
    figures = {"mean": "mean_itl_ms", **{f"p{p}": f"p{p}_itl_ms" for p in (50, 90, 95, 99)}}
    return Served(
        str(folder),
        [str(name) for name in rows["request_id"]],
        rows["arrival_s"].to_numpy(np.float64) - start,
        rows["first_token_s"].to_numpy(np.float64) - start,
        rows["finish_s"].to_numpy(np.float64) - start,
        rows["prompt_tokens"].to_numpy(np.int64),
        rows["generated_tokens"].to_numpy(np.int64),
        itl_figures={name: summary[key] / 1e3 for name, key in figures.items() if summary.get(key) is not None},
        series=_own_series(folder, start),
        preemptions=summary.get("preemptions"),
    )


def _own_series(folder: Path, start: float) -> Series | None:
    columns = ["start_s", "running", "waiting", "used", "reserved", "internal", "cached", "external", "idle"]
    try:
        rows = pq.read_table(folder / "steps.parquet", columns=columns).to_pandas()
    except (OSError, ValueError):
        return None
    if not len(rows):
        return None
    held = rows["used"] + rows["reserved"] + rows["internal"]
    slots = held + rows["cached"] + rows["external"] + rows["idle"]
    time, running, waiting = (rows[name].to_numpy(np.float64) for name in ("start_s", "running", "waiting"))
    return Series(time - start, running, waiting, (held / slots).to_numpy(np.float64))


def _recorded(folder: Path) -> Served:
    """A folder with `meta.json`, `requests.jsonl` and, perhaps, `timeseries.csv`."""
    rows = recorded_requests(str(folder))
    output = np.array([row.output_tokens for row in rows], np.int64)
    first = np.array([row.first_token_s for row in rows])
    last = np.array([row.last_token_s for row in rows])
    intervals = int((output - 1).sum())
    return Served(
        str(folder),
        [row.name for row in rows],
        np.array([row.queued_s for row in rows]),
        first,
        last,
        np.array([row.input_tokens for row in rows], np.int64),
        output,
        # Of the times between tokens only their sum is known.
        itl_figures={"mean": float((last - first).sum()) / intervals} if intervals else {},
        series=_recorded_series(folder / "timeseries.csv"),
    )


def _recorded_series(path: Path) -> Series | None:
    columns = ("t", "running", "waiting", "kv_cache_pct")
    if not path.exists():
        return None
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            rows = [tuple(float(row[name]) for name in columns) for row in csv.DictReader(stream)]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is no table of {', '.join(columns)} ({error}); remove it or record again.") from None
    if not rows:
        return None
    time, running, waiting, percent = np.array(rows).T
    return Series(time, running, waiting, percent / 100 if percent.any() else None)  # all 0: not recorded


def _bench(path: Path) -> Served:
    """The JSON of `vllm bench serve --save-result --save-detailed`; failed requests are left out."""
    try:
        columns = bench_columns(str(path), ("input_lens", "output_lens", "ttfts", "itls", "start_times"))
    except NotJson as error:
        raise UserError(f"{path}: not readable as JSON ({error}); give {ANY}.") from None
    served = [row for row in enumerate(zip(*columns.values(), strict=True)) if row[1][1] > 0 and row[1][2] > 0]
    if not served:
        raise UserError(f"{path}: no request was served; there is nothing to compare.")
    names = [str(index) for index, _ in served]
    prompt, output, ttft, itls, start = zip(*(row for _, row in served), strict=True)
    arrival = np.array(start) - min(start)
    first = arrival + np.array(ttft)
    return Served(
        str(path),
        names,
        arrival,
        first,
        first + np.array([float(sum(intervals)) for intervals in itls]),
        np.array(prompt, np.int64),
        np.array(output, np.int64),
        itl_s=np.array([interval for intervals in itls for interval in intervals]),
    )
