"""The Azure reader: what it accepts, what it refuses and in which words, and that it never reads ahead."""

import gzip
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.errors import UserError
from workloads.readers import csv_columns
from workloads.readers.azure import AzureTrace
from workloads.request import Request

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
DROP = "Use workload.on_bad_row=drop to skip such rows."


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str | bytes], str]:
    """Writes a trace and returns its path."""

    def to_file(content: str | bytes) -> str:
        file = tmp_path / "azure.csv"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(file)

    return to_file


Write = Callable[[str | bytes], str]

# Two rows, 1.5 seconds apart.
ROWS = [Request(0, 0.0, 374, 44), Request(1, 1.5, 396, 109)]


@pytest.mark.parametrize(
    ("quirk", "content"),
    [
        ("LF", f"{HEADER}\n2023-11-16 18:15:46.5,374,44\n2023-11-16 18:15:48.0,396,109\n"),
        ("CRLF", f"{HEADER}\r\n2023-11-16 18:15:46.5,374,44\r\n2023-11-16 18:15:48.0,396,109\r\n"),
        ("no last line end", f"{HEADER}\r\n2023-11-16 18:15:46.5,374,44\r\n2023-11-16 18:15:48.0,396,109"),
        ("blank last lines", f"{HEADER}\n2023-11-16 18:15:46.5,374,44\n2023-11-16 18:15:48.0,396,109\n\n  \r\n\n"),
        ("7 digits", f"{HEADER}\n2023-11-16 18:15:46.5000000,374,44\n2023-11-16 18:15:48.0000000,396,109\n"),
        ("6 digits", f"{HEADER}\n2023-11-16 18:15:46.500000,374,44\n2023-11-16 18:15:48.000000,396,109\n"),
        ("no digits in one", f"{HEADER}\n2023-11-16 18:15:46.5000000,374,44\n2023-11-16 18:15:48,396,109\n"),
        ("offset", f"{HEADER}\n2024-05-10 00:00:00.500000+00:00,374,44\n2024-05-10 00:00:02+00:00,396,109\n"),
        ("two offsets", f"{HEADER}\n2024-05-10 02:00:00.5+02:00,374,44\n2024-05-09 19:00:02-0500,396,109\n"),
        ("offset in one", f"{HEADER}\n2024-05-10 02:00:00.5+02:00,374,44\n2024-05-10 00:00:02,396,109\n"),
        ("ISO 8601", f"{HEADER}\n2024-05-10T00:00:00.5Z,374,44\n2024-05-10T00:00:02Z,396,109\n"),
        ("byte order mark", f"\ufeff{HEADER}\n2023-11-16 18:15:46.5,374,44\n2023-11-16 18:15:48,396,109\n"),
        ("quotes", f'"TIMESTAMP",{HEADER[10:]}\n"2023-11-16 18:15:46.5","374",44\n2023-11-16 18:15:48,396,"109"\n'),
        (
            "other order",
            "GeneratedTokens,TIMESTAMP,ContextTokens\n44,2023-11-16 18:15:46.5,374\n109,2023-11-16 18:15:48,396\n",
        ),
        (
            "other columns",
            f'Häuser,{HEADER},Note\nä,2023-11-16 18:15:46.5,374,44,\nö,2023-11-16 18:15:48,396,109,"a, b"\n',
        ),
    ],
)
def test_accepts(quirk: str, content: str, write: Write) -> None:
    assert list(AzureTrace(write(content))) == ROWS, quirk


def test_seconds_since_the_first_row_are_exact_to_the_nanosecond(write: Write) -> None:
    # A week after the first row and 100 ns more: 604,800.0000001. A float of the Unix time (1.7e9) would keep 240 ns.
    trace = AzureTrace(write(f"{HEADER}\n2024-05-10 00:00:00.0000001,1,1\n2024-05-17 00:00:00.0000002,1,1\n"))
    assert [request.arrival_s for request in trace] == [0.0, 604_800.0000001]


