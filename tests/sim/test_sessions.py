"""Conversations in closed loop: when a turn is sent, what it finds in the cache, and when there is none."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.cli import main
from sim.clients import Arrivals, ClosedLoop
from workloads.errors import UserError
from workloads.request import Request

Simulate = Callable[..., Path]
SECONDS = ["timing=constant", "timing.step_seconds=1"]


def bailian(folder: Path, *rows: tuple[int, int, float, int, int]) -> list[str]:
    """Writes (chat_id, parent_chat_id, time, prompt, output) as a trace; returns the overrides that read it."""
    lines = [
        {
            "chat_id": chat,
            "parent_chat_id": parent,
            "timestamp": time,
            "input_length": prompt,
            "output_length": output,
            "type": "text",
            "turn": 1,
            "hash_ids": [1000 * chat + block for block in range(-(-prompt // 16))],
        }
        for chat, parent, time, prompt, output in rows
    ]
    path = folder / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return ["workload=trace", f"workload.path={path}"]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (
        pd.read_parquet(folder / "requests.parquet").sort_values("request_id").to_dict("records")
    )
    return rows


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return summary


THREE_TURNS = [(7, -1, 0.0, 4, 3), (8, 7, 1.0, 8, 2), (9, 8, 20.0, 12, 1)]


def test_a_turn_of_a_trace_waits_for_the_one_before_it_and_for_its_own_time(simulate: Simulate, tmp_path: Path) -> None:
    # Steps of 1 s, a token each. The first turn ends at 3, the second's own time, 1, is over: it is sent at 3 and ends
    # at 5. The third's own time is 20.
    rows = rows_of(simulate(*bailian(tmp_path, *THREE_TURNS), *SECONDS, "workload.closed_loop=true"))
    assert [(row["arrival_s"], row["finish_s"]) for row in rows] == [(0, 3), (3, 5), (20, 21)]


def test_without_closed_loop_the_clock_alone_says_when(simulate: Simulate, tmp_path: Path) -> None:
    rows = rows_of(simulate(*bailian(tmp_path, *THREE_TURNS), *SECONDS))
    assert [row["arrival_s"] for row in rows] == [0, 1, 20]


def test_a_turn_whose_parent_is_from_before_the_trace_comes_at_its_own_time(simulate: Simulate, tmp_path: Path) -> None:
    rows = rows_of(simulate(*bailian(tmp_path, (7, 3, 2.0, 4, 3)), *SECONDS, "workload.closed_loop=true"))
    assert [row["arrival_s"] for row in rows] == [2]


def test_slow_motion_keeps_the_turns_in_order(simulate: Simulate, tmp_path: Path) -> None:
    options = ["workload.closed_loop=true", "workload.time_scale=0.1"]
    rows = rows_of(simulate(*bailian(tmp_path, *THREE_TURNS), *SECONDS, *options))
    assert [row["arrival_s"] for row in rows] == [0, 3, 5]  # own times 0, 0.1 and 2


def test_after_a_turn_that_is_turned_away_the_others_are_never_sent(simulate: Simulate, tmp_path: Path) -> None:
    # 4 blocks of 16 are too few for the second turn's 100 tokens; the third and fourth follow it, the fifth does not.
    turns = [(1, -1, 0.0, 4, 3), (2, 1, 0.0, 100, 2), (3, 2, 0.0, 12, 1), (4, 3, 9.0, 12, 1), (5, -1, 9.0, 4, 1)]
    pool = ["memory.block_size=16", "memory.num_blocks=5"]
    folder = simulate(*bailian(tmp_path, *turns), *pool, *SECONDS, "workload.closed_loop=true")
    assert [(row["request_id"], row["status"]) for row in rows_of(folder)] == [
        (0, "finished"),
        (1, "rejected"),
        (4, "finished"),
    ]
    summary = summary_of(folder)
    assert (summary["completed"], summary["failed"], summary["never_sent"]) == (2, 1, 2)


@pytest.mark.parametrize(
    ("turns", "line"),
    [
        ([(7, 7, 0.0, 4, 3)], "request 0 follows turn 7, which is request 0 and does not come before it."),
        (
            [(7, 8, 0.0, 4, 3), (8, 7, 1.0, 4, 3)],
            "request 0 follows turn 8, which is request 1 and does not come before it.",
        ),
        ([(7, -1, 0.0, 4, 3), (7, -1, 1.0, 4, 3)], "requests 0 and 1 are both turn 7; expected a name for each."),
    ],
    ids=["itself", "circle", "twice"],
)
def test_parents_that_go_in_circles_are_one_line(
    turns: list[Any], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*bailian(tmp_path, *turns), *SECONDS, f"hydra.run.dir={tmp_path}/run", "plots=false"]
    assert main(["sim", *options, "workload.closed_loop=true"]) == 2
    assert capsys.readouterr().err == (
        f"kvtwin: {tmp_path}/trace.jsonl: {line} Correct the file, or leave workload.closed_loop out.\n"
    )
    assert main(["sim", *options]) == 0  # the clock needs no parents


def test_a_format_without_conversations_has_no_closed_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,2\n")
    assert main(["sim", "workload=trace", f"workload.path={path}", "workload.closed_loop=true"]) == 2
    assert capsys.readouterr().err == (
        f"kvtwin: workload.closed_loop is true, but {path} is taken for azure, whose requests do not say which one "
        "they follow; leave it out.\n"
    )


def test_a_turn_that_follows_a_later_request_is_one_line() -> None:
    with pytest.raises(UserError) as error:
        Arrivals(iter([Request(0, 0.0, 1, 1, after=1), Request(1, 0.0, 1, 1)]))
    assert str(error.value) == (
        "request 0 follows request 1, which does not come before it; the turns of a conversation have to be in order. "
        "Correct the workload, or leave workload.closed_loop out."
    )


@st.composite
def forests(draw: st.DrawFn) -> list[tuple[Request, float]]:
    """Requests, some of which follow others, and how long each is served; 0 for those that are turned away."""
    now, requests = 0.0, []
    for number in range(draw(st.integers(1, 25))):
        now += draw(st.sampled_from([0.0, 0.0, 0.5, 3.0]))
        after = draw(st.none() | st.integers(0, number - 1)) if number else None
        request = Request(number, now, 1, 1, after=after, think_s=draw(st.sampled_from([0.0, 0.25, 2.0])))
        requests.append((request, draw(st.sampled_from([0.0, 1.0, 1.0, 2.0, 5.0]))))
    return requests


@settings(deadline=None)
@given(forests(), st.none() | st.integers(1, 5))
def test_turns_are_sent_as_a_list_of_everybody_says(forest: list[tuple[Request, float]], places: int | None) -> None:
    # The witness looks at all requests each time. Who is due first is sent next, as soon as there is a place: whoever
    # follows one that was not sent yet is due later than that one.
    served = dict(enumerate(seconds for _, seconds in forest))
    end: dict[int, float] = {}  # of those that were sent; infinity without an answer

    def due(request: Request) -> float:
        if request.after is None:
            return request.arrival_s
        return max(request.arrival_s, end.get(request.after, math.inf) + request.think_s)

    expected, running = [], []
    left = [request for request, _ in forest]
    while left:
        request = min(left, key=lambda one: (due(one), one.request_id))
        if due(request) == math.inf:
            break
        left.remove(request)
        busy = sorted(running)[-(places or 99) :]
        sent = due(request) if len(busy) < (places or 99) else max(due(request), busy[0])
        expected.append((sent, request.request_id))
        seconds = served[request.request_id]
        end[request.request_id] = sent + seconds if seconds else math.inf
        running.append(sent + seconds)

    def stream() -> Iterator[Request]:
        yield from (request for request, _ in forest)

    arrivals = Arrivals(stream()) if places is None else ClosedLoop(stream(), places)
    sent_at, ends = [], []
    while ends or arrivals.next_s < math.inf:
        now = min((at for at, _ in ends), default=math.inf)
        if arrivals.next_s <= now:
            now = arrivals.next_s
            for request in arrivals.until(now):
                sent_at.append((request.arrival_s, request.request_id))
                if served[request.request_id]:
                    ends.append((request.arrival_s + served[request.request_id], request))
                else:
                    arrivals.failed([request], request.arrival_s)
        else:
            arrivals.ended([request for at, request in ends if at == now], now)
            ends = [(at, request) for at, request in ends if at > now]
    assert sorted(sent_at) == sorted(expected)
    assert arrivals.num_never_sent == len(left)


CONVERSATIONS = ["workload=conversations", "max_model_len=2048", "workload/turns=fixed", "workload/think=fixed"]
FIXED = ["workload/prompt_lengths=fixed", "workload/output_lengths=fixed"]


def test_a_turn_finds_prompt_and_output_of_the_one_before_it(simulate: Simulate) -> None:
    # New prompts of 40 tokens and answers of 24. The last token of an answer is never computed, so a turn finds the
    # full blocks of 16 among 63 tokens, and among 63 + 64: 48 and 112. The first finds nothing.
    tokens = ["workload.prompt_lengths.tokens=40", "workload.output_lengths.tokens=24", "workload.turns.turns=3"]
    options = ["workload.num_conversations=5", "workload.rate=0.01", "memory.block_size=16"]
    rows = rows_of(simulate(*CONVERSATIONS, *FIXED, *tokens, *options, "workload.think.seconds=1"))
    assert [row["prompt_tokens"] for row in rows] == [40, 104, 168] * 5
    assert [row["hit_tokens"] for row in rows] == [0, 48, 112] * 5


@pytest.mark.parametrize("think_s", [0, 2.5, 30])
def test_the_response_time_law_of_a_closed_system_holds(simulate: Simulate, think_s: float) -> None:
    # N = 12 users think Z and get 4 tokens at 1 s a step from a server with 5 seats, until the first of them is done.
    # Up to then the users' N T seconds are made up of whole cycles, R + Z each, but for the one that each is in, and
    # for the think time that the first does not have. That is under two cycles of 40.
    users, turns = 12, 40
    tokens = ["workload.prompt_lengths.tokens=4", "workload.output_lengths.tokens=4", f"workload.turns.turns={turns}"]
    options = [f"workload.num_conversations={users}", "workload/arrivals=all_at_once", "scheduler.max_num_seqs=5"]
    folder = simulate(*CONVERSATIONS, *FIXED, *tokens, *options, *SECONDS, f"workload.think.seconds={think_s}")
    rows = pd.DataFrame(rows_of(folder))
    assert len(rows) == users * turns
    end = rows.groupby(rows["request_id"] // turns)["finish_s"].max().min()
    rows = rows[rows["finish_s"] <= end]
    response = (rows["finish_s"] - rows["arrival_s"]).mean()
    assert len(rows) / end == pytest.approx(users / (response + think_s), rel=2 / turns)
    assert (response > 4.5) == (think_s < 3)  # 12 users are too many for 5 seats unless they think: then nobody waits


def test_users_who_never_wait_for_a_seat_have_the_response_time_of_one(simulate: Simulate) -> None:
    # One user with Z = 6 and R = 4 s: a cycle is 10 s, exactly, and ten turns end at 10 * 10 - 6 = 94 s.
    tokens = ["workload.prompt_lengths.tokens=4", "workload.output_lengths.tokens=4", "workload.turns.turns=10"]
    options = ["workload.num_conversations=1", "workload/arrivals=all_at_once", "workload.think.seconds=6"]
    rows = rows_of(simulate(*CONVERSATIONS, *FIXED, *tokens, *options, *SECONDS))
    assert [row["arrival_s"] for row in rows] == [10.0 * turn for turn in range(10)]
    assert [row["finish_s"] for row in rows] == [10.0 * turn + 4 for turn in range(10)]


def test_turns_wait_for_places_too(simulate: Simulate) -> None:
    # Two users who go on at once, one place, 4 s each: they take turns, for who has been due longest is next.
    tokens = ["workload.prompt_lengths.tokens=4", "workload.output_lengths.tokens=4", "workload.turns.turns=2"]
    options = ["workload.num_conversations=2", "workload/arrivals=all_at_once", "workload.concurrency=1"]
    rows = rows_of(simulate(*CONVERSATIONS, *FIXED, *tokens, *options, *SECONDS))
    assert [(row["request_id"], row["arrival_s"]) for row in rows] == [(0, 0), (1, 8), (2, 4), (3, 12)]


@pytest.mark.parametrize("engine", ["vllm_v1", "vllm_v0", "sglang", "tgi"])
def test_an_engine_that_leaps_serves_conversations_as_one_that_steps(simulate: Simulate, engine: str) -> None:
    # Pools of some 300 blocks, or as many tokens, so that users wait for one another.
    lengths = ["workload/prompt_lengths=uniform", "workload.prompt_lengths.low=5", "workload.prompt_lengths.high=90"]
    lengths += ["workload/output_lengths=uniform", "workload.output_lengths.low=1", "workload.output_lengths.high=60"]
    users = ["workload=conversations", "workload.num_conversations=12", "workload.rate=6", "workload.think.mean=0.5"]
    pool = ["max_model_len=512", f"memory.num_blocks={1500 if engine == 'sglang' else 90}"]
    leaping, stepping = (
        simulate(f"engine={engine}", *users, *lengths, *pool, f"engine.leap={leap}") for leap in ("true", "false")
    )
    for table in ("requests", "events"):
        assert (leaping / f"{table}.parquet").read_bytes() == (stepping / f"{table}.parquet").read_bytes()
    summary = summary_of(leaping)
    assert summary["never_sent"] == summary_of(stepping)["never_sent"]
    assert summary["mean_waiting"] > 0
