"""All blocks that a limit may need, taken at admission: what is set aside, and that all else stays as it was."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from policy_runs import LIMIT, limited_requests, serve_audited
from pool_audit import BlockContents, audit_paged
from test_leap import assert_same, observed

from sim.memory.paged import PagedMemory
from sim.memory.reservation import LimitReservation
from sim.recorder import Record
from sim.scheduler.continuous import ContinuousBatching
from sim.scheduler.queues import Fcfs
from sim.sequence import Sequence
from workloads.request import Request


def test_the_limit_is_what_the_client_allows_less_the_last_token() -> None:
    # 10 + 30 allowed within 64: 39 slots; within 32: 31. Who asks for what is generated: 10 + 5 - 1.
    allowed = Sequence.of(Request(0, 0.0, 10, 5, max_tokens=30), 64)
    assert LimitReservation().tokens(allowed, 64) == 39
    assert LimitReservation().tokens(allowed, 32) == 31
    assert LimitReservation().tokens(Sequence.of(Request(0, 0.0, 10, 5), 64), 64) == 14


def reserving(blocks: int, size: int) -> PagedMemory:
    return PagedMemory(blocks, size, reservation=LimitReservation(), max_model_len=LIMIT)


@settings(max_examples=40, deadline=None)
@given(limited_requests(), st.integers(50, 90), st.sampled_from([1, 2, 4]))
def test_blocks_set_aside_are_cached_as_they_are_filled(requests, blocks, size) -> None:
    memory = reserving(blocks, size)
    contents = BlockContents()

    def audit(live: list[Sequence], head: Sequence | None) -> None:
        audit_paged(memory, live, head)
        contents.look(memory, live, seen_all=False)

    engine = ContinuousBatching(memory, LIMIT, Fcfs(), 6, 30)
    assert serve_audited(engine, requests, audit)["preemptions"] == 0


@settings(max_examples=60, deadline=None)
@given(limited_requests(), st.integers(50, 90), st.sampled_from([1, 2, 4]))
def test_a_run_with_blocks_set_aside_that_leaps_equals_one_that_steps(requests, blocks, size) -> None:
    runs = []
    for leap in (True, False):
        memory = reserving(blocks, size)
        runs.append(observed(memory, ContinuousBatching(memory, LIMIT, Fcfs(), 6, 30, leap=leap), requests, Record()))
    assert_same(*runs)
