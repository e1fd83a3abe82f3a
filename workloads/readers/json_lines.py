"""JSON with one object a request: JSON Lines, or one array of objects. What the keys mean is the caller's business.

Objects come one by one, each with its place, and only one is in memory at a time.
"""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from workloads.errors import UserError
from workloads.readers.bad_rows import BadRow
from workloads.readers.source_file import open_source
from workloads.readers.token_counts import shown

MAX_BYTES = 8 << 20  # of one object; a longer one is no request
_CHUNK = 1 << 18
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACE = " \t\r\n"


def json_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Number, from 1, and text of each line that is not blank. Accepts CRLF and a byte order mark.

    Raises:
        UserError: a line that is too long to be a request, or a damaged file.
    """
    with open_source(file) as stream:
        line = 0
        while text := stream.readline(MAX_BYTES):
            line += 1
            if len(text) == MAX_BYTES and not text.endswith(b"\n"):
                raise UserError(f"{file}, line {line} is over {MAX_BYTES >> 20} MiB long; expected one request a line.")
            stripped = (text.removeprefix(_BYTE_ORDER_MARK) if line == 1 else text).strip()
            if stripped:
                yield line, stripped


def json_array(file: Path) -> Iterator[tuple[int, object]]:
    """Number, from 1, and value of each element of the array that the file holds.

    Raises:
        UserError: it is no array, broken, or has an element that is too large to be a request.
    """
    with open_source(file) as stream:
        text = _Text(file, stream)
        text.expect("[")
        if text.skip("]"):
            return
        for number in range(1, 1 << 62):
            yield number, text.value(number)
            if not text.skip(","):
                text.expect("]")
                return


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
    return as_object(value)


def as_object(value: object) -> dict[str, Any]:
    """The value, which must be an object. Raises BadRow."""
    if not isinstance(value, dict):
        raise BadRow("not an object", f"{shown(value, quoted=repr)} is no JSON object; expected one object a line")
    return value


def required(row: dict[str, Any], key: str) -> Any:
    """The value of `key`. Raises BadRow if the row has no such key."""
    if key not in row:
        raise BadRow("missing key", f"the key {key!r} is missing; the row has {shown(', '.join(row) or 'none')}")
    return row[key]


class _Text:
    """The text of a JSON file, as far as it is needed: what has been taken is forgotten."""

    def __init__(self, file: Path, stream: BinaryIO) -> None:
        self._file = file
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder()
        self._text = ""
        self._at = 0
        self._whole = False  # everything has been read

    def skip(self, mark: str) -> bool:
        """Takes `mark` if it comes next, after any space."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text) or not self._more():
                break
        if not self._text.startswith(mark, self._at):
            return False
        self._at += len(mark)
        return True

    def expect(self, mark: str) -> None:
        """Takes `mark`, which must come next."""
        if not self.skip(mark):
            found = (
                shown(self._text[self._at : self._at + 60], quoted=repr) if self._at < len(self._text) else "its end"
            )
            raise UserError(f"{self._file} has {found} where {mark!r} was expected; it is no whole JSON array.")

    def value(self, number: int) -> object:
        """Takes the element that comes next."""
        self.skip("")  # to where it begins
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except RecursionError:
                raise UserError(f"{self._file}, element {number} is nested too deep to be a request.") from None
            except ValueError as error:
                if len(self._text) - self._at > MAX_BYTES:
                    raise UserError(
                        f"{self._file}, element {number} is over {MAX_BYTES >> 20} MiB long or no JSON; expected one "
                        "request an element."
                    ) from None
                if not self._more():
                    raise UserError(f"{self._file}, element {number} is not JSON ({error}).") from None
                continue
            if end < len(self._text) or not self._more():  # a number might go on
                self._at = end
                return value

    def _more(self) -> bool:
        """Reads on; False at the end."""
        if self._whole:
            return False
        size = max(_CHUNK, len(self._text) - self._at)  # twice as much each time, so that long elements stay cheap
        data = self._stream.read(size)
        self._whole = not data
        try:
            self._text = self._text[self._at :] + self._decoder.decode(data, final=self._whole)
        except UnicodeDecodeError as error:
            raise UserError(f"{self._file} is not UTF-8 ({error.reason}); save it as UTF-8.") from None
        self._at = 0
        return bool(data)
