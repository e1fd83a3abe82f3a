"""Prefix caching with chained block keys, as in vLLM's v1 block pool (0.33).

Decides which blocks carry a key, which of them a new sequence can use again, and in which order the unused ones are
evicted. Rule numbers are those of the vLLM conformance cases. Blocks without a key are the pool's (`paged.py`).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator

from sim.sequence import Sequence
from workloads.errors import UserError
from workloads.request import HashIds, TokenIds


class PrefixCache:
    """The blocks that carry a prefix key, and the holders of every block.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens in a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.shared = 0  # table entries beyond the first of each block
        self._holders = [0] * num_blocks  # sequences that have the block in their table
        self._key_of: list[Hashable | None] = [None] * num_blocks
        # A key's blocks in the order of registration. Nearly always there is just one, and it stands there bare.
        self._blocks_of: dict[Hashable, int | list[int]] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # keyed blocks without a holder, next to go first

    @property
    def num_evictable(self) -> int:
        """Blocks that hold a reusable prefix and belong to no live sequence."""
        return len(self._evictable)

    def evictable(self) -> Iterator[int]:
        """Those blocks, next to be evicted first."""
        return iter(self._evictable)

    def registered(self) -> list[int]:
        """Blocks that carry a key, ascending."""
        return [block for block, key in enumerate(self._key_of) if key is not None]

    def lookup(self, sequence: Sequence) -> list[int]:
        """Blocks of the longest registered prefix that leaves at least one token to compute (rule 5)."""
        hit: list[int] = []
        for position in range((sequence.known - 1) // self.block_size):
            blocks = self._blocks_of.get(key_of_block(sequence, position, self.block_size))
            if blocks is None:
                break
            hit.append(blocks if isinstance(blocks, int) else blocks[0])
        return hit

    def num_without_holder(self, blocks: list[int]) -> int:
        """How many of these blocks stand in the free list now."""
        return sum(self._holders[block] == 0 for block in blocks)

    def hold_hit(self, blocks: list[int]) -> None:
        """Gives each block one more holder; one that had none leaves the free list wherever it stands (rule 5)."""
        for block in blocks:
            if self._holders[block]:
                self.shared += 1
            else:
                del self._evictable[block]
            self._holders[block] += 1

    def hold_new(self, blocks: Iterable[int]) -> None:
        """Gives blocks fresh from the free list their first holder."""
        for block in blocks:
            self._holders[block] = 1

    def evict(self, count: int) -> list[int]:
        """Takes `count` blocks from the front of the evictable ones; each loses its key (rule 1)."""
        evicted = [self._evictable.popitem(last=False)[0] for _ in range(count)]
        for block in evicted:
            self._forget(block)
        return evicted

    def register(self, sequence: Sequence, start: int, num_tokens: int) -> None:
        """Registers the blocks from the `start`-th on that the first `num_tokens` tokens complete (rule 4)."""
        for position in range(start, num_tokens // self.block_size):
            block, key = sequence.blocks[position], key_of_block(sequence, position, self.block_size)
            self._key_of[block] = key
            same = self._blocks_of.get(key)
            if same is None:
                self._blocks_of[key] = block
            elif isinstance(same, int):
                self._blocks_of[key] = [same, block]
            else:
                same.append(block)

    def release(self, blocks: Iterable[int]) -> list[int]:
        """Drops one holder from each block; those left with a key but no holder queue for eviction so (rule 2).

        Returns:
            The blocks left with neither holder nor key, in this order.
        """
        without_key = []
        for block in blocks:
            self._holders[block] -= 1
            if self._holders[block]:
                self.shared -= 1
            elif self._key_of[block] is None:
                without_key.append(block)
            else:
                self._evictable[block] = None
        return without_key

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        self._key_of[block] = None
        blocks = self._blocks_of[key]
        if isinstance(blocks, int):
            del self._blocks_of[key]
        else:
            blocks.remove(block)
            if len(blocks) == 1:
                self._blocks_of[key] = blocks[0]


def key_of_block(sequence: Sequence, position: int, block_size: int) -> Hashable:
    """The key of a full block: equal for two blocks exactly if all tokens up to the block's end are equal (rule 3).

    What is known only by its length, and output that nobody told us, is like no other content. Keys are made once and
    kept with the sequence, also through a preemption.

    Raises:
        UserError: prompt known by hash ids of blocks that neither divide ours nor are a multiple of them.
    """
    keys = sequence.keys
    while len(keys) <= position:
        keys.append(_next_key(sequence, len(keys), block_size))
    return keys[position]


def _next_key(sequence: Sequence, position: int, block_size: int) -> Hashable:
    request, end = sequence.request, (position + 1) * block_size
    match request.prompt:
        case TokenIds(ids) if end <= len(ids):
            # The parent's digest stands for all tokens before it: 128 bits, so that a collision is out of the question.
            parent = sequence.keys[-1] if position else b""
            assert isinstance(parent, bytes)
            content = array("q", ids[end - block_size : end]).tobytes()
            return hashlib.blake2b(parent + content, digest_size=16).digest()
        case HashIds(ids, hash_block) if end <= request.prompt_tokens:
            # Chained ids stand for all tokens before by themselves.
            if hash_block % block_size == 0:
                per_id = hash_block // block_size
                return ids[position // per_id], position % per_id
            if block_size % hash_block == 0:
                return ids[end // hash_block - 1], 0
            raise UserError(
                f"request {request.request_id} knows its prompt by hash ids of {hash_block} tokens, which "
                f"memory.block_size={block_size} neither divides nor is a multiple of; choose such a size or "
                "memory.prefix_caching=false."
            )
    return request.request_id, position, None
