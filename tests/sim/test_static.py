"""Static batching, worked out on paper, and the laws that every policy keeps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_runs import LIMIT, limited_requests, serve_audited
from pool_audit import NAMES, name_of
from test_leap import assert_same, observed
from test_tgi import batches
from test_tiny_cases import State, check, request

from sim.memory.allocators.exact import ExactSlots
from sim.memory.allocators.fit import FirstFit
from sim.memory.contiguous import ContiguousMemory
from sim.memory.paged import PagedMemory
from sim.memory.reservation import MaxReservation
from sim.plan import StepWork
from sim.plots.latency import latencies
from sim.recorder import Record
from sim.scheduler.queues import Fcfs
from sim.scheduler.static import StaticBatching
from sim.sequence import Sequence
from workloads.errors import UserError
from workloads.request import Request
from workloads.sampling import ParallelSampling

Simulate = Callable[..., Path]
Trace = Callable[..., list[str]]


def pool(slots: int, limit: int) -> ContiguousMemory:
    return ContiguousMemory(slots, limit, MaxReservation(), FirstFit(slots))


FOUR = [request("A", 2, 2), request("B", 1, 3), request("C", 3, 1), request("D", 1, 1)]


def test_a_batch_runs_until_its_longest_member_is_done() -> None:
    # 12 slots and a limit of 4: three members. A stores 3, B 3, C 3 of their 4; a member that is done stores nothing
    # that anybody needs, and all its slots are internal.
    a, b, c = [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]
    check(
        StaticBatching(pool(12, 4), 4, Fcfs()),  # type: ignore[arg-type]
        {1: FOUR},
        [
            State("A2 B1 C3", {"A": a, "B": b, "C": c}, (6, 3, 3, 0, 0, 0), 0, waiting="D", new="ABC"),
            # C is done: 4 internal beside one each of A's and B's.
            State("A1 B1", {"A": a, "B": b}, (5, 1, 6, 0, 0, 0), 0, waiting="D"),
            # So is A. B fills its third slot, and with that all three are returned.
            State("B1", {"B": b}, (3, 0, 9, 0, 0, 0), 0, waiting="D", done="ABC"),
            State("D1", {"D": a}, (1, 0, 3, 0, 0, 8), 8, new="D", done="D"),
        ],
    )


def test_the_work_is_that_of_the_padded_batch() -> None:
    engine = StaticBatching(pool(12, 4), 4, Fcfs())
    for each in FOUR:
        engine.arrive(each)
    works = []
    for _ in range(4):
        plan = engine.schedule()
        works.append(plan.work)
        engine.commit(plan)
    assert works == [
        # Three prompts padded to 3: 9 tokens, and 1 + 2 + 3 pairs each. All three gain a token.
        StepWork(num_sequences=3, num_tokens=9, prefill_tokens=9, prefill_pairs=18, prefill_context=9, num_generated=3),
        # All three read 3 + 1 tokens, though C is done; then 3 + 2, though A is too.
        StepWork(3, 3, decode_sequences=3, decode_context=12, num_generated=2, decode_longest=4),
        StepWork(3, 3, decode_sequences=3, decode_context=15, num_generated=1, decode_longest=5),
        # A prompt of one token counts as a decode, as everywhere.
        StepWork(1, 1, decode_sequences=1, decode_context=1, num_generated=1, decode_longest=1),
    ]


def test_nobody_joins_a_batch_with_room() -> None:
    # B runs in three steps; D comes after the first, while two thirds of the pool are free, and has its own batch.
    engine = StaticBatching(pool(12, 4), 4, Fcfs())
    assert batches(engine, {1: [FOUR[1]], 2: [FOUR[3]]}, 4) == ["B1", "B1", "B1", "D1"]


def test_a_batch_has_at_most_so_many_members() -> None:
    engine = StaticBatching(pool(12, 4), 4, Fcfs(), max_num_seqs=2)
    for each in FOUR:
        engine.arrive(each)
    assert len(engine.schedule().admitted) == 2


def test_results_come_whole_at_the_end_of_the_batch(simulate: Simulate, trace: Trace) -> None:
    # Steps of 1 s. Two requests at once: a prefill and 3 decodes until the first is done. The third comes in between,
    # at 1.5 s, and has its only token a step after that, at 5 s.
    rows = trace([(0, 3, 4), (0, 5, 2), (1.5, 4, 1)])
    folder = simulate("engine=static_batching", *rows, "timing=constant", "timing.step_seconds=1")
    requests = pd.read_parquet(folder / "requests.parquet").sort_values("request_id")
    assert list(requests["finish_s"]) == list(requests["first_token_s"]) == [4, 4, 5]
    assert list(requests["first_scheduled_s"]) == [0, 0, 4]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["mean_ttft_ms"] == summary["mean_e2el_ms"] == pytest.approx((4000 + 4000 + 3500) / 3)
    assert summary["mean_tpot_ms"] is None
    assert summary["mean_itl_ms"] is None
    assert not len(latencies(requests)["TPOT: for each further token"])


def test_the_pool_of_kwon_holds_seven_members(simulate: Simulate) -> None:
    # 15,728 slots, 2,048 each: 7, and 1,392 are left over, 8.9 %, as for Orca (Max).
    folder = simulate(
        "engine=static_batching", "experiment=kwon_fig2", "workload.num_requests=100", "workload/arrivals=all_at_once"
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["completed"], summary["max_running"]) == ("complete", 100, 7)
    assert summary["saturated_share_idle"] == pytest.approx(1392 / 15728)


def test_what_it_cannot_serve_is_said_in_one_line() -> None:
    with pytest.raises(UserError, match="asks for 2 outputs of one prompt"):
        StaticBatching(pool(12, 4), 4, Fcfs()).arrive(Request(0, 0.0, 1, 1, sampling=ParallelSampling(2)))
    with pytest.raises(UserError, match="keeps a region for each member of a batch; choose memory=contiguous"):
        StaticBatching(PagedMemory(12), 4, Fcfs())


@settings(max_examples=50, deadline=None)
@given(limited_requests(), st.integers(LIMIT, 6 * LIMIT), st.integers(1, 8))
def test_every_slot_is_accounted_for_and_everyone_finishes(requests, slots, members) -> None:
    memory = ContiguousMemory(slots, LIMIT, MaxReservation(), ExactSlots(slots))
    engine = StaticBatching(memory, LIMIT, Fcfs(), members)

    def audit(live: list[Sequence], head: Sequence | None) -> None:
        names: dict[int, str] = {}
        for sequence in engine.unfinished():  # those that are done as well
            for place, slot in enumerate(sequence.blocks):
                assert slot not in names, "a slot is in two regions"
                names[slot] = name_of(sequence, place) if sequence in live else "internal"
        found, said = Counter(names.values()), memory.occupancy(head)
        found["idle"] = slots - len(names)
        assert {name: getattr(said, name) for name in NAMES} == {name: found[name] for name in NAMES}

    assert serve_audited(engine, requests, audit)["preemptions"] == 0
    assert memory.num_free_blocks == slots


@settings(max_examples=50, deadline=None)
@given(limited_requests(), st.integers(LIMIT, 6 * LIMIT), st.integers(1, 8))
def test_a_run_that_leaps_equals_one_that_steps(requests, slots, members) -> None:
    runs = []
    for leap in (True, False):
        memory = ContiguousMemory(slots, LIMIT, MaxReservation(), ExactSlots(slots))
        engine = StaticBatching(memory, LIMIT, Fcfs(), members, leap=leap)
        runs.append(observed(memory, engine, requests, Record()))  # type: ignore[arg-type]
    assert_same(*runs)
