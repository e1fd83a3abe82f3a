"""Prefix caching with chained block keys, as in vLLM's v1 block pool (0.33).

Decides which blocks carry a key and which of them a new sequence can use again. In which order the unused ones are
evicted is another's choice (`eviction.py`). Rule numbers are those of the vLLM conformance cases. Blocks without a key
are the pool's (`paged.py`).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Hashable, Iterator
from itertools import count, islice

from mypy_extensions import mypyc_attr

from sim.memory.eviction import EvictionOrder, LeastRecentlyUsed
from sim.memory.holders import Holders
from sim.sequence import Sequence
from workloads.errors import UserError
from workloads.request import HashIds, Request, TokenIds
from workloads.sampling import BeamSearch


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixCache:
    """The blocks that carry a prefix key.

    A block that carries one is either held, by one sequence or by several, or it waits to be evicted.

    Args:
        block_size: tokens in a block.
        holders: of all blocks of the pool.
        order: in which those without a holder are evicted; None: the least recently used first, as in vLLM.
    """

    def __init__(self, block_size: int, holders: Holders, order: EvictionOrder | None = None) -> None:
        self.block_size = block_size
        self._holders = holders
        self._live: set[Sequence] = set()
        # Keys are kept only where another sequence, or the same after a preemption, could ask for the block.
        self._key_of: dict[int, Hashable] = {}
        # A key's blocks in the order of registration. Nearly always there is just one, and it stands there bare.
        self._blocks_of: dict[Hashable, int | list[int]] = {}
        self._order = LeastRecentlyUsed() if order is None else order  # of keyed blocks without a holder
        self._evictable = self._order.blocks

    @property
    def num_evictable(self) -> int:
        """Blocks that hold a reusable prefix and belong to no live sequence."""
        return len(self._evictable)

    def evictable(self) -> Iterator[int]:
        """Those blocks, next to be evicted first."""
        return iter(self._order)

    def registered(self) -> list[int]:
        """Blocks that carry a key, ascending: the full ones of every table, and those that wait to be evicted."""
        held = (block for sequence in self._live for block in sequence.blocks[: sequence.computed // self.block_size])
        return sorted(self._evictable.union(held))

    def lookup(self, sequence: Sequence) -> list[int]:
        """Blocks of the longest registered prefix that leaves at least one token to compute (rule 5)."""
        hit: list[int] = []
        for key in islice(prefix_keys(sequence, self.block_size), (sequence.known - 1) // self.block_size):
            blocks = self._blocks_of.get(key)
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
        again: list[int] = []
        for block in hit:
            if block in self._evictable:
                again.append(block)
            else:
                self._holders.add(block)
        self._order.remove(again)

    def evict(self, count: int) -> list[int]:
        """Takes the next `count` blocks of the evictable ones; each loses its key (rule 1)."""
        evicted = self._order.take(count)
        self._lose_keys(evicted)
        return evicted

    def _lose_keys(self, evicted: list[int]) -> None:
        if self._key_of:
            for block in evicted:
                key = self._key_of.pop(block, None)
                if key is not None:
                    self._forget(block, key)

    def _forget(self, block: int, key: Hashable) -> None:
        """The block has lost `key`, which others may carry too."""
        same = self._blocks_of.pop(key)
        if isinstance(same, list):
            same.remove(block)
            self._blocks_of[key] = same if len(same) > 1 else same[0]

    def register(self, sequence: Sequence, start: int, num_tokens: int) -> None:
        """Registers the blocks from the `start`-th on that the first `num_tokens` tokens complete (rule 4)."""
        end = num_tokens // self.block_size
        keys, blocks = comparable_keys(sequence, self.block_size)[start:end], sequence.blocks[start:end]
        if not keys:
            return
        if self._blocks_of.keys().isdisjoint(keys):
            self._key_of.update(zip(blocks, keys, strict=False))
            self._blocks_of.update(zip(keys, blocks, strict=False))
        else:
            for block, key in zip(blocks, keys, strict=False):
                self._note(block, key)

    def unregister(self, sequence: Sequence, num_tokens: int) -> None:
        """Takes the keys back from blocks that are full only if more than `num_tokens` tokens are computed."""
        for block in sequence.blocks[num_tokens // self.block_size : sequence.computed // self.block_size]:
            key = self._key_of.pop(block, None)
            if key is not None:
                self._forget(block, key)

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
        """Drops a holder from each full block, the last first; so keyed ones without another join the queue (rule 2).

        Returns:
            The blocks that carry no key, in table order; they may have other holders.
        """
        full = sequence.computed // self.block_size  # every full block carries a key, and no other does
        keyed = list(sequence.blocks[full - 1 :: -1]) if full else []
        self._live.remove(sequence)
        if sequence.known < sequence.final:  # it comes back, and may find blocks that nobody else could ask for
            for position in range(len(comparable_keys(sequence, self.block_size)), self._own(sequence, full)):
                if (block := sequence.blocks[position]) not in self._key_of:
                    self._note(block, _own_key(sequence, position))
        if self._holders.shared:
            keyed = [block for block in keyed if not self._holders.leave(block)]
        self._order.add(sequence, keyed)
        return list(sequence.blocks[full:])

    def _own(self, sequence: Sequence, full: int) -> int:
        """How many of its first `full` blocks it finds again by its own keys: of several outputs, only the prompt's.

        Behind the prompt, one key would stand for a different text in each of them.
        """
        return full if sequence.group is None else min(full, sequence.request.prompt_tokens // self.block_size)


def prefix_keys(sequence: Sequence, block_size: int) -> Iterator[Hashable]:
    """The keys of its blocks (rule 3): equal for two blocks exactly if all tokens up to the blocks' ends are equal."""
    keys = comparable_keys(sequence, block_size)
    yield from keys
    for position in count(len(keys)):
        yield _own_key(sequence, position)


