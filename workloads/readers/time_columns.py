"""Arrival times in a trace, and their unit: a format states it, and nothing is guessed from the numbers.

Every time becomes whole nanoseconds, so that differences of large times are exact.
"""

import calendar
import re
from datetime import datetime
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from workloads.readers import token_counts
from workloads.readers.bad_rows import BadRow

MAX_NS = 2**62  # 146 years; a time beyond is a fault of the file
UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
"""Nanoseconds in each unit."""
_SPELLED = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}

# The years are those that nanoseconds in an int64 can count. Arrow and Python both read these patterns.
_NAIVE = r"((?:19|20|21)[0-9]{2}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]{1,9}))?"
_OFFSET = r"(Z|[+-](?:[01][0-9]|2[0-3]):?[0-5][0-9])"
_TIME = re.compile(f"{_NAIVE}{_OFFSET}?")
_NUMBER = re.compile(r"[0-9]{1,19}(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,2})?|\.[0-9]+")


class TimeColumn(Protocol):
    """A column of arrival times."""

    @property
    def name(self) -> str:
        """As the file's header spells it."""

    def from_column(self, column: Any) -> NDArray[np.int64] | None:
        """Nanoseconds of each element of an Arrow array of strings, or None if any cannot be read."""

    def from_text(self, text: str) -> int:
        """Nanoseconds of one field. Raises BadRow."""

    def from_value(self, value: object) -> int:
        """Nanoseconds of a value such as JSON and Parquet have. Raises BadRow."""


class DateTimes:
    """Dates with times of day, with 0 to 9 digits after the second, and a UTC offset or none, which means UTC."""

    def __init__(self, name: str) -> None:
        self.name = name

    def from_column(self, column: Any) -> NDArray[np.int64] | None:
        zoned = pc.match_substring_regex(column, f"^{_NAIVE}{_OFFSET}$")
        if not pc.all(zoned).as_py():
            # Arrow wants an offset everywhere or nowhere.
            column = pc.if_else(zoned, column, pc.binary_join_element_wise(column, "Z", ""))
            if not pc.all(pc.match_substring_regex(column, f"^{_NAIVE}{_OFFSET}$")).as_py():
                return None
        try:
            nanoseconds: NDArray[np.int64] = column.cast(pa.timestamp("ns", "UTC")).cast(pa.int64()).to_numpy()
        except pa.ArrowInvalid:  # the form is right, but there is no such day or hour
            return None
        return nanoseconds

    def from_text(self, text: str) -> int:
        """Nanoseconds since 1970 UTC. Raises BadRow."""
        try:
            match = _TIME.fullmatch(text)
            if match is None:
                raise ValueError(text)
            seconds = calendar.timegm(datetime.fromisoformat(match[1]).timetuple())
        except ValueError as error:
            raise self._bad(text) from error
        return (seconds - _offset_s(match[3])) * 10**9 + int((match[2] or "").ljust(9, "0"))

    def from_value(self, value: object) -> int:
        if isinstance(value, str):
            return self.from_text(value)
        if not isinstance(value, datetime) or not 1900 <= value.year < 2200:  # the years that `_NAIVE` has
            raise self._bad(value)
        seconds = calendar.timegm(value.utctimetuple())
        return seconds * 10**9 + value.microsecond * 1000 + getattr(value, "nanosecond", 0)  # pandas' has that too

    def _bad(self, value: object) -> BadRow:
        return BadRow(
            "unreadable time",
            f"{self.name} is {token_counts.shown(value, quoted=repr)}; "
            "expected a time like 2023-11-16 18:15:46.6805900",
        )


class Numbers:
    """Times as numbers in a stated unit, as the trace counts them.

    Args:
        name: of the column.
        unit: one of `UNITS`.
    """

    def __init__(self, name: str, unit: str) -> None:
        self.name = name
        self._unit = unit
        self._factor = UNITS[unit]

    def from_column(self, column: Any) -> NDArray[np.int64] | None:
        if not pc.all(pc.match_substring_regex(column, f"^(?:{_NUMBER.pattern})$")).as_py():
            return None
        values = np.rint(column.cast(pa.float64()).to_numpy() * self._factor)
        if not (values <= MAX_NS).all():
            return None
        nanoseconds: NDArray[np.int64] = values.astype(np.int64)
        return nanoseconds

    def from_text(self, text: str) -> int:
        if _NUMBER.fullmatch(text) is None:
            raise self._bad(token_counts.shown(text, quoted=repr))
        return self.from_number(int(text) if text.isdecimal() else float(text))

    def from_number(self, value: object) -> int:
        """Nanoseconds of a number, such as JSON has. Raises BadRow."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_NS / self._factor:
            raise self._bad(token_counts.shown(value, quoted=repr))
        return round(value * self._factor)

    def from_value(self, value: object) -> int:
        return self.from_text(value) if isinstance(value, str) else self.from_number(value)

    def _bad(self, shown: str) -> BadRow:
        return BadRow(
            "unreadable time",
            f"{self.name} is {shown}; expected {_SPELLED[self._unit]} from 0 to {MAX_NS / self._factor:.1e}",
        )


def _offset_s(offset: str | None) -> int:
    """Seconds east of UTC of an offset such as +05:30; 0 for Z and for none."""
    if offset is None or offset == "Z":
        return 0
    seconds = int(offset[1:3]) * 3600 + int(offset[-2:]) * 60
    return -seconds if offset[0] == "-" else seconds
