"""A pool of blocks with a free list and prefix keys, as vLLM's v1 block pool (0.33) keeps them.

Decides which block is handed out next and which still holds what it held. Rule numbers are those of the vLLM
conformance cases. What a key stands for, and who asks, is left to others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable

from sim.memory.holders import Holders


class BlockPool:
    """Blocks that are held, by one table or by several, or free.

    The free list has two ends (rule 2). At its front stand the blocks without a key, last freed first used; at its back
    those with one, least recently freed first.

    Args:
        num_blocks: blocks of the pool.
        num_reserved: those with the lowest ids, which are never handed out.

    Attributes:
        holders: of the blocks that stand in several tables.
    """

    def __init__(self, num_blocks: int, num_reserved: int) -> None:
        self.holders = Holders()
        self._free = list(range(num_blocks - 1, num_reserved - 1, -1))  # without a key; its front is at the end
        self._cached: OrderedDict[int, None] = OrderedDict()  # with one, next to be handed out first
        self._key_of: dict[int, Hashable] = {}
        self._blocks_of: dict[Hashable, dict[int, None]] = {}  # of each key, in order of registration

    @property
    def num_free(self) -> int:
        """Blocks without a holder, those with a key included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks without a holder that carry a key."""
        return len(self._cached)

    def free_list(self) -> list[int]:
        """Free blocks, next to be handed out first."""
        return [*reversed(self._free), *self._cached]

    def registered(self) -> list[int]:
        """Blocks that carry a key, ascending."""
        return sorted(self._key_of)

    def is_free(self, block: int) -> bool:
        """Whether a block with a key stands in the free list."""
        return block in self._cached

    def take(self, count: int) -> list[int]:
        """Takes `count` blocks from the front of the free list, which has as many; they lose their keys (rule 1)."""
        free = self._free
        blocks = free[: -count - 1 : -1] if count else []
        del free[len(free) - len(blocks) :]
        while len(blocks) < count:
            block, _ = self._cached.popitem(last=False)
            self.unregister(block)
            blocks.append(block)
        return blocks

    def hold(self, block: int) -> None:
        """Gives a block with a key one more holder; it leaves the free list if it had none (rule 5)."""
        if block in self._cached:
            del self._cached[block]
        else:
            self.holders.add(block)

    def free(self, blocks: Iterable[int]) -> None:
        """Drops a holder from each block. Of those left with none, the ones without a key go to the front of the free
        list, first of them foremost, and the others to its back (rule 2).
        """
        if self.holders.shared:
            blocks = [block for block in blocks if not self.holders.leave(block)]
        without_key = []
        for block in blocks:
            if block in self._key_of:
                self._cached[block] = None
            else:
                without_key.append(block)
        self._free.extend(reversed(without_key))

    def find(self, key: Hashable) -> int | None:
        """The block that was registered first under `key`, of those that still are (rule 5)."""
        blocks = self._blocks_of.get(key)
        return next(iter(blocks)) if blocks else None

    def register(self, block: int, key: Hashable) -> None:
        """Gives a block that is held, and carries none, a key; others may carry the same (rule 4)."""
        self._key_of[block] = key
        self._blocks_of.setdefault(key, {})[block] = None

    def unregister(self, block: int) -> None:
        """Takes the key from a block, if it has one."""
        key = self._key_of.pop(block, None)
        if key is not None:
            same = self._blocks_of[key]
            del same[block]
            if not same:
                del self._blocks_of[key]