def _own_key(sequence: Sequence, position: int) -> Hashable:
    """The key of a block that is known only by its length, or was generated without telling us: like no other."""
    return sequence.request.request_id, position


def comparable_keys(sequence: Sequence, block_size: int) -> list[Hashable]:
    """The keys of its first full blocks, as far as another sequence could hold the same. Made once, kept with it.

    An output that is known beforehand is the one of a single sequence, or the first of several drawn in parallel; which
    beam it will be, if any, is not known.

    Raises:
        UserError: prompt known by hash ids of blocks that neither divide ours nor are a multiple of them.
    """
    if sequence.keys is None:
        match sequence.request.prompt:
            case None:
                sequence.keys = []
            case TokenIds(ids):
                beams = isinstance(sequence.request.sampling, BeamSearch)
                sequence.keys = _digests(ids[: sequence.request.prompt_tokens] if beams else ids, block_size)
            case HashIds(ids, hash_block):
                sequence.keys = _from_hash_ids(sequence.request, ids, hash_block, block_size)
    return sequence.keys


def _digests(ids: tuple[int, ...], block_size: int) -> list[Hashable]:
    """The parent's digest stands for all tokens before it: 128 bits, so that a collision is out of the question."""
    keys: list[Hashable] = []
    digest = b""
    for end in range(block_size, len(ids) + 1, block_size):
        content = array("q", ids[end - block_size : end]).tobytes()
        digest = hashlib.blake2b(digest + content, digest_size=16).digest()
        keys.append(digest)
    return keys


def _from_hash_ids(request: Request, ids: tuple[int, ...], hash_block: int, block_size: int) -> list[Hashable]:
    """An id and a position in one number. Chained ids stand for all tokens before them by themselves."""
    full = request.prompt_tokens // block_size
    if hash_block % block_size == 0:
        per_id = hash_block // block_size
        keys: list[Hashable] = []
        for position, id_ in enumerate(ids):
            first = (id_ << 32) + position * per_id
            keys.extend(range(first, first + per_id))
        return keys[:full]
    if block_size % hash_block == 0:
        per_block = block_size // hash_block
        return [(ids[(position + 1) * per_block - 1] << 32) + position for position in range(full)]
    raise UserError(
        f"request {request.request_id} knows its prompt by hash ids of {hash_block} tokens, which memory.block_size="
        f"{block_size} neither divides nor is a multiple of; choose such a size or memory.prefix_caching=false."
    )
