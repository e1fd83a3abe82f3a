"""JSON Lines: one object a line, each with its line number. What the keys mean is the caller's business."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workloads.readers.bad_rows import BadRow
from workloads.readers.token_counts import shown


def json_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Number, from 1, and text of each line that is not blank. Accepts CRLF and a byte order mark."""
    with file.open("rb") as stream:
        for line, text in enumerate(stream, 1):
            stripped = (text.removeprefix(b"\xef\xbb\xbf") if line == 1 else text).strip()
            if stripped:
                yield line, stripped


def json_object(text: bytes) -> dict[str, Any]:
    """The object on one line. Raises BadRow."""
    try:
        value = json.loads(text.decode())
    except UnicodeDecodeError as error:
        raise BadRow("not UTF-8", f"has the byte 0x{text[error.start]:02x}, which is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise BadRow(
            "not JSON", f"{shown(text.decode(), quoted=repr)} is not JSON ({error}); expected one object a line"
        ) from error
    if not isinstance(value, dict):
        raise BadRow("not an object", f"{shown(value, quoted=repr)} is no JSON object; expected one object a line")
    return value


def required(row: dict[str, Any], key: str) -> Any:
    """The value of `key`. Raises BadRow if the row has no such key."""
    if key not in row:
        raise BadRow("missing key", f"the key {key!r} is missing; the row has {shown(', '.join(row) or 'none')}")
    return row[key]
