"""Whole runs small enough to be worked out on paper: every step's state, for each memory policy.

A state is that of the pool and the queues while the step runs: after it was planned, before its tokens are known.
Requests are letters in order of arrival. `stores` in a comment is prompt + output - 1, for the last token is never
computed. Waste is written in the order used, reserved, internal, cached, external, idle.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import pytest

from sim.memory.allocators.buddy import Buddy
from sim.memory.allocators.exact import ExactSlots
from sim.memory.allocators.fit import FirstFit
from sim.memory.contiguous import ContiguousMemory
from sim.memory.interface import KVMemory
from sim.memory.paged import PagedMemory
from sim.memory.reservation import MaxReservation, OracleReservation, Pow2Reservation
from sim.plan import StepPlan
from sim.scheduler.continuous import ContinuousBatching
from sim.scheduler.queues import Fcfs
from sim.sequence import Sequence
from workloads.request import Request, TokenIds


@dataclass(frozen=True)
class State:
    """One step.

    Args:
        batch: requests with the tokens they compute, in the order in which the batch was filled.
        blocks: block tables of the running sequences, in the order of the running queue.
        waste: slots that are used, reserved, internal, cached, external, idle.
        free: the free list where there is one, next to be handed out first; else the largest free run in slots.
        waiting: the waiting queue, front first.
        new: taken from the waiting queue for the first time.
        resumed: taken from it after a preemption.
        preempted: who lost their blocks, in that order.
        hits: prefix-cache hits in tokens of those taken from the waiting queue, where there are any.
        done: who finishes with this step's tokens, in the order in which their blocks are freed.
    """

    batch: str
    blocks: dict[str, list[int]]
    waste: tuple[int, int, int, int, int, int]
    free: list[int] | int
    waiting: str = ""
    new: str = ""
    resumed: str = ""
    preempted: str = ""
    hits: dict[str, int] = field(default_factory=dict)
    done: str = ""


def request(letter: str, prompt: int, output: int, ids: tuple[int, ...] | None = None) -> Request:
    number = ord(letter) - ord("A")
    return Request(number, float(number), prompt, output, prompt=TokenIds(ids) if ids else None)


def letters(sequences: Iterable[Sequence]) -> str:
    return "".join(chr(ord("A") + sequence.request.request_id) for sequence in sequences)


def run_slots(start: int, end: int) -> list[int]:
    """The region [start, end)."""
    return list(range(start, end))


def observe(engine: ContinuousBatching, plan: StepPlan) -> State:
    """The state after planning; then the step's tokens are applied."""
    memory: KVMemory = engine.memory
    occupancy = memory.occupancy(engine.waiting.head() if engine.waiting else None)
    used, reserved, internal = occupancy.used, occupancy.reserved, occupancy.internal
    free = memory.free_list() if isinstance(memory, PagedMemory) else occupancy.largest_free_run
    tables = {letters([sequence]): list(sequence.blocks) for sequence in engine.running}
    waiting = letters(engine.waiting)
    return State(
        batch=" ".join(f"{letters([sequence])}{tokens}" for sequence, tokens in plan.batch),
        blocks=tables,
        waste=(used, reserved, internal, occupancy.cached, occupancy.external, occupancy.idle),
        free=free,
        waiting=waiting,
        new=letters(plan.admitted),
        resumed=letters(plan.resumed),
        preempted=letters(event.victim for event in plan.preemptions),
        hits={letters([sequence]): tokens for sequence, tokens in plan.hits if tokens},
        done=letters(engine.commit(plan)),
    )


def check(engine: ContinuousBatching, arrivals: dict[int, list[Request]], expected: list[State]) -> None:
    """Runs until nobody is left; `arrivals` says who joins before which step, the first being 1."""
    for number, state in enumerate(expected, start=1):
        assert sum(state.waste) == engine.memory.num_slots, f"step {number} of the expectation does not add up"
        for newcomer in arrivals.get(number, []):
            _, reason = engine.arrive(newcomer)
            assert reason is None
        seen = observe(engine, engine.schedule())
        assert seen == state, f"step {number}"
        assert list(seen.blocks) == list(state.blocks), f"running queue of step {number}"
    assert engine.idle


