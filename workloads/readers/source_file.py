"""The file a reader was pointed at: is there anything to read, and if it is compressed, what does it unpack to?"""

import gzip
import io
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from workloads.errors import UserError

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_UNREADABLE = {
    b"PK\x03\x04": "is a zip archive; unpack it first",
    b"\xfd7zXZ": "is compressed with xz; unpack it first, or use gzip or zstd",
    b"BZh": "is compressed with bzip2; unpack it first, or use gzip or zstd",
    b"\xff\xfe": "is in UTF-16; save it as UTF-8 first",
    b"\xfe\xff": "is in UTF-16; save it as UTF-8 first",
}
# Traces shrink five- to twentyfold. What unpacks to far more is no trace, and might not end.
_MOST_UNPACKED, _MOST_TIMES = 1 << 30, 500
_BUFFER = 1 << 20


def source_file(path: str) -> Path:
    """The file at `path`, which can be opened and holds at least one byte.

    A regular file is asked for, no pipe: iterating over a workload twice must give the same requests twice.

    Raises:
        UserError: nothing is there, or a folder, or an empty, unreadable or foreign file.
    """
    file = Path(path).expanduser()
    try:
        if file.is_dir():
            raise UserError(f"{path} is a folder; expected a file. Give the path of a file in it.")
        if not file.exists():
            raise UserError(f"{path}: no such file. Check the path; a relative one starts at {Path.cwd()}.")
        if not file.is_file():
            raise UserError(f"{path} is no regular file; a trace is read more than once. Save it to a file first.")
        with file.open("rb") as stream:
            first = stream.read(6)
    except (OSError, ValueError) as error:  # a path with a NUL is a ValueError
        raise UserError(f"{path!r} cannot be read ({error}). Check path and permissions.") from error
    if not first:
        raise UserError(f"{path} is empty; expected a trace. Check that it was fetched or written in full.")
    for magic, what in _UNREADABLE.items():
        if first.startswith(magic):
            raise UserError(f"{path} {what}.")
    return file


def open_source(file: Path) -> BinaryIO:
    """The content of `file`, unpacked if it is compressed with gzip or zstd, whatever its name.

    Reading raises UserError if the file ends too early, is damaged, or unpacks to what no trace does.
    """
    with file.open("rb") as stream:
        first = stream.read(4)
    if first.startswith(_GZIP):
        return io.BufferedReader(_Unpacked(file, gzip.open(file, "rb")), _BUFFER)
    if first == _ZSTD:
        return io.BufferedReader(_Unpacked(file, pa.CompressedInputStream(pa.OSFile(str(file)), "zstd")), _BUFFER)
    return file.open("rb")


def seekable(file: Path) -> BinaryIO:
    """As `open_source`, for what is not read from front to back: compressed files are unpacked to disk first."""
    stream = open_source(file)
    if not isinstance(stream, io.BufferedReader) or not isinstance(stream.raw, _Unpacked):
        return stream
    unpacked = tempfile.TemporaryFile()  # noqa: SIM115 - the caller's to close
    with stream:
        shutil.copyfileobj(stream, unpacked, _BUFFER)
    unpacked.seek(0)
    return unpacked


class _Unpacked(io.RawIOBase):
    """What a compressed file unpacks to, within bounds."""

    def __init__(self, file: Path, stream: "gzip.GzipFile | BinaryIO") -> None:
        self._file = file
        self._stream = stream
        self._most = max(_MOST_UNPACKED, _MOST_TIMES * file.stat().st_size)
        self._num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            data = self._stream.read(len(buffer))
        except EOFError:
            raise UserError(f"{self._file} ends in the middle; fetch or write it again.") from None
        except (OSError, zlib.error, pa.ArrowInvalid) as error:
            raise UserError(f"{self._file} cannot be unpacked ({error}); fetch or write it again.") from error
        self._num_bytes += len(data)
        if self._num_bytes > self._most:
            raise UserError(
                f"{self._file} unpacks to more than {self._most / 2**30:.0f} GiB, more than {_MOST_TIMES} times its "
                "size; that is no trace. Unpack it first if it is one."
            )
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()
