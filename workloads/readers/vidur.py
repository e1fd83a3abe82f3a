"""Processed traces of Vidur (MLSys 2024), also Splitwise's in Vidur's form: CSV with arrivals in seconds, or with none.

Columns arrived_at, num_prefill_tokens and num_decode_tokens; its length files have num_total_tokens and pd_ratio
instead of arrivals. Vidur itself cuts prompts that are too long without a word; nothing is cut here.
"""

from workloads.readers.columnar import CONTAINERS, columnar
from workloads.readers.csv_trace import CsvLayout
from workloads.readers.format import Format
from workloads.readers.time_columns import Numbers

VIDUR = CsvLayout(Numbers("arrived_at", "s"), "num_prefill_tokens", "num_decode_tokens")
LENGTHS = CsvLayout(None, "num_prefill_tokens", "num_decode_tokens")

FORMATS = (
    Format(
        name="vidur",
        title="Vidur's processed traces",
        containers=CONTAINERS,
        keys=frozenset(VIDUR.columns),
        unit="s",
        drops="none; every row is a request",
        source="microsoft/vidur",
        licence="MIT",
        open=columnar(VIDUR),
    ),
    Format(
        name="vidur-lengths",
        title="Vidur's processed lengths, Splitwise's among them",
        containers=CONTAINERS,
        keys=frozenset(LENGTHS.columns),
        absent=frozenset({"arrived_at"}),
        unit="none",
        drops="none; every row is a request",
        source="microsoft/vidur",
        licence="MIT",
        open=columnar(LENGTHS),
    ),
)
