"""Scheduler and memory under random arrivals: whatever happens, every slot is accounted for and every request ends.

The account is kept by `pool_audit.py`, which knows the definitions but none of the policies' sums.
"""

from __future__ import annotations

from collections.abc import Callable
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
from sim.plan import StepPlan
from sim.scheduler.continuous import ContinuousBatching
from sim.scheduler.queues import Fcfs, Priority
from sim.sequence import Sequence
from workloads.request import HashIds, Request, TokenIds

LIMIT = 24  # tokens of one request
ENOUGH_STEPS = 4_000  # far more than any of these workloads takes


class AuditedRun:
    """A scheduler and its memory, audited before and after each step's tokens are applied.

    Args:
        engine: with nothing in it.
        audit: given the live sequences and the head of the waiting queue, fails if a slot is not what it is said to be.
        each_preemption_pays: whether nobody can be preempted twice without another request having ended or lost its
            blocks in between. True without prefix caching if admission asks for room for all known tokens: what a
            preemption frees is less than the victim needs to come back.
    """

    def __init__(
        self,
        engine: ContinuousBatching,
        audit: Callable[[list[Sequence], Sequence | None], None],
        each_preemption_pays: bool,
    ) -> None:
        self.engine = engine
        self.arrived: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.preemptions = 0
        self._audit = audit
        self._each_preemption_pays = each_preemption_pays
        self._turnover: list[Sequence] = []  # who ended or was preempted, in that order

    def arrive(self, request: Request) -> None:
        """Queues a request, unless it can never finish."""
        sequence, reason = self.engine.arrive(request)
        if reason is None:
            self.arrived.append(sequence)
        self.audit()

    def step(self) -> None:
        """One step, with the laws that hold for any."""
        if self.engine.idle:
            return
        ran_before = list(self.engine.running)
        plan = self.engine.schedule()
        self._check_plan(plan, ran_before)
        self.audit()
        known = {sequence: sequence.known for sequence, _ in plan.batch}
        caught_up = [sequence for sequence, _ in plan.batch if sequence.computed == sequence.known]
        finished = self.engine.commit(plan)
        assert {sequence: sequence.known - known[sequence] for sequence in known} == {
            sequence: int(sequence in caught_up) for sequence in known
        }
        for sequence in finished:
            assert sequence.known == sequence.final and not sequence.blocks
        self.finished += finished
        self._turnover += finished
        self.audit()

    def audit(self) -> None:
        """Names every slot."""
        waiting = self.engine.waiting
        assert all(not sequence.blocks for sequence in waiting)
        self._audit(list(self.engine.running), waiting.head() if waiting else None)

    def run_out(self) -> None:
        """Runs until nobody is left; then everybody has all that was asked for, and all blocks are free."""
        for _ in range(ENOUGH_STEPS):
            if self.engine.idle:
                break
            self.step()
        assert self.engine.idle, self.engine.explain_stall()
        assert len(self.finished) == len(set(self.finished)) == len(self.arrived)
        for sequence in self.finished:
            request = sequence.request
            assert sequence.generated == min(request.output_tokens, LIMIT - request.prompt_tokens)
        occupancy = self.engine.memory.occupancy(None)
        assert occupancy.idle + occupancy.cached == self.engine.memory.num_slots

    def _check_plan(self, plan: StepPlan, ran_before: list[Sequence]) -> None:
        victims = [preemption.victim for preemption in plan.preemptions]
        scheduled = [sequence for sequence, _ in plan.batch]
        # An oversize request is turned away, so there is always something to do.
        assert plan.batch or plan.preemptions
        assert len(scheduled) == len(set(scheduled)) and all(tokens > 0 for _, tokens in plan.batch)
        assert set(scheduled) <= set(self.engine.running) and not set(victims) & set(self.engine.running)
        # Whoever runs was let in with the budget that those before left, and they never want more again.
        assert set(ran_before) <= set(scheduled) | set(victims)
        assert not plan.preemptions or not (plan.admitted or plan.resumed)
        for sequence in self.engine.running:
            assert 0 < sequence.computed <= sequence.known < sequence.final
        for victim in victims:
            assert not victim.blocks and victim.computed == 0 and victim in self.engine.waiting
            self._check_preemption_pays(victim)
        self.preemptions += len(victims)

    def _check_preemption_pays(self, victim: Sequence) -> None:
        if self._each_preemption_pays and victim in self._turnover:
            assert self._turnover[-1] is not victim, "preempted twice, and nothing had changed in between"
        self._turnover.append(victim)


# ------------------------------------------------------------------------------------------------------- the two memories


