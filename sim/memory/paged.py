"""Paged KV memory: blocks of fixed size, a block table for each sequence (Kwon et al., SOSP 2023, §4.2).

Hands out, shares and takes back blocks as vLLM's v1 block pool does (0.33); rule numbers are those of the vLLM
conformance cases. Which sequence asks, and who must go when there is no room, is the scheduler's business.
"""

from __future__ import annotations

from collections import deque

from sim.memory.interface import Occupancy
from sim.memory.prefix import PrefixCache
from sim.sequence import Sequence
from workloads.errors import UserError

_run_through = deque[None](maxlen=0).extend  # an iterator, for its effects


class PagedMemory:
    """A pool of blocks and the list of free ones.

    The free list has two ends (rule 2). At its front stand the blocks without a prefix key, last freed first used: a
    stack. At its back stand those with a key, least recently freed first: the prefix cache keeps them.

    Args:
        num_blocks: blocks in the pool, as an engine's log counts them.
        block_size: tokens in a block.
        watermark: share of `num_blocks` that an admission must leave free while others run.
        prefix_caching: keep full blocks for reuse by content after their sequence has gone.
        num_reserved_blocks: blocks with the lowest ids that are never handed out; vLLM v1 keeps block 0.

    Raises:
        UserError: a size that leaves no block to hand out, or a watermark outside [0, 1).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        watermark: float = 0.0,
        prefix_caching: bool = True,
        num_reserved_blocks: int = 1,
    ) -> None:
        if block_size < 1:
            raise UserError(f"memory.block_size is {block_size}; expected a whole number of at least 1.")
        if not 0 <= watermark < 1:
            raise UserError(f"memory.watermark is {watermark}; expected a share of the pool, at least 0 and below 1.")
        if num_reserved_blocks < 0:
            raise UserError(f"memory.num_reserved_blocks is {num_reserved_blocks}; expected at least 0.")
        if num_blocks <= num_reserved_blocks:
            raise UserError(
                f"memory.num_blocks is {num_blocks}, of which {num_reserved_blocks} are never handed out; "
                f"expected at least {num_reserved_blocks + 1}."
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_usable_blocks = num_blocks - num_reserved_blocks
        self.prefix = PrefixCache(block_size) if prefix_caching else None
        self._watermark_blocks = int(watermark * num_blocks)
        self._free = list(
            range(num_blocks - 1, num_reserved_blocks - 1, -1)
        )  # the front of the free list is at the end
        self._computed = 0  # tokens stored, summed over the live sequences
        self._internal = 0  # slots held by a sequence beyond the last it will fill, summed likewise

    @property
    def num_slots(self) -> int:
        """Slots that can be handed out."""
        return self.num_usable_blocks * self.block_size

    @property
    def caches_prefixes(self) -> bool:
        """As chosen."""
        return self.prefix is not None

    @property
    def num_free_blocks(self) -> int:
        """Blocks without a holder, those that still hold a reusable prefix included."""
        return len(self._free) + self.num_cached_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks without a holder that still hold a reusable prefix."""
        return self.prefix.num_evictable if self.prefix else 0

    def free_list(self) -> list[int]:
        """Free block ids, next to be handed out first."""
        return self._free[::-1] + (list(self.prefix.evictable()) if self.prefix else [])

    def never_fits(self, sequence: Sequence) -> str | None:
        """Says so if the blocks it holds at its end are more than the pool has."""
        need = self._blocks_for(sequence.final - 1)
        if need <= self.num_usable_blocks:
            return None
        return f"needs {need} blocks of {self.block_size} at its end, the pool has {self.num_usable_blocks}"

    def table_entries(self, sequence: Sequence) -> int:
        """One for each block that holds a token."""
        return self._blocks_for(sequence.computed)

    def lookup(self, sequence: Sequence) -> list[int]:
        """Rule 5; nothing is hit without prefix caching."""
        return self.prefix.lookup(sequence) if self.prefix else []

    def admit(self, sequence: Sequence, hit: list[int], num_tokens: int, room_for: int, others_run: bool) -> bool:
        """Rules 13 and 14: room is what is free, less hit blocks that stand in the free list, less the watermark."""
        taken_by_hit = self.prefix.num_without_holder(hit) if self.prefix and hit else 0
        watermark = self._watermark_blocks if others_run else 0
        if self._blocks_for(room_for) - len(hit) + taken_by_hit + watermark > self.num_free_blocks:
            return False
        if self.prefix:
            self.prefix.hold(sequence, hit)
        sequence.blocks = hit + self._take(self._blocks_for(num_tokens) - len(hit))
        if self.prefix:
            self.prefix.register(sequence, len(hit), num_tokens)
        self._computed += num_tokens
        self._internal += self._beyond_end(sequence)
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Rule 8: the missing blocks, if there are enough; neither watermark nor lookahead counts."""
        missing = self.missing_blocks(sequence, num_tokens)
        if missing > 0:
            if missing > self.num_free_blocks:
                return False
            self._internal -= self._beyond_end(sequence)
            assert isinstance(sequence.blocks, list)
            sequence.blocks.extend(self._take(missing))
            self._internal += self._beyond_end(sequence)
        if self.prefix:
            self.prefix.register(sequence, sequence.computed // self.block_size, num_tokens)
        self._computed += num_tokens - sequence.computed
        return True

    def missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Rule 8: blocks for all tokens, less those it has."""
        return self._blocks_for(num_tokens) - len(sequence.blocks)

    def room_left(self, sequence: Sequence) -> int:
        """Empty slots of its last block."""
        return len(sequence.blocks) * self.block_size - sequence.computed

    def decode(self, tables: list[list[int]], num_tokens: int, never_filled: int) -> int:
        """Blocks come from the front of the free list."""
        self._computed += num_tokens
        self._internal += never_filled
        if not tables:
            return 0
        free = self._free
        if len(tables) > len(free):
            from_cache = len(tables) - len(free)
            _run_through(map(list.append, tables, self._take(len(tables))))
            return from_cache
        _run_through(map(list.append, tables, iter(free.pop, None)))
        return 0

    def complete(self, sequence: Sequence) -> None:
        """Registers the block (rule 4)."""
        if self.prefix:
            full = len(sequence.blocks)
            self.prefix.register(sequence, full - 1, full * self.block_size)

    def release(self, sequence: Sequence) -> None:
        """Rule 2: blocks without a key go to the front, the last of the table foremost; keyed ones to the back."""
        self._computed -= sequence.computed
        self._internal -= self._beyond_end(sequence)
        if self.prefix:
            self._free.extend(self.prefix.release(sequence))
        else:
            self._free.extend(sequence.blocks)
        sequence.blocks = []

    def occupancy(self, head: Sequence | None) -> Occupancy:
        """Any free block serves any table, so nothing free is ever *external*."""
        size = self.block_size
        idle = len(self._free) * size
        cached = self.num_cached_blocks * size
        # A shared block is full, and stands in every holder's table: it counts once.
        used = self._computed - (self.prefix.shared * size if self.prefix else 0)
        reserved = self.num_slots - idle - cached - used - self._internal
        return Occupancy(used, reserved, self._internal, cached, 0, idle, idle + cached)

    def _take(self, count: int) -> list[int]:
        """Takes `count` blocks from the front of the free list, which has as many (rule 1)."""
        free = self._free
        blocks = free[: -count - 1 : -1]
        del free[len(free) - len(blocks) :]
        if len(blocks) < count:
            assert self.prefix
            blocks += self.prefix.evict(count - len(blocks))
        return blocks

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _beyond_end(self, sequence: Sequence) -> int:
        return max(0, len(sequence.blocks) * self.block_size - (sequence.final - 1))
