"""`kvtwin convert`: what it writes, `workload=trace` reads back as it was; a file that is not that is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.commands.convert import main, write
from workloads.errors import UserError
from workloads.readers.converted import COLUMNS, SCHEMA, row_of
from workloads.readers.trace import Trace
from workloads.request import HashIds, Request, TokenIds
from workloads.sampling import BeamSearch, ParallelSampling

CONF = Path(__file__).parents[2] / "conf" / "workload"
DOCS = Path(__file__).parents[2] / "docs" / "workload_schema.md"

ids = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6).map(tuple)
tokens = st.integers(1, 2**31 - 1)
prompts = st.none() | ids.map(TokenIds) | st.builds(HashIds, ids, st.integers(1, 1024))
samplings = (
    st.none()
    | st.builds(ParallelSampling, st.integers(1, 9))
    | st.builds(BeamSearch, st.integers(1, 9), st.floats(1e-9, 1e9), st.integers(0, 2**40))
)


class Listed:
    """A workload that is a list."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests

    @property
    def num_requests(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Any:
        return iter(self.requests)


@st.composite
def workloads(draw: st.DrawFn) -> list[Request]:
    arrivals = sorted(draw(st.lists(st.floats(0, 1e9), min_size=1, max_size=8)))
    return [
        Request(
            number,
            arrival_s,
            draw(tokens),
            draw(tokens),
            draw(st.integers(-(2**31), 2**31)),
            draw(prompts),
            draw(samplings),
            draw(st.none() | tokens),
            draw(st.none() | st.integers(0, number - 1)) if number else None,
            draw(st.floats(0, 1e9)),
            draw(st.none() | st.text(max_size=5)),
        )
        for number, arrival_s in enumerate(arrivals)
    ]


@given(workloads())
@settings(deadline=None, max_examples=60)
def test_every_request_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, requests: list[Request]) -> None:
    path = tmp_path_factory.mktemp("converted") / "out.parquet"
    assert write(Listed(requests), path) == len(requests)
    trace = Trace(str(path))
    assert trace.format.name == "converted"
    assert trace.num_requests == len(requests)
    assert list(trace) == requests
    assert list(trace) == requests  # and once more


def test_the_schema_has_a_place_for_every_field_of_a_request() -> None:
    """A field added to Request must be added here, to the schema (raise its version) and to its page."""
    fields = {
        "request_id",
        "arrival_s",
        "prompt_tokens",
        "output_tokens",
        "priority",
        "prompt",
        "sampling",
        "max_tokens",
        "after",
        "think_s",
        "traffic_class",
    }
    assert set(Request._fields) == fields | {"promised"}  # which is no part of the file
    assert len(row_of(Request(0, 0.0, 1, 1))) == len(SCHEMA)


def test_the_page_describes_the_schema() -> None:
    rows = [line.split("|") for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    described = [(row[1].strip(" `"), row[2].strip(), row[3].strip() == "yes") for row in rows]
    kinds = {pa.float64(): "float64", pa.int64(): "int64", pa.list_(pa.int64()): "list<int64>", pa.string(): "string"}
    assert described == [(name, kinds[kind], nullable) for name, kind, nullable in COLUMNS]


TRACES = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.1234567,1,2\n2023-11-16 18:15:47,3,4\n",
    "mooncake": json.dumps({"timestamp": 27, "input_length": 600, "output_length": 5, "hash_ids": [3, 4]}),
    "joint_lengths": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.1234567,1,2\n",
    "trace": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5.1,A,4,2,6,L\n",
    "recorded_run": json.dumps(
        {
            "request_id": "a",
            "dataset_arrival_s": 0.1,
            "queued_s": 0.2,
            "scheduled_s": 0.3,
            "first_token_s": 0.4,
            "last_token_s": 0.5,
            "input_tokens": 20,
            "output_tokens": 2,
            "block_hash_ids": [9],
        }
    ),
}


@pytest.mark.parametrize("name", sorted(file.stem for file in CONF.glob("*.yaml")))
def test_every_workload_can_be_converted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [f"workload={name}", f"to={tmp_path / 'out.parquet'}", "workload.limit=300", "workload.max_tokens=7"]
    if name in TRACES:
        trace = tmp_path / ("requests.jsonl" if name == "recorded_run" else "trace")
        trace.write_text(TRACES[name])
        options.append(f"workload.path={tmp_path if name == 'recorded_run' else trace}")
    written: list[Request] = []

    def noting(request: Request) -> tuple[Any, ...]:
        written.append(request)
        return row_of(request)

    monkeypatch.setattr("workloads.readers.converted.row_of", noting)
    assert main([*options, "workload/sampling=parallel", "workload.sampling.n=2"]) == 0
    assert written
    assert list(Trace(str(tmp_path / "out.parquet"))) == [request._replace(promised=None) for request in written]
    assert {request.sampling for request in written} == {ParallelSampling(2)}


