"""Whatever is in a file, a reader gives requests that are in order and whole, or one line that says what is wrong.

    python -m tests.workloads.fuzz_readers -runs=100000      with atheris installed; its options are libFuzzer's

`test_trace_fuzz.py` puts the same question to damaged samples with hypothesis.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from pathlib import Path

from tests.workloads.trace_samples import RATE, SAMPLES
from workloads.errors import UserError
from workloads.readers.format import Format
from workloads.readers.recognise import FORMATS, recognise
from workloads.readers.token_counts import MAX_TOKENS
from workloads.readers.trace import Trace

MOST_REQUESTS = 10_000


def check(path: Path, name: str, on_bad_row: str) -> None:
    """Reads the file as a format; raises AssertionError, or what a reader lets through, if that breaks the promise."""
    try:
        trace = Trace(str(path), format=name, on_bad_row=on_bad_row, **options(FORMATS[name]))
        requests = list(itertools.islice(trace, MOST_REQUESTS))
    except UserError as error:
        message = str(error)
        assert len(message.splitlines()) == 1 and message.isprintable(), message
        assert len(message) < 2000, message
        return
    latest = 0.0
    for number, request in enumerate(requests):
        assert request.request_id == number
        assert request.arrival_s >= latest
        assert 1 <= request.prompt_tokens <= MAX_TOKENS and 1 <= request.output_tokens <= MAX_TOKENS
        latest = request.arrival_s
    if len(requests) < MOST_REQUESTS:
        assert trace.fate.kept == len(requests)


def options(one: Format) -> dict[str, object]:
    """Without which the format cannot be read."""
    texts = {"tokens_per_character": 0.25, "turns": "all"} if "turns" in one.options else {}
    return texts | (RATE if one.unit == "none" else {})


def recognised(path: Path) -> None:
    """Whatever it is, the file is taken for something, or for nothing in one line."""
    try:
        recognise(str(path))
    except UserError as error:
        assert str(error).isprintable(), error


def main() -> None:
    """Runs atheris with the arguments of the command line."""
    import atheris

    names = sorted(SAMPLES)
    folder = Path(tempfile.mkdtemp())
    path = folder / f"{os.getpid()}.dat"
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, name in enumerate(names):
        (corpus / name).write_bytes(bytes([number, 1]) + SAMPLES[name].content.encode())

    def one_input(data: bytes) -> None:
        path.write_bytes(data[2:])
        recognised(path)
        check(path, names[data[0] % len(names)] if data else names[0], "drop" if data[1:2] > b"\x7f" else "error")

    atheris.instrument_all()
    atheris.Setup([*sys.argv, str(corpus)], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