# ---------------------------------------------------------------------------------------------------- contiguous memory


def test_contiguous_max_over_a_buddy() -> None:
    # 12 slots = 8 (from 0) + 4 (from 8); the limit is 4, so every region is 4: the lone 4 first, then the halves of the
    # 8. A stores 3 of 4, B 3, C 3, D 1; each region has one slot at least that is never filled.
    memory = ContiguousMemory(12, 4, MaxReservation(), Buddy(12))
    engine = ContinuousBatching(memory, 4, Fcfs(), max_num_batched_tokens=16)
    requests = [request("A", 2, 2), request("B", 1, 3), request("C", 3, 1), request("D", 1, 1)]
    a, b, c = run_slots(8, 12), run_slots(0, 4), run_slots(4, 8)
    check(
        engine,
        {1: requests},
        [
            # Stored 2 + 1 + 3 of 3 + 3 + 3. D needs 4 and nothing is free, so nothing is external either.
            State("A2 B1 C3", {"A": a, "B": b, "C": c}, (6, 3, 3, 0, 0, 0), 0, waiting="D", new="ABC", done="C"),
            # C's region goes to D. Stored 3 + 2 + 1 of 3 + 3 + 1: 7 to fill, 5 never.
            State("A1 B1 D1", {"A": a, "B": b, "D": c}, (6, 1, 5, 0, 0, 0), 0, new="D", done="AD"),
            # B fills its third. 4 to 7 and 8 to 11 are free and neighbours, but no buddies: 4 is the largest.
            State("B1", {"B": b}, (3, 0, 1, 0, 0, 8), 4, done="B"),
        ],
    )
    assert memory.occupancy(None).largest_free_run == 8


def test_contiguous_pow2_over_first_fit() -> None:
    # 12 slots, limit 8. Reserved: A 1 + 4 (output 3), B 1 + 4, C 1 + 1, D 2 + 4. Stored in the end: A 3, B 4, C 1, D 4.
    engine = ContinuousBatching(
        ContiguousMemory(12, 8, Pow2Reservation(), FirstFit(12)), 8, Fcfs(), max_num_batched_tokens=16
    )
    requests = [request("A", 1, 3), request("B", 1, 4), request("C", 1, 1), request("D", 2, 3)]
    a, b, c, d = run_slots(0, 5), run_slots(5, 10), run_slots(10, 12), run_slots(0, 6)
    check(
        engine,
        {1: requests},
        [
            # Stored 3 of 3 + 4 + 1 = 8; 4 of the 12 are never filled.
            State("A1 B1 C1", {"A": a, "B": b, "C": c}, (3, 5, 4, 0, 0, 0), 0, waiting="D", new="ABC", done="C"),
            # C's two are free; D needs 6, so they would not be enough anyway: idle.
            State("A1 B1", {"A": a, "B": b}, (4, 3, 3, 0, 0, 2), 2, waiting="D"),
            State("A1 B1", {"A": a, "B": b}, (6, 1, 3, 0, 0, 2), 2, waiting="D", done="A"),
            # Free are 0 to 4 and 10 to 11: 7, enough for D's 6, but B stands between them: external.
            State("B1", {"B": b}, (4, 0, 1, 0, 7, 0), 5, waiting="D", done="B"),
            # D at the bottom of the pool: stores 2 of 4, 2 of its 6 are never filled.
            State("D2", {"D": d}, (2, 2, 2, 0, 0, 6), 6, new="D"),
            State("D1", {"D": d}, (3, 1, 2, 0, 0, 6), 6),
            State("D1", {"D": d}, (4, 0, 2, 0, 0, 6), 6, done="D"),
        ],
    )