def test_rows_at_one_time_keep_their_order(write: Write) -> None:
    rows = "".join(f"2024-05-10 00:00:00,{prompt},1\n" for prompt in (3, 1, 2))
    assert [request.prompt_tokens for request in AzureTrace(write(f"{HEADER}\n{rows}"))] == [3, 1, 2]


def test_iterates_twice_alike(write: Write) -> None:
    trace = AzureTrace(write(f"{HEADER}\n2023-11-16 18:15:46.5,374,44\n2023-11-16 18:15:48,396,109\n"))
    assert list(trace) == list(trace) == ROWS


def test_does_not_know_its_number_of_requests(write: Write) -> None:
    assert AzureTrace(write(f"{HEADER}\n2023-11-16 18:15:46,374,44\n")).num_requests is None


# The bad row is line 3, after a good one.
BAD_ROWS = [
    ("2023-11-16 18:15:47,many,44", "not a number", "ContextTokens is 'many'; expected a whole number of at least 1"),
    ("2023-11-16 18:15:47,0x1F,44", "not a number", "ContextTokens is '0x1F'; expected a whole number of at least 1"),
    ("2023-11-16 18:15:47, 374,44", "not a number", "ContextTokens is ' 374'; expected a whole number of at least 1"),
    ("2023-11-16 18:15:47,374,NA", "not a number", "GeneratedTokens is 'NA'; expected a whole number of at least 1"),
    (
        "2023-11-16 18:15:47,3.5,44",
        "fraction of a token",
        "ContextTokens is 3.5; expected a whole number of at least 1",
    ),
    ("2023-11-16 18:15:47,374,-3", "below 1", "GeneratedTokens is -3; expected a whole number of at least 1"),
    ("2023-11-16 18:15:47,374,0", "below 1", "GeneratedTokens is 0; expected a whole number of at least 1"),
    ("2023-11-16 18:15:47,,44", "empty field", "ContextTokens is empty; expected a whole number of at least 1"),
    (
        "2023-11-16 18:15:47,2147483648,44",
        "out of range",
        "ContextTokens is 2147483648; expected a whole number of at most 2147483647",
    ),
    (
        "2023-11-16 18:15:47,99999999999999999999999,44",
        "out of range",
        "ContextTokens is 99999999999999999999999; expected a whole number of at most 2147483647",
    ),
    ("2023-11-16 18:15:47,374", "wrong number of fields", "2 fields; expected 3 as in line 1"),
    ("2023-11-16 18:15:47", "wrong number of fields", "1 field; expected 3 as in line 1"),
    ("2023-11-16 18:15:47,374,44,7", "wrong number of fields", "4 fields; expected 3 as in line 1"),
    (
        ",374,44",
        "unreadable time",
        "TIMESTAMP is ''; expected a time like 2023-11-16 18:15:46.6805900",
    ),
    (
        "16/11/2023 18:15,374,44",
        "unreadable time",
        "TIMESTAMP is '16/11/2023 18:15'; expected a time like 2023-11-16 18:15:46.6805900",
    ),
    (
        "2023-02-29 00:00:00,374,44",  # no leap year
        "unreadable time",
        "TIMESTAMP is '2023-02-29 00:00:00'; expected a time like 2023-11-16 18:15:46.6805900",
    ),
    (
        "2023-11-16 18:15:47.1234567891,374,44",  # 10 digits
        "unreadable time",
        "TIMESTAMP is '2023-11-16 18:15:47.1234567891'; expected a time like 2023-11-16 18:15:46.6805900",
    ),
    ('2023-11-16 18:15:47,"374,44', "broken quoting", "cannot be split into fields (unexpected end of data)"),
    ("2023-11-16 18:15:47,374,\xff", "not UTF-8", "has the byte 0xff, which is not UTF-8"),
]


