"""Paged KV memory: blocks of fixed size, a block table for each sequence (Kwon et al., SOSP 2023, §4.2).

Hands out, shares and takes back blocks as vLLM's v1 block pool does (0.33); rule numbers are those of the vLLM
conformance cases. Forks, copy-on-write and swaps are those of the paper, §4.3 to §4.5, and of vLLM's v0 block manager.
Which sequence asks, and who must go when there is no room, is the scheduler's business.

A block that several sequences hold counts once in the waste account. If it is full, all its slots are used. If it is
partly filled, all but one of its holders will copy it before they write, and the last one, whoever that is, fills it to
its end: so its empty slots are reserved up to where the sequences end and internal beyond, as if it had one holder.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import chain, takewhile

from mypy_extensions import mypyc_attr

from sim.memory.holders import Holders
from sim.memory.host import HostPool
from sim.memory.interface import Occupancy
from sim.memory.prefix import PrefixCache
from sim.memory.reservation import Reservation
from sim.sequence import Sequence
from workloads.errors import UserError

_run_through = deque[None](maxlen=0).extend  # an iterator, for its effects


@mypyc_attr(allow_interpreted_subclasses=True)
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
        num_host_blocks: blocks of host memory for sequences that are swapped out.
        reservation: tokens to take blocks for at admission, so that a table never grows; None: it grows as it is
            filled. Tables that are longer than what is in them are not shared.
        max_model_len: most tokens of one request; of use to the reservation only.

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
        num_host_blocks: int = 0,
        reservation: Reservation | None = None,
        max_model_len: int = 0,
    ) -> None:
        check_pool(num_blocks, block_size, watermark, num_reserved_blocks)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_usable_blocks = num_blocks - num_reserved_blocks
        self.holders = Holders()
        self.prefix = PrefixCache(block_size, self.holders) if prefix_caching else None
        self.host = HostPool(num_host_blocks)
        self.watermark_blocks = int(watermark * num_blocks)
        self._reservation = reservation
        self._max_model_len = max_model_len
        self._free = list(
            range(num_blocks - 1, num_reserved_blocks - 1, -1)
        )  # the front of the free list is at the end
        self._computed = 0  # tokens stored, summed over the live sequences
        self._internal = 0  # slots held beyond the last that is filled; of a shared block, once
        self._open = 0  # empty slots of partly filled shared blocks, for each table entry beyond the first
        self._copies: list[tuple[Sequence, int, int]] = []  # who copied which block to which since they were taken
        self._swapped: dict[Sequence, list[int]] = {}  # host block tables

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
        """Says so if the blocks that its request may hold at its end are more than the pool has."""
        need = self.most_blocks(sequence)
        if need <= self.num_usable_blocks:
            return None
        return f"needs {need} blocks of {self.block_size} at its end, the pool has {self.num_usable_blocks}"

    def most_blocks(self, sequence: Sequence) -> int:
        """Blocks that its request holds at its end if its sequences share nothing but the full blocks of the prompt."""
        most = self._blocks_for(
            self._reservation.tokens(sequence, self._max_model_len) if self._reservation else sequence.final - 1
        )
        if sequence.group is None:
            return most
        common = sequence.request.prompt_tokens // self.block_size
        return common + sequence.group.width * (most - common)

    def table_entries(self, sequence: Sequence) -> int:
        """One for each block that it holds."""
        return len(sequence.blocks)

    def lookup(self, sequence: Sequence) -> list[int]:
        """Rule 5; nothing is hit without prefix caching."""
        return self.prefix.lookup(sequence) if self.prefix else []

    def admit(self, sequence: Sequence, hit: list[int], num_tokens: int, room_for: int, others_run: bool) -> bool:
        """Rules 13 and 14: room is what is free, less hit blocks that stand in the free list, less the watermark."""
        if not self._has_room(sequence, hit, room_for, others_run):
            return False
        reserved = self._reservation.tokens(sequence, self._max_model_len) if self._reservation else 0
        if self.prefix:
            self.prefix.hold(sequence, hit)
        sequence.blocks = hit + self._take(self._blocks_for(max(num_tokens, reserved)) - len(hit))
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
            if self._open and self._shares_last(sequence):
                self._copy_last(sequence)
                missing -= 1
            self._internal -= self._beyond_end(sequence)
            assert isinstance(sequence.blocks, list)
            sequence.blocks.extend(self._take(missing))
            self._internal += self._beyond_end(sequence)
        if self.prefix:
            self.prefix.register(sequence, sequence.computed // self.block_size, num_tokens)
        self._computed += num_tokens - sequence.computed
        return True

    def missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Rule 8: blocks for all tokens, less those it has; and one to copy a shared block to that it writes in."""
        missing = self._blocks_for(num_tokens) - len(sequence.blocks)
        return missing + 1 if self._open and self._shares_last(sequence) else missing

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
            full = sequence.computed // self.block_size
            self.prefix.register(sequence, full - 1, full * self.block_size)

    def release(self, sequence: Sequence) -> None:
        """Rule 2: blocks without a key go to the front, the last of the table foremost; keyed ones to the back.

        A block that others hold stays with them.
        """
        self._computed -= sequence.computed
        if self._open and self._shares_last(sequence):
            self._open -= self._empty_in_last(sequence)
        else:
            self._internal -= self._beyond_end(sequence)
        if self._copies:  # it will not write after all
            self._copies = [copy for copy in self._copies if copy[0] is not sequence]
        freed = self.prefix.release(sequence) if self.prefix else sequence.blocks
        if self.holders.shared:
            freed = [block for block in freed if not self.holders.leave(block)]
        self._free.extend(freed)
        sequence.blocks = []

    @property
    def can_leap(self) -> bool:
        """Whoever decodes takes one block now and then, and gives none back."""
        return True

    @property
    def can_share(self) -> bool:
        """Any block may stand in several tables."""
        return self._reservation is None

    def fork(self, parent: Sequence, children: list[Sequence]) -> None:
        """Each block of the parent's gets as many more holders (§4.4); nothing is copied yet."""
        table, empty = parent.blocks, self._empty_in_last(parent)
        full_prompt = parent.request.prompt_tokens // self.block_size
        for child in children:
            child.blocks = list(table)
            child.computed = parent.computed
            child.keys = None if parent.keys is None else parent.keys[:full_prompt]
            if self.prefix:
                self.prefix.hold(child, child.blocks)
            else:
                for block in table:
                    self.holders.add(block)
        self._computed += parent.computed * len(children)
        self._open += empty * len(children)

    def take_copies(self) -> list[tuple[Sequence, int, int]]:
        """Those that were made since they were last taken."""
        copies, self._copies = self._copies, []
        return copies

    def take_back(self, sequence: Sequence, num_tokens: int) -> None:
        """What was given since goes back where it was: the copy of a shared block, blocks, and their keys."""
        if self.prefix:
            self.prefix.unregister(sequence, num_tokens)
        table = sequence.blocks
        assert isinstance(table, list)
        self._internal -= self._beyond_end(sequence)
        kept = self._blocks_for(num_tokens)
        self._free.extend(reversed(table[kept:]))
        del table[kept:]
        self._computed -= sequence.computed - num_tokens
        sequence.computed = num_tokens
        for copy in self._copies:
            if copy[0] is sequence:
                _, source, copied = copy
                self._copies.remove(copy)
                table[-1] = source
                self._free.append(copied)
                self.holders.add(source)
                self._open += self._empty_in_last(sequence)
                return
        self._internal += self._beyond_end(sequence)

    def swap_out(self, sequences: list[Sequence]) -> list[tuple[int, int]] | None:
        """A block goes once, however many of the sequences hold it (§4.5)."""
        blocks = dict.fromkeys(chain.from_iterable(sequence.blocks for sequence in sequences))
        if len(blocks) > self.host.num_free:
            return None
        host_block = dict(zip(blocks, self.host.take(len(blocks)), strict=True))
        for sequence in sequences:
            self._swapped[sequence] = [host_block[block] for block in sequence.blocks]
            self.release(sequence)
        return list(host_block.items())

    def swap_in(
        self, sequences: list[Sequence], num_tokens: list[int], others_run: bool
    ) -> list[tuple[int, int]] | None:
        """Room is asked for as vLLM's v0 block manager does: one block more for each sequence, at least.

        That is, unless even the last token of all needs fewer: a request that fits the pool always comes back.
        """
        tables = [self._swapped[sequence] for sequence in sequences]
        host_blocks = Counter(chain.from_iterable(tables))
        need = len(host_blocks)
        for sequence, tokens, table in zip(sequences, num_tokens, tables, strict=True):
            copies = host_blocks[table[-1]] > 1 and self._empty_in_last(sequence) > 0
            need += max(1, self._blocks_for(tokens) - len(table) + copies)
        need = min(need, self.most_blocks(sequences[0]))
        if need + (self.watermark_blocks if others_run else 0) > self.num_free_blocks:
            return None
        block = dict(zip(host_blocks, self._take(len(host_blocks)), strict=True))
        seen: set[int] = set()
        for sequence, table in zip(sequences, tables, strict=True):
            sequence.blocks = [block[host_block] for host_block in table]
            self._come_back(sequence, seen)
            del self._swapped[sequence]
        self.host.give_back(host_blocks)
        return list(block.items())

    def host_table(self, sequence: Sequence) -> list[int]:
        """Host blocks of a sequence that is swapped out, in the order of its tokens."""
        return list(self._swapped[sequence])

    def is_swapped(self, sequence: Sequence) -> bool:
        """Whether it has a table of host blocks."""
        return sequence in self._swapped

    def occupancy(self, head: Sequence | None) -> Occupancy:
        """Any free block serves any table, so nothing free is ever *external*. A block counts once (see above)."""
        size = self.block_size
        idle = len(self._free) * size
        cached = self.num_cached_blocks * size
        saved = self.holders.shared * size
        used = self._computed - saved + self._open
        reserved = self.num_slots - idle - cached - used - self._internal
        return Occupancy(used, reserved, self._internal, cached, 0, idle, idle + cached, saved)

    def _take(self, count: int) -> list[int]:
        """Takes `count` blocks from the front of the free list, which has as many (rule 1)."""
        free = self._free
        blocks = free[: -count - 1 : -1]
        del free[len(free) - len(blocks) :]
        if len(blocks) < count:
            assert self.prefix
            blocks += self.prefix.evict(count - len(blocks))
        return blocks

    def _has_room(self, sequence: Sequence, hit: list[int], room_for: int, others_run: bool) -> bool:
        taken_by_hit = self.prefix.num_without_holder(hit) if self.prefix and hit else 0
        watermark = self.watermark_blocks if others_run else 0
        reserved = self._reservation.tokens(sequence, self._max_model_len) if self._reservation else 0
        need = self._blocks_for(max(room_for, reserved)) - len(hit) + taken_by_hit + watermark
        return need <= self.num_free_blocks

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _beyond_end(self, sequence: Sequence) -> int:
        return max(0, len(sequence.blocks) * self.block_size - (sequence.final - 1))

    def _empty_in_last(self, sequence: Sequence) -> int:
        """Slots that its last block has room for, as far as it is computed."""
        return -sequence.computed % self.block_size

    def _shares_last(self, sequence: Sequence) -> bool:
        """Whether its last block is partly filled and others hold it: it has not written since it was forked."""
        return bool(sequence.computed % self.block_size) and sequence.blocks[-1] in self.holders

    def _copy_last(self, sequence: Sequence) -> None:
        """Copy-on-write (§4.4): its last block is replaced by one of its own."""
        table = sequence.blocks
        assert isinstance(table, list)
        shared = table[-1]
        (table[-1],) = self._take(1)
        self.holders.leave(shared)
        self._open -= self._empty_in_last(sequence)
        self._internal += self._beyond_end(sequence)
        self._copies.append((sequence, shared, table[-1]))

    def _come_back(self, sequence: Sequence, seen: set[int]) -> None:
        """Counts a sequence that has its blocks again; those `seen` are counted, and stand first in its table."""
        table = sequence.blocks
        self._computed += sequence.computed
        shared = list(takewhile(seen.__contains__, table))
        for block in shared:
            self.holders.add(block)
        if table[-1] in seen:
            self._open += self._empty_in_last(sequence)
        else:
            self._internal += self._beyond_end(sequence)
        if self.prefix:
            self.prefix.hold(sequence, [])
            self.prefix.register(sequence, len(shared), sequence.computed)
        seen.update(table)


def check_pool(num_blocks: int, block_size: int, watermark: float, num_reserved_blocks: int) -> None:
    """Raises UserError for a size that leaves no block to hand out, or a watermark outside [0, 1)."""
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
