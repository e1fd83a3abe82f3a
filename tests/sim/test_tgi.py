"""TGI's rules, worked out on paper, and the laws that every policy keeps."""

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
from test_tiny_cases import State, check, letters, request

from sim.memory.paged import PagedMemory
from sim.memory.reservation import LimitReservation
from sim.recorder import Record
from sim.scheduler.base import Scheduler
from sim.scheduler.queues import Fcfs
from sim.scheduler.tgi import TextGenerationInference
from workloads.errors import UserError
from workloads.request import Request
from workloads.sampling import ParallelSampling


def pool(usable: int, block_size: int = 2, limit: int = 64) -> PagedMemory:
    """Blocks numbered from 1; block 0 is for health checks."""
    return PagedMemory(
        usable + 1, block_size, prefix_caching=False, reservation=LimitReservation(), max_model_len=limit
    )


def tgi(usable: int, prefill: int = 64, ratio: float = 0.3, patience: int = 20) -> TextGenerationInference:
    return TextGenerationInference(
        pool(usable),
        64,
        Fcfs(),
        max_num_batched_tokens=prefill,
        waiting_served_ratio=ratio,
        max_waiting_tokens=patience,
    )


def batches(engine: Scheduler, arrivals: dict[int, list[Request]], steps: int) -> list[str]:
    """Who computes how many tokens in each step; `arrivals` says who joins before which, the first being 1."""
    seen = []
    for number in range(1, steps + 1):
        for newcomer in arrivals.get(number, []):
            engine.arrive(newcomer)
        plan = engine.schedule()
        seen.append(" ".join(f"{letters([sequence])}{tokens}" for sequence, tokens in plan.batch))
        engine.commit(plan)
    return seen


def test_all_blocks_are_taken_at_admission_and_a_prefill_pauses_those_who_run() -> None:
    # 5 blocks of 2. TGI takes input + max_new_tokens - 1 slots: A 3 + 4 - 1 = 6 in 3 blocks, B 2 + 3 - 1 = 4 in 2, C 1
    # in 1. A stores 3 + 2 - 1 = 4 of its 6, B all 4, C 1 of 2.
    a = request("A", 3, 2)._replace(max_tokens=4)
    b, c = request("B", 2, 3), request("C", 1, 1)
    engine = tgi(5)
    check(
        engine,
        {1: [a, b, c]},
        [
            # Stored 3 + 2; of A's 6 slots 2 are never filled. C finds no block.
            State("A3 B2", {"A": [1, 2, 3], "B": [4, 5]}, (5, 3, 2, 0, 0, 0), [], waiting="C", new="AB"),
            State("A1 B1", {"A": [1, 2, 3], "B": [4, 5]}, (7, 1, 2, 0, 0, 0), [], waiting="C", done="A"),
            # One waits, and int(1 * 0.3) = 0 must wait for the one that runs: C comes in, and B pauses.
            State("C1", {"B": [4, 5], "C": [3]}, (4, 1, 1, 0, 0, 4), [2, 1], new="C", done="C"),
            State("B1", {"B": [4, 5]}, (4, 0, 0, 0, 0, 6), [3, 2, 1], done="B"),
        ],
    )


def test_few_wait_for_more_or_for_twenty_decodes() -> None:
    # Half as many must wait as run. A to D run from step 1, E comes alone: 1 < 2. Tokens since the last prefill are 1
    # after it, 2 after step 2, 3 after step 3: as many as max_waiting_tokens, so in step 4 one is enough.
    first = [request(letter, 1, 9) for letter in "ABCD"]
    alone = batches(tgi(40, ratio=0.5, patience=3), {1: first, 2: [request("E", 2, 9)]}, 5)
    everyone = "A1 B1 C1 D1"
    assert alone == [everyone, everyone, everyone, "E2", f"{everyone} E1"]
    # With F there are two, and both come in at once.
    both = batches(tgi(40, ratio=0.5, patience=3), {1: first, 2: [request("E", 2, 9), request("F", 3, 9)]}, 3)
    assert both == [everyone, "E2 F3", f"{everyone} E1 F1"]


def test_those_who_wait_come_in_together_or_not_at_all() -> None:
    # A to D take 9 slots, 5 blocks, each; of 27 blocks 7 are left. E fits, F does not, and two are needed: neither
    # comes in before max_waiting_tokens have passed, and then E alone.
    first = [request(letter, 1, 9) for letter in "ABCD"]
    late = [request("E", 2, 8), request("F", 3, 9)]
    everyone = "A1 B1 C1 D1"
    assert batches(tgi(27, ratio=0.5, patience=3), {1: first, 2: late}, 4) == [everyone, everyone, everyone, "E2"]


def test_after_one_pause_comes_a_decode() -> None:
    # One prompt fits a prefill of 4 tokens. With nobody running yet B follows A at once; then those who run have
    # paused once, and decode before C comes in, and before D does.
    four = [request(letter, 4, 9) for letter in "ABCD"]
    assert batches(tgi(60, prefill=4), {1: four}, 7) == [
        "A4",
        "B4",
        "A1 B1",
        "C4",
        "A1 B1 C1",
        "D4",
        "A1 B1 C1 D1",
    ]


