"""LightLLM's peak, worked out on paper and by looking at every step to come, and the laws that every policy keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_runs import LIMIT, limited_requests, serve_audited
from pool_audit import audit_paged
from test_leap import assert_same, observed
from test_tgi import batches
from test_tiny_cases import request

from sim.memory.paged import PagedMemory
from sim.recorder import Record
from sim.scheduler.lightllm import Forecast, LightLLM
from sim.scheduler.queues import Fcfs
from workloads.errors import UserError
from workloads.request import Request
from workloads.sampling import ParallelSampling


def pool(slots: int) -> PagedMemory:
    return PagedMemory(slots, 1, prefix_caching=False, num_reserved_blocks=0)


def lightllm(slots: int, every: int = 1, prefill: int = 64, limit: int = 64) -> LightLLM:
    return LightLLM(pool(slots), limit, Fcfs(), max_num_batched_tokens=prefill, router_max_wait_tokens=every)


# A has 10 tokens and 5 left, B 4 and 8, C 7 and 2. Most left first: B, A, C.
#   k = 1: 8 * 1 + 4 = 12;   k = 2: 5 * 2 + 4 + 10 = 24;   k = 3: 2 * 3 + 4 + 10 + 7 = 27.
THREE = [request("A", 9, 7), request("B", 3, 10), request("C", 6, 4)]


def test_the_peak_of_three_requests() -> None:
    forecast = Forecast()
    for tokens, limit, peak, steps in [(10, 16, 15, 5), (4, 13, 24, 5), (7, 10, 27, 2)]:
        forecast.add(tokens, limit)
        forecast.look_ahead()
        assert (forecast.peak, forecast.until_peak) == (peak, steps)


def test_three_requests_come_in_if_their_peak_is_below_the_pool() -> None:
    assert batches(lightllm(28), {1: THREE}, 2) == ["A9 B3 C6", "A1 B1 C1"]
    # 27 is not below 27: C waits. A step later its end would meet A with 13 and B with 7: 9 + 13 + 7 = 29. Only when A
    # is done, after 7 tokens, are B's 10 + 2 and C's 7 + 2 together below.
    assert batches(lightllm(27), {1: THREE}, 9) == ["A9 B3", *["A1 B1"] * 6, "C6", "B1 C1"]


def test_a_limit_above_the_output_keeps_others_out() -> None:
    # The same three, but B's client allows 30 tokens: 4 + 28 = 32 by itself, and 14 + 5 * 2, 21 + 2 * 3 as before.
    a, b, c = THREE
    b = b._replace(max_tokens=30)
    assert batches(lightllm(33), {1: [a, b, c]}, 1) == ["A9 B3 C6"]
    assert lightllm(32).arrive(b)[1] == "may hold 32 tokens at its end; the pool must have more, and has 32"


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=12))
def test_the_peak_is_the_most_that_any_step_holds(entries: list[tuple[int, int]]) -> None:
    # Looked at step by step: whoever has `left` steps left holds one more token in each of them, and then nothing.
    forecast = Forecast()
    for tokens, left in entries:
        forecast.add(tokens, tokens + left + 1)
    forecast.look_ahead()
    held = [sum(tokens + step for tokens, left in entries if left >= step) for step in range(31)]
    assert forecast.peak == max(held)
    assert held[forecast.until_peak] == max(held)


def test_the_router_looks_at_the_queue_every_so_many_decodes() -> None:
    # C arrives before the third step. Looks are after 3 decodes, in steps 5 and 8.
    a, b, c = request("A", 2, 20), request("B", 2, 20), request("C", 2, 9)
    late = batches(lightllm(99, every=3), {1: [a, b], 3: [c]}, 6)
    assert late == ["A2 B2", "A1 B1", "A1 B1", "A1 B1", "C2", "A1 B1 C1"]
    later = batches(lightllm(99, every=3), {1: [a, b], 6: [c]}, 8)
    assert later == ["A2 B2", *["A1 B1"] * 6, "C2"]


def test_prompts_of_one_prefill_stay_within_its_budget() -> None:
    four = [request(letter, 4, 9) for letter in "ABCD"]
    assert batches(lightllm(200, prefill=9), {1: four}, 3) == ["A4 B4", "A1 B1", "C4 D4"]
    assert lightllm(200, prefill=9).arrive(request("A", 10, 2))[1] == (
        "prompt of 10 tokens exceeds scheduler.max_num_batched_tokens 9, and is not split"
    )


def test_a_decode_looks_up_one_table_entry_for_each_token() -> None:
    engine = lightllm(99)
    for each in THREE:
        engine.arrive(each)
    engine.commit(engine.schedule())
    # 10 + 4 + 7 tokens, each in a block of its own.
    work = engine.schedule().work
    assert (work.decode_blocks, work.decode_context) == (21, 21)


def test_what_it_cannot_serve_is_said_in_one_line() -> None:
    with pytest.raises(UserError, match="asks for 2 outputs of one prompt"):
        lightllm(50).arrive(Request(0, 0.0, 1, 1, sampling=ParallelSampling(2)))
    with pytest.raises(UserError, match="block_size is 2, but the peak is predicted in tokens; choose 1"):
        LightLLM(PagedMemory(50, 2), 64, Fcfs())


options = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 12),
        "max_num_batched_tokens": st.sampled_from([30, 48]),
        "router_max_wait_tokens": st.integers(1, 10),
    }
)


@settings(max_examples=50, deadline=None)
@given(limited_requests(), st.integers(50, 200), options)
def test_growth_never_fails_and_everyone_finishes(requests, slots, rules) -> None:
    memory = pool(slots)
    engine = LightLLM(memory, LIMIT, Fcfs(), **rules)
    assert serve_audited(engine, requests, partial(audit_paged, memory))["preemptions"] == 0
    assert memory.num_free_blocks == slots


@settings(max_examples=50, deadline=None)
@given(limited_requests(), st.integers(50, 120), options)
def test_a_run_that_leaps_equals_one_that_steps(requests, slots, rules) -> None:
    runs = []
    for leap in (True, False):
        memory = pool(slots)
        runs.append(observed(memory, LightLLM(memory, LIMIT, Fcfs(), leap=leap, **rules), requests, Record()))  # type: ignore[arg-type]
    assert_same(*runs)


def test_leaps_go_over_looks_at_the_queue_that_are_in_vain() -> None:
    # B, 30 + 30, does not fit beside A, 4 + 50, in 60 slots; the router looks every second step and would not see that
    # change for most of A's 49 decodes.
    memory = pool(61)
    requests = [Request(0, 0.0, 4, 50), Request(1, 0.0, 30, 30)]
    engine = LightLLM(memory, 64, Fcfs(), router_max_wait_tokens=2, leap=True)
    run = observed(memory, engine, requests, Record())  # type: ignore[arg-type]
    joined = max(row["first_scheduled_s"] for row in run["requests"])
    before = [row for row in run["steps"] if row["start_s"] < joined]
    assert sum(row["repeat"] for row in before) > 25
    assert len(before) < 12


def test_the_preset_serves_without_internal_fragmentation(simulate: Callable[..., Path]) -> None:
    folder = simulate("engine=lightllm", "workload=synthetic", "workload.num_requests=50", "workload.max_tokens=512")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["completed"], summary["preemptions"]) == ("complete", 50, 0)
    assert summary["share_internal"] == summary["share_reserved"] == 0
    assert summary["share_used"] > 0
