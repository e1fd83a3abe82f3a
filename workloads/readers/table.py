"""The formats as a table for `docs/traces.md`: `python -m workloads.readers.table` prints it."""

from workloads.readers.format import Format
from workloads.readers.recognise import FORMATS

_HEADER = ("format", "what it is", "files", "recognised by", "time unit", "left out", "source", "licence")


def formats_table() -> str:
    """A row of Markdown for each format."""
    rows = [_HEADER, ("---",) * len(_HEADER), *map(_row, FORMATS.values())]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(one: Format) -> tuple[str, ...]:
    names = ", ".join(f"`{name}`" for name in sorted(one.keys))
    without = "".join(f"; no `{name}`" for name in sorted(one.absent))
    unit = "no times" if one.unit == "none" else one.unit
    return (
        f"`{one.name}`",
        one.title,
        ", ".join(one.containers),
        names + without,
        unit,
        one.drops,
        one.source,
        one.licence,
    )


if __name__ == "__main__":
    print(formats_table(), end="")