@pytest.mark.parametrize(("row", "cause", "message"), BAD_ROWS)
def test_a_bad_row_is_an_error_that_names_line_and_remedy(row: str, cause: str, message: str, write: Write) -> None:
    content = f"{HEADER}\n2023-11-16 18:15:46,1,2\n{row}\n2023-11-16 18:15:48,3,4\n"
    path = write(content.encode("latin-1"))
    with pytest.raises(UserError) as error:
        list(AzureTrace(path))
    assert str(error.value) == f"{path}, line 3: {message}. {DROP}"


@pytest.mark.parametrize(("row", "cause", "message"), BAD_ROWS)
def test_a_bad_row_can_be_dropped_and_is_counted(row: str, cause: str, message: str, write: Write) -> None:
    content = f"{HEADER}\r\n2023-11-16 18:15:46,1,2\r\n{row}\r\n2023-11-16 18:15:48,3,4"
    trace = AzureTrace(write(content.encode("latin-1")), on_bad_row="drop")
    for _ in range(2):  # the counts are of one pass, not of all
        assert list(trace) == [Request(0, 0.0, 1, 2), Request(1, 2.0, 3, 4)]
        assert trace.dropped == {cause: 1}


def test_time_zero_is_the_first_row_that_is_kept(write: Write) -> None:
    content = f"{HEADER}\n2023-11-16 18:15:46,0,2\n2023-11-16 18:15:50,1,2\n2023-11-16 18:15:51,1,2\n"
    assert [request.arrival_s for request in AzureTrace(write(content), on_bad_row="drop")] == [0.0, 1.0]


@pytest.mark.parametrize("on_bad_row", ["error", "drop"])
def test_rows_out_of_order_are_always_an_error(on_bad_row: str, write: Write) -> None:
    path = write(f"{HEADER}\n2023-11-16 18:15:46,1,2\n2023-11-16 18:15:45.9,3,4\n")
    with pytest.raises(UserError) as error:
        list(AzureTrace(path, on_bad_row))  # type: ignore[arg-type]
    assert str(error.value) == (
        f"{path}, line 3: TIMESTAMP 2023-11-16 18:15:45.9 is earlier than the row before; "
        "expected rows in order of time. Sort the file by TIMESTAMP."
    )


def test_of_two_faults_the_first_in_the_file_is_reported(write: Write) -> None:
    path = write(f"{HEADER}\n2023-11-16 18:15:46,1,2\n2023-11-16 18:15:45,3,4\n2023-11-16 18:15:47,0,4\n")
    with pytest.raises(UserError, match="line 3: TIMESTAMP"):
        list(AzureTrace(path))


def test_blank_lines_count_as_lines(write: Write) -> None:
    with pytest.raises(UserError, match=r"line 5: GeneratedTokens is 0;"):
        list(AzureTrace(write(f"{HEADER}\n\n2023-11-16 18:15:46,1,2\n\n2023-11-16 18:15:47,1,0\n")))


@pytest.mark.parametrize(
    ("header", "shown"),
    [
        ("time,in,out", "'time,in,out'"),
        ("TIMESTAMP,ContextTokens", "'TIMESTAMP,ContextTokens'"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens,ContextTokens",
            "'TIMESTAMP,ContextTokens,GeneratedTokens,ContextTokens'",
        ),
        ("timestamp,contexttokens,generatedtokens", "'timestamp,contexttokens,generatedtokens'"),
        ("", "''"),
        ("2023-11-16 18:15:46.6805900,374,44", "'2023-11-16 18:15:46.6805900,374,44'"),
    ],
)
def test_a_wrong_header_is_refused_before_any_row_is_read(header: str, shown: str, write: Write) -> None:
    path = write(f"{header}\n2023-11-16 18:15:46,374,44\n")
    with pytest.raises(UserError) as error:
        AzureTrace(path)
    assert str(error.value) == (
        f"{path}, line 1: the header is {shown}; expected the column names {HEADER}, each once, in any order. "
        "Check that this is the right file and reader."
    )