def test_a_bare_argument_is_the_file_whatever_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "a=b, it's ${mine}.csv"
    trace.write_text(TRACES["azure"])
    out = tmp_path / "out.parquet"
    assert main([str(trace), f"to={out}"]) == 0
    assert capsys.readouterr().out == f"2 requests written to {out}\nkvtwin sim workload=trace workload.path={out}\n"
    assert [request.prompt_tokens for request in Trace(str(out))] == [1, 3]


def test_what_goes_wrong_leaves_no_file_and_the_old_one_alone(tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACES["azure"])
    assert main([str(trace), f"to={out}"]) == 0
    before = out.read_bytes()
    trace.write_text(TRACES["azure"] + "2023-11-16 18:15:48,x,4\n")
    with pytest.raises(UserError, match=r"line 4: ContextTokens is 'x'"):
        main([str(trace), f"to={out}"])
    assert out.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.parquet", "trace.csv"]
    with pytest.raises(UserError, match=r"ids are whole numbers of at most 64 bits"):
        write(Listed([Request(0, 0.0, 1, 1, prompt=HashIds((2**63,), 16))]), out)
    assert out.read_bytes() == before
    with pytest.raises(UserError, match="is a folder; give the name of a file in it"):
        main([str(trace), f"to={tmp_path}"])
    with pytest.raises(UserError, match="to is not set; give it as to=VALUE"):
        main([str(trace)])
    with pytest.raises(UserError, match="the file is given twice"):
        main([str(trace), "workload.path=other", f"to={out}"])


def rewritten(path: Path, **columns: Any) -> str:
    """A file of two good rows, with some columns exchanged; None takes one out."""
    rows = [row_of(Request(0, 1.0, 5, 6)), row_of(Request(1, 2.0, 7, 8, prompt=HashIds((1,), 16)))]
    table = pa.table(
        [pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), SCHEMA, strict=True)], SCHEMA
    )
    for name, values in columns.items():
        at = table.schema.get_field_index(name)
        table = table.remove_column(at)
        if values is not None:
            table = table.add_column(
                at, pa.field(name, SCHEMA.field(name).type), pa.array(values, SCHEMA.field(name).type)
            )
    pq.write_table(table, path)
    return str(path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"arrival_s": [2.0, 1.0]}, "has rows out of order; expected them sorted by arrival_s"),
        ({"arrival_s": [1.0, float("nan")]}, "row 2: unreadable time"),
        ({"arrival_s": [-1.0, 1.0]}, "row 1: unreadable time"),
        ({"prompt_tokens": [1, None]}, "row 2: unreadable token count"),
        ({"output_tokens": [0, 1]}, "row 1: unreadable token count"),
        ({"output_tokens": [1, 2**31]}, "row 2: unreadable token count"),
        ({"priority": [None, 1]}, "row 1: no priority"),
        ({"block_size": [None, None]}, "row 2: hash_ids without block_size"),
        ({"block_size": [16, 16]}, "row 1: hash_ids without block_size"),
    ],
)
def test_a_row_that_no_request_can_be_is_named(columns: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = rewritten(tmp_path / "out.parquet", **columns)
    with pytest.raises(UserError) as error:
        list(Trace(path))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_such_rows_can_be_dropped_and_the_others_are_numbered_anew(tmp_path: Path) -> None:
    trace = Trace(rewritten(tmp_path / "out.parquet", prompt_tokens=[0, 7]), on_bad_row="drop")
    assert list(trace) == [Request(0, 2.0, 7, 8, prompt=HashIds((1,), 16))]
    assert trace.dropped == {"unreadable token count": 1}


def test_another_version_or_type_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    rewritten(path)
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({"kvtwin_workload_schema": "2"}), path)
    with pytest.raises(UserError, match="has the workload schema 2; this kvtwin reads 1"):
        Trace(str(path))
    at = table.schema.get_field_index("priority")
    pq.write_table(table.set_column(at, "priority", table["priority"].cast(pa.string())), path)
    with pytest.raises(UserError, match="has no column priority of type int64"):
        Trace(str(path))
    rewritten(path, priority=None)
    with pytest.raises(UserError, match="is of no format that is known"):
        Trace(str(path))
    whole = rewritten(path)
    with pytest.raises(UserError, match="block_size has no use"):
        Trace(whole, block_size=16)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match="is no whole Parquet file"):
        Trace(whole)