def test_contiguous_oracle_over_exact_slots() -> None:
    # 6 slots. Reserved are prompt + output: A 3, B 3, C 4, D 2; each stores one less.
    engine = ContinuousBatching(
        ContiguousMemory(6, 8, OracleReservation(), ExactSlots(6)), 8, Fcfs(), max_num_batched_tokens=16
    )
    requests = [request("A", 1, 2), request("B", 2, 1), request("C", 1, 3), request("D", 1, 1)]
    check(
        engine,
        {1: requests},
        [
            State("A1 B2", {"A": [0, 1, 2], "B": [3, 4, 5]}, (3, 1, 2, 0, 0, 0), 0, waiting="CD", new="AB", done="B"),
            # 3 slots are free. C needs 4; D would fit, but does not pass C.
            State("A1", {"A": [0, 1, 2]}, (2, 0, 1, 0, 0, 3), 3, waiting="CD", done="A"),
            # Put back were 3, 4, 5 and then 0, 1, 2; the last one comes out first. C and D lie in pieces.
            State("C1 D1", {"C": [2, 1, 0, 5], "D": [4, 3]}, (2, 2, 2, 0, 0, 0), 0, new="CD", done="D"),
            State("C1", {"C": [2, 1, 0, 5]}, (2, 1, 1, 0, 0, 2), 2),
            State("C1", {"C": [2, 1, 0, 5]}, (3, 0, 1, 0, 0, 2), 2, done="C"),
        ],
    )


@pytest.mark.parametrize("charge", ["external", "internal"])
def test_contiguous_oracle_over_a_buddy(charge: Literal["internal", "external"]) -> None:
    # 16 slots. A reserves 2 + 4 = 6 in a region of 8 (2 of rounding, stores 5), B 3 + 2 = 5 in 8 (3 of rounding, stores
    # 4), C 1 + 2 = 3 in 4 (1 of rounding, stores 2). Each reserves one slot that is never filled.
    memory = ContiguousMemory(16, 16, OracleReservation(), Buddy(16), charge_rounding_to=charge)
    engine = ContinuousBatching(memory, 16, Fcfs())
    requests = [request("A", 2, 4), request("B", 3, 2), request("C", 1, 2)]
    a, b, c = run_slots(0, 8), run_slots(8, 16), run_slots(8, 12)

    def waste(used: int, reserved: int, unfilled: int, rounding: int, idle: int) -> tuple[int, int, int, int, int, int]:
        if charge == "external":
            return used, reserved, unfilled, 0, rounding, idle
        return used, reserved, unfilled + rounding, 0, 0, idle

    check(
        engine,
        {1: requests},
        [
            # Stored 2 + 3 of 5 + 4; one of each reservation is never filled, 2 + 3 are rounding.
            State("A2 B3", {"A": a, "B": b}, waste(5, 4, 2, 5, 0), 0, waiting="C", new="AB"),
            State("A1 B1", {"A": a, "B": b}, waste(7, 2, 2, 5, 0), 0, waiting="C", done="B"),
            # C gets the lower half of B's region. Stored 4 + 1 of 5 + 2; rounding 2 + 1.
            State("A1 C1", {"A": a, "C": c}, waste(5, 2, 2, 3, 4), 4, new="C"),
            State("A1 C1", {"A": a, "C": c}, waste(7, 0, 2, 3, 4), 4, done="AC"),
        ],
    )
    assert memory.occupancy(None).largest_free_run == 16


def test_contiguous_max_over_first_fit_in_blocks() -> None:
    # 5 blocks of 2, limit 4: each region is 2 blocks, and the fifth block is too small for any. A stores 3, B 2, C 2.
    engine = ContinuousBatching(
        ContiguousMemory(5, 4, MaxReservation(), FirstFit(5), block_size=2), 4, Fcfs(), max_num_batched_tokens=8
    )
    requests = [request("A", 2, 2), request("B", 1, 2), request("C", 2, 1)]
    check(
        engine,
        {1: requests},
        [
            # Stored 2 + 1 of 3 + 2. The last block is free, but C wants two: idle.
            State("A2 B1", {"A": [0, 1], "B": [2, 3]}, (3, 2, 3, 0, 0, 2), 2, waiting="C", new="AB"),
            State("A1 B1", {"A": [0, 1], "B": [2, 3]}, (5, 0, 3, 0, 0, 2), 2, waiting="C", done="AB"),
            State("C2", {"C": [0, 1]}, (2, 0, 2, 0, 0, 6), 6, new="C", done="C"),
        ],
    )


# --------------------------------------------------------------------------------------------------------- paged memory


