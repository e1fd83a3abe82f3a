"""`workload=trace`: each format is recognised by its names, says its unit, and yields exactly these requests."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.workloads.trace_samples import BURSTGPT_1, BURSTGPT_3, SAMPLES
from workloads.errors import UserError
from workloads.readers.recognise import FORMATS, recognise
from workloads.readers.trace import Trace
from workloads.request import HashIds, Request

Write = Callable[[str | bytes], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file whose name says nothing, and returns its path."""

    def to_file(content: str | bytes) -> str:
        file = tmp_path / "log.dat"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(file)

    return to_file


def without_content(requests: Iterable[Request]) -> list[Request]:
    """ShareGPT's blocks are named by hashes."""
    return [one._replace(prompt=None) if isinstance(one.prompt, HashIds) else one for one in requests]


def same(name: str, requests: Iterable[Request]) -> bool:
    expected = SAMPLES[name].requests
    return list(requests) == expected or (name == "sharegpt" and without_content(requests) == expected)


def test_every_format_has_a_sample_here() -> None:
    assert set(SAMPLES) == set(FORMATS) - {"converted"}  # which test_converted.py writes


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize(
    "pack", [bytes, gzip.compress, lambda data: pa.compress(data, "zstd", asbytes=True)], ids=["plain", "gzip", "zstd"]
)
def test_each_format_is_recognised_and_read_exactly(name: str, pack: Callable[[bytes], bytes], write: Write) -> None:
    sample = SAMPLES[name]
    trace = Trace(write(pack(sample.content.encode())), **sample.options)
    assert trace.format.name == name
    first = list(trace)
    assert same(name, first)
    assert list(trace) == first  # and once more
    num_rows = len(sample.requests)
    assert (trace.fate.read, trace.fate.kept, trace.dropped) == (num_rows, num_rows, {})


@pytest.mark.parametrize("name", SAMPLES)
def test_each_format_named_is_the_format_recognised(name: str, write: Write) -> None:
    sample = SAMPLES[name]
    assert same(name, list(Trace(write(sample.content), format=name, **sample.options)))


@pytest.mark.parametrize("name", SAMPLES)
def test_a_trace_counts_from_its_first_request_if_that_is_asked_for(name: str, write: Write) -> None:
    sample = SAMPLES[name]
    zero = sample.requests[0].arrival_s
    trace = Trace(write(sample.content), rebase=True, **sample.options)
    assert [one.arrival_s for one in trace] == [one.arrival_s - zero for one in sample.requests]


@pytest.mark.parametrize("name", [name for name, one in SAMPLES.items() if not one.one_object])
def test_rows_may_be_an_array(name: str, write: Write) -> None:
    sample = SAMPLES[name]
    trace = Trace(write(json.dumps(sample.rows(), indent=1)), **sample.options)
    assert trace.format.name == name
    assert same(name, list(trace))


@pytest.mark.parametrize("name", [name for name in SAMPLES if "parquet" in FORMATS[name].containers])
@pytest.mark.parametrize(
    "pack", [bytes, gzip.compress, lambda data: pa.compress(data, "zstd", asbytes=True)], ids=["plain", "gzip", "zstd"]
)
def test_rows_may_be_those_of_a_parquet_file(name: str, pack: Callable[[bytes], bytes], write: Write) -> None:
    sample = SAMPLES[name]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(sample.rows()), buffer)
    trace = Trace(write(pack(buffer.getvalue())), **sample.options)
    assert trace.format.name == name
    assert same(name, list(trace))


def test_parquet_may_hold_times_as_times(write: Write) -> None:
    buffer = io.BytesIO()
    times = pa.array([1_700_000_000_000_000_000, 1_700_000_000_000_000_025], pa.timestamp("ns"))
    pq.write_table(pa.table({"TIMESTAMP": times, "ContextTokens": [3, 4], "GeneratedTokens": [5, 6]}), buffer)
    assert list(Trace(write(buffer.getvalue()))) == [Request(0, 0.0, 3, 5), Request(1, 25e-9, 4, 6)]


