"""TensorRT-LLM's two capacity policies: cases worked out on paper, its rules written down once more, and the laws.

The rules are those of `capacityScheduler.cpp` (1.0): here as passes over one list of requests in order of arrival, as
they stand there, and without queues.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_runs import LIMIT, limited_requests, serve_audited
from pool_audit import audit_paged
from test_leap import assert_same, observed
from test_tgi import batches
from test_tiny_cases import State, check, request

from sim.memory.paged import PagedMemory
from sim.recorder import Record
from sim.scheduler.continuous import ContinuousBatching
from sim.scheduler.no_evict import GuaranteedNoEvict
from sim.scheduler.queues import Fcfs
from sim.sequence import Sequence
from workloads.errors import UserError
from workloads.request import Request, TokenIds
from workloads.sampling import ParallelSampling

Simulate = Callable[..., Path]


def pool(blocks: int, block_size: int = 2, prefix_caching: bool = False) -> PagedMemory:
    return PagedMemory(blocks, block_size, prefix_caching=prefix_caching, num_reserved_blocks=0)


def no_evict(blocks: int, budget: int = 64, chunked: bool = False, block_size: int = 2) -> GuaranteedNoEvict:
    return GuaranteedNoEvict(pool(blocks, block_size), 64, Fcfs(), 8, budget, chunked)


def max_utilization(blocks: int) -> ContinuousBatching:
    return ContinuousBatching(pool(blocks), 64, Fcfs(), 8, 64, chunked_prefill=False)


# ------------------------------------------------------------------------------------------------- GUARANTEED_NO_EVICT


def test_nobody_comes_in_who_could_not_run_to_the_end() -> None:
    # 5 blocks of 2. A: ceil((3 + 3) / 2) = 3 blocks by its limit, and stores 5. B: ceil((2 + 4) / 2) = 3, and stores 2.
    a, b = request("A", 3, 3), request("B", 2, 1)._replace(max_tokens=4)
    check(
        no_evict(5),  # type: ignore[arg-type]
        {1: [a, b]},
        [
            # A holds 2 and may take 1 more: B's 3 and that 1 are more than the 3 that are free.
            State("A3", {"A": [0, 1]}, (3, 1, 0, 0, 0, 6), [2, 3, 4], waiting="B", new="A"),
            State("A1", {"A": [0, 1]}, (4, 0, 0, 0, 0, 6), [2, 3, 4], waiting="B"),
            # A has taken its last block: 3 against 2.
            State("A1", {"A": [0, 1, 2]}, (5, 0, 1, 0, 0, 4), [3, 4], waiting="B", done="A"),
            State("B2", {"B": [2]}, (2, 0, 0, 0, 0, 8), [1, 0, 3, 4], new="B", done="B"),
        ],
    )


def test_prompts_and_decodes_share_a_step_and_its_budget() -> None:
    # A budget of 8: A's 6 and B's 2; then a decode of each leaves 6 for C, whose 7 have to wait for an end.
    a, b, c = request("A", 6, 3), request("B", 2, 9), request("C", 7, 2)
    assert batches(no_evict(40, budget=8), {1: [a, b, c]}, 4) == ["A6 B2", "A1 B1", "A1 B1", "B1 C7"]


def test_a_chunked_context_is_computed_in_whole_blocks() -> None:
    # Blocks of 4, 11 tokens a step. A's 4, and of C's 17 the 7 left: one block. Then 10 beside A's decode: two blocks.
    # Then its last 5.
    a, c = request("A", 4, 9), request("C", 17, 2)
    engine = no_evict(40, budget=11, chunked=True, block_size=4)
    assert batches(engine, {1: [a, c]}, 4) == ["A4 C4", "A1 C8", "A1 C5", "A1 C1"]


def test_a_huge_limit_keeps_others_waiting_though_memory_is_free() -> None:
    # NVIDIA/TensorRT-LLM#1012 and #2866: 20 blocks of 2. A generates 2 tokens but may generate 34: 18 blocks by its
    # limit. B's 3 wait, though A holds 1.
    a, b = request("A", 2, 2)._replace(max_tokens=34), request("B", 2, 4)
    assert batches(no_evict(20), {1: [a, b]}, 3) == ["A2", "A1", "B2"]
    assert batches(max_utilization(20), {1: [a, b]}, 2) == ["A2 B2", "A1 B1"]
    assert no_evict(17).arrive(a)[1] == "may need 18 blocks of 2 by its limit, the pool has 17"


def test_a_hit_that_others_hold_is_not_needed_again() -> None:
    # Blocks of 2, limits of 6, 3 blocks each. A holds 2 full blocks of its prompt and may take 1 more. B begins with
    # the same 4 tokens: 2 of its 3 are there, and 1 and A's 1 have to be free. Without reuse it would be 3 and 1.
    ids = TokenIds((1, 2, 3, 4, 5))
    both = [Request(0, 0.0, 4, 2, prompt=ids), Request(1, 0.0, 5, 1, prompt=ids)]
    for blocks, caching, first_step in [(4, True, "A4 B1"), (3, True, "A4"), (5, False, "A4"), (6, False, "A4 B5")]:
        engine = GuaranteedNoEvict(pool(blocks, prefix_caching=caching), 64, Fcfs(), 8, 64)
        assert batches(engine, {1: both}, 1) == [first_step]


def test_what_it_cannot_serve_is_said_in_one_line() -> None:
    with pytest.raises(UserError, match="asks for 2 outputs of one prompt"):
        no_evict(9).arrive(Request(0, 0.0, 1, 1, sampling=ParallelSampling(2)))
    with pytest.raises(UserError, match=r"is 7, too few for a decode of scheduler\.max_num_seqs=8; choose at least"):
        no_evict(9, budget=7)
    assert no_evict(40, budget=8).arrive(request("A", 9, 2))[1] == (
        "prompt of 9 tokens exceeds scheduler.max_num_batched_tokens 8 without chunks"
    )


def rules_of_no_evict(memory: PagedMemory, live: list[Sequence], head: Sequence | None, seats: int) -> None:
    """Of a plan without sharing and chunks: what all may take fits the pool, and with the head it would not."""

    def most(sequence: Sequence) -> int:
        asked = sequence.request.prompt_tokens + (sequence.request.max_tokens or 0)
        return -(-max(min(asked, LIMIT), sequence.final) // memory.block_size)

    promised = sum(map(most, live))
    assert promised <= memory.num_blocks
    if head is not None and len(live) < seats:
        assert promised + most(head) > memory.num_blocks


@settings(max_examples=40, deadline=None)
@given(
    limited_requests(), st.integers(12, 60), st.sampled_from([1, 2, 4]), st.booleans(), st.booleans(), st.integers(1, 8)
)
def test_no_evict_keeps_its_promise_and_lets_in_whoever_it_can(requests, blocks, size, caching, chunked, seats) -> None:
    memory = pool(blocks, size, caching)
    budget = 16 if chunked else 1000  # which never keeps anybody out
    engine = GuaranteedNoEvict(memory, LIMIT, Fcfs(), seats, budget, chunked)
    audit = partial(audit_paged, memory)

    def audit_rules(live: list[Sequence], head: Sequence | None) -> None:
        audit(live, head)
        planned = live and all(one.computed == one.known for one in live)  # once committed, some may have ended
        if planned and not caching and not chunked:
            rules_of_no_evict(memory, live, head, seats)

    assert serve_audited(engine, requests, audit_rules)["preemptions"] == 0
    assert memory.num_free_blocks == blocks


@settings(max_examples=40, deadline=None)
@given(
    limited_requests(), st.integers(12, 40), st.sampled_from([1, 2, 4]), st.booleans(), st.booleans(), st.integers(1, 8)
)
def test_a_run_of_no_evict_that_leaps_equals_one_that_steps(requests, blocks, size, caching, chunked, seats) -> None:
    runs = []
    for leap in (True, False):
        memory = pool(blocks, size, caching)
        engine = GuaranteedNoEvict(memory, LIMIT, Fcfs(), seats, 16 if chunked else LIMIT, chunked, leap=leap)
        runs.append(observed(memory, engine, requests, Record()))  # type: ignore[arg-type]
    assert_same(*runs)


# ----------------------------------------------------------------------------------------------------- MAX_UTILIZATION


@dataclass
class Active:
    """A request as MAX_UTILIZATION sees it."""

    number: int
    known: int
    final: int
    blocks: int = 0  # 0: not started, or paused
    started: bool = False


class MaxUtilizationOnPaper:
    """One list of requests in order of arrival; a pass decides who has blocks for this step and who is paused."""

    def __init__(self, blocks: int, size: int, seats: int, budget: int) -> None:
        self.blocks, self.size, self.seats, self.budget = blocks, size, seats, budget
        self.active: list[Active] = []

    def step(self) -> tuple[list[int], list[int]]:
        """Numbers of those who compute, and of those who are paused."""
        free = self.blocks - sum(one.blocks for one in self.active)
        scheduled: list[Active] = []
        paused: list[Active] = []
        index, end = 0, len(self.active)
        while index < end:
            one = self.active[index]
            need = -(-one.known // self.size) - one.blocks
            if len(scheduled) < self.seats and need <= free:
                free -= need
                scheduled.append(one)
                index += 1
                continue
            last = next((place for place in reversed(range(index, end)) if self.active[place].started), None)
            if last is None:
                break
            victim = self.active[last]
            free += victim.blocks
            victim.blocks, victim.started = 0, False
            paused.append(victim)
            end = last
        batch, left = [], self.budget
        for one in scheduled:  # a prompt that exceeds the tokens left waits, and so does whoever is behind it
            tokens = 1 if one.started else one.known
            if tokens > left:
                break
            left -= tokens
            batch.append(one)
        for one in batch:
            one.blocks, one.started = -(-one.known // self.size), True
            one.known += 1
        self.active = [one for one in self.active if one.known < one.final]
        return [one.number for one in batch], [one.number for one in paused]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=16),
    st.integers(0, 30),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 8),
    st.sampled_from([40, 64]),
)
def test_max_utilization_decides_as_its_rules_on_paper(rows, spare, size, seats, budget) -> None:
    blocks = -(-40 // size) + spare // size
    memory = pool(blocks, size)
    engine = ContinuousBatching(memory, 64, Fcfs(), seats, budget, chunked_prefill=False)
    paper = MaxUtilizationOnPaper(blocks, size, seats, budget)
    gaps, number = list(rows), 0
    wait = gaps[0][0]
    while gaps or not engine.idle:
        while gaps and wait == 0:
            _, prompt, output = gaps.pop(0)
            assert engine.arrive(Request(number, float(number), prompt, output))[1] is None
            paper.active.append(Active(number, prompt, prompt + output))
            number += 1
            wait = gaps[0][0] if gaps else 0
        wait = max(0, wait - 1)
        plan = engine.schedule()
        computed, paused = paper.step()
        assert [one.request.request_id for one, _ in plan.batch] == computed
        assert [each.victim.request.request_id for each in plan.preemptions] == paused
        engine.commit(plan)
    assert not paper.active


# -------------------------------------------------------------------------------------------------------------- presets


@pytest.mark.parametrize("policy", ["no_evict", "max_utilization"])
def test_the_presets_serve(simulate: Simulate, policy: str) -> None:
    folder = simulate(f"engine=tensorrt_llm_{policy}", "workload=synthetic", "workload.num_requests=50")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["completed"], summary["block_size"]) == ("complete", 50, 32)


# ----------------------------------------------------------------------------------------------------------- experiment


@pytest.fixture(scope="module")
def points(simulate: Simulate) -> Callable[[str, int, str], dict[str, float]]:
    """The summary of a point of the experiment, with 200 requests: policy, blocks, what clients allow."""

    def summary(policy: str, blocks: int, allowed: str) -> dict[str, float]:
        options = [f"engine=tensorrt_llm_{policy}", f"memory.num_blocks={blocks}", f"workload.max_tokens={allowed}"]
        folder = simulate("experiment=tensorrt_llm_policies", "workload.num_requests=200", *options)
        values: dict[str, float] = json.loads((folder / "summary.json").read_text())
        assert values["completed"] == 200
        return values

    return summary


Points = Callable[[str, int, str], dict[str, float]]


def test_without_pressure_the_policies_are_the_same(points: Points) -> None:
    figures = [
        {
            name: value
            for name, value in points(policy, 10000, allowed).items()
            if name not in ("engine", "request_rate")
        }
        for policy in ("no_evict", "max_utilization")
        for allowed in ("null", "2048")
    ]
    assert figures[0]["preemptions"] == 0
    assert all(other == figures[0] for other in figures[1:])


def test_under_pressure_one_queues_and_the_other_pauses(points: Points) -> None:
    queues, pauses = points("no_evict", 500, "null"), points("max_utilization", 500, "null")
    assert queues["preemptions"] == queues["tokens_recomputed"] == 0
    assert pauses["preemptions"] > 0
    assert pauses["tokens_recomputed"] > 0
    assert pauses["mean_running"] > queues["mean_running"]
    assert pauses["mean_waiting"] < queues["mean_waiting"]
    # What is computed again shows in the tokens of all steps; reuse takes some of it off.
    assert pauses["scheduled_tokens"] > queues["scheduled_tokens"]


def test_only_no_evict_cares_what_clients_allow(points: Points) -> None:
    # NVIDIA/TensorRT-LLM#1012, #2866: few run though memory is free. 2,048 allowed tokens alone are 64 of 500 blocks.
    modest, huge = points("no_evict", 500, "null"), points("no_evict", 500, "2048")
    assert huge["mean_running_saturated"] < 0.6 * modest["mean_running_saturated"]
    assert huge["mean_running_saturated"] < 500 / 65
    assert huge["share_used"] < modest["share_used"]
    assert huge["output_throughput"] < modest["output_throughput"]
    for name in ("output_throughput", "preemptions", "mean_running"):
        assert points("max_utilization", 500, "null")[name] == points("max_utilization", 500, "2048")[name]