@pytest.mark.parametrize("compress", [gzip.compress, lambda data: pa.compress(data, "zstd", asbytes=True)])
def test_a_compressed_file_is_read_whatever_its_name(write: Write, compress: Callable[[bytes], bytes]) -> None:
    content = f"{HEADER}\n2023-11-16 18:15:46.5,374,44\n2023-11-16 18:15:48.0,396,109\n"
    assert list(AzureTrace(write(compress(content.encode())))) == ROWS


def test_a_compressed_file_that_ends_in_the_middle_is_refused(write: Write) -> None:
    whole = gzip.compress(("\n".join([HEADER] + 999 * ["2023-11-16 18:15:46.5,374,44"])).encode())
    path = write(whole[:-20])
    with pytest.raises(UserError, match="ends in the middle; fetch or write it again"):
        list(AzureTrace(path))


def test_a_missing_file_a_folder_and_an_empty_file_are_refused(tmp_path: Path, write: Write) -> None:
    with pytest.raises(UserError, match=r"nowhere\.csv: no such file\. Check the path"):
        AzureTrace(str(tmp_path / "nowhere.csv"))
    with pytest.raises(UserError, match="is a folder; expected a file"):
        AzureTrace(str(tmp_path))
    with pytest.raises(UserError, match="is empty; expected a trace"):
        AzureTrace(write(""))


def test_a_file_without_rows_is_refused(write: Write) -> None:
    with pytest.raises(UserError, match=r"azure\.csv has no usable row \(none dropped\)"):
        list(AzureTrace(write(f"{HEADER}\n")))


def test_a_file_whose_rows_are_all_dropped_is_refused(write: Write) -> None:
    path = write(f"{HEADER}\n2023-11-16 18:15:46,0,2\n2023-11-16 18:15:46,1,0\n2023-11-16 18:15:46,1\n")
    with pytest.raises(UserError, match=r"no usable row \(2 × below 1, 1 × wrong number of fields\)"):
        list(AzureTrace(path, on_bad_row="drop"))


def test_an_unknown_way_with_bad_rows_is_refused(write: Write) -> None:
    with pytest.raises(UserError) as error:
        AzureTrace(write(f"{HEADER}\n2023-11-16 18:15:46,1,2\n"), "skip")  # type: ignore[arg-type]
    assert str(error.value) == "workload.on_bad_row is 'skip'; expected one of: error, drop."


def test_lines_keep_their_numbers_across_blocks(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_columns, "_BLOCK_BYTES", 64)  # two to three rows
    rows = [f"2023-11-16 18:15:{second:02d},{second + 1},1" for second in range(40)]
    rows[20] = ""
    rows[31] = "2023-11-16 18:15:31,0,1"  # rows start in line 2, so this is line 33
    with pytest.raises(UserError, match="line 33: ContextTokens is 0;"):
        list(AzureTrace(write("\n".join([HEADER, *rows]))))


def test_order_is_checked_across_blocks(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_columns, "_BLOCK_BYTES", 1)  # every row is a block
    path = write(f"{HEADER}\n2023-11-16 18:15:46,1,2\n2023-11-16 18:15:45,3,4\n")
    with pytest.raises(UserError, match="line 3: TIMESTAMP"):
        list(AzureTrace(path))


def test_rows_are_read_only_when_the_iteration_reaches_them(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_columns, "_BLOCK_BYTES", 1)  # every row is a block
    requests = iter(AzureTrace(write(f"{HEADER}\n2023-11-16 18:15:46,1,2\n2023-11-16 18:15:47,0,2\n")))
    assert next(requests) == Request(0, 0.0, 1, 2)
    with pytest.raises(UserError, match="line 3"):
        next(requests)


def test_a_line_without_end_is_refused_instead_of_read_whole(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_columns, "_BLOCK_BYTES", 10)
    monkeypatch.setattr(csv_columns, "_LINE_BYTES", 100)
    with pytest.raises(UserError, match="line 2 is over 100 bytes long"):
        list(AzureTrace(write(f"{HEADER}\n{'x' * 200}\n")))


