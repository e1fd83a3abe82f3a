"""Paged KV memory for models whose layers do not all attend to everything: vLLM's hybrid KV cache manager (v1, 0.33).

Layers are grouped by attention type (`layer_groups.py`). A sequence has a block table for each group; all draw from one
pool and one free list. A sliding group gives back a block when all of it lies behind the window. A prefix is hit only
if every group has what it needs of it: a full group all blocks, a sliding group those that the window reaches back to.
Rule numbers are those of the vLLM conformance cases; what they say of one table holds here for each. Neither forks nor
swaps: vLLM v1 has none. Which sequence asks, and who must go when there is no room, is the scheduler's business.

A slot is room for one token in one group. One that holds a token which no step reads any more, in a block of which the
window still needs another part, counts as *internal*: its sequence will never fill it with anything that is needed.
"""

from __future__ import annotations

import collections.abc
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from itertools import chain
from typing import overload

from sim.layer_groups import LayerGroup
from sim.memory.block_pool import BlockPool
from sim.memory.interface import Occupancy
from sim.memory.paged import check_pool
from sim.memory.prefix import comparable_keys
from sim.memory.unforked import Unforked
from sim.sequence import Sequence
from workloads.errors import UserError

NO_BLOCK = 0  # stands in a hit where a block is not needed: vLLM's null block


class GroupTables(collections.abc.Sequence[int]):
    """The block tables of a sequence, one for each group. As a listing: all blocks that it holds.

    Attributes:
        tables: blocks in the order of their tokens. Those of sliding groups begin with block `skipped` of the sequence.
        skipped: blocks behind the window, given back or never held by the sliding groups.
        end: blocks of the sequence so far, skipped ones included: no table reaches further, and all reach that far.
        unread: tokens in the first block of a sliding group's table that lie behind the window.
        junction: tokens of a longer prefix that full groups had at admission, 0 if they had no more than was hit.
    """

    __slots__ = ("end", "junction", "skipped", "tables", "unread")

    def __init__(self, tables: list[list[int]], skipped: int, junction: int) -> None:
        self.tables = tables
        self.skipped = skipped
        self.end = 0
        self.unread = 0
        self.junction = junction

    def __len__(self) -> int:
        return sum(map(len, self.tables))

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.tables)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return list(self)[index]


