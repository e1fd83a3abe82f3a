"""The tables of a run: what each row says, and that a file is whole or not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sim.cli import main
from sim.files import whole, write_json, write_text
from sim.tables import Table
from workloads.errors import UserError

SECONDS = ["timing=constant", "timing.step_seconds=1"]
FOUR_BLOCKS_OF_4 = ["memory.block_size=4", "memory.num_blocks=5", "memory.prefix_caching=false"]
NUMBERS = pa.schema([("n", pa.int64())])


@pytest.fixture(scope="module")
def preempted(simulate: Callable[..., Path], trace: Callable[..., list[str]]) -> Path:
    """Two requests of 7 + 6 tokens at time 0 in a pool of 16 slots, steps of 1 s.

    Both run until A needs its third block for the ninth token, at t = 2. B loses its two, waits until A is done at 6,
    computes 9 tokens at once, and is done at 10.
    """
    return simulate(*trace([(0, 7, 6), (0, 7, 6)]), *FOUR_BLOCKS_OF_4, *SECONDS)


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = pq.read_table(folder / f"{name}.parquet").to_pylist()
    return records


def test_a_row_a_request_with_its_times(preempted: Path) -> None:
    known = {"arrival_s": 0, "prompt_tokens": 7, "output_tokens": 6, "priority": 0, "generated_tokens": 6}
    ended = {"status": "finished", "finish_reason": "stop", "hit_tokens": 0, "traffic_class": None}
    # B was first scheduled at 0 and had its first token at 1; its return changes neither.
    times = {"first_scheduled_s": 0, "first_token_s": 1}
    assert rows(preempted, "requests") == [
        {"request_id": 0, "finish_s": 6, "preemptions": 0, **known, **ended, **times},
        {"request_id": 1, "finish_s": 10, "preemptions": 1, **known, **ended, **times},
    ]


def test_a_row_a_preemption_with_who_and_why(preempted: Path) -> None:
    # In the third step, number 2; B held two blocks with 8 tokens.
    assert rows(preempted, "events") == [
        {
            "time_s": 2,
            "step": 2,
            "event": "preemption",
            "request_id": 1,
            "cause": "growth of another request",
            "because_of": 0,
            "blocks": 2,
            "tokens": 8,
        }
    ]


def test_a_victim_of_its_own_growth_is_named_as_such(
    simulate: Callable[..., Path], trace: Callable[..., list[str]]
) -> None:
    # 6 and 8 tokens take two blocks each. In the next step A's seventh fits, B's ninth needs a third block: the last of
    # the running queue is B itself.
    folder = simulate(*trace([(0, 6, 2), (0, 8, 3)]), *FOUR_BLOCKS_OF_4, *SECONDS)
    (event,) = rows(folder, "events")
    assert (event["event"], event["request_id"], event["because_of"]) == ("preemption", 1, 1)
    assert (event["time_s"], event["cause"], event["blocks"], event["tokens"]) == (1, "itself", 2, 8)


def test_a_row_a_plan_with_the_pool_and_the_queues_while_it_ran(preempted: Path) -> None:
    steps = rows(preempted, "steps")
    assert sum(row["repeat"] for row in steps) == sum(row["duration_s"] for row in steps) == 10
    first = {"step": 0, "repeat": 1, "start_s": 0, "duration_s": 1, "num_tokens": 14, "num_sequences": 2}
    queues = {"running": 2, "waiting": 0, "preempted": 0}
    pool = {"used": 14, "reserved": 2, "internal": 0, "cached": 0, "external": 0, "idle": 0}
    assert steps[0] == {**first, **queues, **pool, "largest_free_run": 0, "saved": 0}
    (preempting,) = [row for row in steps if row["preempted"]]
    # A stores its ninth token and holds 12 slots, B waits, one block is free.
    expected = {
        "step": 2,
        "start_s": 2,
        "num_tokens": 1,
        "num_sequences": 1,
        "running": 1,
        "waiting": 1,
        "preempted": 1,
    }
    expected |= {"used": 9, "reserved": 3, "internal": 0, "cached": 0, "external": 0, "idle": 4, "largest_free_run": 4}
    assert {name: preempting[name] for name in expected} == expected
    (returning,) = [row for row in steps if row["start_s"] == 6]
    assert (returning["step"], returning["num_tokens"], returning["running"], returning["waiting"]) == (6, 9, 1, 0)


def test_columns_are_those_that_readers_of_a_run_folder_count_on(preempted: Path) -> None:
    kinds = {
        name: {field.name: str(field.type) for field in pq.read_schema(preempted / f"{name}.parquet")}
        for name in ("requests", "steps", "events")
    }
    text = ("status", "finish_reason", "event", "cause", "traffic_class")
    times = ("arrival_s", "first_scheduled_s", "first_token_s", "finish_s", "start_s", "duration_s", "time_s")
    for columns in kinds.values():
        for name, kind in columns.items():
            expected = "string" if name in text else "double" if name in times else "int64"
            assert kind == expected, name
    pool = ["used", "reserved", "internal", "cached", "external", "idle", "largest_free_run", "saved"]
    assert list(kinds["steps"])[-8:] == pool
    assert {"request_id", "arrival_s", "prompt_tokens", "output_tokens", "finish_s"} <= kinds["requests"].keys()


def test_a_run_without_events_has_an_empty_table_of_them(
    simulate: Callable[..., Path], trace: Callable[..., list[str]]
) -> None:
    folder = simulate(*trace([(0, 1, 1)]), *SECONDS)
    events = pd.read_parquet(folder / "events.parquet")
    assert len(events) == 0
    assert "because_of" in events.columns


def test_the_summary_counts_everything_whatever_rows_are_kept(simulate: Callable[..., Path]) -> None:
    run = ["workload.num_requests=40", "workload.rate=8", "memory.num_blocks=400", "max_model_len=2048"]
    whole_run, none, some = (
        simulate(*run, *record)
        for record in (
            [],
            ["record.steps=none", "record.requests=none"],
            ["record.steps=sampled", "record.requests=sampled", "record.sample_every=10"],
        )
    )
    summary = (whole_run / "summary.json").read_text()
    assert (none / "summary.json").read_text() == summary
    assert rows(none, "steps") == rows(none, "requests") == []
    # Each tenth request by its id, and the first row in each second of the run that has one.
    assert sorted(row["request_id"] for row in rows(some, "requests")) == [0, 10, 20, 30]
    seconds = [int(row["start_s"]) for row in rows(some, "steps")]
    assert seconds == sorted(set(seconds))
    assert len(seconds) > 10
    # Leaps end at samples, so sums are added up in another order.
    got, expected = json.loads((some / "summary.json").read_text()), json.loads(summary)
    assert got.pop("rows_dropped") == expected.pop("rows_dropped") == {}
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        close = isinstance(value, float)
        assert got[key] == (pytest.approx(value, rel=1e-9, abs=1e-9) if close else value), key


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("record.steps=few", "record.steps is 'few'; expected all, sampled or none."),
        ("record.sample_interval_s=0", "record.sample_interval_s is 0.0; expected seconds, above 0."),
        ("record.sample_every=0", "record.sample_every is 0; expected a whole number of at least 1."),
    ],
)
def test_rows_to_keep_that_make_no_sense_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, message: str
) -> None:
    assert main(["sim", f"hydra.run.dir={tmp_path}", option]) == 2
    assert capsys.readouterr().err == f"kvtwin: {message}\n"


def test_a_table_appears_under_its_name_only_when_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "down" / "numbers.parquet"
    table = Table(path, NUMBERS)
    table.add((1,))
    assert not path.exists()
    table.close()
    assert pq.read_table(path).to_pylist() == [{"n": 1}]
    assert [file.name for file in path.parent.iterdir()] == ["numbers.parquet"]


def test_rows_stream_out_in_groups_and_none_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.tables.ROWS_PER_GROUP", 3)
    table = Table(tmp_path / "numbers.parquet", NUMBERS)
    for n in range(8):
        table.add((n,))
    table.close()
    file = pq.ParquetFile(tmp_path / "numbers.parquet")
    assert [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)] == [3, 3, 2]
    assert file.read()["n"].to_pylist() == list(range(8))


def test_a_discarded_table_leaves_what_was_there_before(tmp_path: Path) -> None:
    path = tmp_path / "numbers.parquet"
    for n, finish in ((1, Table.close), (2, Table.discard)):
        table = Table(path, NUMBERS)
        table.add((n,))
        finish(table)
    assert pq.read_table(path)["n"].to_pylist() == [1]
    assert [file.name for file in tmp_path.iterdir()] == ["numbers.parquet"]


def test_discarding_a_closed_table_does_no_harm(tmp_path: Path) -> None:
    table = Table(tmp_path / "numbers.parquet", NUMBERS)
    table.close()
    table.discard()
    assert pq.read_table(tmp_path / "numbers.parquet").num_rows == 0


def test_a_file_whose_writing_fails_keeps_its_old_content(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    write_text(path, "old")
    with pytest.raises(ZeroDivisionError), whole(path) as temporary:
        temporary.write_text("half of the ne")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["note.txt"]


def test_json_that_other_tools_cannot_read_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "summary.json", {"share": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_floats_keep_every_digit_in_json(tmp_path: Path) -> None:
    write_json(tmp_path / "summary.json", {"b": 0.1 + 0.2, "a": None})
    assert (tmp_path / "summary.json").read_text() == '{\n "b": 0.30000000000000004,\n "a": null\n}\n'


def test_what_cannot_be_written_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "run" / "summary.json"
    for write in (lambda: write_json(below, {}), lambda: Table(below, NUMBERS)):
        with pytest.raises(UserError) as error:
            write()
        assert str(error.value) == (
            f"cannot write {below}: Not a directory; free some space or choose another folder with hydra.run.dir=."
        )
