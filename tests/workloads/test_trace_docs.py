"""`docs/traces.md` says what the readers do."""

from pathlib import Path

from workloads.readers.table import formats_table

PAGE = Path(__file__).parents[2] / "docs" / "traces.md"


def test_the_table_of_formats_is_up_to_date() -> None:
    # If not, put in its place what `python -m workloads.readers.table` prints.
    assert formats_table() in PAGE.read_text(encoding="utf-8")
