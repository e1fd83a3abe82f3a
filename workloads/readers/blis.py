"""BLIS TraceV2 (inference-sim): the CSV of a trace, with times in microseconds.

A trace is two files, a YAML header and a CSV of 22 or more columns, some of them optional in the middle; the CSV is the
one that is read. Its arrival_time_us is when the client meant to send a request. The warm-up is not in it. `status` is
ok, error or timeout.
"""

from workloads.readers.columnar import CONTAINERS, columnar
from workloads.readers.csv_trace import CsvLayout, Outcome
from workloads.readers.format import Format
from workloads.readers.time_columns import Numbers

BLIS = CsvLayout(
    Numbers("arrival_time_us", "us"), "input_tokens", "output_tokens", outcome=Outcome("status", served="ok")
)

FORMATS = (
    Format(
        name="blis",
        title="BLIS TraceV2, its CSV",
        containers=CONTAINERS,
        keys=frozenset(BLIS.columns),
        unit="us",
        drops="rows whose status is not ok",
        source="inference-sim/inference-sim",
        licence="one's own files",
        open=columnar(BLIS),
    ),
)
