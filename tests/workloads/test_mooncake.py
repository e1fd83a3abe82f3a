"""The Mooncake reader: what it accepts, what it refuses and in which words."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from workloads.errors import UserError
from workloads.readers.mooncake import MooncakeTrace
from workloads.request import HashIds, Request

DROP = "Use workload.on_bad_row=drop to skip such rows."
Write = Callable[[str | bytes], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a trace and returns its path."""

    def to_file(content: str | bytes) -> str:
        file = tmp_path / "mooncake.jsonl"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(file)

    return to_file


def row(timestamp: object = 0, input_length: object = 600, output_length: object = 5, hash_ids: object = (0, 1)) -> str:
    keys = {"timestamp": timestamp, "input_length": input_length, "output_length": output_length, "hash_ids": hash_ids}
    return json.dumps(keys)


# 600 tokens are one full block of 512 and a partial one.
FIRST = Request(0, 0.0, 600, 5, prompt=HashIds((0, 1), 512))
SECOND = Request(1, 3.0, 512, 7, prompt=HashIds((0,), 512))
TWO_ROWS = [row(), row(3000, 512, 7, [0])]


@pytest.mark.parametrize(
    ("quirk", "content"),
    [
        ("LF", "\n".join(TWO_ROWS) + "\n"),
        ("CRLF", "\r\n".join(TWO_ROWS) + "\r\n"),
        ("no last line end", "\n".join(TWO_ROWS)),
        ("blank lines", "\n\n".join(TWO_ROWS) + "\n \n\n"),
        ("byte order mark", "\ufeff" + "\n".join(TWO_ROWS)),
        ("other keys", "\n".join(TWO_ROWS).replace("{", '{"session_id": "ä", ')),
        ("times with a fraction", "\n".join(TWO_ROWS).replace("3000", "3000.0")),
    ],
)
def test_accepts(quirk: str, content: str, write: Write) -> None:
    assert list(MooncakeTrace(write(content))) == [FIRST, SECOND], quirk


def test_times_are_milliseconds_and_are_not_shifted(write: Write) -> None:
    trace = MooncakeTrace(write("\n".join([row(1500), row(1500), row(2001)])))
    assert [request.arrival_s for request in trace] == [1.5, 1.5, 2.001]


def test_the_block_size_is_the_readers_argument(write: Write) -> None:
    # 33 tokens in blocks of 16: two full blocks and one token, so three ids.
    trace = MooncakeTrace(write(row(0, 33, 5, [4, 5, 6])), block_size=16)
    assert [request.prompt for request in trace] == [HashIds((4, 5, 6), 16)]


def test_does_not_know_its_number_of_requests(write: Write) -> None:
    assert MooncakeTrace(write(row())).num_requests is None


# The bad row is line 2, after a good one.
BAD_ROWS = [
    (
        row(hash_ids=[0]),
        "wrong number of hash ids",
        "1 hash_ids; expected 2 for an input_length of 600 and workload.block_size=512",
    ),
    (
        row(hash_ids=[0, 1, 2]),
        "wrong number of hash ids",
        "3 hash_ids; expected 2 for an input_length of 600 and workload.block_size=512",
    ),
    (row(hash_ids=[0, "a"]), "unreadable hash ids", "hash_ids is [0, 'a']; expected a list of whole numbers"),
    (row(hash_ids={"0": 1}), "unreadable hash ids", "hash_ids is {'0': 1}; expected a list of whole numbers"),
    (row(hash_ids=[0, True]), "unreadable hash ids", "hash_ids is [0, True]; expected a list of whole numbers"),
    (row(input_length="600"), "not a number", "input_length is '600'; expected a whole number of at least 1"),
    (row(input_length=None), "not a number", "input_length is None; expected a whole number of at least 1"),
    (row(input_length=True), "not a number", "input_length is True; expected a whole number of at least 1"),
    (row(input_length=600.5), "fraction of a token", "input_length is 600.5; expected a whole number of at least 1"),
    (row(output_length=0), "below 1", "output_length is 0; expected a whole number of at least 1"),
    (row(output_length=-3), "below 1", "output_length is -3; expected a whole number of at least 1"),
    (
        row(output_length=2**31),
        "out of range",
        "output_length is 2147483648; expected a whole number of at most 2147483647",
    ),
    (row(timestamp="0"), "unreadable time", "timestamp is '0'; expected milliseconds from 0 to 4.6e+12"),
    (row(timestamp=-1), "unreadable time", "timestamp is -1; expected milliseconds from 0 to 4.6e+12"),
    (
        row(timestamp=float("nan")),
        "unreadable time",
        "timestamp is nan; expected milliseconds from 0 to 4.6e+12",
    ),
    (
        row(timestamp=float("inf")),
        "unreadable time",
        "timestamp is inf; expected milliseconds from 0 to 4.6e+12",
    ),
    (
        '{"timestamp": 0, "input_length": 600, "hash_ids": [0, 1]}',
        "missing key",
        "the key 'output_length' is missing; the row has timestamp, input_length, hash_ids",
    ),
    ("[1, 2]", "not an object", "[1, 2] is no JSON object; expected one object a line"),
    (
        "timestamp,input_length",
        "not JSON",
        "'timestamp,input_length' is not JSON (Expecting value: line 1 column 1 (char 0)); expected one object a line",
    ),
    ('{"timestamp": "\xff"}', "not UTF-8", "has the byte 0xff, which is not UTF-8"),
]


