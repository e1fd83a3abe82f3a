"""An account of every slot of a pool, kept apart from the policies' own sums.

It walks the pool slot by slot, gives each the name that the definitions demand, and only then compares with what the
policy says. It reads block tables, token counts, the free list and the list of registered blocks; never a sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from sim.memory.contiguous import ContiguousMemory
from sim.memory.interface import KVMemory
from sim.memory.paged import PagedMemory
from sim.sequence import Sequence
from workloads.request import HashIds, TokenIds

NAMES = ("used", "reserved", "internal", "cached", "external", "idle")  # of a shared slot, the first that applies
UNSEEN: Hashable = object()  # content of a block that was written and given back between two looks


# ----------------------------------------------------------------------------------------------------------- every pool


def name_of(sequence: Sequence, token: int) -> str:
    """What a slot is that a live sequence holds for its `token`-th token, from 0; its last token is never stored."""
    if token < sequence.computed:
        return "used"
    return "reserved" if token < sequence.final - 1 else "internal"


def compare(memory: KVMemory, names: dict[int, str], head: Sequence | None, largest_free_run: int) -> None:
    """Fails unless the policy counts as many slots of each name as were found."""
    found, said = Counter(names.values()), memory.occupancy(head)
    assert {name: getattr(said, name) for name in NAMES} == {name: found[name] for name in NAMES}
    assert sum(found.values()) == memory.num_slots
    assert said.largest_free_run == largest_free_run


# ----------------------------------------------------------------------------------------------------------- paged pool


def audit_paged(memory: PagedMemory, live: Collection[Sequence], head: Sequence | None) -> None:
    """Fails if a slot has no name, two names, or not the one that the policy says.

    Args:
        memory: the pool.
        live: all sequences that hold something.
        head: the front of the waiting queue, or None.
    """
    free, size = memory.free_list(), memory.block_size
    assert len(set(free)) == len(free) == memory.num_free_blocks
    names = _held_slots(live, size)
    cached = set(memory.prefix.registered()) if memory.prefix else set()
    for block in free:
        for slot in range(block * size, (block + 1) * size):
            assert slot not in names, f"block {block} is free and held"
            names[slot] = "cached" if block in cached else "idle"
    first = memory.num_blocks - memory.num_usable_blocks
    assert names.keys() == set(range(first * size, memory.num_blocks * size)), "a block is lost, or was never ours"
    _audit_sharing(live, size, memory.prefix is not None)
    compare(memory, names, head, len(free) * size)
    entries = [block for sequence in live for block in sequence.blocks]
    assert memory.occupancy(head).saved == (len(entries) - len(set(entries))) * size


def _held_slots(live: Collection[Sequence], size: int) -> dict[int, str]:
    names: dict[int, str] = {}
    for sequence in live:
        for position, block in enumerate(sequence.blocks):
            for offset in range(size):
                slot, name = block * size + offset, name_of(sequence, position * size + offset)
                names[slot] = min(name, names.get(slot, name), key=NAMES.index)
    return names


def _audit_sharing(live: Collection[Sequence], size: int, may_share: bool) -> None:
    """Two tables may name one block only where it is full in both and the tokens up to its end are the same.

    Two outputs of one prompt may also share what they have generated in common, and a block that neither has filled.
    Whether it is in common is not seen here, but by the executor of `kv_executor.py`.
    """
    contents: dict[int, Hashable] = {}
    for sequence in live:
        assert len(set(sequence.blocks)) == len(sequence.blocks)
        for position, block in enumerate(sequence.blocks):
            end = (position + 1) * size
            group = sequence.group
            content: Hashable = tokens_up_to(sequence, end)
            if end > sequence.computed:
                content = ("part of", group or sequence, sequence.computed)
            elif group is not None and end > sequence.request.prompt_tokens:
                if group.beams is not None:
                    content = ("output of", group)
                elif sequence is not group.first:
                    content = ("output of", sequence)
            if block in contents:
                assert may_share or group is not None, f"block {block} stands in two tables"
                assert content == contents[block], f"block {block} stands in two tables with different content"
            contents[block] = content


def tokens_up_to(sequence: Sequence, end: int) -> tuple[Hashable, ...]:
    """The first `end` tokens, spelled out; one that nobody told us is like no other."""
    request = sequence.request
    match request.prompt:
        case TokenIds(ids):
            told: tuple[Hashable, ...] = ids
        case HashIds(ids, per_id):
            told = tuple((ids[j // per_id], j % per_id) for j in range(request.prompt_tokens))
        case None:
            told = ()
    return told[:end] + tuple((request.request_id, "token", j) for j in range(len(told), end))


@dataclass(slots=True)
class BlockContents:
    """What each block of a pool with prefix caching was last seen to hold: who should hit what, and what is cached.

    Look once after every decision; a block's content is kept from one look to the next until another sequence has it.
    """

    _content: dict[int, Hashable] = field(default_factory=dict)  # of the blocks that should carry a key

    def look(self, memory: PagedMemory, live: Collection[Sequence], seen_all: bool) -> None:
        """Fails unless exactly the blocks that hold a whole prefix are registered.

        Args:
            memory: the pool.
            live: all sequences that hold something.
            seen_all: whether every block that was handed out since the last look is still held, so that what the free
                ones hold is known.
        """
        assert memory.prefix is not None
        held, registered = self._of_tables(live, memory.block_size), set(memory.prefix.registered())
        full = {block: content for block, content in held.items() if content is not None}
        free = set(memory.free_list())
        if seen_all:
            kept = {block: content for block, content in self._content.items() if block in free}
        else:
            kept = dict.fromkeys(free & registered, UNSEEN)
        assert registered == full.keys() | kept.keys(), "keys do not point to the blocks with whole prefixes"
        self._content = full | kept

    def check_lookup(self, memory: PagedMemory, sequence: Sequence) -> None:
        """Fails unless a lookup finds the longest prefix that some blocks hold and that leaves a token to compute."""
        size, hit = memory.block_size, memory.lookup(sequence)
        prefixes = [tokens_up_to(sequence, (i + 1) * size) for i in range((sequence.known - 1) // size)]
        for block, prefix in zip(hit, prefixes, strict=False):
            assert self._content[block] in (prefix, UNSEEN)
        assert len(hit) <= len(prefixes)
        known_here = set(self._content.values())
        if UNSEEN not in known_here:
            longest = next((i for i, prefix in enumerate(prefixes) if prefix not in known_here), len(prefixes))
            assert len(hit) == longest

    @staticmethod
    def _of_tables(live: Iterable[Sequence], size: int) -> dict[int, Hashable | None]:
        """Content of each held block, None where it is not full."""
        return {
            block: tokens_up_to(sequence, (position + 1) * size) if (position + 1) * size <= sequence.computed else None
            for sequence in live
            for position, block in enumerate(sequence.blocks)
        }


# ------------------------------------------------------------------------------------------------------ contiguous pool


def fits_anywhere(free: Collection[int], num_blocks: int) -> bool:
    """Exact slots: blocks need not be neighbours."""
    return num_blocks <= len(free)


def fits_run(free: Collection[int], num_blocks: int) -> bool:
    """First, best and next fit: neighbours."""
    free = set(free)
    return any(free.issuperset(range(start, start + num_blocks)) for start in free)


def fits_aligned(free: Collection[int], num_blocks: int) -> bool:
    """Buddy: the next power of two, aligned to itself."""
    free, size = set(free), next_power_of_two(num_blocks)
    return any(start % size == 0 and free.issuperset(range(start, start + size)) for start in free)


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is no less than `number`, counted up from 1."""
    power = 1
    while power < number:
        power *= 2
    return power


