"""Clients that keep so many requests in flight: who is sent when, and that no more have a place than there are."""

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
from sim.clients import ClosedLoop
from workloads.errors import UserError
from workloads.request import Request

Simulate = Callable[..., Path]
Trace = Callable[..., list[str]]
SECONDS = ["timing=constant", "timing.step_seconds=1"]


def requests_of(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (
        pd.read_parquet(folder / "requests.parquet").sort_values("request_id").to_dict("records")
    )
    return rows


def times(rows: list[dict[str, Any]]) -> list[tuple[float, float, float]]:
    return [(row["arrival_s"], row["first_scheduled_s"], row["finish_s"]) for row in rows]


def test_the_next_request_is_sent_the_moment_another_finishes(simulate: Simulate, trace: Trace) -> None:
    # Steps of 1 s, one for each token of the output. Two places; outputs of 2, 4, 3 and 1 tokens, all ready at 0. The
    # third is sent when the first is done, at 2; the fourth when the second is, at 4.
    rows = requests_of(
        simulate(*trace([(0, 4, 2), (0, 4, 4), (0, 4, 3), (0, 4, 1)]), *SECONDS, "workload.concurrency=2")
    )
    assert times(rows) == [(0, 0, 2), (0, 0, 4), (2, 2, 5), (4, 4, 5)]


def test_latency_counts_from_when_a_request_is_sent(simulate: Simulate, trace: Trace) -> None:
    # Each of the three is served alone and at once: 1 s to the first token of two.
    folder = simulate(*trace([(0, 4, 2)] * 3), *SECONDS, "workload.concurrency=1")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert (summary["p99_ttft_ms"], summary["p99_e2el_ms"], summary["duration"]) == (1000, 2000, 6)


def test_a_request_still_waits_for_its_own_time(simulate: Simulate, trace: Trace) -> None:
    # One place, free again from 2 on; the second request's time comes at 5.5, while nothing runs. The third's, 6, is
    # over when the place is free again, at 7.5.
    rows = requests_of(simulate(*trace([(0, 4, 2), (5.5, 4, 2), (6, 4, 1)]), *SECONDS, "workload.concurrency=1"))
    assert times(rows) == [(0, 0, 2), (5.5, 5.5, 7.5), (7.5, 7.5, 8.5)]


def test_under_asynchronous_scheduling_the_next_request_joins_one_plan_later(simulate: Simulate, trace: Trace) -> None:
    # The first finishes at 2, when the step after that is planned already: the third is sent at 2 and runs from 3 on.
    options = [*SECONDS, "scheduler.async_scheduling=true", "workload.concurrency=2"]
    rows = requests_of(simulate(*trace([(0, 4, 2), (0, 4, 6), (0, 4, 1)]), *options))
    assert times(rows) == [(0, 0, 2), (0, 0, 6), (2, 3, 4)]


def test_a_request_that_is_turned_away_gives_its_place_back_at_once(simulate: Simulate, trace: Trace) -> None:
    # 4 blocks of 4: the second and third would need 6 at their end. One place: they go when the first is done, at 2,
    # and the fourth gets the place at that same time.
    pool = ["memory.block_size=4", "memory.num_blocks=5"]
    rows = requests_of(
        simulate(*trace([(0, 4, 2), (0, 20, 4), (0, 20, 4), (0, 4, 1)]), *pool, *SECONDS, "workload.concurrency=1")
    )
    assert [row["status"] for row in rows] == ["finished", "rejected", "rejected", "finished"]
    assert [row["arrival_s"] for row in rows] == [0, 2, 2, 2]
    assert rows[3]["finish_s"] == 3


def test_places_that_are_never_short_change_nothing(simulate: Simulate, tmp_path: Path) -> None:
    options = ["workload.num_requests=60", "workload.rate=20", "memory.num_blocks=400"]
    tables = [
        (simulate(*options, f"workload.concurrency={places}") / "requests.parquet").read_bytes()
        for places in ("null", 60)
    ]
    assert tables[0] == tables[1]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.0, 0.5, 3.0]), st.integers(1, 9)), min_size=1, max_size=30),
    st.integers(1, 6),
)
def test_requests_are_sent_in_order_and_as_soon_as_there_is_a_place(
    wanted: list[tuple[float, int]], concurrency: int
) -> None:
    # Each is served alone for a whole number of seconds. What is expected is worked out from the definition: the k-th
    # takes the place that is free first.
    own, clock = [], 0.0
    for gap, _ in wanted:
        clock += gap
        own.append(clock)
    free = [0.0] * concurrency
    expected = []
    for arrival, (_, seconds) in zip(own, wanted, strict=True):
        free.sort()
        expected.append(max(arrival, free[0]))
        free[0] = expected[-1] + seconds
    stream: Iterator[Request] = (Request(k, arrival, 1, 1) for k, arrival in enumerate(own))
    loop = ClosedLoop(stream, concurrency)
    ends: list[tuple[float, Request]] = []
    sent = []
    while ends or loop.next_s < math.inf:
        now = min((end for end, _ in ends), default=math.inf)
        if loop.next_s <= now:
            for request in loop.until(loop.next_s):
                sent.append(request.arrival_s)
                ends.append((request.arrival_s + wanted[request.request_id][1], request))
        else:
            loop.ended([request for end, request in ends if end == now], now)
            ends = [(end, request) for end, request in ends if end > now]
        assert len(ends) <= concurrency
    assert sent == expected


def test_no_more_is_read_than_can_be_sent() -> None:
    read = []

    def stream() -> Iterator[Request]:
        for number in range(100):
            read.append(number)
            yield Request(number, 0.0, 1, 1)

    loop = ClosedLoop(stream(), 3)
    assert len(list(loop.until(1e9))) == 3
    assert len(read) == 4  # the one that is next, and waits


@pytest.mark.parametrize("places", [0, -1])
def test_fewer_than_one_place_is_refused(places: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        f"workload.concurrency is {places}; expected a whole number of at least 1, or null for clients that wait for "
        "nobody."
    )
    with pytest.raises(UserError) as error:
        ClosedLoop(iter([]), places)
    assert str(error.value) == line
    assert main(["sim", "plots=false", f"hydra.run.dir={tmp_path}", f"workload.concurrency={places}"]) == 2
    assert capsys.readouterr().err == f"kvtwin: {line}\n"
