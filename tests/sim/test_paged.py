"""Paged memory without prefix caching, rule by rule; rule numbers are those of the vLLM conformance cases."""

from __future__ import annotations

import pytest
from pool_audit import audit_paged

from sim.memory.interface import Occupancy
from sim.memory.paged import PagedMemory
from sim.sequence import Sequence
from workloads.errors import UserError
from workloads.request import Request


def pool(usable: int, block_size: int, watermark: float = 0.0) -> PagedMemory:
    """A pool with `usable` blocks, numbered from 1."""
    return PagedMemory(usable + 1, block_size, watermark, prefix_caching=False)


def sequence(prompt: int, output: int) -> Sequence:
    return Sequence.of(Request(0, 0.0, prompt, output), 2048)


def admit(memory: PagedMemory, prompt: int, output: int, chunk: int | None = None) -> Sequence:
    """A sequence that has been admitted and is about to compute `chunk` tokens of its prompt, or all."""
    newcomer = sequence(prompt, output)
    tokens = prompt if chunk is None else chunk
    assert memory.admit(newcomer, memory.lookup(newcomer), tokens, tokens, others_run=False)
    newcomer.computed = tokens
    return newcomer


def grow(memory: PagedMemory, running: Sequence, tokens: int) -> bool:
    if not memory.grow(running, tokens):
        return False
    running.computed = tokens
    return True


def test_last_block_is_the_only_waste_of_a_paged_sequence() -> None:
    # 600 + 251 tokens store 850, for the last one is never computed. 850 tokens in blocks of 16: 53 full blocks + 2
    # tokens, so 54 blocks and 14 empty slots, which will never be filled.
    memory = pool(60, 16)
    running = admit(memory, 600, 251)
    assert grow(memory, running, 850)
    assert len(running.blocks) == 54
    assert memory.occupancy(None) == Occupancy(850, 0, 14, 0, 0, 96, largest_free_run=96)


def test_empty_slots_are_reserved_until_it_is_the_last_block() -> None:
    # 5 + 6 tokens store 10: blocks of 4 and 4 and 2. With 5 stored, two blocks, 3 slots will be filled; with 9 stored,
    # three blocks, 1 will be and 2 never.
    memory = pool(3, 4)
    running = admit(memory, 5, 6)
    assert memory.occupancy(None) == Occupancy(5, 3, 0, 0, 0, 4, largest_free_run=4)
    assert grow(memory, running, 9)
    assert memory.occupancy(None) == Occupancy(9, 1, 2, 0, 0, 0, largest_free_run=0)


def test_the_pool_starts_with_block_0_kept_back_and_hands_out_in_order() -> None:
    # Rule 1.
    memory = pool(4, 2)
    assert memory.free_list() == [1, 2, 3, 4]
    assert memory.num_slots == 8
    assert admit(memory, 5, 1).blocks == [1, 2, 3]
    assert memory.free_list() == [4]


def test_no_block_has_to_be_kept_back() -> None:
    memory = PagedMemory(3, 2, prefix_caching=False, num_reserved_blocks=0)
    assert memory.free_list() == [0, 1, 2]
    assert memory.num_slots == 6


def test_freed_blocks_are_reused_last_in_first_out() -> None:
    # Rule 2: the last of the table foremost, in front of what was free.
    memory = pool(6, 2)
    first, second = admit(memory, 4, 1), admit(memory, 3, 1)
    assert (first.blocks, second.blocks, memory.free_list()) == ([1, 2], [3, 4], [5, 6])
    memory.release(first)
    assert memory.free_list() == [2, 1, 5, 6]
    memory.release(second)
    assert memory.free_list() == [4, 3, 2, 1, 5, 6]
    assert admit(memory, 6, 1).blocks == [4, 3, 2]


def test_growth_takes_a_block_only_when_the_last_one_is_full() -> None:
    # Rule 8: 3 tokens in 2 blocks of 2; the fourth fills the second, the fifth and sixth fill a third.
    memory = pool(3, 2)
    running = admit(memory, 3, 9)
    held = [len(running.blocks) for tokens in (4, 5, 6) if grow(memory, running, tokens)]
    assert held == [2, 3, 3]


def test_growth_may_take_several_blocks_at_once_or_none() -> None:
    # 1 + 3 blocks of 2 with 4 usable: a chunk up to 8 tokens fits, one up to 9 would need a fifth.
    memory = pool(4, 2)
    running = admit(memory, 12, 1, chunk=2)
    assert not grow(memory, running, 9)
    assert (running.blocks, memory.free_list()) == ([1], [2, 3, 4])
    assert memory.occupancy(None) == Occupancy(2, 0, 0, 0, 0, 6, largest_free_run=6)
    assert grow(memory, running, 8)
    assert running.blocks == [1, 2, 3, 4]


