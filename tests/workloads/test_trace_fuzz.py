"""Hostile files: a clear line, in bounded memory and time, whatever the reader."""

from __future__ import annotations

import copy
import csv
import gzip
import io
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.workloads.fuzz_readers import check, options, recognised
from tests.workloads.trace_samples import SAMPLES
from workloads.errors import UserError
from workloads.readers.recognise import FORMATS, recognise
from workloads.readers.trace import Trace

MANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
HOSTILE_JSON = [
    None, True, -1, 0, 1.5, 1e308, -0.0, 10**30, float("nan"), float("inf"), "", "x", "9" * 400, "\x00", "\ud800", [],
    {}, [[]], [None], {"a": 1}, [-1], ["\n"],
]  # fmt: skip
HOSTILE_TEXT = ["", "-1", "0", "1e999", "nan", "inf", "1.5", "x", "9" * 400, "\x00", '"', "a,b", "\r", "٣", "0x10"]
names = st.sampled_from(sorted(SAMPLES))
parquet_names = st.sampled_from([name for name in SAMPLES if "parquet" in FORMATS[name].containers])
texts = st.text(st.characters(codec="utf-8"), max_size=200).map(str.encode)
ways = st.sampled_from(["error", "drop"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.dat"


@MANY
@given(name=names, on_bad_row=ways, data=st.data())
def test_a_sample_with_damaged_bytes(name: str, on_bad_row: str, data: Any, path: Path) -> None:
    content = bytearray(SAMPLES[name].content.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        end = min(len(content), at + data.draw(st.integers(0, 8)))
        content[at:end] = data.draw(
            st.binary(max_size=6) | st.sampled_from([b"\n", b'"', b"{", b"[", b"\x00", b"9" * 30])
        )
    path.write_bytes(content)
    recognised(path)
    check(path, name, on_bad_row)


@MANY
@given(name=names, on_bad_row=ways, data=st.data())
def test_a_sample_with_hostile_values(name: str, on_bad_row: str, data: Any, path: Path) -> None:
    rows = SAMPLES[name].rows()
    if SAMPLES[name].content.startswith("{"):
        for _ in range(data.draw(st.integers(1, 3))):
            replace_somewhere(rows, data)
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    else:
        table = list(csv.reader(io.StringIO(SAMPLES[name].content)))
        row = data.draw(st.sampled_from(table[1:]))
        row[data.draw(st.integers(0, len(row) - 1))] = data.draw(st.sampled_from(HOSTILE_TEXT))
        out = io.StringIO()
        csv.writer(out).writerows(table)
        path.write_text(out.getvalue())
    check(path, name, on_bad_row)


def replace_somewhere(value: Any, data: Any) -> None:
    """Puts a hostile value in place of one that is somewhere within."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    if not keys:
        return
    key = data.draw(st.sampled_from(keys))
    if isinstance(value[key], dict | list) and value[key] and data.draw(st.booleans()):
        replace_somewhere(value[key], data)
    else:
        value[key] = copy.deepcopy(data.draw(st.sampled_from(HOSTILE_JSON)))


@MANY
@given(name=names, on_bad_row=ways, content=st.binary(max_size=300) | texts)
def test_any_bytes_at_all(name: str, on_bad_row: str, content: bytes, path: Path) -> None:
    path.write_bytes(content)
    recognised(path)
    check(path, name, on_bad_row)


@settings(MANY, max_examples=30)
@given(name=parquet_names, on_bad_row=ways, data=st.data())
def test_a_damaged_parquet_file(name: str, on_bad_row: str, data: Any, path: Path) -> None:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(SAMPLES[name].rows()), buffer)
    content = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(4, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    recognised(path)
    check(path, name, on_bad_row)


DEEP = "[" * 200_000
NAMED_HOSTILE: dict[str, Callable[[], bytes]] = {
    "a line of 10 MB": lambda: b'{"timestamp": "' + b"x" * 10_000_000 + b'"}\n',
    "a line of 10 MB without an end": lambda: b"x" * 10_000_000,
    "a header of a million columns": lambda: ",".join(f"c{number}" for number in range(1_000_000)).encode(),
    "an object of a million keys": lambda: json.dumps({f"k{number}": 0 for number in range(1_000_000)}).encode(),
    "an array nested deep": lambda: DEEP.encode(),
    "an object nested deep": lambda: b'{"a":' * 200_000,
    "a value nested deep": lambda: f'{{"input_length": {DEEP}}}\n'.encode(),
    "an array of 10 MB in one element": lambda: b'["' + b"x" * 10_000_000 + b'"]',
    "NUL bytes": lambda: bytes(10_000_000),
    "NUL bytes in a row": lambda: b"arrived_at,num_prefill_tokens,num_decode_tokens\n1,\x005,6\n",
    "UTF-16 without a mark": lambda: "arrived_at,num_prefill_tokens,num_decode_tokens\n1,5,6\n".encode("utf-16-le"),
    "Latin-1": lambda: "Timestamp,Anfrageläuge\n".encode("latin-1"),
    "a number of 5,000 digits": lambda: (
        f'{{"timestamp": {"9" * 5000}, "input_length": 1, "output_length": 1}}'.encode()
    ),
    "a gzip file of nothing": lambda: gzip.compress(b""),
    "a gzip file in a gzip file": lambda: gzip.compress(gzip.compress(b"arrived_at\n")),
    "half a gzip file": lambda: gzip.compress(os.urandom(1000))[:500],
    "a gzip bomb of blank lines": lambda: gzip.compress(b"\n" * (32 << 20), 9),
    "a gzip bomb of blanks": lambda: gzip.compress(b" " * (32 << 20), 9),
    "an array of 32 MB of blanks": lambda: b"[" + b" " * (32 << 20),
    "rows of blank lines": lambda: b"arrived_at,num_prefill_tokens,num_decode_tokens\n" + b"\n" * (32 << 20),
    "half a zstd file": lambda: pa.compress(os.urandom(1000), "zstd", asbytes=True)[:500],
}


@pytest.mark.parametrize("what", NAMED_HOSTILE)
def test_a_hostile_file_is_refused_in_bounded_memory(what: str, path: Path) -> None:
    path.write_bytes(NAMED_HOSTILE[what]())
    tracemalloc.start()
    try:
        with pytest.raises(UserError) as error:
            list(Trace(str(path)))
        recognise_named(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    assert peak < 200 << 20  # bytes; an object may have 8 MiB of text, which Python holds several times over


def recognise_named(path: Path) -> None:
    """One reader of each kind, told what the file is."""
    for name in ("vidur", "guidellm", "sharegpt", "vllm-bench", "otel"):
        with pytest.raises(UserError):
            list(Trace(str(path), format=name, **options(FORMATS[name])))


def test_a_bomb_that_goes_on_is_cut_off(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workloads.readers.source_file._MOST_UNPACKED", 1 << 20)
    header = b"arrived_at,num_prefill_tokens,num_decode_tokens\n"
    path.write_bytes(gzip.compress(header + b"0,1,1\n" * (8 << 20), 9))  # 48 MiB from less than 100 kB
    with pytest.raises(UserError, match="more than 500 times its size; that is no trace"):
        for _ in Trace(str(path)):
            pass


def test_links_are_followed_and_folders_pipes_and_dangling_links_refused(path: Path, tmp_path: Path) -> None:
    path.write_text(SAMPLES["vidur"].content)
    (tmp_path / "link").symlink_to(path)
    assert list(Trace(str(tmp_path / "link"))) == SAMPLES["vidur"].requests
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    for name in ("", "dangling", "loop", "pipe", "nul\x00"):
        with pytest.raises(UserError):
            recognise(str(tmp_path / name))


def test_ids_that_occur_twice_and_parents_in_a_circle_change_nothing(path: Path) -> None:
    first, second = SAMPLES["bailian"].rows()
    first |= {"chat_id": 7, "parent_chat_id": 7}
    second |= {"chat_id": 7, "parent_chat_id": 7}
    path.write_text(json.dumps([first, second]))
    assert list(Trace(str(path))) == SAMPLES["bailian"].requests


@pytest.mark.skipif(find_spec("atheris") is None, reason="atheris is not installed")
def test_atheris_finds_nothing_in_a_few_thousand_runs() -> None:
    command = [sys.executable, "-m", "tests.workloads.fuzz_readers", "-runs=3000", "-seed=1", "-rss_limit_mb=2048"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-3000:]
