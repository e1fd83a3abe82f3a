"""Downloads a public trace into a folder: resumed where it broke off, checked, and under its name only when whole.

The standard library's HTTP client, since one GET with a Range is all there is to it. A download that broke off is
resumed only if the server still has the same file (`If-Range`, RFC 9110, 13.1.5); else it starts anew.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from workloads.errors import UserError
from workloads.published import Published

PAUSES_S = (1.0, 3.0, 9.0)  # before each further try; one that gets some bytes across starts them anew
TIMEOUT_S = 30.0  # without a byte
_CHUNK = 1 << 18
_TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)

Report = Callable[[int, int | None], None]
"""Told how many bytes are here, and how many there are if the server says so."""
Check = Literal["publisher", "first fetch", "nothing"]


@dataclass(frozen=True, slots=True)
class Fetched:
    """A trace that is here.

    Args:
        path: the file.
        sha256: its checksum.
        checked: what it was compared with: the checksum in our table, that of the first fetch, or nothing, because
            this is the first.
        downloaded: False if it was here already.
    """

    path: Path
    sha256: str
    checked: Check
    downloaded: bool


class _BrokenOff(Exception):
    """A try failed for a reason that may pass."""


def cache_folder() -> Path:
    """Where traces are kept unless the user says otherwise: by the XDG base directory specification."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "kvtwin"


def fetch(
    trace: Published,
    folder: Path,
    report: Report = lambda done, total: None,
    pauses_s: Sequence[float] = PAUSES_S,
) -> Fetched:
    """Gets the trace, unless it is in `folder` already. Its checksum is written beside it, as `sha256sum` writes it.

    Args:
        trace: what to get.
        folder: where to; made if it does not exist.
        report: told of the progress.
        pauses_s: seconds to wait before each further try.

    Raises:
        UserError: no network, no such file, a wrong checksum, a full disk; or the file here is not what was fetched.
    """
    file, note = folder / trace.file_name, folder / f"{trace.file_name}.sha256"
    part, tag = folder / f"{trace.file_name}.part", folder / f"{trace.file_name}.part.tag"
    expected, checked = _expected(trace, note)
    if here := file.is_file():
        found = _sha256(file)
        if expected not in (None, found):
            raise UserError(f"{file} is not what was fetched: its sha256 is {found}. Remove it and fetch it again.")
    else:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(folder, error) from None
        _download(trace, part, tag, report, pauses_s)
        found = _sha256(part)
        if expected not in (None, found):
            part.unlink()
            tag.unlink(missing_ok=True)
            raise UserError(
                f"{trace.url} has the sha256 {found}; expected {expected}, of {checked}. The download was removed; try "
                f"again, and if it stays so, see {trace.page} for what the publisher has changed"
                + (f" and remove {note}." if checked == "first fetch" else ".")
            )
    try:
        if checked != "first fetch":
            note.write_text(f"{found}  {file.name}\n", encoding="ascii")
        if not here:
            part.replace(file)
            tag.unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_write(file, error) from None
    return Fetched(file, found, checked, not here)


def _expected(trace: Published, note: Path) -> tuple[str | None, Check]:
    """The checksum that the file must have, and whose it is."""
    if trace.sha256 is not None:
        return trace.sha256, "publisher"
    with suppress(OSError, UnicodeDecodeError):
        words = note.read_text(encoding="ascii").split()
        if words and len(words[0]) == 64:
            return words[0], "first fetch"
    return None, "nothing"


def _download(trace: Published, part: Path, tag: Path, report: Report, pauses_s: Sequence[float]) -> None:
    """Completes `part`, in as many tries as it takes. Raises UserError if there are too many without a byte."""
    failures = 0
    while True:
        before = _size(part)
        try:
            return _transfer(trace, part, tag, report)
        except _BrokenOff as error:
            failures = 0 if _size(part) > before else failures + 1
            if failures > len(pauses_s):
                kept = "; what has come is kept, and the same command goes on from there" if _size(part) else ""
                raise UserError(
                    f"cannot fetch {trace.url}: {error}{kept}. Check the network (a proxy is given as https_proxy)."
                ) from None
            time.sleep(pauses_s[max(0, failures - 1)] if pauses_s else 0.0)