def paged(usable: int, watermark: float = 0.0, prefix_caching: bool = False) -> PagedMemory:
    """Blocks of 2 slots, numbered from 1."""
    return PagedMemory(usable + 1, 2, watermark, prefix_caching)


def test_paged_growth_preempts_the_latest_which_resumes_first() -> None:
    # 4 blocks. A stores 6 in 3 blocks, B 4 in 2, C 1 in 1.
    engine = ContinuousBatching(paged(4), 16, Fcfs())
    check(
        engine,
        {1: [request("A", 3, 4), request("B", 2, 3)], 2: [request("C", 1, 1)]},
        [
            # A's fourth slot will be filled.
            State("A3 B2", {"A": [1, 2], "B": [3]}, (5, 1, 0, 0, 0, 2), [4], new="AB"),
            # B's third token takes the last block; C has to wait. A is full, B's fourth slot will be filled.
            State("A1 B1", {"A": [1, 2], "B": [3, 4]}, (7, 1, 0, 0, 0, 0), [], waiting="C"),
            # A needs a third block: B, the latest, goes, its 4 and then its 3 to the front; A takes 4. B is put before
            # C, and nobody is admitted in this step.
            State("A1", {"A": [1, 2, 4]}, (5, 1, 0, 0, 0, 2), [3], waiting="BC", preempted="B"),
            # B needs 2 blocks for its 4 tokens and finds one; C does not pass it.
            State("A1", {"A": [1, 2, 4]}, (6, 0, 0, 0, 0, 2), [3], waiting="BC", done="A"),
            # Free: 4, 2, 1, 3. B computes its 2 + 2 tokens again and gains its last; C's second slot is never filled.
            State("B4 C1", {"B": [4, 2], "C": [1]}, (5, 0, 1, 0, 0, 2), [3], new="C", resumed="B", done="BC"),
        ],
    )
    # B's 4, 2 come back first, 2 foremost; then C's 1.
    assert engine.memory.free_list() == [1, 2, 4, 3]  # type: ignore[attr-defined]


def test_paged_with_prefix_caching() -> None:
    # 4 blocks. A, B, C and E begin with 1, 2; E is B again. D is told by length only. A, B, C, D, E store 4 each.
    engine = ContinuousBatching(paged(4, prefix_caching=True), 16, Fcfs())
    check(
        engine,
        {
            1: [request("A", 3, 2, (1, 2, 3)), request("B", 4, 1, (1, 2, 3, 9))],
            2: [request("C", 3, 2, (1, 2, 7))],
            3: [request("D", 3, 2)],
            4: [request("E", 4, 1, (1, 2, 3, 9))],
        },
        [
            # A registers block 1 as it is scheduled, so B hits it in the same step and needs one more. Block 1 counts
            # once: 2 + 1 + 2 used. A's fourth slot will be filled. B ends; block 3 (1, 2, 3, 9) stays, at the back.
            State("A3 B2", {"A": [1, 2], "B": [1, 3]}, (5, 1, 0, 0, 0, 2), [4], new="AB", hits={"B": 2}, done="B"),
            # C hits block 1, which A holds, and takes 4, which has no key, before the cached 3. Its fourth slot will be
            # filled. A ends: block 2 (with a generated token) goes to the back, 1 is C's.
            State("A1 C1", {"A": [1, 2], "C": [1, 4]}, (5, 1, 0, 2, 0, 0), [3], new="C", hits={"C": 2}, done="A"),
            # D takes 3 and 2, the one freed earlier first; both lose their keys. C ends: 4, then 1 to the back.
            State("C1 D3", {"C": [1, 4], "D": [3, 2]}, (7, 1, 0, 0, 0, 0), [], new="D", done="C"),
            # E hits block 1, out of the free list; (1, 2, 3, 9) is gone, and a token has to be left anyway. It needs a
            # block and one that the hit takes: the two free ones. D ends with both blocks full of its own.
            State("D1 E2", {"D": [3, 2], "E": [1, 4]}, (8, 0, 0, 0, 0, 0), [], new="E", hits={"E": 2}, done="DE"),
        ],
    )
    # D's tail, D's head, E's tail, E's head.
    assert engine.memory.free_list() == [2, 3, 4, 1]  # type: ignore[attr-defined]
    assert engine.memory.occupancy(None).cached == 8


