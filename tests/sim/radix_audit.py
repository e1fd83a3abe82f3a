"""An account of every slot under a radix tree, kept apart from the policy's own sums and from the tree's.

It walks the tree node by node and the tables block by block. What a block of the tree says is known from the sequence
that was seen to write it; the tree's own keys are not believed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field

from pool_audit import NAMES, compare, name_of, tokens_up_to

from sim.memory.radix import RadixMemory
from sim.memory.radix_tree import Node
from sim.sequence import Sequence


def nodes_of(memory: RadixMemory) -> Iterator[Node]:
    """Every node but the root, parents first."""
    nodes = list(memory.tree.root.children.values())
    while nodes:
        node = nodes.pop()
        yield node
        nodes += node.children.values()


def path_blocks(node: Node) -> list[int]:
    """Blocks from the tree's root to the end of a node."""
    parts: list[list[int]] = []
    up: Node | None = node
    while up is not None:
        parts.append(list(up.blocks))
        up = up.parent
    return [block for part in reversed(parts) for block in part]


@dataclass(slots=True)
class RadixAudit:
    """Looks at a memory after every decision.

    Args:
        memory: the pool.
        all_seen: whether every block is looked at between being written and becoming the tree's; not so if a run leaps.
    """

    memory: RadixMemory
    all_seen: bool = True
    _said: dict[int, tuple[Hashable, ...]] = field(default_factory=dict)  # block -> the tokens up to its end

    def look(self, live: Collection[Sequence], head: Sequence | None) -> None:
        """Fails if a slot has no name, two names, or not the one that the policy says, or if the tree is amiss."""
        memory, size = self.memory, self.memory.block_size
        free = memory.free_list()
        assert len(set(free)) == len(free)
        in_tree = [block for node in nodes_of(memory) for block in node.blocks]
        assert len(set(in_tree)) == len(in_tree) == memory.tree.num_blocks
        assert not set(free) & set(in_tree), "a block is free and in the tree"
        names = dict.fromkeys((block * size + slot for block in free for slot in range(size)), "idle")
        names |= dict.fromkeys((block * size + slot for block in in_tree for slot in range(size)), "cached")
        held: Counter[int] = Counter()
        for sequence in live:
            held.update(sequence.blocks)
            for position, block in enumerate(sequence.blocks):
                assert held[block] == 1 or block in set(in_tree), "a block outside the tree is in two tables"
                for slot in range(size):
                    assert names.get(block * size + slot) != "idle", "a block is free and held"
                    name = name_of(sequence, position * size + slot)
                    before = names.get(block * size + slot, name)
                    names[block * size + slot] = name if before == "cached" else min(name, before, key=NAMES.index)
        assert names.keys() == set(range(memory.num_slots)), "a block is lost, or was never ours"
        evictable = [block for block in in_tree if block not in held]
        assert memory.num_free_blocks == len(free) + len(evictable)
        compare(memory, names, head, memory.num_free_blocks * size)
        assert memory.occupancy(head).saved == (held.total() - len(held)) * size
        self._look_at_tree(live, held)

    def check_lookup(self, sequence: Sequence) -> None:
        """Fails unless a lookup finds the longest beginning in the tree that leaves a token to compute."""
        size, hit = self.memory.block_size, self.memory.lookup(sequence)
        there = {self._said[block] for node in nodes_of(self.memory) for block in node.blocks}
        pages = (sequence.known - 1) // size
        longest = next((i for i in range(pages) if tokens_up_to(sequence, (i + 1) * size) not in there), pages)
        assert len(hit) == longest
        assert [self._said[block] for block in hit] == [tokens_up_to(sequence, (i + 1) * size) for i in range(longest)]

    def _look_at_tree(self, live: Collection[Sequence], held: Counter[int]) -> None:
        size = self.memory.block_size
        for sequence in live:
            for position, block in enumerate(sequence.blocks):
                if (position + 1) * size <= sequence.computed:
                    says = tokens_up_to(sequence, (position + 1) * size)
                    if held[block] > 1:
                        assert self._said.get(block, says) == says, "two tables mean different things by a block"
                    self._said[block] = says
        ends = set()
        for node in nodes_of(self.memory):
            assert node.parent is not None and node.parent.children[node.pages[0]] is node
            assert len(node.pages) == len(node.blocks) > 0
            assert node.locks == held[node.blocks[0]] == held[node.blocks[-1]], "locks are not those who hold it"
            if self.all_seen:
                says = self._said[node.blocks[-1]]
                assert len(says) == len(path_blocks(node)) * size
                assert [self._said[block] for block in path_blocks(node)] == [
                    says[:end] for end in range(size, len(says) + 1, size)
                ], "a path does not say what its sequence said"
                assert says not in ends, "the same text is in the tree twice"
                ends.add(says)
