"""Contiguous memory, rule by rule; slots are counted by hand."""

from __future__ import annotations

from typing import Literal

import pytest
from pool_audit import ContiguousRules, audit_contiguous, fits_aligned, next_power_of_two

from sim.memory.allocators.buddy import Buddy
from sim.memory.allocators.exact import ExactSlots
from sim.memory.allocators.fit import FirstFit
from sim.memory.allocators.interface import Allocator
from sim.memory.contiguous import ContiguousMemory
from sim.memory.interface import Occupancy
from sim.memory.reservation import MaxReservation, OracleReservation, Pow2Reservation, Reservation
from sim.sequence import Sequence
from workloads.errors import UserError
from workloads.request import Request

LIMIT = 2048
Charge = Literal["internal", "external"]


def sequence(prompt: int, output: int, request_id: int = 0) -> Sequence:
    return Sequence.of(Request(request_id, 0.0, prompt, output), LIMIT)


def admit(memory: ContiguousMemory, prompt: int, output: int, chunk: int | None = None) -> Sequence:
    """A sequence that has got its region and is about to compute `chunk` tokens of its prompt, or all."""
    newcomer = sequence(prompt, output)
    tokens = prompt if chunk is None else chunk
    assert memory.admit(newcomer, [], tokens, prompt, others_run=False)
    newcomer.computed = tokens
    return newcomer


def pool(
    num_blocks: int,
    allocator: type[Buddy] | type[FirstFit] | type[ExactSlots] = FirstFit,
    reservation: Reservation | None = None,
    block_size: int = 1,
    charge_rounding_to: Charge = "external",
) -> ContiguousMemory:
    made: Allocator = allocator(num_blocks)
    return ContiguousMemory(num_blocks, LIMIT, reservation or OracleReservation(), made, block_size, charge_rounding_to)


def test_the_whole_region_is_taken_at_admission_even_for_a_first_chunk() -> None:
    # 6 + 4 tokens: 10 slots, 9 of which will be filled. A chunk of 2 fills 2, so 7 are reserved and 1 never fills.
    memory = pool(16)
    newcomer = admit(memory, 6, 4, chunk=2)
    assert list(newcomer.blocks) == list(range(10))
    assert memory.occupancy(None) == Occupancy(2, 7, 1, 0, 0, 6, largest_free_run=6)


def test_growing_always_succeeds_and_turns_reserved_slots_into_used_ones() -> None:
    # A pool with nothing free: 6 + 4 in 10 slots; 9 fill one after the other.
    memory = pool(10)
    newcomer = admit(memory, 6, 4)
    for stored in (7, 8, 9):
        assert memory.grow(newcomer, stored)
        newcomer.computed = stored
        assert memory.occupancy(None) == Occupancy(stored, 9 - stored, 1, 0, 0, 0, largest_free_run=0)


def test_release_gives_back_the_region_and_empties_the_table() -> None:
    memory = pool(10)
    newcomer = admit(memory, 6, 4)
    memory.release(newcomer)
    assert len(newcomer.blocks) == 0
    assert memory.occupancy(None) == Occupancy(0, 0, 0, 0, 0, 10, largest_free_run=10)


def test_a_sequence_without_a_region_leaves_everything_as_it_was() -> None:
    memory = pool(10)
    admit(memory, 6, 2)
    before, refused = memory.occupancy(None), sequence(1, 2)
    assert not memory.admit(refused, [], 1, 1, others_run=True)  # 3 slots, 2 are free
    assert len(refused.blocks) == 0
    assert memory.occupancy(None) == before


def test_nothing_is_shared_and_no_table_is_looked_up() -> None:
    memory = pool(10)
    newcomer = admit(memory, 6, 2)
    assert memory.lookup(sequence(6, 2)) == []
    assert memory.table_entries(newcomer) == 0


def test_orca_max_holds_seven_requests_of_opt_13b_and_no_eighth() -> None:
    # 15,728 slots hold seven aligned regions of 2,048 (test_allocators.py). Each request stores 10 + 5 - 1 = 14 in the
    # end, 10 now: 4 reserved, 2,034 internal. The 1,392 free ones are not enough for an eighth, so they are idle.
    memory = pool(15_728, Buddy, MaxReservation())
    for _ in range(7):
        admit(memory, 10, 5)
    assert not memory.admit(sequence(1, 1), [], 1, 1, others_run=True)
    assert memory.occupancy(sequence(1, 1)) == Occupancy(70, 28, 7 * 2034, 0, 0, 1392, largest_free_run=1024)


def test_free_slots_are_external_only_if_they_would_be_enough_for_the_waiting_head() -> None:
    # Three regions of 4 in 14 slots; the outer two go. Free: 4 and, behind the middle one, 4 + 2 = 6; 10 in all.
    memory = pool(14)
    first, _, third = (admit(memory, 3, 1) for _ in range(3))
    memory.release(first)
    memory.release(third)
    held = {"used": 3, "reserved": 0, "internal": 1, "cached": 0, "largest_free_run": 6}
    assert memory.occupancy(None) == Occupancy(**held, external=0, idle=10)
    assert memory.occupancy(sequence(3, 3)) == Occupancy(**held, external=0, idle=10)  # 6 fit behind the middle one
    assert memory.occupancy(sequence(3, 4)) == Occupancy(**held, external=10, idle=0)  # 7 fit nowhere in a row
    assert memory.occupancy(sequence(3, 7)) == Occupancy(**held, external=10, idle=0)  # 10: all that is free
    assert memory.occupancy(sequence(3, 8)) == Occupancy(**held, external=0, idle=10)  # 11 are not there at all


