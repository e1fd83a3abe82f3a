"""What AIPerf measured, request by request: `profile_export.jsonl`.

One object a line: `metadata` with request_start_ns (Unix time) and benchmark_phase, `metrics` with
input_sequence_length and output_sequence_length as objects of value and unit, and `error`, null if there was none.
Requests stand in the order in which they ended, so they are sorted. The warm-up is no part of the run.
"""

from workloads.readers import token_counts
from workloads.readers.bad_rows import BadRow, LeftOut
from workloads.readers.format import Format
from workloads.readers.json_lines import required, required_object
from workloads.readers.record_trace import Arrival, Record, RecordTrace
from workloads.readers.time_columns import Numbers

_TIME = Numbers("request_start_ns", "ns")


def _arrival(row: Record) -> Arrival:
    metadata = required_object(row, "metadata")
    if metadata.get("benchmark_phase") == "warmup":
        raise LeftOut("warm-up")
    if row.get("error") is not None or metadata.get("was_cancelled") is True:
        raise BadRow("failed", "the request failed or was cancelled")
    metrics = required_object(row, "metrics")
    prompt, output = (
        token_counts.from_json(name, required(required_object(metrics, name), "value"))
        for name in ("input_sequence_length", "output_sequence_length")
    )
    return Arrival(_TIME.from_number(required(metadata, "request_start_ns")), prompt, output)


FORMATS = (
    Format(
        name="aiperf-export",
        title="AIPerf's records of a run (profile_export.jsonl)",
        containers=("json",),
        keys=frozenset({"metadata", "metrics"}),
        unit="ns",
        drops="requests of the warm-up; those that failed or were cancelled",
        source="ai-dynamo/aiperf",
        licence="one's own files",
        open=lambda path, reading: RecordTrace(path, _arrival, reading.on_bad_row, from_first=True, any_order=True),
    ),
)
