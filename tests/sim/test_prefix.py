"""Prefix caching, rule by rule; rule numbers are those of the vLLM conformance cases.

Blocks hold 2 tokens unless a test says otherwise, and are numbered from 1.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_audit import BlockContents, audit_paged

from sim.memory.interface import Occupancy
from sim.memory.paged import PagedMemory
from sim.sequence import Sequence
from workloads.errors import UserError
from workloads.request import HashIds, Request, TokenIds

LIMIT = 1_000_000


def pool(usable: int, block_size: int = 2) -> PagedMemory:
    return PagedMemory(usable + 1, block_size, prefix_caching=True)


def spelled(*ids: int, output: int = 2, request_id: int = 0) -> Sequence:
    """A request whose prompt is known token by token."""
    return Sequence.of(Request(request_id, 0.0, len(ids), output, prompt=TokenIds(ids)), LIMIT)


def anonymous(prompt: int, output: int = 2, request_id: int = 99) -> Sequence:
    """A request of whose prompt only the length is known."""
    return Sequence.of(Request(request_id, 0.0, prompt, output), LIMIT)


def admit(memory: PagedMemory, newcomer: Sequence, tokens: int | None = None) -> list[int]:
    """Admits a sequence that is about to have `tokens` tokens in the pool, or all known ones; returns what it hits."""
    hit = memory.lookup(newcomer)
    tokens = newcomer.known if tokens is None else tokens
    assert memory.admit(newcomer, hit, tokens, newcomer.known, others_run=False)
    newcomer.computed = tokens
    return hit


def decode(memory: PagedMemory, running: Sequence, tokens: int) -> None:
    """Lets a sequence that has caught up generate `tokens` tokens, and compute them."""
    for _ in range(tokens):
        running.known += 1
        assert memory.grow(running, running.computed + 1)
        running.computed += 1


def registered(memory: PagedMemory) -> list[int]:
    assert memory.prefix is not None
    return memory.prefix.registered()


# ------------------------------------------------------------------------------------------------------ keys and lookup


def test_an_equal_prompt_hits_whole_blocks_and_leaves_at_least_one_token_to_compute() -> None:
    # Rule 5: at most (known - 1) div 2 blocks. 6 equal tokens: 2 blocks, though 3 are there; 7 tokens: 3 blocks.
    memory = pool(9)
    admit(memory, spelled(1, 2, 3, 4, 5, 6))
    assert memory.lookup(spelled(1, 2, 3, 4, 5, 6)) == [1, 2]
    assert memory.lookup(spelled(1, 2, 3, 4, 5, 6, 7)) == [1, 2, 3]
    assert memory.lookup(spelled(1, 2, 3, 4, 5)) == [1, 2]
    assert memory.lookup(spelled(1, 2)) == []


def test_a_lookup_ends_at_the_first_block_that_differs() -> None:
    memory = pool(9)
    admit(memory, spelled(1, 2, 3, 4, 5, 6))
    assert memory.lookup(spelled(1, 2, 3, 9, 5, 6, 7)) == [1]
    assert memory.lookup(spelled(9, 2, 3, 4, 5, 6, 7)) == []


def test_keys_are_chained_so_an_equal_second_block_after_a_different_first_is_no_hit() -> None:
    # (3, 4) is registered after (1, 2) and after (5, 6), but not after (7, 8), so there only the first block is hit.
    memory = pool(9)
    admit(memory, spelled(1, 2, 3, 4))
    admit(memory, spelled(5, 6, 3, 4))
    admit(memory, spelled(7, 8))
    assert memory.lookup(spelled(5, 6, 3, 4, 0)) == [3, 4]
    assert memory.lookup(spelled(7, 8, 3, 4, 0)) == [5]


def test_only_full_blocks_are_registered() -> None:
    # Rule 3: 5 tokens fill two blocks; the third has one token until a sixth is generated and computed.
    memory = pool(4)
    running = spelled(1, 2, 3, 4, 5, output=4)
    admit(memory, running)
    assert registered(memory) == [1, 2]
    decode(memory, running, 1)
    assert registered(memory) == [1, 2, 3]


def test_a_chunk_registers_the_blocks_that_it_completes() -> None:
    # Rule 4: 3 of 6 tokens complete one block, 5 complete two.
    memory = pool(4)
    running = spelled(1, 2, 3, 4, 5, 6)
    admit(memory, running, tokens=3)
    assert registered(memory) == [1]
    assert memory.grow(running, 5)
    running.computed = 5
    assert registered(memory) == [1, 2]


def test_a_prompt_known_by_length_only_shares_nothing_but_its_own_past() -> None:
    # Two of the same length have nothing in common. After a preemption one finds its own blocks again: 5 known tokens
    # of which 4 were stored, so both full blocks.
    memory = pool(6)
    first, second = anonymous(4, request_id=0), anonymous(4, request_id=1)
    admit(memory, first)
    assert memory.lookup(second) == []
    first.known += 1
    memory.release(first)
    assert memory.lookup(second) == []
    assert memory.lookup(first) == [1, 2]


def test_generated_tokens_are_hit_by_their_own_request_only() -> None:
    # 3 + 1 tokens: the second block ends in a generated token. The first is common, the second is not.
    memory = pool(6)
    first = spelled(1, 2, 3, output=4, request_id=0)
    admit(memory, first)
    decode(memory, first, 1)
    first.known += 1
    second = spelled(1, 2, 3, output=4, request_id=1)
    admit(memory, second)
    decode(memory, second, 1)
    assert second.blocks[0] == first.blocks[0] == 1
    assert second.blocks[1] != first.blocks[1]
    memory.release(first)
    assert memory.lookup(first) == [1, 2]


def test_a_request_admitted_in_the_same_step_hits_what_was_only_scheduled() -> None:
    # Rule 4: registration is at scheduling, so nothing has to be computed in between.
    memory = pool(6)
    admit(memory, spelled(1, 2, 3, request_id=0))
    assert admit(memory, spelled(1, 2, 3, request_id=1)) == [1]


# -------------------------------------------------------------------------------------------------- sharing and holders


def test_a_shared_block_counts_once_and_is_free_only_when_its_last_holder_has_gone() -> None:
    # Two sequences of 3 tokens share block 1: 2 + 1 + 1 slots are used, and each will fill one more (3 + 2 store 4).
    # That saves a block of 2.
    memory = pool(4)
    first, second = spelled(1, 2, 3, request_id=0), spelled(1, 2, 3, request_id=1)
    admit(memory, first)
    admit(memory, second)
    assert (first.blocks, second.blocks) == ([1, 2], [1, 3])
    assert memory.occupancy(None) == Occupancy(4, 2, 0, 0, 0, 2, largest_free_run=2, saved=2)
    memory.release(first)
    assert memory.free_list() == [2, 4]
    assert memory.occupancy(None) == Occupancy(3, 1, 0, 0, 0, 4, largest_free_run=4)
    memory.release(second)
    assert memory.free_list() == [3, 2, 4, 1]
    assert memory.occupancy(None) == Occupancy(0, 0, 0, 2, 0, 6, largest_free_run=8)


def test_equal_blocks_are_not_merged_and_the_first_registered_is_hit() -> None:
    # Rules 4 and 5: the second computes its last block anew, for one token has to be left; now 2 and 3 are alike.
    memory = pool(3)
    first, second = spelled(1, 2, 3, 4, request_id=0), spelled(1, 2, 3, 4, request_id=1)
    admit(memory, first)
    admit(memory, second)
    assert (first.blocks, second.blocks, registered(memory)) == ([1, 2], [1, 3], [1, 2, 3])
    longer = spelled(1, 2, 3, 4, 5, request_id=2)
    assert memory.lookup(longer) == [1, 2]
    # The first one's copy is handed out again: then the other is hit.
    memory.release(first)
    assert memory.lookup(longer) == [1, 2]
    admit(memory, anonymous(1))
    assert (registered(memory), memory.lookup(longer)) == ([1, 3], [1, 3])


def test_of_three_equal_blocks_the_next_oldest_takes_over() -> None:
    # Blocks 2, 3 and 4 hold the same. When 3 is handed out, 2 is still first; when 2 is too, 4 remains.
    memory = pool(4)
    twins = [spelled(1, 2, 3, 4, request_id=i) for i in range(3)]
    for twin in twins:
        admit(memory, twin)
    longer = spelled(1, 2, 3, 4, 5, request_id=9)
    memory.release(twins[1])
    admit(memory, anonymous(1, request_id=7))
    assert (registered(memory), memory.lookup(longer)) == ([1, 2, 4], [1, 2])
    memory.release(twins[0])
    admit(memory, anonymous(1, request_id=8))
    assert (registered(memory), memory.lookup(longer)) == ([1, 4], [1, 4])


def test_hit_blocks_that_nobody_holds_are_taken_from_what_is_free() -> None:
    # Rule 13: 3 blocks; the hit one is free and about to be taken. 5 tokens need 3 blocks, 1 hit: 2 new + 1 taken = 3.
    memory = pool(3)
    first = spelled(1, 2, 3)
    admit(memory, first)
    memory.release(first)
    assert memory.free_list() == [2, 3, 1]
    fits, too_long = spelled(1, 2, 7, 8, 9, request_id=1), spelled(1, 2, 7, 8, 9, 10, 11, request_id=2)
    assert not memory.admit(too_long, memory.lookup(too_long), 7, 7, others_run=False)
    assert (too_long.blocks, memory.free_list(), registered(memory)) == ([], [2, 3, 1], [1])
    assert admit(memory, fits) == [1]
    assert (fits.blocks, memory.free_list()) == ([1, 2, 3], [])


def test_hit_blocks_that_are_held_cost_nothing() -> None:
    # 3 blocks, two of them held: 3 tokens with a hit on block 1 need one more, and there is one.
    memory = pool(3)
    admit(memory, spelled(1, 2, 3, request_id=0))
    second = spelled(1, 2, 4, request_id=1)
    admit(memory, second)
    assert (second.blocks, memory.free_list()) == ([1, 3], [])


# ------------------------------------------------------------------------------------------------- release and eviction


def test_released_blocks_without_a_key_go_to_the_front_and_those_with_one_to_the_back() -> None:
    # Rule 2: of [1, 2, 3] the third is not full. It goes to the front; 2, then 1 go to the back, so tails are evicted
    # before heads.
    memory = pool(5)
    first = spelled(1, 2, 3, 4, 5)
    admit(memory, first)
    memory.release(first)
    assert memory.free_list() == [3, 4, 5, 2, 1]
    assert memory.occupancy(None) == Occupancy(0, 0, 0, 4, 0, 6, largest_free_run=10)


def test_a_block_loses_its_key_only_when_it_is_handed_out_again() -> None:
    # Free: 3, 4, then the cached 2, 1. Two new blocks leave the cache whole; the third takes 2, and the head stays.
    memory = pool(4)
    first = spelled(1, 2, 3, 4, 5)
    admit(memory, first)
    memory.release(first)
    again = spelled(1, 2, 3, 4, 5, request_id=1)
    admit(memory, anonymous(3))
    assert memory.free_list() == [2, 1]
    assert memory.lookup(again) == [1, 2]
    admit(memory, anonymous(1, request_id=98))
    assert (memory.free_list(), memory.lookup(again)) == ([1], [1])


def test_content_released_last_is_evicted_last_and_a_hit_renews_it() -> None:
    # Three prompts of one block each, released in order: 1, 2, 3 wait for eviction. A hit takes 1 from where it
    # stands, and its release puts it last.
    memory = pool(4)
    prompts = [spelled(i, i, request_id=i) for i in range(3)]
    for prompt in prompts:
        admit(memory, prompt)
    for prompt in prompts:
        memory.release(prompt)
    assert memory.free_list() == [4, 1, 2, 3]
    renewed = spelled(0, 0, 7, request_id=3)
    assert admit(memory, renewed) == [1]
    assert memory.free_list() == [2, 3]
    memory.release(renewed)
    assert memory.free_list() == [4, 2, 3, 1]


def test_a_victims_freed_blocks_lose_their_keys_when_others_take_them() -> None:
    # A simulator that kept the keys made re-prefill almost free and throughput 45 times too high. The victim's blocks
    # 1, 2, 3 go back as 3, 2, 1; another request takes two of them, so the victim hits only its first block again.
    memory = pool(3)
    victim = anonymous(6, output=4, request_id=0)
    admit(memory, victim)
    victim.known += 1
    memory.release(victim)
    assert memory.lookup(victim) == [1, 2, 3]
    other = anonymous(4, request_id=1)
    admit(memory, other)
    assert other.blocks == [3, 2]
    assert memory.lookup(victim) == [1]
    memory.release(other)
    assert memory.lookup(victim) == [1]


def test_lookups_and_refusals_change_nothing() -> None:
    memory = pool(3)
    first = spelled(1, 2, 3, 4, 5)
    admit(memory, first)
    memory.release(first)
    before = memory.free_list(), memory.occupancy(None), registered(memory)
    head = spelled(1, 2, 3, 4, 5, 6, 7, 8, request_id=1)
    assert memory.lookup(head) == memory.lookup(head) == [1, 2]
    assert not memory.admit(head, [1, 2], 8, 8, others_run=False)
    assert (memory.free_list(), memory.occupancy(None), registered(memory)) == before


def test_the_audit_is_able_to_object() -> None:
    memory, contents = pool(4), BlockContents()
    first, second = spelled(1, 2, 3, request_id=0), spelled(1, 2, 9, request_id=1)
    admit(memory, first)
    admit(memory, second)
    audit_paged(memory, [first, second], None)
    contents.look(memory, [first, second], seen_all=True)
    stranger = Sequence.of(Request(1, 0.0, 3, 2, prompt=TokenIds((1, 7, 9))), LIMIT)
    stranger.blocks, stranger.computed = second.blocks, second.computed
    with pytest.raises(AssertionError, match="different content"):
        audit_paged(memory, [first, stranger], None)
    ahead = Sequence.of(second.request, LIMIT)  # as if its second block were full, which nobody registered
    ahead.blocks, ahead.known, ahead.computed = second.blocks, 4, 4
    with pytest.raises(AssertionError, match="keys do not point"):
        contents.look(memory, [first, ahead], seen_all=True)


# ------------------------------------------------------------------------------------------------------------- hash ids

HASH_BLOCK = 512


@st.composite
def shared_prompts(draw: st.DrawFn) -> list[tuple[HashIds, int]]:
    """Prompts that branch off each other, as chained ids of 512 tokens, with lengths; the last id may be partial."""
    branches = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), min_size=1, max_size=6))
    ids_of_path: dict[tuple[int, ...], int] = {}
    prompts = []
    for path in branches:
        paths = [tuple(path[: depth + 1]) for depth in range(len(path))]
        ids = tuple(ids_of_path.setdefault(prefix, len(ids_of_path)) for prefix in paths)
        missing = draw(st.sampled_from([0, 1, 15, 16, 200, HASH_BLOCK - 1]))
        prompts.append((HashIds(ids, HASH_BLOCK), len(ids) * HASH_BLOCK - missing))
    return prompts


def hits_one_after_the_other(prompts: list[tuple[HashIds, int]], block_size: int, spell: bool) -> list[int]:
    """Hit tokens of each prompt, all of them staying in the pool."""
    memory = pool(sum(-(-length // block_size) for _, length in prompts), block_size)
    hits = []
    for request_id, (hashed, length) in enumerate(prompts):
        tokens = TokenIds(tuple(i * HASH_BLOCK + j for i in hashed.ids for j in range(HASH_BLOCK))[:length])
        prompt: TokenIds | HashIds = tokens if spell else hashed
        newcomer = Sequence.of(Request(request_id, 0.0, length, 1, prompt=prompt), LIMIT)
        hits.append(len(admit(memory, newcomer)) * block_size)
    return hits


@settings(max_examples=25, deadline=None)
@given(prompts=shared_prompts(), block_size=st.sampled_from([16, 512, 1024]))
def test_hash_ids_hit_what_the_same_prompts_spelled_out_hit(
    prompts: list[tuple[HashIds, int]], block_size: int
) -> None:
    assert hits_one_after_the_other(prompts, block_size, spell=False) == hits_one_after_the_other(
        prompts, block_size, spell=True
    )


@pytest.mark.parametrize(("block_size", "hit"), [(16, 1152), (512, 1024), (1024, 1024)])
def test_a_hash_id_stands_for_whole_blocks_of_ours_or_for_a_part_of_one(block_size: int, hit: int) -> None:
    # Both prompts begin with 2 * 512 tokens and then the first 140 of block 9: 1,164 tokens, 72 full blocks of 16 =
    # 1,152. Of blocks of 512 two are full, of blocks of 1,024 one.
    prompts = [(HashIds((7, 8, 9), HASH_BLOCK), 1164), (HashIds((7, 8, 9), HASH_BLOCK), 1165)]
    assert hits_one_after_the_other(prompts, block_size, spell=False) == [0, hit]


def test_half_a_block_of_ours_is_not_enough() -> None:
    # Blocks of 1,024: the first half, id 7, is common, the second, 8 or 9, is not.
    prompts = [(HashIds((7, 8), HASH_BLOCK), 1024), (HashIds((7, 9, 10), HASH_BLOCK), 1500)]
    assert hits_one_after_the_other(prompts, 1024, spell=False) == [0, 0]
    assert hits_one_after_the_other(prompts, 512, spell=False) == [0, 512]


def test_hash_blocks_that_do_not_divide_are_refused_in_one_line() -> None:
    newcomer = Sequence.of(Request(5, 0.0, 1024, 1, prompt=HashIds((1, 2), HASH_BLOCK)), LIMIT)
    with pytest.raises(UserError) as caught:
        pool(50, 24).lookup(newcomer)
    assert str(caught.value) == (
        "request 5 knows its prompt by hash ids of 512 tokens, which memory.block_size=24 neither divides nor is a "
        "multiple of; choose such a size or memory.prefix_caching=false."
    )