def test_a_buddy_strands_slots_that_are_enough_before_rounding() -> None:
    # 8 + 4 + 1 slots, the 8 are held by 5 + 3. The head needs 5, and 4 + 1 are free, but 5 rounds to 8.
    memory = pool(13, Buddy)
    admit(memory, 5, 3)
    assert memory.occupancy(sequence(2, 3)) == Occupancy(5, 2, 1, 0, 5, 0, largest_free_run=4)
    assert memory.occupancy(sequence(2, 2)) == Occupancy(5, 2, 1, 0, 0, 5, largest_free_run=4)  # 4 fit


def test_exact_slots_are_never_external() -> None:
    memory = pool(14, ExactSlots)
    first, _, third = (admit(memory, 3, 1) for _ in range(3))
    memory.release(first)
    memory.release(third)
    assert memory.occupancy(sequence(3, 7)) == Occupancy(3, 0, 1, 0, 0, 10, largest_free_run=10)


@pytest.mark.parametrize(("charge", "internal", "external"), [("external", 1, 3), ("internal", 4, 0)])
def test_a_buddys_rounding_is_charged_where_it_is_told_to(charge: Charge, internal: int, external: int) -> None:
    # 3 + 2 tokens: 5 slots in a region of 8. 4 will be filled, 1 is reserved in vain, 3 are rounding.
    memory = pool(16, Buddy, charge_rounding_to=charge)
    newcomer = admit(memory, 3, 2)
    assert memory.occupancy(None) == Occupancy(3, 1, internal, 0, external, 8, largest_free_run=8)
    memory.release(newcomer)
    assert memory.occupancy(None) == Occupancy(0, 0, 0, 0, 0, 16, largest_free_run=16)


def test_rounding_and_stranded_slots_add_up_under_external() -> None:
    # 16 = a region of 8 for 3 + 2 tokens (3 of rounding), 4 for 3 + 1, and 4 free, into which a head of 1 + 3 fits:
    # only the 3 are external.
    memory = pool(16, Buddy)
    admit(memory, 3, 2)
    middle = admit(memory, 3, 1)
    assert memory.occupancy(sequence(1, 3)).external == 3
    # Of two more regions of 2 the first comes free beside the held second: 4 + 2 free, 5 wanted, 8 rounded.
    first, _ = admit(memory, 1, 1), admit(memory, 1, 1)
    memory.release(middle)
    memory.release(first)
    assert memory.occupancy(sequence(1, 4)).external == 3 + 6
    assert memory.occupancy(sequence(1, 4)).idle == 0


def test_rounding_to_whole_blocks_is_internal_and_a_buddys_on_top_is_not() -> None:
    # 3 + 2 tokens in blocks of 2: 3 blocks, rounded to 4, of 8. Of the reserved 6 slots 4 fill; 2 are internal; the
    # fourth block is rounding.
    memory = pool(8, Buddy, block_size=2)
    newcomer = admit(memory, 3, 2)
    assert list(newcomer.blocks) == [0, 1, 2, 3]
    assert memory.occupancy(None) == Occupancy(3, 1, 2, 0, 2, 8, largest_free_run=8)
    assert memory.num_slots == 16


def test_pow2_wastes_what_it_rounds_the_output_by() -> None:
    # 10 + 25 tokens: 42 slots, 34 of which will be filled.
    memory = pool(50, reservation=Pow2Reservation())
    admit(memory, 10, 25)
    assert memory.occupancy(None) == Occupancy(10, 24, 8, 0, 0, 8, largest_free_run=8)


def test_the_audit_agrees_with_the_hand_counts() -> None:
    # The same state as in the test of stranded slots, counted slot by slot; and the audit is able to object.
    memory = pool(13, Buddy)
    held, head = admit(memory, 5, 3), sequence(2, 3)
    rules = ContiguousRules(lambda sequence: sequence.final, next_power_of_two, fits_aligned, "external")
    audit_contiguous(memory, rules, [held], head)
    held.computed = 6  # behind the policy's back
    with pytest.raises(AssertionError):
        audit_contiguous(memory, rules, [held], head)


def test_a_request_larger_than_the_largest_region_of_an_empty_pool_never_fits() -> None:
    # 13 = 8 + 4 + 1: 5 to 8 tokens take 8, 9 would take 16. First fit has all 13 in a row.
    buddy = pool(13, Buddy)
    admit(buddy, 1, 1)
    assert buddy.never_fits(sequence(4, 4)) is None  # though it has to wait now
    reason = buddy.never_fits(sequence(5, 4))
    assert reason == "needs a region of 16 slots, the largest of the empty pool is 8"
    assert pool(13).never_fits(sequence(9, 4)) is None
    assert pool(13).never_fits(sequence(10, 4)) == "needs a region of 14 slots, the largest of the empty pool is 13"


@pytest.mark.parametrize(("knob", "sizes"), [("block_size", (4, 0)), ("num_blocks", (0, 1)), ("num_blocks", (-3, 1))])
def test_a_size_below_one_is_one_clear_line(knob: str, sizes: tuple[int, int]) -> None:
    num_blocks, block_size = sizes
    with pytest.raises(UserError, match=rf"^memory\.{knob} is .*; expected a whole number of at least 1\.$"):
        ContiguousMemory(num_blocks, LIMIT, OracleReservation(), FirstFit(4), block_size)