def largest_that_fits(free: Collection[int], fits: Callable[[Collection[int], int], bool]) -> int:
    """The largest request that finds room, in blocks; 0 if none does."""
    return next((count for count in range(len(free), 0, -1) if fits(free, count)), 0)


@dataclass(frozen=True, slots=True)
class ContiguousRules:
    """What a contiguous pool has been set up to do, said once more.

    Args:
        reserves: tokens that are set aside for a sequence.
        region: blocks that a request for so many takes.
        fits: whether free blocks have room for a request.
        rounding: the name of slots that a region has beyond what was reserved.
    """

    reserves: Callable[[Sequence], int]
    region: Callable[[int], int]
    fits: Callable[[Collection[int], int], bool]
    rounding: Literal["internal", "external"]

    def need(self, sequence: Sequence, size: int) -> int:
        """Blocks of `size` slots that hold the reservation."""
        tokens, blocks = self.reserves(sequence), 0
        while blocks * size < tokens:
            blocks += 1
        return blocks


def audit_contiguous(
    memory: ContiguousMemory, rules: ContiguousRules, live: Collection[Sequence], head: Sequence | None
) -> None:
    """Fails if a slot has two names, or not the one that the policy says."""
    size = memory.block_size
    names: dict[int, str] = {}
    for sequence in live:
        need = rules.need(sequence, size)
        assert len(sequence.blocks) == rules.region(need)
        for position, block in enumerate(sequence.blocks):
            for offset in range(size):
                assert block * size + offset not in names, f"block {block} is in two regions"
                name = name_of(sequence, position * size + offset) if position < need else rules.rounding
                names[block * size + offset] = name
    assert names.keys() <= set(range(memory.num_slots))
    free = {block for block in range(memory.num_blocks) if block * size not in names}
    stranded = False
    if head is not None:
        need = rules.need(head, size)
        stranded = need <= len(free) and not rules.fits(free, need)
    for block in free:
        for slot in range(block * size, (block + 1) * size):
            names[slot] = "external" if stranded else "idle"
    compare(memory, names, head, largest_that_fits(free, rules.fits) * size)
