"""The radix tree and the pool around it: what is shared, what is given back, and what goes first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from radix_audit import RadixAudit

from sim.memory.radix import RadixMemory, content_of
from sim.memory.radix_tree import Content, Node, RadixTree
from sim.sequence import Sequence
from workloads.errors import UserError
from workloads.request import HashIds, Request, TokenIds


def sequence(number: int, prompt: int, output: int, ids: tuple[int, ...] | None = None) -> Sequence:
    return Sequence.of(Request(number, 0.0, prompt, output, prompt=TokenIds(ids) if ids else None), 100_000)


def prefill(memory: RadixMemory, one: Sequence) -> int:
    """Lets a sequence in and computes its prompt; returns its hit in pages."""
    hit = memory.lookup(one)
    assert memory.admit(one, hit, one.known, one.known, others_run=False)
    one.computed = one.known
    return len(hit)


def finish(memory: RadixMemory, one: Sequence) -> None:
    """Generates all that is left, with the last token not stored."""
    assert memory.grow(one, one.final - 1)
    one.computed = one.final - 1
    one.known = one.final
    memory.release(one)


# ------------------------------------------------------------------------------------------------------------ the tree


def test_a_node_is_split_where_contents_part_and_keeps_its_holders() -> None:
    tree = RadixTree()
    node, there = tree.insert(Content([1, 2, 3, 4], 1 << 64), 4, [10, 11, 12, 13], tree.root, 0)
    tree.lock(node, tree.root)
    assert (there, tree.num_locked) == (0, 4)
    other, there = tree.insert(Content([1, 2, 7], 2 << 64), 3, [20, 21, 22], tree.root, 0)
    assert there == 2  # 20 and 21 are for their bringer to give back
    assert (tree.num_blocks, tree.num_locked) == (5, 4)
    assert [list(one.blocks) for one in (other.parent, other, node) if one] == [[10, 11], [22], [12, 13]]
    tree.unlock(node)
    assert tree.num_locked == 0


def test_leaves_go_whole_the_least_recently_used_first_and_parents_after_them() -> None:
    tree = RadixTree()
    for number, ids in enumerate([[1, 2, 3], [1, 2, 4, 5], [9]]):
        tree.insert(Content(ids, number << 64), len(ids), range(10 * number, 10 * number + len(ids)), tree.root, 0)
    tree.use(tree.match(Content([1, 2, 3], 7 << 64), 3))
    # Leaves: 4, 5 (used second), 9 (third), 3 (again just now). One block is asked for, and the leaf's two are taken.
    assert tree.evict(1) == [12, 13]
    assert tree.evict(1) == [20]
    # 1, 2 has no child left once 3 is gone, and was used as late.
    assert tree.evict(3) == [2, 0, 1]
    assert (tree.num_blocks, tree.evict(1)) == (0, [])


def test_nothing_is_evicted_before_what_follows_it_nor_while_somebody_holds_it() -> None:
    tree = RadixTree()
    node, _ = tree.insert(Content([1, 2], 0), 2, [0, 1], tree.root, 0)
    tree.insert(Content([1, 2, 3], 0), 3, [0, 1, 2], tree.root, 0)
    tree.lock(node, tree.root)
    assert tree.evict(99) == [2]
    tree.unlock(node)
    assert tree.evict(99) == [0, 1]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(0, 3)), max_size=25))
def test_the_tree_holds_exactly_the_beginnings_that_were_put_in_and_not_evicted(
    steps: list[tuple[list[int], int]],
) -> None:
    """Against a dictionary of all beginnings; every third content is held until the end, every fourth step evicts."""
    tree, of_text, held, born = RadixTree(), {}, [], 0
    for number, (ids, action) in enumerate(steps):
        content = Content(list(ids), 5 << 64)
        found = [block for node, same in tree.match(content, len(ids)) for block in node.blocks[:same]]
        beginnings = [tuple(ids[: end + 1]) for end in range(len(ids))]
        assert found == [of_text[one] for one in beginnings if one in of_text]
        blocks = list(range(born, born + len(ids)))
        born += len(ids)
        node, there = tree.insert(content, len(ids), blocks, tree.root, 0)
        assert there == len(found)
        of_text |= {one: block for one, block in zip(beginnings, blocks, strict=True) if one not in of_text}
        if number % 3 == 0:
            tree.lock(node, tree.root)
            held += beginnings
        if action == 3:
            gone = set(tree.evict(2))
            assert not gone & {of_text[one] for one in held}
            of_text = {one: block for one, block in of_text.items() if block not in gone}
            assert all(one[:-1] in of_text or len(one) == 1 for one in of_text), "a beginning went before what follows"
        assert tree.num_blocks == len(of_text)
        assert tree.num_locked == len(set(held))


def test_what_is_known_by_its_length_only_costs_one_node_however_long_it_is() -> None:
    memory = RadixMemory(100_000)
    one = sequence(0, 50_000, 20_000)
    prefill(memory, one)
    memory.keep(one)
    finish(memory, one)
    nodes: list[Node] = list(memory.tree.root.children.values())
    assert [len(node.pages) for node in nodes] == [50_000]
    assert [len(node.pages) for node in nodes[0].children.values()] == [19_999]
    assert all(isinstance(node.pages, range) for node in nodes)


# ------------------------------------------------------------------------------------------------------------ the pool


def test_whoever_computes_what_another_has_just_brought_takes_the_tree_s_blocks_and_gives_its_own_back() -> None:
    memory = RadixMemory(10)
    one, other = sequence(0, 4, 3, (1, 2, 3, 4)), sequence(1, 4, 3, (1, 2, 3, 9))
    assert prefill(memory, one) == prefill(memory, other) == 0  # in one batch: nothing is in the tree yet
    assert memory.occupancy(None) == (8, 0, 0, 0, 0, 2, 2, 0)
    tables = one.blocks, other.blocks
    memory.keep(one)
    memory.keep(other)
    assert (one.blocks, other.blocks) == ([0, 1, 2, 3], [0, 1, 2, 7])
    # By this an executor that keeps copies of tables sees which have changed otherwise than by growing.
    assert (one.blocks is tables[0], other.blocks is tables[1]) == (True, False)
    assert memory.free_list() == [8, 9, 4, 5, 6]
    # 5 slots hold what 8 would without sharing.
    assert memory.occupancy(None) == (5, 0, 0, 0, 0, 5, 5, 3)


def test_a_finished_request_stays_cached_with_its_output_and_a_retracted_one_with_what_was_kept() -> None:
    memory = RadixMemory(20)
    done, again = sequence(0, 3, 5), sequence(1, 4, 9)
    for one in (done, again):
        prefill(memory, one)
        memory.keep(one)
    finish(memory, done)  # 3 + 5 - 1 stored
    assert memory.grow(again, 6)
    again.known, again.computed = 7, 6
    memory.release(again)  # before its end: 4 of its 6 had been kept
    assert memory.occupancy(None).cached == 7 + 4
    assert memory.num_free_blocks == 20
    assert len(memory.lookup(again)) == 4


def test_a_known_output_is_found_by_the_prompt_that_goes_on_from_it() -> None:
    # The second turn of a chat: its prompt is the first prompt, the answer and more. The answer's last token is not
    # stored; the second turn hits 3 + 4 - 1 tokens in pages of 1, and 6 // 2 pages of 2.
    for page_size, pages in ((1, 6), (2, 3)):
        memory = RadixMemory(40, page_size)
        first = sequence(0, 3, 4, tuple(range(7)))
        prefill(memory, first)
        memory.keep(first)
        finish(memory, first)
        assert len(memory.lookup(sequence(1, 9, 1, tuple(range(9))))) == pages


def test_the_last_token_is_computed_even_if_all_of_the_prompt_is_there() -> None:
    memory = RadixMemory(40)
    for number, hit in ((0, 0), (1, 4)):
        one = sequence(number, 5, 1, (1, 2, 3, 4, 5))
        assert prefill(memory, one) == hit
        memory.keep(one)
        one.known = one.final
        memory.release(one)
    assert memory.tree.num_blocks == 5


def test_pages_that_are_not_full_are_never_the_tree_s() -> None:
    # Pages of 4: 6 prompt tokens and 5 of 6 output tokens are 11, two full pages and 3 tokens of a third.
    memory = RadixMemory(10, 4)
    one = sequence(0, 6, 6)
    prefill(memory, one)
    memory.keep(one)
    assert memory.occupancy(None) == (6, 2, 0, 0, 0, 32, 32, 0)
    finish(memory, one)
    assert memory.occupancy(None) == (0, 0, 0, 8, 0, 32, 40, 0)


def test_room_that_a_hit_locks_is_no_room() -> None:
    # 10 pages: 6 are cached, and the newcomer hits 4 of them. 2 + 4 are left for its other 7 tokens: one too few.
    memory = RadixMemory(10)
    old = sequence(0, 6, 1, (1, 2, 3, 4, 5, 6))
    prefill(memory, old)
    memory.keep(old)
    old.known = old.final
    memory.release(old)
    new = sequence(1, 11, 1, (1, 2, 3, 4, *range(20, 27)))
    hit = memory.lookup(new)
    assert len(hit) == 4
    assert not memory.admit(new, hit, 11, 11, others_run=False)
    assert memory.num_cached_blocks == 6
    assert memory.admit(new, hit, 10, 10, others_run=False)
    assert memory.num_free_blocks == 0


def test_making_room_evicts_as_much_as_is_asked_for_whatever_is_free() -> None:
    # SGLang evicts the whole demand if what is free does not cover it: 3 asked for, 2 free, so 3 more are taken out.
    memory = RadixMemory(8)
    for number in range(3):
        one = sequence(number, 2, 1, (number, 7))
        prefill(memory, one)
        memory.keep(one)
        one.known = one.final
        memory.release(one)
    memory.make_room(2)
    assert memory.num_cached_blocks == 6
    memory.make_room(3)
    assert (len(memory.free_list()), memory.num_cached_blocks) == (6, 2)


def test_without_prefix_caching_nothing_outlives_its_sequence() -> None:
    memory = RadixMemory(20, prefix_caching=False)
    for number in range(2):
        one = sequence(number, 4, 3, (1, 2, 3, 4))
        assert prefill(memory, one) == 0
        memory.keep(one)
        finish(memory, one)
    assert memory.occupancy(None) == (0, 0, 0, 0, 0, 20, 20, 0)


@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
def test_hash_ids_mean_the_same_tokens_in_pages_of_any_size_that_fits(page_size: int) -> None:
    # Ids stand for 4 tokens. Common are 2 ids, 8 tokens; the third id differs.
    one, other = (
        Sequence.of(Request(number, 0.0, 12, 1, prompt=HashIds((5, 6, last), 4)), 1000)
        for number, last in enumerate((7, 8))
    )
    memory = RadixMemory(40, page_size)
    prefill(memory, one)
    memory.keep(one)
    assert len(memory.lookup(other)) == 8 // page_size


def test_hash_ids_that_do_not_fit_the_pages_are_refused() -> None:
    one = Sequence.of(Request(3, 0.0, 12, 1, prompt=HashIds((5, 6, 7), 4)), 1000)
    with pytest.raises(
        UserError, match=r"request 3 knows its prompt by hash ids of 4 tokens, which memory.block_size=3"
    ):
        content_of(one, 3)


@pytest.mark.parametrize(("knob", "value"), [("num_blocks", 0), ("block_size", 0)])
def test_sizes_below_one_are_refused(knob: str, value: int) -> None:
    with pytest.raises(UserError, match=f"memory.{knob} is 0"):
        RadixMemory(**{"num_blocks": 4, knob: value})


def test_the_account_can_fail() -> None:
    memory = RadixMemory(6)
    one = sequence(0, 3, 2)
    prefill(memory, one)
    memory.keep(one)
    audit = RadixAudit(memory)
    audit.look([one], None)
    one.blocks = [0, 1, 5]
    with pytest.raises(AssertionError, match="free and held"):
        audit.look([one], None)
