"""Processed traces of Vidur (MLSys 2024), also Splitwise's in Vidur's form: CSV with arrivals in seconds.

Columns arrived_at, num_prefill_tokens and num_decode_tokens. Vidur's length files (num_prefill_tokens,
num_decode_tokens, num_total_tokens, pd_ratio) have no arrivals; take their columns for generated lengths instead.
Vidur itself cuts prompts that are too long without a word; nothing is cut here.
"""

from workloads.readers.csv_trace import CsvLayout, CsvTrace
from workloads.readers.format import Format
from workloads.readers.time_columns import Numbers

VIDUR = CsvLayout(Numbers("arrived_at", "s"), "num_prefill_tokens", "num_decode_tokens")

FORMATS = (
    Format(
        name="vidur",
        title="Vidur's processed traces",
        containers=("csv",),
        keys=frozenset(VIDUR.columns),
        unit="s",
        drops="none; every row is a request",
        source="microsoft/vidur",
        licence="MIT",
        open=lambda path, reading: CsvTrace(path, VIDUR, reading.on_bad_row),
    ),
)
