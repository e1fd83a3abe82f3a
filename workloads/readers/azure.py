"""The Azure LLM inference traces of 2023 (Splitwise, ISCA 2024), 2024 (DynamoLLM, HPCA 2025) and 2025 (multimodal).

CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens, found by their names. All years' quirks are
accepted, also mixed in one file: 7, 6 or no digits after the second, a UTC offset or none (a time without one is taken
as UTC), and the further column NumImages of 2025, whose tokens are in ContextTokens.
"""

from workloads.readers.bad_rows import OnBadRow
from workloads.readers.columnar import CONTAINERS, columnar
from workloads.readers.csv_trace import CsvLayout, CsvTrace
from workloads.readers.format import Format
from workloads.readers.time_columns import DateTimes

AZURE = CsvLayout(DateTimes("TIMESTAMP"), "ContextTokens", "GeneratedTokens", from_first=True)


class AzureTrace(CsvTrace):
    """A workload from an Azure trace. Arrivals count in seconds from the first row that is not dropped.

    Args:
        path: the CSV file.
        on_bad_row: as in `CsvTrace`.

    Raises:
        UserError: as in `CsvTrace`.
    """

    def __init__(self, path: str, on_bad_row: OnBadRow = "error") -> None:
        super().__init__(path, AZURE, on_bad_row)


FORMATS = (
    Format(
        name="azure",
        title="Azure LLM inference traces of 2023, 2024 and 2025",
        containers=CONTAINERS,
        keys=frozenset(AZURE.columns),
        unit="date-time",
        drops="none; every row is a request",
        source="Azure/AzurePublicDataset",
        licence="CC-BY 4.0",
        open=columnar(AZURE),
    ),
)
