"""Results of `vllm bench serve` and of SGLang's `bench_serving` that keep each request: one object of columns.

vLLM writes input_lens, output_lens, start_times (seconds of a clock of its own) and errors with `--save-result
--save-detailed`; versions without start_times leave open when requests came. SGLang appends a line for each run to its
file, and with `--output-details` input_lens, output_lens and errors, but never times. A request that failed has an
error, or an output of 0 tokens.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workloads.errors import UserError
from workloads.readers import token_counts
from workloads.readers.bad_rows import BadRow
from workloads.readers.format import Format, Reading
from workloads.readers.json_lines import whole_object
from workloads.readers.record_trace import Arrival, Record, RecordTrace
from workloads.readers.source_file import source_file
from workloads.readers.time_columns import Numbers
from workloads.request import Workload

_TIME = Numbers("start_times", "s")


def bench_columns(path: str, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, list[Any]]:
    """Columns of the result at `path`, with an element a request; those of `optional` only where they are there.

    Raises:
        UserError: no such file, broken, more than one run, a column that is missing, or of another length.
    """
    file = source_file(path)
    members = whole_object(file, {*names, *optional})
    found = ((name, members.get(name)) for name in (*names, *optional))
    columns = {name: column for name, column in found if isinstance(column, list)}
    missing = [name for name in names if name not in columns]
    if missing:
        raise UserError(
            f"{path} has no list {missing[0]}; run vllm bench serve with --save-result --save-detailed, and a version "
            "that writes start_times."
        )
    if len(set(map(len, columns.values()))) != 1:
        raise UserError(f"{path}: {', '.join(columns)} differ in length; the file is damaged, run the benchmark again.")
    return columns


class _Requests:
    """The columns of one run as records."""

    def __init__(self, path: str, names: tuple[str, ...]) -> None:
        self._path = path
        self._names = names

    def __call__(self, file: Path) -> Iterator[tuple[str, Record]]:
        columns = bench_columns(self._path, self._names, optional=("errors",))
        for number, row in enumerate(zip(*columns.values(), strict=True), 1):
            yield f"request {number}", dict(zip(columns, row, strict=True))


def _arrival(row: Record) -> Arrival:
    if row.get("errors") or row["output_lens"] == 0:
        raise BadRow("failed", f"output_lens is {token_counts.shown(row['output_lens'])}: the request failed")
    time_ns = _TIME.from_number(row["start_times"]) if "start_times" in row else 0
    prompt_tokens = token_counts.from_json("input_lens", row["input_lens"])
    return Arrival(time_ns, prompt_tokens, token_counts.from_json("output_lens", row["output_lens"]))


def _timed(path: str, reading: Reading) -> Workload:
    requests = _Requests(path, ("input_lens", "output_lens", "start_times"))
    return RecordTrace(path, _arrival, reading.on_bad_row, from_first=True, any_order=True, source=requests)


def _untimed(path: str, reading: Reading) -> Workload:
    return RecordTrace(path, _arrival, reading.on_bad_row, source=_Requests(path, ("input_lens", "output_lens")))


FORMATS = (
    Format(
        name="vllm-bench",
        title="vllm bench serve --save-result --save-detailed",
        containers=("json",),
        keys=frozenset({"input_lens", "output_lens", "start_times"}),
        unit="s",
        drops="requests that failed",
        source="vllm-project/vllm",
        licence="one's own files",
        open=_timed,
    ),
    Format(
        name="bench-lengths",
        title="SGLang's bench_serving --output-details, and vllm bench serve of versions without start_times",
        containers=("json",),
        keys=frozenset({"input_lens", "output_lens"}),
        absent=frozenset({"start_times"}),
        unit="none",
        drops="requests that failed",
        source="sgl-project/sglang, vllm-project/vllm",
        licence="one's own files",
        open=_untimed,
    ),
)