class HybridPagedMemory(Unforked):
    """A pool of blocks, each of `block_size` tokens in as many layers as a group has.

    Args:
        num_blocks: blocks in the pool, as an engine's log counts them.
        layer_groups: the groups of the model, in vLLM's order; their sliding layers have one window.
        max_model_len: most tokens of one request.
        max_num_batched_tokens: most tokens of a step; None: `max_model_len`. So many more than its window may a sliding
            group hold while a prompt is computed.
        block_size: tokens in a block.
        watermark: share of `num_blocks` that an admission must leave free while others run.
        prefix_caching: keep full blocks for reuse by content after their sequence has gone, or the window has.
        prefix_cache_retention_interval: which blocks of sliding groups are kept so. None: all. 0: those that a request
            needs which begins with the whole prompt, or with as much of it as full groups had already. A multiple of
            `block_size`: also those needed for a hit of every multiple of so many tokens.
        num_reserved_blocks: blocks with the lowest ids that are never handed out; vLLM v1 keeps block 0.

    Raises:
        UserError: a size that leaves no block to hand out, a watermark outside [0, 1), or an interval that no hit ends
            at.
    """

    def __init__(
        self,
        num_blocks: int,
        layer_groups: tuple[LayerGroup, ...],
        max_model_len: int,
        max_num_batched_tokens: int | None = None,
        block_size: int = 16,
        watermark: float = 0.0,
        prefix_caching: bool = True,
        prefix_cache_retention_interval: int | None = 0,
        num_reserved_blocks: int = 1,
    ) -> None:
        check_pool(num_blocks, block_size, watermark, num_reserved_blocks)
        interval = prefix_cache_retention_interval
        if interval is not None and (interval < 0 or interval % block_size):
            raise UserError(
                f"memory.prefix_cache_retention_interval is {interval}; expected null, 0 or a multiple of "
                f"memory.block_size={block_size}."
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_usable_blocks = num_blocks - num_reserved_blocks
        self.pool = BlockPool(num_blocks, num_reserved_blocks)
        self.windows = [group.window for group in layer_groups]
        self._slides = [window is not None for window in self.windows]
        windows = {window for window in self.windows if window is not None}
        assert len(windows) <= 1, "one window per model"
        self._window = min(windows, default=0)
        self._num_sliding = sum(self._slides)
        self._full = [group for group, slides in enumerate(self._slides) if not slides]
        self._sliding = [group for group, slides in enumerate(self._slides) if slides]
        self._caching = prefix_caching
        self._interval = interval
        self._watermark_blocks = int(watermark * num_blocks)
        # Most blocks that a sliding group holds: the window of the step's first token, which may straddle a boundary
        # more than fits exactly, and the step's own tokens (`SlidingWindowSpec.max_admission_blocks_per_request`).
        reach = self._window - 1 + (max_model_len if max_num_batched_tokens is None else max_num_batched_tokens)
        self._most_sliding = self._blocks_for(min(reach, max_model_len)) + 1
        self._blocks_of_window = self._blocks_for(self._window - 1)  # that a hit must end with
        self._live: dict[Sequence, None] = {}

    @property
    def num_slots(self) -> int:
        """Slots that can be handed out."""
        return self.num_usable_blocks * self.block_size

    @property
    def caches_prefixes(self) -> bool:
        """As chosen."""
        return self._caching

    @property
    def can_leap(self) -> bool:
        """What falls due in a step is not one block, and blocks come back in between."""
        return False

    @property
    def num_free_blocks(self) -> int:
        """Blocks without a holder, those that still hold a reusable prefix included."""
        return self.pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Blocks without a holder that still hold a reusable prefix."""
        return self.pool.num_cached

    def never_fits(self, sequence: Sequence) -> str | None:
        """Says so if the blocks that its groups may hold together are more than the pool has."""
        need = self._blocks_in_all(sequence.final - 1)
        if need <= self.num_usable_blocks:
            return None
        return (
            f"needs {need} blocks of {self.block_size} at once over {len(self._slides)} groups of layers, "
            f"the pool has {self.num_usable_blocks}"
        )

    def table_entries(self, sequence: Sequence) -> int:
        """As a layer of a full group looks them up: what a timer prices is the same as over `PagedMemory`."""
        return self._blocks_for(sequence.computed)

    def lookup(self, sequence: Sequence) -> list[int]:
        """The hit of full groups, shortened to where sliding groups have the window before its end (rule 5 for each).

        Blocks of the first group; where that slides, only the last ones are there.
        """
        if not self._caching:
            return []
        length = (sequence.known - 1) // self.block_size
        if self._full:
            length = self._hit_of_full(sequence, length)
        if self._sliding:
            length = self._hit_of_sliding(sequence, length)
        first = self._hit_tables(sequence, length)[0]
        return [NO_BLOCK] * (length - len(first)) + first

    def admit(self, sequence: Sequence, hit: list[int], num_tokens: int, room_for: int, others_run: bool) -> bool:
        """Rules 13 and 14, each sum over the groups; for `room_for`, a sliding group counts no more than it ever holds.

        Hit blocks behind the window are not taken.
        """
        length, pool = len(hit), self.pool
        tables = self._hit_tables(sequence, length)
        in_all = sum(max(0, blocks - length) for blocks in self._blocks_by_group(room_for))
        now = self._blocks_for(num_tokens)
        need = max(in_all, len(tables) * (now - length))
        need += sum(map(pool.is_free, chain.from_iterable(tables)))
        if need + (self._watermark_blocks if others_run else 0) > pool.num_free:
            return False
        held = GroupTables(tables, self._skipped(length * self.block_size), self._junction(sequence, length))
        for block in chain.from_iterable(tables):
            pool.hold(block)
        sequence.blocks = held
        self._live[sequence] = None
        self._extend(held, now)
        held.unread = self._unread(held, length * self.block_size)
        self._register(sequence, held, length, num_tokens)
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Rule 8. What lies behind the window is given back before, and stays so if there is no room."""
        held = self._held(sequence)
        self._give_back(held, sequence.computed)
        end = self._blocks_for(num_tokens)
        if end > held.end:
            if len(held.tables) * (end - held.end) > self.pool.num_free:
                return False
            self._extend(held, end)
        self._register(sequence, held, sequence.computed // self.block_size, num_tokens)
        return True

    def missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Rule 8 for all groups; what `grow` gives back before is not subtracted."""
        held = self._held(sequence)
        return len(held.tables) * max(0, self._blocks_for(num_tokens) - held.end)

    def room_left(self, sequence: Sequence) -> int:
        """Empty slots of the last block of any group."""
        return self._held(sequence).end * self.block_size - sequence.computed

    def decode(self, tables: list[list[int]], num_tokens: int, never_filled: int) -> int:
        """Never asked for."""
        raise AssertionError("each sequence is planned by itself in each step")

    def complete(self, sequence: Sequence) -> None:
        """Never asked for."""
        raise AssertionError("each sequence is planned by itself in each step")

    def release(self, sequence: Sequence) -> None:
        """Rule 2 for one table after another."""
        for table in self._held(sequence).tables:
            self.pool.free(reversed(table))
        del self._live[sequence]
        sequence.blocks = []

    def take_back(self, sequence: Sequence, num_tokens: int) -> None:
        """Blocks and keys go; what was behind the window does not come back."""
        held = self._held(sequence)
        kept = self._blocks_for(num_tokens)
        for table in held.tables:
            first = held.end - len(table)
            for block in table[max(0, num_tokens // self.block_size - first) :]:
                self.pool.unregister(block)
            self.pool.free(reversed(table[max(0, kept - first) :]))
            del table[max(0, kept - first) :]
        held.end = kept
        sequence.computed = num_tokens

    def occupancy(self, head: Sequence | None) -> Occupancy:
        """Any free block serves any group, so nothing free is ever *external*."""
        size, pool, groups = self.block_size, self.pool, len(self._slides)
        stored = internal = 0
        for sequence in self._live:
            held = self._held(sequence)
            stored += groups * sequence.computed - self._num_sliding * held.skipped * size
            internal += groups * max(0, held.end * size - (sequence.final - 1))
        unread = self._unread_slots()
        idle, cached = (pool.num_free - pool.num_cached) * size, pool.num_cached * size
        saved = pool.holders.shared * size
        used, internal = stored - saved - unread, internal + unread
        reserved = self.num_slots - idle - cached - used - internal
        return Occupancy(used, reserved, internal, cached, 0, idle, idle + cached, saved)

    # --------------------------------------------------------------------------------------------------------- windows

    def _skipped(self, computed: int) -> int:
        """Blocks that lie behind the window of the token after `computed` ones."""
        return max(0, computed - self._window + 1) // self.block_size if self._num_sliding else 0

    def _unread(self, held: GroupTables, computed: int) -> int:
        """Tokens that lie behind that window in the first block of a sliding group's table."""
        return max(0, computed - self._window + 1 - held.skipped * self.block_size) if self._num_sliding else 0

    def _give_back(self, held: GroupTables, computed: int) -> None:
        """Sliding groups free what lies behind the window, the last block first."""
        skipped = self._skipped(computed)
        if skipped > held.skipped:
            for group in self._sliding:
                table = held.tables[group]
                self.pool.free(table[skipped - held.skipped - 1 :: -1])
                del table[: skipped - held.skipped]
            held.skipped = skipped
        held.unread = self._unread(held, computed)

    def _unread_slots(self) -> int:
        """Slots that hold a token which no step reads any more. One in a shared block counts if nobody reads it."""
        total, holders = 0, self.pool.holders
        shared: dict[int, list[int]] = {}
        for sequence in self._live:
            held = self._held(sequence)
            if not held.unread:
                continue
            for group in self._sliding:
                first = held.tables[group][0]
                if first in holders:
                    shared.setdefault(first, []).append(held.unread)
                else:
                    total += held.unread
        if shared:
            tables = Counter(chain.from_iterable(map(self._held, self._live)))
            total += sum(min(unread) for block, unread in shared.items() if len(unread) == tables[block])
        return total

    # ------------------------------------------------------------------------------------------------------------ keys

    def _key(self, sequence: Sequence, position: int) -> Hashable:
        """Of a block of the sequence; each group adds its number (rule 3)."""
        keys = comparable_keys(sequence, self.block_size)
        return keys[position] if position < len(keys) else (sequence.request.request_id, position)

    def _has(self, groups: Iterable[int], key: Hashable) -> bool:
        find = self.pool.find
        return all(find((group, key)) is not None for group in groups)

    def _hit_of_full(self, sequence: Sequence, limit: int) -> int:
        """Blocks of the longest prefix, `limit` at most, that all full groups have."""
        for position in range(limit):
            if not self._has(self._full, self._key(sequence, position)):
                return position
        return limit

    def _hit_of_sliding(self, sequence: Sequence, limit: int) -> int:
        """Blocks of the longest prefix, `limit` at most, of which all sliding groups have the last window or all."""
        run = 0
        for position in range(limit - 1, -1, -1):
            if self._has(self._sliding, self._key(sequence, position)):
                run += 1
                if run >= self._blocks_of_window:
                    return position + run
            else:
                run = 0
        return run

    def _hit_tables(self, sequence: Sequence, length: int) -> list[list[int]]:
        """The blocks that each group has of a hit of `length` blocks and needs."""
        skipped = self._skipped(length * self.block_size)
        keys = [self._key(sequence, position) for position in range(length)]
        tables = []
        for group, slides in enumerate(self._slides):
            found = [self.pool.find((group, key)) for key in (keys[skipped:] if slides else keys)]
            tables.append([block for block in found if block is not None])
        return tables

    def _junction(self, sequence: Sequence, length: int) -> int:
        """Tokens of the prefix that full groups have, if that is more than the `length` blocks that are hit."""
        if not (self._caching and self._full and self._sliding):
            return 0
        longest = self._hit_of_full(sequence, (sequence.known - 1) // self.block_size)
        return longest * self.block_size if longest > length else 0

    def _register(self, sequence: Sequence, held: GroupTables, start: int, num_tokens: int) -> None:
        """Rule 4, from block `start` on, for all groups; in sliding ones only what is to be kept."""
        if not self._caching:
            return
        for position in range(start, num_tokens // self.block_size):
            key = self._key(sequence, position)
            kept = self._sliding and self._is_kept(sequence, held, position)
            for group, table in enumerate(held.tables):
                if kept or not self._slides[group]:
                    self.pool.register(table[position - held.end], (group, key))

    def _is_kept(self, sequence: Sequence, held: GroupTables, position: int) -> bool:
        """Whether a block of a sliding group gets a key (`SlidingWindowManager.reachable_block_mask`)."""
        if self._interval is None:
            return self._blocks_of_window > 0
        needed, size = self._blocks_of_window, self.block_size
        if self._interval:
            each = self._interval // size
            if position % each >= each - needed:
                return True
        ends = ((sequence.request.prompt_tokens - 1) // size, held.junction // size)
        return any(end - needed <= position < end for end in ends)

    # ---------------------------------------------------------------------------------------------------------- tables

    def _held(self, sequence: Sequence) -> GroupTables:
        held = sequence.blocks
        assert isinstance(held, GroupTables)
        return held

    def _extend(self, held: GroupTables, end: int) -> None:
        """Lets all tables reach `end`; a group gets its blocks after those before it."""
        for group, table in enumerate(held.tables):
            reached = len(table) + (held.skipped if self._slides[group] else 0)
            table += self.pool.take(end - reached)
        held.end = end

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _blocks_by_group(self, num_tokens: int) -> list[int]:
        """Most blocks that each group holds of a sequence of that length."""
        full = self._blocks_for(num_tokens)
        return [min(full, self._most_sliding) if slides else full for slides in self._slides]

    def _blocks_in_all(self, num_tokens: int) -> int:
        return sum(self._blocks_by_group(num_tokens))