def _transfer(trace: Published, part: Path, tag: Path, report: Report) -> None:
    """One try. Raises _BrokenOff if another may help, UserError if none will."""
    have = _size(part)
    known = _read_tag(tag) if have else ""
    if not known:
        have = 0
    headers = {"User-Agent": "kvtwin", "Accept-Encoding": "identity"}
    if have:
        headers |= {"Range": f"bytes={have}-", "If-Range": known}
    try:
        with urllib.request.urlopen(urllib.request.Request(trace.url, headers=headers), timeout=TIMEOUT_S) as response:
            _receive(trace, response, have, part, tag, report)
    except urllib.error.HTTPError as error:
        if error.code == 416 and error.headers.get("Content-Range") == f"bytes */{have}":
            return  # it was whole already
        if error.code == 416:
            tag.unlink(missing_ok=True)
            raise _BrokenOff("the server has another file than the one begun") from None
        if error.code in _TRY_AGAIN:
            raise _BrokenOff(f"HTTP {error.code} {_one_line(error.reason)}") from None
        raise UserError(
            f"cannot fetch {trace.url}: HTTP {error.code} {_one_line(error.reason)}. See {trace.page} for "
            "where the publisher has it now; workload.path= takes a file from anywhere."
        ) from None
    except urllib.error.URLError as error:
        raise _BrokenOff(_one_line(error.reason)) from None
    except (http.client.HTTPException, OSError) as error:  # of the connection; the disk's own is a UserError by now
        raise _BrokenOff(_one_line(error) or type(error).__name__) from None


def _receive(
    trace: Published, response: http.client.HTTPResponse, have: int, part: Path, tag: Path, report: Report
) -> None:
    if response.headers.get_content_type() == "text/html":
        raise UserError(
            f"{trace.url} answers with a web page and not with the file, perhaps a network's login; see {trace.page}."
        )
    resumed = response.status == 206
    if resumed and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
        tag.unlink(missing_ok=True)
        raise _BrokenOff("the server sent another part than the one asked for")
    length = response.headers.get("Content-Length")
    done = have if resumed else 0
    total = None if length is None else done + int(length)
    if trace.num_bytes is not None and total not in (None, trace.num_bytes):
        raise UserError(
            f"{trace.url} has {total:,} bytes; expected {trace.num_bytes:,}. See {trace.page} for what the publisher "
            "has changed."
        )
    try:
        tag.write_text(_validator(response), encoding="utf-8")
        stream = part.open("ab" if resumed else "wb")
    except OSError as error:
        raise _cannot_write(part, error) from None
    try:
        while chunk := response.read(_CHUNK):
            _write(stream, chunk, part)
            done += len(chunk)
            report(done, total)
    finally:
        _close(stream, part)
    if total is not None and done != total:
        raise _BrokenOff(f"the connection broke off after {done:,} of {total:,} bytes")


def _validator(response: http.client.HTTPResponse) -> str:
    """What `If-Range` may name of this answer: a strong ETag, else the date; nothing if there is neither."""
    etag = response.headers.get("ETag", "")
    return etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified", "")


def _write(stream: BinaryIO, chunk: bytes, part: Path) -> None:
    try:
        stream.write(chunk)
    except OSError as error:
        raise _cannot_write(part, error) from None


def _close(stream: BinaryIO, part: Path) -> None:
    try:
        stream.close()  # writes what is still buffered
    except OSError as error:
        raise _cannot_write(part, error) from None


def _cannot_write(path: Path, error: OSError) -> UserError:
    kept = " What has come is kept, and the same command goes on from there." if path.suffix == ".part" else ""
    return UserError(
        f"cannot write {path}: {error.strerror or error}; free some space or choose another folder with fetch.dir=."
        + kept
    )


def _one_line(reason: object) -> str:
    """What a server or the system says, as part of a message."""
    return " ".join(str(reason).split())


def _read_tag(tag: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return tag.read_text(encoding="utf-8").strip()
    return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}). Check its permissions.") from None