def test_the_prefill_budget_is_rounded_up_to_whole_blocks() -> None:
    # Blocks of 2: a budget of 3 becomes 4.
    assert batches(tgi(40, prefill=3), {1: [request("A", 2, 2), request("B", 2, 2)]}, 1) == ["A2 B2"]
    assert tgi(40, prefill=3).arrive(request("A", 5, 2))[1] == (
        "prompt of 5 tokens exceeds scheduler.max_num_batched_tokens 3, and is not split"
    )


def test_many_small_requests_meet_the_token_budget_before_the_blocks_run_out() -> None:
    # Each allows 3 tokens and stores 2, one block. The router counts 3 each of the (10 + 1) * 2 = 22 tokens that it
    # believes to be left: 7 come in, though there are 10 blocks.
    many = [request(letter, 1, 2) for letter in "ABCDEFGHIJ"]
    assert batches(tgi(10), {1: many}, 1) == ["A1 B1 C1 D1 E1 F1 G1"]


def test_who_could_never_finish_is_turned_away() -> None:
    # 4 blocks are 8 slots: 2 + 8 - 1 = 9 do not fit, though its 2 true tokens would.
    assert tgi(4).arrive(Request(0, 0.0, 2, 2, max_tokens=8))[1] == "needs 5 blocks of 2 at its end, the pool has 4"
    with pytest.raises(UserError, match="asks for 2 outputs of one prompt, which this engine serves as that many"):
        tgi(4).arrive(Request(0, 0.0, 1, 1, sampling=ParallelSampling(2)))


options = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 8),
        "max_num_batched_tokens": st.sampled_from([30, 48]),
        "waiting_served_ratio": st.sampled_from([0.0, 0.3, 1.2, 3.0]),
        "max_waiting_tokens": st.integers(1, 7),
    }
)


@settings(max_examples=50, deadline=None)
@given(limited_requests(), st.integers(6, 60), st.sampled_from([1, 2, 8]), options)
def test_every_slot_is_accounted_for_and_everyone_finishes(requests, blocks, block_size, rules) -> None:
    memory = pool(blocks, block_size, LIMIT)
    engine = TextGenerationInference(memory, LIMIT, Fcfs(), **rules)
    assert serve_audited(engine, requests, partial(audit_paged, memory))["preemptions"] == 0
    assert memory.num_free_blocks == blocks


@settings(max_examples=50, deadline=None)
@given(limited_requests(), st.integers(6, 60), st.sampled_from([1, 2, 8]), options)
def test_a_run_that_leaps_equals_one_that_steps(requests, blocks, block_size, rules) -> None:
    runs = []
    for leap in (True, False):
        memory = pool(blocks, block_size, LIMIT)
        engine = TextGenerationInference(memory, LIMIT, Fcfs(), leap=leap, **rules)
        runs.append(observed(memory, engine, requests, Record()))  # type: ignore[arg-type]
    assert_same(*runs)


def test_a_leap_ends_when_few_have_waited_long_enough() -> None:
    # As above, E alone: of A to D's decodes only those up to max_waiting_tokens may be one leap.
    four = [Request(number, 0.0, 1, 30) for number in range(4)]
    runs = []
    for leap in (True, False):
        memory = pool(100)
        engine = TextGenerationInference(memory, 64, Fcfs(), waiting_served_ratio=0.5, max_waiting_tokens=9, leap=leap)
        runs.append(observed(memory, engine, [*four, Request(4, 0.35, 2, 9)], Record()))  # type: ignore[arg-type]
    assert_same(*runs)
    # A step takes a little over 0.1 s: the prefill and 8 decodes, which is 9 tokens, and then E.
    (joined,) = (row["first_scheduled_s"] for row in runs[0]["requests"] if row["request_id"] == 4)
    assert sum(row["repeat"] for row in runs[0]["steps"] if row["start_s"] < joined) == 9


def test_leaps_do_happen_while_somebody_waits_for_room() -> None:
    # A takes 4 + 40 - 1 = 43 slots, all 11 blocks; B waits for them, and A's 39 decodes are a few leaps all the same.
    memory = pool(11, 4)
    requests = [Request(0, 0.0, 4, 40), Request(1, 0.0, 4, 2)]
    engine = TextGenerationInference(memory, 64, Fcfs(), max_waiting_tokens=3, leap=True)
    run = observed(memory, engine, requests, Record())  # type: ignore[arg-type]
    assert sum(row["repeat"] for row in run["steps"]) == 40 + 2
    assert len(run["steps"]) <= 12


def test_the_preset_serves_and_reserves_what_clients_allow(simulate: Callable[..., Path]) -> None:
    folder = simulate("engine=tgi", "workload=synthetic", "workload.num_requests=50", "workload.max_tokens=512")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["completed"], summary["preemptions"]) == ("complete", 50, 0)
    # Each stores 1,024 + 128 - 1 tokens; of 1,024 + 512 - 1 = 1,535 slots in 96 blocks, 384 + 1 are never filled.
    held = summary["share_used"] + summary["share_reserved"] + summary["share_internal"]
    assert summary["share_internal"] / held == pytest.approx(385 / 1536, rel=1e-3)
