"""Numbers of tokens in a trace: whole, at least 1, and no larger than any context could be."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from workloads.readers.bad_rows import BadRow

MAX_TOKENS = 2**31 - 1
"""Beyond this a count is a fault of the file: no model has a context of two billion tokens."""

_AT_LEAST_ONE = "expected a whole number of at least 1"
_AT_MOST = f"expected a whole number of at most {MAX_TOKENS}"
_WHOLE = re.compile(r"-?[0-9]+")
_DECIMAL = re.compile(r"-?[0-9]*\.[0-9]+|-?[0-9]+\.")


def from_column(column: Any, least: int = 1) -> NDArray[np.int64] | None:
    """All counts of an Arrow array of strings or integers, or None if any of them is none that we accept.

    Args:
        column: the array.
        least: the smallest count to accept.
    """
    if column.null_count:
        return None
    try:
        if pa.types.is_string(column.type) and not pc.all(pc.ascii_is_decimal(column)).as_py():
            return None
        counts: NDArray[np.int64] = column.cast(pa.int64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:  # more digits than an int64 holds
        return None
    if len(counts) and (counts.min() < least or counts.max() > MAX_TOKENS):
        return None
    return counts


def from_text(name: str, text: str) -> int:
    """The count that the field `name` of a CSV row gives. Raises BadRow."""
    if text == "":
        raise BadRow("empty field", f"{name} is empty; {_AT_LEAST_ONE}")
    if _WHOLE.fullmatch(text):
        if len(text) > 20:  # int() refuses numbers of thousands of digits with an error of its own
            raise BadRow("out of range", f"{name} is {shown(text)}; {_AT_MOST}")
        return _in_range(name, int(text))
    if _DECIMAL.fullmatch(text):
        raise BadRow("fraction of a token", f"{name} is {shown(text)}; {_AT_LEAST_ONE}")
    raise BadRow("not a number", f"{name} is {shown(text, quoted=repr)}; {_AT_LEAST_ONE}")


def from_json(name: str, value: object) -> int:
    """The count that the key `name` of a JSON object, or a cell of a table, gives. Raises BadRow."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRow("not a number", f"{name} is {shown(value, quoted=repr)}; {_AT_LEAST_ONE}")
    if isinstance(value, float):
        raise BadRow("fraction of a token", f"{name} is {value}; {_AT_LEAST_ONE}")
    return _in_range(name, value)


def _in_range(name: str, count: int) -> int:
    if count < 1:
        raise BadRow("below 1", f"{name} is {shown(count)}; {_AT_LEAST_ONE}")
    if count > MAX_TOKENS:
        raise BadRow("out of range", f"{name} is {shown(count)}; {_AT_MOST}")
    return count


def shown(value: object, quoted: Callable[[object], str] = str) -> str:
    """`value` for an error message: on one line, and no longer than a reader can take in."""
    text = quoted(value)[:61]
    if not text.isprintable():
        text = text.encode("unicode_escape").decode()
    return text if len(text) <= 60 else f"{text[:57]}..."