def test_paged_with_a_watermark() -> None:
    # 5 blocks and block 0: 0.4 of 6 is 2.4, so 2 have to stay free while others run. A, B, C store 4 in 2 blocks each.
    engine = ContinuousBatching(paged(5, watermark=0.4), 16, Fcfs())
    check(
        engine,
        {1: [request("A", 2, 3), request("B", 3, 2), request("C", 4, 1)]},
        [
            # A is alone: no watermark. B: 2 + 2 of the 4 that are left. C: 2 + 2, but 2 are left.
            State("A2 B3", {"A": [1], "B": [2, 3]}, (5, 1, 0, 0, 0, 4), [4, 5], waiting="C", new="AB"),
            # A grows into a block of the watermark.
            State("A1 B1", {"A": [1, 4], "B": [2, 3]}, (7, 1, 0, 0, 0, 2), [5], waiting="C", done="B"),
            # 3 blocks are free, C needs 2, but 4 with the watermark.
            State("A1", {"A": [1, 4]}, (4, 0, 0, 0, 0, 6), [3, 2, 5], waiting="C", done="A"),
            # Nobody runs: no watermark.
            State("C4", {"C": [4, 1]}, (4, 0, 0, 0, 0, 6), [3, 2, 5], new="C", done="C"),
        ],
    )


def test_paged_with_chunked_prefill() -> None:
    # 6 blocks, 4 tokens a step. A stores 8 in 4 blocks, B 3 in 2, C 2 in 1.
    engine = ContinuousBatching(paged(6), 16, Fcfs(), max_num_batched_tokens=4)
    check(
        engine,
        {1: [request("A", 7, 2), request("B", 2, 2), request("C", 1, 2)]},
        [
            # A gets the whole budget, and blocks for these 4 tokens only.
            State("A4", {"A": [1, 2]}, (4, 0, 0, 0, 0, 8), [3, 4, 5, 6], waiting="BC", new="A"),
            # A's last 3 and 1 of B's 2. A's eighth slot and B's second will be filled.
            State("A3 B1", {"A": [1, 2, 3, 4], "B": [5]}, (8, 2, 0, 0, 0, 2), [6], waiting="C", new="B"),
            # A's output, B's second prompt token, C's only one. C's second slot will be filled.
            State("A1 B1 C1", {"A": [1, 2, 3, 4], "B": [5], "C": [6]}, (11, 1, 0, 0, 0, 0), [], new="C", done="A"),
            # A's blocks are back, the last foremost; B's third token takes that one. Its fourth slot is never filled.
            State("B1 C1", {"B": [5, 4], "C": [6]}, (5, 0, 1, 0, 0, 6), [3, 2, 1], done="BC"),
        ],
    )
    assert engine.memory.free_list() == [6, 4, 5, 3, 2, 1]  # type: ignore[attr-defined]


def test_paged_without_chunked_prefill() -> None:
    # 4 blocks, 4 tokens a step. A stores 4, B 2, C 1, D 4.
    engine = ContinuousBatching(paged(4), 16, Fcfs(), max_num_batched_tokens=4, chunked_prefill=False)
    check(
        engine,
        {1: [request("A", 3, 2), request("B", 2, 1), request("C", 1, 1)], 2: [request("D", 4, 1)]},
        [
            # One token of the budget is left: too little for B, and C does not pass it.
            State("A3", {"A": [1, 2]}, (3, 1, 0, 0, 0, 4), [3, 4], waiting="BC", new="A"),
            # 1 + 2 + 1 is the budget. C's second slot is never filled.
            State("A1 B2 C1", {"A": [1, 2], "B": [3], "C": [4]}, (7, 0, 1, 0, 0, 0), [], "D", new="BC", done="ABC"),
            # Freed in batch order: 2, 1, then 3, then 4 in front.
            State("D4", {"D": [4, 3]}, (4, 0, 0, 0, 0, 4), [2, 1], new="D", done="D"),
        ],
    )
    assert engine.memory.free_list() == [3, 4, 2, 1]  # type: ignore[attr-defined]
