"""Formats whose rows are flat: the same columns in CSV, JSON Lines, a JSON array, or Parquet."""

from collections.abc import Callable

from workloads.readers import token_counts
from workloads.readers.csv_trace import CsvLayout, CsvTrace
from workloads.readers.format import Reading
from workloads.readers.json_lines import required
from workloads.readers.record_trace import Arrival, Record, RecordTrace
from workloads.readers.sample import Container, container_of
from workloads.request import Workload

CONTAINERS: tuple[Container, ...] = ("csv", "json", "parquet")


def columnar(layout: CsvLayout) -> Callable[[str, Reading], Workload]:
    """How to open a file of that layout, as `Format.open` wants it."""

    def opened(path: str, reading: Reading) -> Workload:
        if container_of(path) == "csv":
            return CsvTrace(path, layout, reading.on_bad_row)
        return RecordTrace(path, FlatRow(layout), reading.on_bad_row, from_first=layout.from_first)

    return opened


class FlatRow:
    """Reads the records of a layout."""

    def __init__(self, layout: CsvLayout) -> None:
        self._layout = layout

    def __call__(self, row: Record) -> Arrival:
        """What the record says. Raises BadRow."""
        layout = self._layout
        if layout.outcome is not None:
            layout.outcome.check(required(row, layout.outcome.column))
        time_ns = 0 if layout.time is None else layout.time.from_value(required(row, layout.time.name))
        output = required(row, layout.output)
        layout.check_output(output)
        prompt_tokens = token_counts.from_json(layout.prompt, required(row, layout.prompt))
        return Arrival(time_ns, prompt_tokens, token_counts.from_json(layout.output, output))
