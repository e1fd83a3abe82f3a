"""Rows of a time and two lengths, as load generators replay them: guidellm counts seconds, AIPerf milliseconds.

Both have the columns timestamp, input_length and output_length, so a file cannot tell which of them it is meant for.
AIPerf's rows may also have session_id and, for a later turn, `delay` instead of a timestamp: such a turn waits for the
one before, so when it comes is not in the file, and the row cannot be used. Its output_length is what the client asks
for; a server may stop earlier. Rows with hash_ids are Mooncake's (`mooncake.py`).
"""

from workloads.readers.columnar import CONTAINERS, columnar
from workloads.readers.csv_trace import CsvLayout
from workloads.readers.format import Format
from workloads.readers.time_columns import Numbers

GUIDELLM = CsvLayout(Numbers("timestamp", "s"), "input_length", "output_length")
AIPERF = CsvLayout(Numbers("timestamp", "ms"), "input_length", "output_length")

FORMATS = (
    Format(
        name="guidellm",
        title="guidellm's traces without hash ids",
        containers=CONTAINERS,
        keys=frozenset(GUIDELLM.columns),
        absent=frozenset({"hash_ids"}),
        unit="s",
        drops="none; every row is a request",
        source="vllm-project/guidellm",
        licence="one's own files",
        open=columnar(GUIDELLM),
    ),
    Format(
        name="aiperf",
        title="AIPerf's traces without hash ids",
        containers=CONTAINERS,
        keys=frozenset(AIPERF.columns),
        absent=frozenset({"hash_ids"}),
        unit="ms",
        drops="rows without a timestamp: later turns, which wait for the one before",
        source="ai-dynamo/aiperf",
        licence="one's own files",
        open=columnar(AIPERF),
    ),
)