def test_an_admission_without_room_changes_nothing() -> None:
    memory = pool(4, 2)
    admit(memory, 5, 1)
    refused, before = sequence(3, 1), memory.occupancy(None)
    assert not memory.admit(refused, [], 3, 3, others_run=False)
    assert (refused.blocks, memory.free_list(), memory.occupancy(None)) == ([], [4], before)


def test_admission_looks_for_room_for_all_tokens_but_takes_only_the_chunk() -> None:
    # Rule 13: 8 known tokens need 4 blocks; 3 tokens of them take 2.
    memory = pool(4, 2)
    newcomer = sequence(8, 1)
    assert memory.admit(newcomer, [], 3, 8, others_run=False)
    assert newcomer.blocks == [1, 2]
    memory = pool(3, 2)
    assert not memory.admit(sequence(8, 1), [], 3, 8, others_run=False)


def test_the_watermark_holds_only_at_admission_and_only_while_others_run() -> None:
    # 9 usable + block 0: 0.25 of 10 is 2.5, so 2 blocks stay free. 8 blocks leave 1: too few while others run.
    memory = pool(9, 1, watermark=0.25)
    assert not memory.admit(sequence(8, 2), [], 8, 8, others_run=True)
    assert memory.admit(sequence(7, 2), [], 7, 7, others_run=True)
    memory = pool(9, 1, watermark=0.25)
    newcomer = sequence(8, 3)
    assert memory.admit(newcomer, [], 8, 8, others_run=False)
    newcomer.computed = 8
    assert grow(memory, newcomer, 9)  # rule 8: down to the last block


def test_nothing_free_is_ever_external() -> None:
    # Two blocks that are no neighbours serve a head of 2 blocks; one that needs more than is free finds them idle too.
    memory = pool(3, 2)
    first, _, third = (admit(memory, 2, 1) for _ in range(3))
    memory.release(first)
    memory.release(third)
    for head in (None, sequence(4, 1), sequence(6, 1)):
        assert memory.occupancy(head) == Occupancy(2, 0, 0, 0, 0, 4, largest_free_run=4)


def test_a_decode_kernel_looks_up_one_entry_for_each_block_with_a_token() -> None:
    memory = pool(5, 4)
    running = admit(memory, 8, 9)
    assert memory.table_entries(running) == 2
    assert grow(memory, running, 9)
    assert memory.table_entries(running) == 3


def test_without_prefix_caching_nothing_is_hit_and_nothing_stays_cached() -> None:
    memory = pool(3, 2)
    running = admit(memory, 4, 1)
    assert memory.lookup(sequence(4, 1)) == []
    memory.release(running)
    assert memory.lookup(running) == []
    assert memory.occupancy(None) == Occupancy(0, 0, 0, 0, 0, 6, largest_free_run=6)


def test_what_outgrows_the_whole_pool_never_fits() -> None:
    # 4 blocks of 4 hold 16 tokens: 10 + 7 store 16, 10 + 8 store 17.
    memory = pool(4, 4)
    assert memory.never_fits(sequence(10, 7)) is None
    assert memory.never_fits(sequence(10, 8)) == "needs 5 blocks of 4 at its end, the pool has 4"


def test_the_audit_agrees_with_the_hand_counts_and_is_able_to_object() -> None:
    memory = pool(3, 4)
    running = admit(memory, 5, 6)
    audit_paged(memory, [running], None)
    with pytest.raises(AssertionError, match="lost"):
        audit_paged(memory, [], None)  # nobody owns up to two blocks
    twin = Sequence.of(running.request, 2048)
    twin.blocks, twin.computed = running.blocks, running.computed
    with pytest.raises(AssertionError, match="two tables"):
        audit_paged(memory, [running, twin], None)
    running.blocks = [1, 3]
    with pytest.raises(AssertionError, match="block 3 is free and held"):
        audit_paged(memory, [running], None)


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ((5, 0), "memory.block_size is 0; expected a whole number of at least 1."),
        ((1, 4), "memory.num_blocks is 1, of which 1 are never handed out; expected at least 2."),
        ((5, 4, 1.0), "memory.watermark is 1.0; expected a share of the pool, at least 0 and below 1."),
        ((5, 4, -0.1), "memory.watermark is -0.1; expected a share of the pool, at least 0 and below 1."),
        ((5, 4, 0.0, True, -1), "memory.num_reserved_blocks is -1; expected at least 0."),
    ],
)
def test_a_size_out_of_range_is_one_clear_line(sizes: tuple[int, ...], line: str) -> None:
    with pytest.raises(UserError) as caught:
        PagedMemory(*sizes)  # type: ignore[arg-type]
    assert str(caught.value) == line