def test_columns_are_found_by_name_wherever_they_stand(write: Write) -> None:
    assert list(Trace(write(BURSTGPT_1))) == [Request(0, 5.0, 472, 18), Request(1, 45.0, 10, 3)]
    turned = "\n".join(",".join(reversed(line.split(","))) for line in BURSTGPT_3.splitlines())
    assert list(Trace(write(turned))) == SAMPLES["burstgpt"].requests


FAILED = BURSTGPT_1 + "50,ChatGPT,0,0,0,API log\n60,ChatGPT,9,0,9,API log\n70,ChatGPT,9,2,11,API log\n"


def test_failed_requests_are_an_error_until_they_are_to_be_dropped(write: Write) -> None:
    path = write(FAILED)
    with pytest.raises(UserError) as error:
        list(Trace(path))
    assert str(error.value) == (
        f"{path}, line 4: Response tokens is 0: no response: the request failed. "
        "Use workload.on_bad_row=drop to skip such rows."
    )
    trace = Trace(path, on_bad_row="drop")
    assert [request.prompt_tokens for request in trace] == [472, 10, 9]
    assert [request.request_id for request in trace] == [0, 1, 2]
    assert trace.dropped == {"no response: the request failed": 2}
    assert trace.fate.first_dropped == {"no response: the request failed": "line 4"}
    assert (trace.fate.read, trace.fate.kept) == (5, 3)


def test_failed_requests_are_counted_alike_where_another_row_is_bad(write: Write) -> None:
    trace = Trace(write(FAILED + "80,ChatGPT,x,2,11,API log\n90,ChatGPT,0,2,2,API log\n"), on_bad_row="drop")
    assert [request.prompt_tokens for request in trace] == [472, 10, 9]
    assert trace.dropped == {"no response: the request failed": 2, "not a number": 1, "below 1": 1}
    assert list(trace.fate.first_dropped.values()) == ["line 4", "line 7", "line 8"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n", "is of no format that is known: it is csv with the names a, b. Say which it is with"),
        ('{"a": 1}\n', "is of no format that is known: it is json with the names a. Say which it is with"),
        ("[]", "is an empty array; expected requests"),
        ("[3]", "begins with 3; expected a JSON object a request"),
        ('{"a": \n', "the value of 'a' is not JSON"),
        (" \n \n", "holds nothing but space"),
        (b"\xfe\xffnothing", "is in UTF-16; save it as UTF-8 first"),
        (b"PK\x03\x04zip", "is a zip archive; unpack it first"),
        (b"a,\xe4\n", "is neither JSON nor Parquet nor CSV in UTF-8"),
        (b"PAR1nothing", "is no whole Parquet file"),
        (",".join("abc" for _ in range(20_000)), "has 20000 columns"),
    ],
)
def test_what_is_no_trace_is_one_line_that_says_what_was_found(
    content: str | bytes, message: str, write: Write
) -> None:
    path = write(content)
    with pytest.raises(UserError) as error:
        recognise(path)
    assert message in str(error.value) and str(error.value).startswith(path) and "\n" not in str(error.value)


def test_options_that_do_not_fit_are_refused(write: Write) -> None:
    path = write(BURSTGPT_1)
    with pytest.raises(UserError, match=r"workload.format is 'burstgtp', which is no format; did you mean burstgpt\?"):
        Trace(path, format="burstgtp")
    with pytest.raises(
        UserError, match=r"workload.time_unit is ms, but .* is taken for burstgpt, which has times in s; leave"
    ):
        Trace(path, time_unit="ms")
    with pytest.raises(UserError, match=r"workload.time_unit is 'fortnights'; expected s, ms, us, ns"):
        Trace(path, time_unit="fortnights")
    with pytest.raises(UserError, match=r"workload.block_size is 0; expected at least 1 token"):
        Trace(path, block_size=0)
