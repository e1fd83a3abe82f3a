"""Which format is this file of? `workload.format=auto`, and the list of those that are known.

A new format is one file of this folder with its `Format`, entered in `FORMATS`.
"""

from __future__ import annotations

import csv
import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from workloads.errors import UserError
from workloads.readers import azure, bailian, burstgpt, converted, mooncake, vidur
from workloads.readers.format import Format, Sample
from workloads.readers.json_lines import MAX_BYTES, json_array
from workloads.readers.source_file import open_source, source_file
from workloads.readers.token_counts import shown

FORMATS: Mapping[str, Format] = {
    one.name: one
    for one in (
        *azure.FORMATS,
        *burstgpt.FORMATS,
        *mooncake.FORMATS,
        *bailian.FORMATS,
        *vidur.FORMATS,
        *converted.FORMATS,
    )
}
_SPACE = b" \t\r\n"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_MAX_COLUMNS = 10_000


def format_named(name: str) -> Format:
    """The format of that name.

    Raises:
        UserError: there is none.
    """
    if name in FORMATS:
        return FORMATS[name]
    near = difflib.get_close_matches(name, FORMATS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the formats are auto, {', '.join(sorted(FORMATS))}."
    raise UserError(f"workload.format is {name!r}, which is no format; {hint}")


def recognise(path: str) -> Format:
    """The format of the file at `path`, by the names in it. Of several that fit, the one that asks for most names.

    Raises:
        UserError: no such file, or none or several formats fit.
    """
    sample = sample_of(path)
    fitting = [one for one in FORMATS.values() if one.fits(sample)]
    most = max((len(one.keys) for one in fitting), default=0)
    best = [one for one in fitting if len(one.keys) == most]
    if len(best) == 1:
        return best[0]
    names = shown(", ".join(sorted(sample.keys)) or "none")
    if best:
        raise UserError(f"{path} ({names}) may be {_either(best)}; say which with workload.format=.")
    raise UserError(
        f"{path} is of no format that is known: it is {sample.container} with the names {names}. Say which it is with "
        f"workload.format=, one of {', '.join(sorted(FORMATS))}."
    )


def sample_of(path: str) -> Sample:
    """What the beginning of the file at `path` shows.

    Raises:
        UserError: no such file, or a beginning that is neither CSV nor JSON nor Parquet.
    """
    file = source_file(path)
    with open_source(file) as stream:
        line = b""
        while not line.strip(_SPACE + _BYTE_ORDER_MARK):
            if not (line := stream.readline(MAX_BYTES)):
                raise UserError(f"{path} holds nothing but space; expected a trace.")
    if line.startswith(b"PAR1"):
        return Sample("parquet", _parquet_columns(file))
    text = line.removeprefix(_BYTE_ORDER_MARK).strip()
    if text.startswith(b"["):
        for _, element in json_array(file):
            return Sample("json", _keys(path, element))
        raise UserError(f"{path} is an empty array; expected requests.")
    if text.startswith(b"{"):
        return Sample("json", _keys(path, _object(path, file, text)))
    return Sample("csv", _header(path, text))


def _object(path: str, file: Path, line: bytes) -> object:
    """The object on the first line, or the one that the file is."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        pass
    with open_source(file) as stream:
        text = stream.read(MAX_BYTES + 1)
    try:
        return json.loads(text) if len(text) <= MAX_BYTES else {}
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} begins like JSON and is none ({shown(error)}). Check the file.") from None


def _keys(path: str, value: object) -> frozenset[str]:
    if not isinstance(value, dict):
        raise UserError(f"{path} begins with {shown(value, quoted=repr)}; expected a JSON object a request.")
    return frozenset(value)


def _header(path: str, text: bytes) -> frozenset[str]:
    try:
        names = next(csv.reader([text.decode()], strict=True), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is neither JSON nor Parquet nor CSV in UTF-8 ({shown(error)}).") from None
    if len(names) > _MAX_COLUMNS:
        raise UserError(f"{path} has {len(names)} columns; expected a trace with a request a row.")
    return frozenset(names)


def _parquet_columns(file: Path) -> frozenset[str]:
    try:
        return frozenset(pyarrow.parquet.read_schema(file).names)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{file} is no whole Parquet file ({shown(error)}); fetch or write it again.") from None


def _either(formats: Iterable[Format]) -> str:
    return " or ".join(f"{one.name} ({one.title})" for one in formats)
