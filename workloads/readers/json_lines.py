"""JSON with one object a request: JSON Lines, or one array of objects; and one object that holds columns.

Objects come one by one, each with its place, and only one is in memory at a time. What the keys mean is the caller's
business.
"""

import codecs
import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from workloads.errors import UserError
from workloads.readers.bad_rows import BadRow
from workloads.readers.source_file import open_source
from workloads.readers.token_counts import shown

MAX_BYTES = 8 << 20  # of one object; a longer one is no request
MAX_KEYS = 10_000  # of an object; more are no names that somebody chose
_CHUNK = 1 << 18
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACE = re.compile(r"[ \t\r\n]*")


class NotJson(UserError):
    """A file that was taken for JSON and is none."""


def json_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Number, from 1, and text of each line that is not blank. Accepts CRLF and a byte order mark.

    Raises:
        UserError: a line that is too long to be a request, or a damaged file.
    """
    with open_source(file) as stream:
        line = blank = 0
        while text := stream.readline(MAX_BYTES):
            line += 1
            if len(text) == MAX_BYTES and not text.endswith(b"\n"):
                raise UserError(f"{file}, line {line} is over {MAX_BYTES >> 20} MiB long; expected one request a line.")
            stripped = (text.removeprefix(_BYTE_ORDER_MARK) if line == 1 else text).strip()
            blank = 0 if stripped else blank + len(text)
            if blank > MAX_BYTES:
                raise UserError(f"{file}, line {line}: {MAX_BYTES >> 20} MiB of blank lines before it; check the file.")
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
            yield number, text.value(f"element {number}")
            if not text.skip(","):
                text.expect("]")
                return


def first_keys(file: Path) -> frozenset[str]:
    """The keys of the object that the file begins with; what follows it is not read.

    Raises:
        UserError: it is no object, broken, has too many keys, or a value or element that is too large.
    """
    with open_source(file) as stream:
        return frozenset(key for key, _ in _members(file, _Text(file, stream), ()))


def whole_object(file: Path, wanted: Collection[str]) -> dict[str, object]:
    """The members of the object that the file is, of those keys that are wanted.

    Lists are read element by element, so they may be of any length, and only those that are wanted are in memory.

    Raises:
        UserError: as `first_keys`; or more follows.
    """
    with open_source(file) as stream:
        text = _Text(file, stream)
        members = {key: value for key, value in _members(file, text, wanted) if key in wanted}
        if not text.ends():
            raise UserError(
                f"{file} goes on after its first object; expected one run. Put each into a file of its own."
            )
    return members


def _members(file: Path, text: "_Text", wanted: Collection[str]) -> Iterator[tuple[str, object]]:
    """Key and value of each member of the object that comes next; values that are not wanted are None."""
    text.expect("{")
    if text.skip("}"):
        return
    for _ in range(MAX_KEYS):
        key = text.value("a key")
        if not isinstance(key, str):
            raise UserError(f"{file} has {shown(key, quoted=repr)} where a key was expected; it is no JSON object.")
        text.expect(":")
        yield key, text.member(key, key in wanted)
        if not text.skip(","):
            text.expect("}")
            return
    raise UserError(f"{file} begins with an object of more than {MAX_KEYS} keys; expected a trace.")


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


def required_object(row: dict[str, Any], key: str) -> dict[str, Any]:
    """The object under `key`. Raises BadRow if there is none."""
    value = required(row, key)
    if not isinstance(value, dict):
        raise BadRow("not an object", f"{key} is {shown(value, quoted=repr)}; expected a JSON object")
    return value


def required_list(row: dict[str, Any], key: str) -> list[Any]:
    """The list under `key`. Raises BadRow if there is none."""
    value = required(row, key)
    if not isinstance(value, list):
        raise BadRow("not a list", f"{key} is {shown(value, quoted=repr)}; expected a list")
    return value


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
            space = _SPACE.match(self._text, self._at)
            assert space is not None  # it matches the empty text
            self._at = space.end()
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
            raise NotJson(f"{self._file} has {found} where {mark!r} was expected; it is no whole JSON.")

    def ends(self) -> bool:
        """Whether nothing but space is left."""
        self.skip("")
        return self._at == len(self._text)

    def member(self, key: str, wanted: bool) -> object:
        """Takes the value that comes next, a list element by element. None unless it is wanted."""
        what = f"the value of {shown(key, quoted=repr)}"
        if not self.skip("["):
            value = self.value(what)
            return value if wanted else None
        elements: list[object] = []
        if self.skip("]"):
            return elements if wanted else None
        for number in range(1, 1 << 62):
            element = self.value(f"element {number} of {shown(key, quoted=repr)}")
            if wanted:
                elements.append(element)
            if not self.skip(","):
                break
        self.expect("]")
        return elements if wanted else None

    def value(self, what: str) -> object:
        """Takes the value that comes next; errors call it `what`."""
        self.skip("")  # to where it begins
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except RecursionError:
                raise UserError(f"{self._file}, {what} is nested too deep to be a request.") from None
            except ValueError as error:
                if len(self._text) - self._at > MAX_BYTES:
                    raise UserError(
                        f"{self._file}, {what} is over {MAX_BYTES >> 20} MiB long or no JSON; check the file."
                    ) from None
                if not self._more():
                    raise NotJson(f"{self._file}, {what} is not JSON ({error}).") from None
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
