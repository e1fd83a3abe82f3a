"""BurstGPT (Wang et al., KDD 2025): months of requests to a university's Azure OpenAI service, in three files.

CSV with the columns Timestamp (seconds; it starts at 5 in the first file and at 19,440,110 in the third, and stays so),
Request tokens and Response tokens. The third file (release 2.0) has Session ID and Elapsed time in the middle, which
matters only to readers that count columns. A response of 0 tokens is a request that failed: 1.8 % of the rows of the
first file, 7.3 % of the third. They are errors, or left out with `on_bad_row=drop`.
"""

from workloads.readers.columnar import CONTAINERS, columnar
from workloads.readers.csv_trace import CsvLayout
from workloads.readers.format import Format
from workloads.readers.time_columns import Numbers

BURSTGPT = CsvLayout(
    Numbers("Timestamp", "s"), "Request tokens", "Response tokens", zero_output="no response: the request failed"
)


FORMATS = (
    Format(
        name="burstgpt",
        title="BurstGPT 1, 2 and 3",
        containers=CONTAINERS,
        keys=frozenset((*BURSTGPT.columns, "Model", "Log Type")),
        unit="s",
        drops="rows without a response: the request failed",
        source="HPMLL/BurstGPT",
        licence="CC-BY 4.0",
        open=columnar(BURSTGPT),
    ),
)
