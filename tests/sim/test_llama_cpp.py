"""llama.cpp's cells, placements, defragmentation and servers; cells are counted by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from kv_executor import Executor
from pool_audit import compare, fits_run
from test_leap import assert_same, observed, workloads

from sim.memory.allocators.fit import FirstFit
from sim.memory.cells import Cells
from sim.memory.contiguous import ContiguousMemory
from sim.memory.defragmentation import Defragmentation
from sim.memory.placement import OneRun, Pieces
from sim.memory.reservation import SlotReservation
from sim.memory.unified import UnifiedCells
from sim.plan import StepPlan
from sim.recorder import Record
from sim.scheduler.llama_cpp import SlotServer, UnifiedServer
from sim.scheduler.queues import Fcfs
from sim.sequence import Sequence
from workloads.errors import UserError
from workloads.request import Request

# ----------------------------------------------------------------------------------------------------------- the cells


def holding(num_cells: int, held: Collection[int]) -> Cells:
    """Cells of which just some are held; the search begins at the lowest free one."""
    cells = Cells(num_cells)
    cells.take_run(num_cells)
    cells.settle()
    cells.free(cell for cell in range(num_cells) if cell not in held)
    return cells


def never() -> bool:
    """Cells are not moved."""
    return False


def test_a_search_goes_on_where_the_last_run_ended_and_takes_no_run_that_is_too_short() -> None:
    # 10 cells: 0 to 3, then 4 to 6. With the first four free again, runs of 4 and of 3 are left, none of 5.
    cells = Cells(10)
    assert cells.take_run(4) == range(0, 4)
    assert cells.take_run(3) == range(4, 7)
    cells.free(range(4))
    assert cells.take_run(5) is None
    assert (cells.num_free, cells.largest_free_run(), cells.end) == (7, 4, 7)
    assert cells.take_run(3) == range(0, 3)
    assert cells.take_run(2) == range(7, 9)


def test_a_search_that_finds_nothing_above_begins_again_at_the_bottom_but_no_run_goes_around_the_end() -> None:
    # Cells 0 and 1 and 9 are free, and the search stands at 9: 9, 0, 1 would be three, but are no run.
    cells = holding(10, range(2, 9))
    cells.take_run(2)
    cells.take_run(1)
    cells.free([9])
    cells.free([0, 1])
    assert cells.take_run(3) is None
    assert cells.take_run(2) == range(0, 2)


@pytest.mark.parametrize(("size", "first"), [(3, 0), (5, 23)])
def test_a_search_begins_at_the_bottom_if_more_lies_below_it_than_is_used_and_twice_the_need(
    size: int, first: int
) -> None:
    # One cell, 10, is held, and a run of 12 comes to lie behind it: the head is at 23, 13 cells are used. For 3 tokens
    # 23 > 13 + 2 * 3, so the search begins at 0; for 5 it does not, as 23 = 13 + 2 * 5.
    cells = holding(40, [10])
    assert cells.take_run(12) == range(11, 23)
    assert cells.take_run(size) == range(first, first + size)


@given(st.data())
def test_the_run_that_is_found_is_the_one_that_a_search_cell_by_cell_finds(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 24))
    cells, used, head = Cells(size), set[int](), 0
    for _ in range(data.draw(st.integers(1, 20))):
        if used and data.draw(st.booleans()):
            freed = data.draw(st.sets(st.sampled_from(sorted(used)), min_size=1))
            cells.free(freed)
            used -= freed
            head = min(head, *freed)
            continue
        need = data.draw(st.integers(1, size))
        begin = 0 if head > len(used) + 2 * need else head
        starts = [*range(begin, size - need + 1), *range(min(begin, size - need + 1))]
        found = next((start for start in starts if used.isdisjoint(range(start, start + need))), None)
        run = cells.take_run(need)
        assert (None if run is None else run.start) == found
        if run is not None:
            used |= set(run)
            head = run.stop
        assert cells.num_used == len(used)
        assert cells.end == max(used, default=-1) + 1
        free = [cell for cell in range(size) if cell not in used]
        assert cells.largest_free_run() == max((n for n in range(1, size + 1) if fits_run(free, n)), default=0)


def test_several_runs_are_taken_together_or_not_at_all() -> None:
    # Runs of 4, 3 and 2 are free: for 4 and 4 the second fails, and the first is given back.
    cells = holding(11, [4, 8])
    before = cells.states.tolist()
    assert cells.take_runs([4, 4]) is None
    assert cells.states.tolist() == before
    assert cells.num_used == 2
    assert cells.take_runs([4, 3, 2]) == [range(0, 4), range(5, 8), range(9, 11)]


# ------------------------------------------------------------------------------------------------ placing, moving cells


def test_a_batch_that_finds_no_run_is_halved_and_so_are_those_after_it() -> None:
    # Three runs of 3 are free, at 0, 4 and 8. 8 tokens in micro-batches of 4: no run of 4, for batches of 8 and of 4.
    # Batches of 2 lie at 0, 4 and 8; the next finds only 2, 6 and 10, one cell each: batches of 1 go to 10, where the
    # search stands, and then to 2.
    cells = holding(12, [3, 7, 11])
    assert Pieces(n_batch=8, n_ubatch=4).place(cells, 8, never) == [0, 1, 4, 5, 8, 9, 10, 2]


def test_a_batch_of_several_micro_batches_needs_a_run_for_each_only() -> None:
    # 6 tokens in micro-batches of 3 and 3; runs of 3 and of 4 are free. In one run there would be no room.
    cells = holding(8, [3])
    assert OneRun().place(cells, 6, never) is None
    assert Pieces(n_batch=8, n_ubatch=3).place(cells, 6, never) == [0, 1, 2, 4, 5, 6]


def test_the_last_cells_fill_the_lowest_holes_and_a_pass_makes_a_limited_number_of_moves() -> None:
    # 6 cells are held, so they fit below 6, where 1, 2 and 5 are free. The last two, 9 and 11, go to 1 and 2, and as
    # they are no neighbours that is two moves; then 8 goes to 5.
    cells = holding(12, [0, 3, 4, 8, 9, 11])
    every = [(9, 1), (11, 2), (8, 5)]
    for limit in (1, 2, 3):
        assert Defragmentation(max_moves=limit).moves(cells, boundary=6) == every[:limit]
    cells.move(every)
    assert np.flatnonzero(cells.states).tolist() == [0, 1, 2, 3, 4, 5]
    assert Defragmentation().moves(cells, boundary=6) == []


def test_neighbours_that_move_together_are_one_move() -> None:
    cells = holding(12, [0, 6, 7, 8])
    assert Defragmentation(max_moves=1).moves(cells, boundary=4) == [(6, 1), (7, 2), (8, 3)]


def test_cells_are_moved_before_a_step_if_more_than_the_threshold_of_those_in_reach_are_holes() -> None:
    # Cell 2999 is the last of 2,669 that are held: 331 of 3,000 are holes; 32 count as used on top, so 299, just below
    # a tenth. One hole more makes it 300, which is no more than a tenth; with two it is 301.
    for holes, due in ((331, False), (332, False), (333, True)):
        cells = holding(4000, range(holes, 3000))
        assert Defragmentation(defrag_thold=0.1).is_due(cells) == due
    assert not Defragmentation().is_due(holding(4000, [2046]))  # 2,047 cells in reach are too few
    assert Defragmentation().is_due(holding(4000, [2047]))


# ---------------------------------------------------------------------------------------------------------- the servers


def server(num_cells: int, prompts: OneRun | None, moves: bool, slots: int = 8, **knobs: Any) -> UnifiedServer:
    pieces = Pieces(n_batch=8, n_ubatch=8)
    memory = UnifiedCells(num_cells, pieces, prompts=prompts, defragmentation=Defragmentation() if moves else None)
    return UnifiedServer(memory, 1000, Fcfs(), slots, 64, **knobs)


def test_the_tokens_of_a_step_lie_side_by_side_whosever_they_are() -> None:
    # Prompts of 3 and 3 at 0 and 3; the first tokens of both at 6 and 7, the second at 8 and 9.
    engine = server(20, None, moves=False)
    first, second = (engine.arrive(Request(number, 0.0, 3, 9))[0] for number in range(2))
    for _ in range(3):
        engine.commit(engine.schedule())
    assert list(first.blocks) == [0, 1, 2, 6, 8]
    assert list(second.blocks) == [3, 4, 5, 7, 9]


def one_hole(prompts: OneRun | None, moves: bool) -> tuple[UnifiedServer, Sequence, Sequence, StepPlan]:
    """12 cells: a request that is over has left 0 to 3, another holds 4 and 5 and decodes into 0; 7 tokens come."""
    engine = server(12, prompts, moves)
    engine.arrive(Request(0, 0.0, 4, 1))
    holder, _ = engine.arrive(Request(1, 0.0, 2, 5))
    engine.commit(engine.schedule())
    newcomer, _ = engine.arrive(Request(2, 0.0, 7, 2))
    return engine, holder, newcomer, engine.schedule()


def test_a_prompt_that_needs_one_run_waits_though_cells_enough_are_free() -> None:
    # 1 to 3 and 6 to 11 are free: 9 cells for 7 tokens, but the longest run is 6.
    engine, holder, newcomer, plan = one_hole(OneRun(), moves=False)
    assert list(holder.blocks) == [4, 5, 0]
    assert newcomer in engine.waiting and not plan.copies
    occupancy = engine.memory.occupancy(newcomer)
    assert (occupancy.used, occupancy.external, occupancy.idle, occupancy.largest_free_run) == (3, 9, 0, 6)


def test_moving_cells_makes_the_run_that_a_prompt_needs() -> None:
    # 3 cells are used, so 4 and 5 move to the holes below 3, which are 1 and 2; then 3 to 11 is one run.
    engine, holder, newcomer, plan = one_hole(OneRun(), moves=True)
    assert plan.copies == ((4, 1), (5, 2))
    assert plan.moved == ((holder, 2),)
    assert plan.work.copied_slots == 2
    assert list(holder.blocks) == [1, 2, 0]
    assert list(newcomer.blocks) == list(range(3, 10))
    assert engine.memory.occupancy(None).external == 0


def test_a_prompt_in_pieces_takes_what_it_finds_and_nothing_is_external() -> None:
    # 7 tokens: no such run; 4 lie at 6 to 9, then 3 at 1 to 3.
    engine, _, newcomer, _ = one_hole(None, moves=False)
    assert list(newcomer.blocks) == [6, 7, 8, 9, 1, 2, 3]
    waiting, _ = engine.arrive(Request(3, 0.0, 2, 2))
    assert engine.memory.occupancy(waiting).external == 0


def test_when_no_cell_is_free_for_their_next_tokens_all_who_run_are_ended() -> None:
    # 10 cells, prompts of 4 and 4: the second step takes the last two cells, and then two tokens have none.
    engine = server(10, None, moves=False)
    both = [engine.arrive(Request(number, 0.0, 4, 10))[0] for number in range(2)]
    third, _ = engine.arrive(Request(2, 0.0, 4, 10))
    plan = engine.schedule()
    assert engine.commit(plan) == [] and not plan.aborted
    plan = engine.schedule()
    assert engine.commit(plan) == []
    assert list(plan.aborted) == both
    assert [sequence.generated for sequence in both] == [2, 2]
    assert engine.memory.num_free_blocks == 10
    engine.schedule()
    assert list(engine.running) == [third]


def test_a_request_that_has_the_pool_to_itself_is_cut_off_at_its_end_and_not_aborted() -> None:
    # 10 cells: 10 tokens known at the end, of which the last is never stored.
    engine = server(10, None, moves=False)
    sequence, _ = engine.arrive(Request(0, 0.0, 4, 100))
    assert engine.arrive(Request(1, 0.0, 10, 1))[1] is not None
    aborted: list[Sequence] = []
    while not engine.idle:
        plan = engine.schedule()
        engine.commit(plan)
        aborted += plan.aborted
    assert sequence.known == 10 and not aborted


def test_a_plan_is_one_step_however_many_are_asked_for() -> None:
    engine = server(20, None, moves=False)
    engine.arrive(Request(0, 0.0, 3, 9))
    for _ in range(4):
        plan = engine.schedule(max_steps=100)
        assert plan.repeat == 1
        engine.commit(plan)


def slots(num_cells: int, count: int, leap: bool = False, **knobs: Any) -> tuple[ContiguousMemory, SlotServer]:
    reservation = SlotReservation(num_cells, 1, count)
    memory = ContiguousMemory(num_cells, 64, reservation, FirstFit(num_cells))
    return memory, SlotServer(memory, 64, Fcfs(), count, leap=leap, **knobs)


def test_each_slot_has_an_equal_part_which_its_request_may_fill_but_for_one_cell() -> None:
    # 102 cells in 4 slots: 25 each. A prompt of 25 is refused; one of 24 gets one token.
    memory, engine = slots(102, 4)
    assert engine.arrive(Request(0, 0.0, 25, 1))[1] is not None
    sequences = [engine.arrive(Request(number, 0.0, 24, 10))[0] for number in range(1, 6)]
    engine.schedule()
    assert [list(one.blocks) for one in sequences[:4]] == [list(range(25 * i, 25 * i + 25)) for i in range(4)]
    assert list(engine.waiting) == sequences[4:]
    assert [one.final for one in sequences] == [25] * 5
    # 24 of the 25 cells of each are filled; 2 cells are in no part.
    occupancy = memory.occupancy(None)
    assert (occupancy.used, occupancy.internal, occupancy.idle) == (96, 4, 2)


def test_more_slots_than_the_pool_has_room_for_are_refused() -> None:
    with pytest.raises(UserError, match="leaves a slot 1 of 7 cells"):
        slots(7, 4)


@settings(max_examples=60, deadline=None)
@given(workloads(), st.integers(8, 200), st.integers(1, 4), st.integers(2, 80))
def test_slots_that_leap_equal_slots_that_step(requests: list[Request], cells: int, count: int, budget: int) -> None:
    runs = []
    for leap in (True, False):
        memory, engine = slots(cells, count, leap, max_num_batched_tokens=budget)
        runs.append(observed(memory, engine, requests, Record()))
    assert_same(*runs)


# ------------------------------------------------------------------------------------------------------- random serving


class UnifiedServing(RuleBasedStateMachine):
    """Requests come, steps pass, and an executor follows the plans on a pool of tokens."""

    engine: UnifiedServer

    @initialize(
        num_cells=st.integers(4, 60),
        one_run=st.booleans(),
        max_moves=st.sampled_from([None, 1, 3, 100]),
        threshold=st.sampled_from([0.01, 0.3, 0.9]),
        slots=st.integers(1, 8),
        budget=st.integers(8, 40),
        n_batch=st.integers(1, 40),
        n_ubatch=st.integers(1, 20),
    )
    def begin(
        self,
        num_cells: int,
        one_run: bool,
        max_moves: int | None,
        threshold: float,
        slots: int,
        budget: int,
        n_batch: int,
        n_ubatch: int,
    ) -> None:
        moves = None if max_moves is None else Defragmentation(threshold, max_moves, min_cells=0, padding=0)
        self.prompts = OneRun() if one_run else None
        self.memory = UnifiedCells(num_cells, Pieces(n_batch, n_ubatch), 1, self.prompts, moves)
        self.engine = UnifiedServer(self.memory, 50, Fcfs(), slots, budget)
        self.executor = Executor(self.engine)
        self.arrived: list[Sequence] = []
        self.ended: list[Sequence] = []
        self.aborts = self.moved = 0

    @rule(prompt=st.integers(1, 20), output=st.integers(1, 20), count=st.integers(1, 3))
    def requests_arrive(self, prompt: int, output: int, count: int) -> None:
        for _ in range(count):
            sequence, reason = self.engine.arrive(Request(len(self.arrived), 0.0, prompt, output))
            assert (reason is not None) == (prompt >= self.memory.num_slots)
            if reason is None:
                self.arrived.append(sequence)
        self.audit()

    @rule(count=st.integers(1, 8))
    def steps_pass(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        engine = self.engine
        if engine.idle:
            return
        ran = list(engine.running)
        plan = engine.schedule()
        assert not plan.preemptions
        assert plan.batch, "there is a cell for every token that is due, and room for the head if nobody runs"
        assert set(ran) <= set(engine.running)
        self.executor.execute(plan)
        self.audit()
        finished = engine.commit(plan)
        self.executor.committed(finished)
        for sequence in finished:
            assert sequence.known == sequence.final and not sequence.blocks
        if plan.aborted:
            stored = sum(sequence.computed for sequence in plan.aborted)
            due = sum(sequence.known - sequence.computed for sequence in plan.aborted)
            assert min(due, engine.max_num_batched_tokens) > self.memory.num_slots - stored
            assert not engine.running and not any(sequence.blocks for sequence in plan.aborted)
        self.ended += [*finished, *plan.aborted]
        self.aborts += bool(plan.aborted)
        self.moved += len(plan.copies)
        self.audit()

    def audit(self) -> None:
        """Every cell has one name, and a running request exactly one for each of its tokens."""
        names: dict[int, str] = {}
        for sequence in self.engine.running:
            assert len(sequence.blocks) == sequence.computed
            for cell in sequence.blocks:
                assert 0 <= cell < self.memory.num_slots
                assert cell not in names, f"cell {cell} holds two tokens"
                names[cell] = "used"
        assert all(not sequence.blocks for sequence in self.engine.waiting)
        free = [cell for cell in range(self.memory.num_slots) if cell not in names]
        head = self.engine.waiting.head() if self.engine.waiting else None
        stranded = (
            self.prompts is not None and head is not None and head.known <= len(free) and not fits_run(free, head.known)
        )
        names |= dict.fromkeys(free, "external" if stranded else "idle")
        largest = max((size for size in range(1, len(free) + 1) if fits_run(free, size)), default=0)
        compare(self.memory, names, head, largest)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(5000):
            if self.engine.idle:
                break
            self.step()
        assert self.engine.idle, self.engine.explain_stall()
        assert Counter(self.ended) == Counter(self.arrived)
        assert self.memory.num_free_blocks == self.memory.num_slots
        event(f"aborts: {'some' if self.aborts else 'none'}")
        event(f"moves: {'some' if self.moved else 'none'}")


TestUnifiedServing = UnifiedServing.TestCase
TestUnifiedServing.settings = settings(max_examples=150, stateful_step_count=20, deadline=None)