# How the same time may be written: digits after the second, offset from UTC in minutes (None: naive, taken as UTC).
written_times = st.tuples(st.sampled_from([0, 6, 7, 9]), st.sampled_from([None, 0, 120, -330]))


@st.composite
def traces(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], str]:
    """Rows as (nanoseconds since the first, prompt, output), and a file's text that says the same."""
    rows: list[tuple[int, int, int]] = []
    lines, now_ns = [HEADER], 0
    for _ in range(draw(st.integers(1, 30))):
        digits, offset = draw(written_times)
        unit = 10 ** (9 - digits)
        if rows:
            now_ns += draw(st.integers(0, 10**12))
            now_ns += -now_ns % unit  # up to a time that so many digits can write
        prompt, output = draw(st.integers(1, 2**31 - 1)), draw(st.integers(1, 10**6))
        rows.append((now_ns, prompt, output))
        lines.append(f"{_written(now_ns, digits, offset)},{prompt},{output}")
    return rows, draw(st.sampled_from(["\n", "\r\n"])).join([*lines, *[""] * draw(st.integers(0, 2))])


def _written(ns: int, digits: int, offset: int | None) -> str:
    seconds, fraction = divmod(ns, 10**9)
    local = datetime(2024, 2, 29, 23, 59, tzinfo=UTC) + timedelta(seconds=seconds, minutes=offset or 0)
    text = f"{local:%Y-%m-%d %H:%M:%S}"
    if digits:
        text += f".{fraction:09d}"[: digits + 1]
    if offset is not None:
        text += f"{'-' if offset < 0 else '+'}{abs(offset) // 60:02d}:{abs(offset) % 60:02d}"
    return text


@settings(max_examples=100, deadline=None)
@given(trace=traces())
def test_what_is_written_is_what_is_read(
    trace: tuple[list[tuple[int, int, int]], str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows, content = trace
    file = tmp_path_factory.mktemp("round_trip") / "azure.csv"
    file.write_text(content, newline="")
    assert list(AzureTrace(str(file))) == [
        Request(number, ns / 1e9, prompt, output) for number, (ns, prompt, output) in enumerate(rows)
    ]


@settings(max_examples=100, deadline=None)
@given(trace=traces())
def test_line_by_line_reads_what_all_at_once_reads(
    trace: tuple[list[tuple[int, int, int]], str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    # A blank line after the header changes nothing, except that the block has to be read line by line.
    _, content = trace
    folder = tmp_path_factory.mktemp("two_ways")
    (folder / "plain.csv").write_text(content, newline="")
    (folder / "blank.csv").write_text(content.replace("\n", "\n\n", 1), newline="")
    assert list(AzureTrace(str(folder / "plain.csv"))) == list(AzureTrace(str(folder / "blank.csv")))


@pytest.mark.parametrize(
    ("name", "num_rows", "prompt_tokens", "output_tokens", "last_arrival_s"),
    [
        ("azure_2023_conv.csv", 19_366, 22_361_870, 4_088_665, 3_501.72),
        ("azure_2023_code.csv", 8_819, 18_059_974, 245_896, 3_435.95),
    ],
)
def test_real_traces_have_their_measured_totals(
    name: str,
    num_rows: int,
    prompt_tokens: int,
    output_tokens: int,
    last_arrival_s: float,
    real_trace: Callable[[str], str],
) -> None:
    # Measured once with other tools, and published with the traces; the times are rounded to 10 ms there.
    requests = list(AzureTrace(real_trace(name)))
    assert len(requests) == num_rows
    assert sum(request.prompt_tokens for request in requests) == prompt_tokens
    assert sum(request.output_tokens for request in requests) == output_tokens
    assert requests[0].arrival_s == 0.0
    assert round(requests[-1].arrival_s, 2) == last_arrival_s
