"""Prefix caching with chained block keys, as in vLLM's v1 block pool (0.33).

Decides which blocks carry a key, which of them a new sequence can use again, and in which order the unused ones are
evicted. Rule numbers are those of the vLLM conformance cases. Blocks without a key are the pool's (`paged.py`).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Hashable, Iterator

from sim.sequence import Sequence
from workloads.errors import UserError
from workloads.request import HashIds, TokenIds


class PrefixCache:
    """The blocks that carry a prefix key.

    A block that carries one is either held, by one sequence or by several, or it waits to be evicted.

    Args:
        block_size: tokens in a block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.shared = 0  # table entries beyond the first of each block
        self._holders: dict[int, int] = {}  # of the blocks that more than one sequence holds
        self._live: set[Sequence] = set()
        # Keys are kept only where another sequence, or the same after a preemption, could ask for the block.
        self._key_of: dict[int, Hashable] = {}
        # A key's blocks in the order of registration. Nearly always there is just one, and it stands there bare.
        self._blocks_of: dict[Hashable, int | list[int]] = {}
        self._evictable: set[int] = set()  # keyed blocks without a holder
        self._queue: deque[int] = deque()  # the same, next to go first, among entries that are out of date:
        self._outdated: dict[int, int] = {}  # how many entries of a block, the first ones, are

    @property
    def num_evictable(self) -> int:
        """Blocks that hold a reusable prefix and belong to no live sequence."""
        return len(self._evictable)

    def evictable(self) -> Iterator[int]:
        """Those blocks, next to be evicted first."""
        outdated = dict(self._outdated)
        for block in self._queue:
            if outdated.get(block, 0):
                outdated[block] -= 1
            else:
                yield block

    def registered(self) -> list[int]:
        """Blocks that carry a key, ascending: the full ones of every table, and those that wait to be evicted."""
        held = (block for sequence in self._live for block in sequence.blocks[: sequence.computed // self.block_size])
        return sorted(self._evictable.union(held))

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
        return sum(block in self._evictable for block in blocks)

    def hold(self, sequence: Sequence, hit: list[int]) -> None:
        """Lets the sequence in with what it hits: each block gets one more holder; one that had none leaves the free
        list wherever it stands (rule 5).
        """
        self._live.add(sequence)
        for block in hit:
            if block in self._evictable:
                self._evictable.remove(block)
                self._outdated[block] = self._outdated.get(block, 0) + 1
            else:
                self._holders[block] = self._holders.get(block, 1) + 1
                self.shared += 1

    def evict(self, count: int) -> list[int]:
        """Takes `count` blocks from the front of the evictable ones; each loses its key (rule 1)."""
        evicted = [self._next_evictable() for _ in range(count)]
        self._evictable.difference_update(evicted)
        if self._key_of:
            for block in evicted:
                key = self._key_of.pop(block, None)
                if key is not None:
                    self._forget(block, key)
        return evicted

    def _next_evictable(self) -> int:
        block = self._queue.popleft()
        while block in self._outdated:
            self._pass_over(block)
            block = self._queue.popleft()
        return block

    def _forget(self, block: int, key: Hashable) -> None:
        """The block has lost `key`, which others may carry too."""
        same = self._blocks_of.pop(key)
        if isinstance(same, list):
            same.remove(block)
            self._blocks_of[key] = same if len(same) > 1 else same[0]

    def register(self, sequence: Sequence, start: int, num_tokens: int) -> None:
        """Registers the blocks from the `start`-th on that the first `num_tokens` tokens complete (rule 4)."""
        end = min(num_tokens // self.block_size, num_comparable(sequence, self.block_size))
        for position in range(start, end):
            self._note(sequence.blocks[position], key_of_block(sequence, position, self.block_size))

    def _note(self, block: int, key: Hashable) -> None:
        self._key_of[block] = key
        same = self._blocks_of.get(key)
        if same is None:
            self._blocks_of[key] = block
        elif isinstance(same, int):
            self._blocks_of[key] = [same, block]
        else:
            same.append(block)

    def release(self, sequence: Sequence) -> list[int]:
        """Drops a holder from each block, the last first; keyed ones without another queue for eviction so (rule 2).

        Returns:
            The blocks left with neither holder nor key, in table order.
        """
        full = sequence.computed // self.block_size  # every full block carries a key, and no other does
        keyed = sequence.blocks[full - 1 :: -1] if full else []
        self._live.remove(sequence)
        if sequence.known < sequence.final:  # it comes back, and may find blocks that nobody else could ask for
            for position in range(num_comparable(sequence, self.block_size), full):
                if (block := sequence.blocks[position]) not in self._key_of:
                    self._note(block, own_key(sequence, position))
        if self._holders:
            keyed = [block for block in keyed if not self._shared_further(block)]
        self._evictable.update(keyed)
        self._queue.extend(keyed)
        return list(sequence.blocks[full:])

    def _shared_further(self, block: int) -> bool:
        """Drops a holder from the block if it has several."""
        holders = self._holders.get(block)
        if holders is None:
            return False
        self.shared -= 1
        if holders > 2:
            self._holders[block] = holders - 1
        else:
            del self._holders[block]
        return True

    def _pass_over(self, block: int) -> None:
        left = self._outdated[block] - 1
        if left:
            self._outdated[block] = left
        else:
            del self._outdated[block]


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
                return ids[position // per_id], position
            if block_size % hash_block == 0:
                return ids[end // hash_block - 1], position
            raise UserError(
                f"request {request.request_id} knows its prompt by hash ids of {hash_block} tokens, which "
                f"memory.block_size={block_size} neither divides nor is a multiple of; choose such a size or "
                "memory.prefix_caching=false."
            )
    return own_key(sequence, position)


def num_comparable(sequence: Sequence, block_size: int) -> int:
    """How many of its blocks, the first ones, hold what another sequence could hold too."""
    match sequence.request.prompt:
        case None:
            return 0
        case TokenIds(ids):
            return len(ids) // block_size
        case HashIds():
            return sequence.request.prompt_tokens // block_size


def own_key(sequence: Sequence, position: int) -> int:
    """The key of a block whose content no other sequence can know: consecutive numbers along its table."""
    return (sequence.request.request_id << 32) + position
