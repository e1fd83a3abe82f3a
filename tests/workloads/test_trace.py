"""`workload=trace`: each format is recognised by its names, says its unit, and yields exactly these requests."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

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


def lines(*rows: dict[str, Any]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


BURSTGPT_1 = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,10,3,13,API log\n"
)
BURSTGPT_3 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "19440110,1,2.5,ChatGPT,472,18,490,Conversation log\n19440150.5,,0.1,GPT-4,10,3,13,API log\n"
)
SAMPLES: dict[str, tuple[str, list[Request]]] = {
    "azure": (
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"
        "2025-01-01 00:00:00,1,374,44\n2025-01-01 00:00:01.5,0,396,109\n",
        [Request(0, 0.0, 374, 44), Request(1, 1.5, 396, 109)],
    ),
    "burstgpt": (BURSTGPT_3, [Request(0, 19440110.0, 472, 18), Request(1, 19440150.5, 10, 3)]),
    "mooncake": (
        lines(
            {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
            {"timestamp": 3000, "input_length": 512, "output_length": 7, "hash_ids": [0]},
        ),
        [
            Request(0, 0.0, 600, 5, prompt=HashIds((0, 1), 512)),
            Request(1, 3.0, 512, 7, prompt=HashIds((0,), 512)),
        ],
    ),
    "dynamo": (
        lines(
            {"created_time": 0.25, "input_tokens": 600, "output_tokens": 5, "hash_ids": [0, 1]},
            {"created_time": 1500.5, "input_tokens": 512, "output_tokens": 7, "hash_ids": [0]},
        ),
        [
            Request(0, 0.00025, 600, 5, prompt=HashIds((0, 1), 512)),
            Request(1, 1.5005, 512, 7, prompt=HashIds((0,), 512)),
        ],
    ),
    "bailian": (
        lines(
            {
                "chat_id": 159,
                "parent_chat_id": -1,
                "timestamp": 61.114,
                "input_length": 20,
                "output_length": 5,
                "type": "text",
                "turn": 1,
                "hash_ids": [1089, 1090],
            },
            {
                "chat_id": 160,
                "parent_chat_id": 159,
                "timestamp": 62.5,
                "input_length": 32,
                "output_length": 9,
                "type": "text",
                "turn": 2,
                "hash_ids": [1089, 1091],
            },
        ),
        [
            Request(0, 61.114, 20, 5, prompt=HashIds((1089, 1090), 16)),
            Request(1, 62.5, 32, 9, prompt=HashIds((1089, 1091), 16)),
        ],
    ),
    "vidur": (
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n0.25,396,109\n",
        [Request(0, 0.0, 374, 44), Request(1, 0.25, 396, 109)],
    ),
}


def test_every_format_has_a_sample_here() -> None:
    assert set(SAMPLES) == set(FORMATS) - {"converted"}  # which test_converted.py writes


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize(
    "pack", [bytes, gzip.compress, lambda data: pa.compress(data, "zstd", asbytes=True)], ids=["plain", "gzip", "zstd"]
)
def test_each_format_is_recognised_and_read_exactly(name: str, pack: Callable[[bytes], bytes], write: Write) -> None:
    content, requests = SAMPLES[name]
    trace = Trace(write(pack(content.encode())))
    assert trace.format.name == name
    assert list(trace) == requests
    assert list(trace) == requests  # and once more
    assert trace.dropped == {}


@pytest.mark.parametrize("name", SAMPLES)
def test_each_format_named_is_the_format_recognised(name: str, write: Write) -> None:
    content, requests = SAMPLES[name]
    assert list(Trace(write(content), format=name)) == requests


@pytest.mark.parametrize("name", SAMPLES)
def test_a_trace_counts_from_its_first_request_if_that_is_asked_for(name: str, write: Write) -> None:
    content, requests = SAMPLES[name]
    shifted = [request._replace(arrival_s=request.arrival_s - requests[0].arrival_s) for request in requests]
    assert list(Trace(write(content), rebase=True)) == shifted


@pytest.mark.parametrize("name", [name for name, one in FORMATS.items() if "json" in one.containers])
def test_json_lines_may_be_an_array(name: str, write: Write) -> None:
    content, requests = SAMPLES[name]
    array = json.dumps([json.loads(line) for line in content.splitlines()], indent=1)
    trace = Trace(write(array))
    assert (trace.format.name, list(trace)) == (name, requests)


def test_columns_are_found_by_name_wherever_they_stand(write: Write) -> None:
    assert list(Trace(write(BURSTGPT_1))) == [Request(0, 5.0, 472, 18), Request(1, 45.0, 10, 3)]
    turned = "\n".join(",".join(reversed(line.split(","))) for line in BURSTGPT_3.splitlines())
    assert list(Trace(write(turned))) == SAMPLES["burstgpt"][1]


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


def test_failed_requests_are_counted_alike_where_another_row_is_bad(write: Write) -> None:
    trace = Trace(write(FAILED + "80,ChatGPT,x,2,11,API log\n90,ChatGPT,0,2,2,API log\n"), on_bad_row="drop")
    assert [request.prompt_tokens for request in trace] == [472, 10, 9]
    assert trace.dropped == {"no response: the request failed": 2, "not a number": 1, "below 1": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n", "is of no format that is known: it is csv with the names a, b. Say which it is with"),
        ('{"a": 1}\n', "is of no format that is known: it is json with the names a. Say which it is with"),
        ("[]", "is an empty array; expected requests"),
        ("[3]", "begins with 3; expected a JSON object a request"),
        ('{"a": \n', "begins like JSON and is none"),
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
    with pytest.raises(UserError, match=r"workload.time_unit is ms, but times of burstgpt are in s; leave it out"):
        Trace(path, time_unit="ms")
    with pytest.raises(UserError, match=r"workload.time_unit is 'fortnights'; expected s, ms, us, ns"):
        Trace(path, time_unit="fortnights")
    with pytest.raises(UserError, match=r"workload.block_size is 0; expected at least 1 token"):
        Trace(path, block_size=0)
