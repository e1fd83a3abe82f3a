"""Scheduler and memory under random arrivals: whatever happens, every slot is accounted for and every request ends.

The account is kept by `pool_audit.py`, which knows the definitions but none of the policies' sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from pool_audit import (
    BlockContents,
    ContiguousRules,
    audit_contiguous,
    audit_paged,
    fits_aligned,
    fits_anywhere,
    fits_run,
    next_power_of_two,
)

from sim.memory.allocators.buddy import Buddy
from sim.memory.allocators.exact import ExactSlots
from sim.memory.allocators.fit import BestFit, FirstFit, NextFit
from sim.memory.contiguous import ContiguousMemory
from sim.memory.paged import PagedMemory
from sim.memory.reservation import MaxReservation, OracleReservation, Pow2Reservation
from sim.plan import StepPlan, StepWork
from sim.scheduler.continuous import ContinuousBatching
from sim.scheduler.queues import Fcfs, Priority
from sim.sequence import Sequence
from workloads.request import HashIds, Request, TokenIds

LIMIT = 24  # tokens of one request
ENOUGH_STEPS = 4_000  # far more than any of these workloads takes


class AuditedRun:
    """A scheduler and its memory, audited before and after each plan's tokens are applied.

    Args:
        engine: with nothing in it.
        twin: decides the same, but step by step; None if there is nothing to compare with.
        audit: given the live sequences, the head of the waiting queue, and whether all blocks that were handed out
            since the last audit are still held, fails if a slot is not what it is said to be.
        each_preemption_pays: whether nobody can be preempted twice without another request having ended or lost its
            blocks in between. True without prefix caching if admission asks for room for all known tokens: what a
            preemption frees is less than the victim needs to come back.
    """

    def __init__(
        self,
        engine: ContinuousBatching,
        twin: ContinuousBatching | None,
        audit: Callable[[list[Sequence], Sequence | None, bool], None],
        each_preemption_pays: bool,
    ) -> None:
        self.engine = engine
        self.arrived: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.preemptions = 0
        self.leaps = 0
        self._twin = twin
        self._audit = audit
        self._each_preemption_pays = each_preemption_pays
        self._turnover: list[Sequence] = []  # who ended or was preempted, in that order

    def arrive(self, request: Request) -> None:
        """Queues a request, unless it can never finish."""
        sequence, reason = self.engine.arrive(request)
        if self._twin:
            assert self._twin.arrive(request)[1] == reason
        if reason is None:
            self.arrived.append(sequence)
        self.audit()

    def step(self, max_steps: int) -> None:
        """One plan, of `max_steps` steps at most, with the laws that hold for any."""
        engine = self.engine
        if engine.idle:
            return
        ran_before = list(engine.running)
        plan = engine.schedule(max_steps)
        batch = engine.full_batch(plan)
        self._check_plan(plan, batch, ran_before)
        # By priority a victim may have been given blocks in the very step that takes them away again.
        self.audit(seen_all=not plan.preemptions)
        gains = {sequence: plan.repeat * (sequence.computed == sequence.known) for sequence, _ in batch}
        known = {sequence: sequence.known for sequence in gains}
        works = [replace(work) for work in plan.works()]
        finished = engine.commit(plan)
        assert {sequence: sequence.known - known[sequence] for sequence in known} == gains
        for sequence in finished:
            assert sequence.known == sequence.final and not sequence.blocks
        self.finished += finished
        self._turnover += finished
        self.leaps += plan.repeat > 1
        if self._twin:
            self._compare(self._twin, works, finished)
        self.audit(seen_all=not (plan.repeat > 1 and finished))

    def audit(self, seen_all: bool = True) -> None:
        """Names every slot."""
        waiting = self.engine.waiting
        assert all(not sequence.blocks for sequence in waiting)
        self._audit(list(self.engine.running), waiting.head() if waiting else None, seen_all)

    def run_out(self, max_steps: int) -> None:
        """Runs until nobody is left; then everybody has all that was asked for, and all blocks are free."""
        for _ in range(ENOUGH_STEPS):
            if self.engine.idle:
                break
            self.step(max_steps)
        assert self.engine.idle, self.engine.explain_stall()
        assert len(self.finished) == len(set(self.finished)) == len(self.arrived)
        for sequence in self.finished:
            request = sequence.request
            assert sequence.generated == min(request.output_tokens, LIMIT - request.prompt_tokens)
        occupancy = self.engine.memory.occupancy(None)
        assert occupancy.idle + occupancy.cached == self.engine.memory.num_slots

    def _check_plan(self, plan: StepPlan, batch: list[tuple[Sequence, int]], ran_before: list[Sequence]) -> None:
        running = self.engine.running
        victims = {preemption.victim for preemption in plan.preemptions}
        scheduled = {sequence for sequence, _ in batch}
        # An oversize request is turned away, so there is always something to do.
        assert batch or plan.preemptions
        assert len(scheduled) == len(batch) and all(tokens > 0 for _, tokens in batch)
        assert plan.work.num_tokens == sum(tokens for _, tokens in batch)
        assert scheduled <= set(running) and not victims & set(running)
        # Whoever runs was let in with the budget that those before left, and they never want more again.
        assert set(ran_before) <= scheduled | victims
        assert not plan.preemptions or not (plan.admitted or plan.resumed)
        for sequence in running:
            assert 0 < sequence.computed <= sequence.known < sequence.final
        for preemption in plan.preemptions:
            victim = preemption.victim
            assert not victim.blocks and victim.computed == 0 and victim in self.engine.waiting
            if self._each_preemption_pays and victim in self._turnover:
                assert self._turnover[-1] is not victim, "preempted twice, and nothing had changed in between"
            self._turnover.append(victim)
        self.preemptions += len(plan.preemptions)

    def _compare(self, twin: ContinuousBatching, works: list[StepWork], finished: list[Sequence]) -> None:
        """A plan of many steps does exactly what its steps do one by one."""
        done: list[Sequence] = []
        for work in works:
            assert not done, "the leap went on beyond the step in which a request ended"
            plan = twin.schedule()
            assert plan.work == work
            done = twin.commit(plan)
        assert [sequence.request for sequence in done] == [sequence.request for sequence in finished]
        assert state(self.engine) == state(twin)


def state(engine: ContinuousBatching) -> list[Any]:
    """Queues, block tables, free list, keys and waste: all that later decisions depend on."""
    memory, waiting = engine.memory, engine.waiting
    assert isinstance(memory, PagedMemory)
    return [
        [(s.request.request_id, s.known, s.computed, list(s.blocks)) for s in engine.running],
        [(s.request.request_id, s.known) for s in waiting],
        memory.free_list(),
        memory.prefix.registered() if memory.prefix else [],
        memory.occupancy(waiting.head() if waiting else None),
    ]


# ----------------------------------------------------------------------------------------------------- the two memories


def paged_run(
    usable: int,
    block_size: int,
    prefix_caching: bool,
    policy: type[Fcfs] | type[Priority],
    leap: bool,
    watermark: float = 0.0,
    **knobs: Any,
) -> AuditedRun:
    """A run over a paged pool with `usable` blocks; one that leaps has a twin that does not."""
    memory, memory_of_twin = (PagedMemory(usable + 1, block_size, watermark, prefix_caching) for _ in range(2))
    engine = ContinuousBatching(memory, LIMIT, policy(), leap=leap, **knobs)
    twin = ContinuousBatching(memory_of_twin, LIMIT, policy(), **knobs) if leap else None
    contents = BlockContents()

    def audit(live: list[Sequence], head: Sequence | None, seen_all: bool) -> None:
        audit_paged(memory, live, head)
        if prefix_caching:
            contents.look(memory, live, seen_all or (policy is Fcfs and not leap))
            if head is not None:
                contents.check_lookup(memory, head)

    pays = not prefix_caching and knobs.get("scheduler_reserve_full_isl", True)
    return AuditedRun(engine, twin, audit, each_preemption_pays=pays)


RESERVATIONS: dict[str, tuple[Any, Callable[[Sequence], int]]] = {
    "max": (MaxReservation(), lambda sequence: LIMIT),
    "oracle": (OracleReservation(), lambda sequence: sequence.final),
    "pow2": (
        Pow2Reservation(),
        lambda sequence: min(
            LIMIT,
            sequence.request.prompt_tokens + next_power_of_two(sequence.final - sequence.request.prompt_tokens),
        ),
    ),
}
ALLOCATORS: dict[str, tuple[Any, Callable[[int], int], Any]] = {
    "buddy": (Buddy, next_power_of_two, fits_aligned),
    "first fit": (FirstFit, lambda blocks: blocks, fits_run),
    "best fit": (BestFit, lambda blocks: blocks, fits_run),
    "next fit": (NextFit, lambda blocks: blocks, fits_run),
    "exact": (ExactSlots, lambda blocks: blocks, fits_anywhere),
}


def contiguous_run(
    num_blocks: int, block_size: int, reservation: str, allocator: str, charge: Any, **knobs: Any
) -> AuditedRun:
    """A run over a contiguous pool."""
    policy, reserves = RESERVATIONS[reservation]
    make, region, fits = ALLOCATORS[allocator]
    memory = ContiguousMemory(num_blocks, LIMIT, policy, make(num_blocks), block_size, charge)
    rules = ContiguousRules(reserves, region, fits, charge)
    engine = ContinuousBatching(memory, LIMIT, Fcfs(), **knobs)

    def audit(live: list[Sequence], head: Sequence | None, seen_all: bool) -> None:
        audit_contiguous(memory, rules, live, head)

    return AuditedRun(engine, None, audit, each_preemption_pays=True)


# ----------------------------------------------------------------------------------------------------- random workloads

KNOBS = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(1, 30),
        "chunked_prefill": st.booleans(),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 1, 3]),
        "long_prefill_token_threshold_adaptive": st.booleans(),
        "scheduler_reserve_full_isl": st.booleans(),
    }
)


@st.composite
def prompts(draw: st.DrawFn, length: int, output: int, number: int, per_id: int) -> TokenIds | HashIds | None:
    """Told by length only, token by token, output and all, or by chained ids; they branch off a common beginning."""
    common = draw(st.integers(0, length))
    match draw(st.sampled_from(["length", "tokens", "output too", "hashes"])):
        case "tokens":
            return TokenIds(tuple(j if j < common else 1000 * number + j for j in range(length)))
        case "output too":
            common, length = 2 * common, length + output
            return TokenIds(tuple(j if j < common else 1000 * number + j for j in range(length)))
        case "hashes":
            num_ids = -(-length // per_id)
            return HashIds(tuple(j if j < common // per_id else 1000 * number + j for j in range(num_ids)), per_id)
    return None


class Serving(RuleBasedStateMachine):
    """Requests come, steps pass."""

    run: AuditedRun
    number: int  # of the next request
    per_id: int  # tokens behind a hash id

    @rule(
        data=st.data(),
        prompt=st.integers(1, LIMIT // 2) | st.integers(1, LIMIT - 1),
        output=st.integers(1, LIMIT),
        priority=st.integers(0, 2),
        count=st.integers(1, 3),
    )
    def requests_arrive(self, data: st.DataObject, prompt: int, output: int, priority: int, count: int) -> None:
        for _ in range(count):
            number = self.number
            self.number += 1
            told = data.draw(prompts(prompt, output, number, self.per_id))
            self.run.arrive(Request(number, float(number), prompt, output, priority, told))

    @rule(count=st.integers(1, 6), max_steps=st.integers(1, 9))
    def steps_pass(self, count: int, max_steps: int) -> None:
        for _ in range(count):
            self.run.step(max_steps)

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.run_out(max_steps=100)
            event(f"leaps: {'some' if self.run.leaps else 'none'}")
            event(f"preemptions: {self.run.preemptions if self.run.preemptions < 3 else 'more'}")


class PagedServing(Serving):
    """Paged memory: pools that hold a few blocks, or just one request of the model limit and a little more."""

    @initialize(
        block_size=st.integers(1, 8),
        tiny=st.integers(1, 8) | st.none(),
        spare=st.integers(0, 3),
        per_id=st.sampled_from(["half", "same", "double"]),
        prefix_caching=st.booleans(),
        policy=st.sampled_from([Fcfs, Priority]),
        leap=st.booleans(),
        watermark=st.sampled_from([0.0, 0.0, 0.1, 0.3]),
        knobs=KNOBS,
    )
    def begin(
        self,
        block_size: int,
        tiny: int | None,
        spare: int,
        per_id: str,
        prefix_caching: bool,
        policy: type[Fcfs] | type[Priority],
        leap: bool,
        watermark: float,
        knobs: dict[str, Any],
    ) -> None:
        self.number = 0
        half = block_size // 2 if block_size % 2 == 0 else 1  # 1 divides any size
        self.per_id = {"half": half, "same": block_size, "double": 2 * block_size}[per_id]
        usable = tiny if tiny is not None else -(-LIMIT // block_size) + spare
        self.run = paged_run(usable, block_size, prefix_caching, policy, leap, watermark, **knobs)


class ContiguousServing(Serving):
    """Each reservation over each allocator."""

    @initialize(
        num_blocks=st.integers(4, 60),
        block_size=st.integers(1, 8),
        reservation=st.sampled_from(sorted(RESERVATIONS)),
        allocator=st.sampled_from(sorted(ALLOCATORS)),
        charge=st.sampled_from(["internal", "external"]),
        knobs=KNOBS,
    )
    def begin(
        self, num_blocks: int, block_size: int, reservation: str, allocator: str, charge: str, knobs: dict[str, Any]
    ) -> None:
        self.number, self.per_id = 0, 4
        self.run = contiguous_run(num_blocks, block_size, reservation, allocator, charge, **knobs)

    def teardown(self) -> None:
        super().teardown()
        assert not hasattr(self, "run") or self.run.preemptions == 0


TestPagedServing = PagedServing.TestCase
TestPagedServing.settings = settings(max_examples=200, stateful_step_count=20, deadline=None)
TestContiguousServing = ContiguousServing.TestCase
TestContiguousServing.settings = settings(max_examples=80, stateful_step_count=20, deadline=None)


# ------------------------------------------------------------------------------------------------------- and by the way


@pytest.mark.parametrize("policy", [Fcfs, Priority])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("full_isl", [True, False])
@pytest.mark.parametrize("leap", [False, True])
def test_growth_preempts_and_everything_still_ends(
    policy: type[Fcfs] | type[Priority], prefix_caching: bool, full_isl: bool, leap: bool
) -> None:
    # 5 blocks of 2 let in three prompts of 3 tokens, 2 blocks each, but no two sequences at their end, 3 + 6 - 1 = 8
    # tokens in 4 blocks each: every pair that runs to the end loses one of the two.
    run = paged_run(5, 2, prefix_caching, policy, leap, scheduler_reserve_full_isl=full_isl)
    for number in range(6):
        run.arrive(Request(number, float(number), 3, 6, priority=-number))
    run.run_out(max_steps=10)
    assert run.preemptions >= 1
    assert bool(run.leaps) == leap


@pytest.mark.parametrize("reservation", sorted(RESERVATIONS))
@pytest.mark.parametrize("allocator", sorted(ALLOCATORS))
def test_every_reservation_over_every_allocator_is_audited_once(reservation: str, allocator: str) -> None:
    # 3 regions of the limit at most, and 12 requests of all sorts of lengths.
    run = contiguous_run(40, 2, reservation, allocator, "external", max_num_batched_tokens=40)
    for number in range(12):
        run.arrive(Request(number, float(number), 1 + number * 5 % 11, 1 + number * 7 % 13))
        run.step(max_steps=1)
    run.run_out(max_steps=1)
    assert run.preemptions == 0