@pytest.mark.parametrize(("bad", "cause", "message"), BAD_ROWS)
def test_a_bad_row_is_an_error_that_names_line_and_remedy(bad: str, cause: str, message: str, write: Write) -> None:
    path = write(f"{TWO_ROWS[0]}\n{bad}\n{TWO_ROWS[1]}\n".encode("latin-1"))
    with pytest.raises(UserError) as error:
        list(MooncakeTrace(path))
    assert str(error.value) == f"{path}, line 2: {message}. {DROP}"


@pytest.mark.parametrize(("bad", "cause", "message"), BAD_ROWS)
def test_a_bad_row_can_be_dropped_and_is_counted(bad: str, cause: str, message: str, write: Write) -> None:
    trace = MooncakeTrace(write(f"{TWO_ROWS[0]}\n{bad}\n{TWO_ROWS[1]}\n".encode("latin-1")), on_bad_row="drop")
    for _ in range(2):  # the counts are of one pass, not of all
        assert list(trace) == [FIRST, SECOND]
        assert trace.dropped == {cause: 1}


@pytest.mark.parametrize("on_bad_row", ["error", "drop"])
def test_rows_out_of_order_are_always_an_error(on_bad_row: str, write: Write) -> None:
    path = write("\n".join([row(3000), row(2999)]))
    with pytest.raises(UserError) as error:
        list(MooncakeTrace(path, on_bad_row=on_bad_row))  # type: ignore[arg-type]
    assert str(error.value) == (
        f"{path}, line 2: its time, 2.999 s, is earlier than that of the one before; "
        "expected requests in order of time. Sort the file by time."
    )


def test_rows_are_read_only_when_the_iteration_reaches_them(write: Write) -> None:
    requests = iter(MooncakeTrace(write("\n".join([row(), "{"]))))
    assert next(requests) == FIRST
    with pytest.raises(UserError, match="line 2"):
        next(requests)


def test_a_file_without_a_usable_row_is_refused(write: Write) -> None:
    with pytest.raises(UserError, match=r"has no usable row \(1 × not JSON\)"):
        list(MooncakeTrace(write("TIMESTAMP,ContextTokens,GeneratedTokens\n"), on_bad_row="drop"))


def test_a_missing_file_and_an_impossible_block_size_are_refused(tmp_path: Path, write: Write) -> None:
    with pytest.raises(UserError, match=r"nowhere\.jsonl: no such file"):
        MooncakeTrace(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(UserError, match=r"workload\.block_size is 0; expected at least 1 token"):
        MooncakeTrace(write(row()), block_size=0)


def test_real_trace_has_its_measured_totals(real_trace: Callable[[str], str]) -> None:
    # Measured once with other tools: means of 12,035 and 342.6 tokens, longest prompt 126,195, 1,180 different times.
    requests = list(MooncakeTrace(real_trace("mooncake_conversation.jsonl")))
    assert len(requests) == 12_031
    assert round(sum(request.prompt_tokens for request in requests) / 12_031) == 12_035
    assert round(sum(request.output_tokens for request in requests) / 12_031, 1) == 342.6
    assert max(request.prompt_tokens for request in requests) == 126_195
    assert len({request.arrival_s for request in requests}) == 1_180