def paged_run(
    usable: int,
    block_size: int,
    prefix_caching: bool,
    policy: type[Fcfs] | type[Priority],
    watermark: float = 0.0,
    **knobs: Any,
) -> AuditedRun:
    """A run over a paged pool with `usable` blocks."""
    memory = PagedMemory(usable + 1, block_size, watermark, prefix_caching)
    engine = ContinuousBatching(memory, LIMIT, policy(), **knobs)
    contents = BlockContents()
    preempted_before = 0

    def audit(live: list[Sequence], head: Sequence | None) -> None:
        nonlocal preempted_before
        audit_paged(memory, live, head)
        if prefix_caching:
            # By priority a victim may have been given blocks in the very step that takes them away again.
            total = sum(sequence.preemptions for sequence in run.arrived)
            contents.look(memory, live, seen_all=policy is Fcfs or total == preempted_before)
            preempted_before = total
            if head is not None:
                contents.check_lookup(memory, head)

    pays = not prefix_caching and knobs.get("scheduler_reserve_full_isl", True)
    run = AuditedRun(engine, audit, each_preemption_pays=pays)
    return run


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
    return AuditedRun(engine, lambda live, head: audit_contiguous(memory, rules, live, head), each_preemption_pays=True)


# -------------------------------------------------------------------------------------------------------- random workloads

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
def prompts(draw: st.DrawFn, length: int, number: int) -> TokenIds | HashIds | None:
    """Told by length only, token by token or by chained ids of 8 tokens; the latter two branch off a common beginning."""
    common = draw(st.integers(0, length))
    match draw(st.sampled_from(["length", "tokens", "tokens", "hashes"])):
        case "tokens":
            return TokenIds(tuple(j if j < common else 1000 * number + j for j in range(length)))
        case "hashes":
            num_ids = -(-length // 8)
            return HashIds(tuple(j if j < common // 8 else 1000 * number + j for j in range(num_ids)), 8)
    return None


class Serving(RuleBasedStateMachine):
    """Requests come, steps pass."""

    run: AuditedRun

    @rule(
        data=st.data(),
        prompt=st.integers(1, LIMIT - 1),
        output=st.integers(1, LIMIT),
        priority=st.integers(0, 2),
        count=st.integers(1, 3),
    )
    def requests_arrive(self, data: st.DataObject, prompt: int, output: int, priority: int, count: int) -> None:
        for _ in range(count):
            number = self.number
            self.number += 1
            told = data.draw(prompts(prompt, number))
            self.run.arrive(Request(number, float(number), prompt, output, priority, told))

    @rule(count=st.integers(1, 6))
    def steps_pass(self, count: int) -> None:
        for _ in range(count):
            self.run.step()

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.run_out()
            event(f"preemptions: {min(self.run.preemptions, 3)} or more")


class PagedServing(Serving):
    """Paged memory; hash ids of 8 tokens ask for blocks of 1, 2, 4 or 8."""

    @initialize(
        usable=st.integers(2, 16),
        block_size=st.sampled_from([1, 2, 4, 8]),
        prefix_caching=st.booleans(),
        policy=st.sampled_from([Fcfs, Priority]),
        watermark=st.sampled_from([0.0, 0.0, 0.1, 0.3]),
        knobs=KNOBS,
    )
    def begin(
        self,
        usable: int,
        block_size: int,
        prefix_caching: bool,
        policy: type[Fcfs] | type[Priority],
        watermark: float,
        knobs: dict[str, Any],
    ) -> None:
        self.number = 0
        self.run = paged_run(usable, block_size, prefix_caching, policy, watermark, **knobs)


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
        self.number = 0
        self.run = contiguous_run(num_blocks, block_size, reservation, allocator, charge, **knobs)

    def teardown(self) -> None:
        super().teardown()
        assert not hasattr(self, "run") or self.run.preemptions == 0


TestPagedServing = PagedServing.TestCase
TestPagedServing.settings = settings(max_examples=150, stateful_step_count=20, deadline=None)
TestContiguousServing = ContiguousServing.TestCase
TestContiguousServing.settings = settings(max_examples=80, stateful_step_count=20, deadline=None)


# --------------------------------------------------------------------------------------------------------- and by the way


@pytest.mark.parametrize("policy", [Fcfs, Priority])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("full_isl", [True, False])
def test_growth_preempts_and_everything_still_ends(
    policy: type[Fcfs] | type[Priority], prefix_caching: bool, full_isl: bool
):
    # 5 blocks of 2 let in three prompts of 3 tokens, 2 blocks each, but no two sequences at their end, 3 + 6 - 1 = 8
    # tokens in 4 blocks each: every pair that runs to the end loses one of the two.
    run = paged_run(5, 2, prefix_caching, policy, scheduler_reserve_full_isl=full_isl)
    for number in range(6):
        run.arrive(Request(number, float(number), 3, 6, priority=-number))
    run.run_out()
    assert run.preemptions >= 1


@pytest.mark.parametrize("reservation", sorted(RESERVATIONS))
@pytest.mark.parametrize("allocator", sorted(ALLOCATORS))
def test_every_reservation_over_every_allocator_is_audited_once(reservation: str, allocator: str):
    # 3 regions of the limit at most, and 12 requests of all sorts of lengths.
    run = contiguous_run(40, 2, reservation, allocator, "external", max_num_batched_tokens=40)
    for number in range(12):
        run.arrive(Request(number, float(number), 1 + number * 5 % 11, 1 + number * 7 % 13))
        run.step()
    run.run_out()
    assert run.preemptions == 0
