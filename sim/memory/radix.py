"""KV memory under a radix tree, as SGLang has it (0.5): a pool of pages, and a tree that says which of them hold what.

Any page serves any table. A sequence is let in with what the tree has of it, and holds that. What it computes is its
own until its prefill, or a chunk of it, has run; then the tree takes it over (`keep`). So it does when the request
finishes, with all that was generated. What somebody else has brought into the tree meanwhile is there already: the
sequence takes the tree's blocks for it and gives its own back. Whoever is retracted leaves nothing but what the tree
has. Which sequence asks, and who must go, is the scheduler's business; it also says when a prefill has run.

In the waste account a page of the tree is used while live sequences hold it, once however many they are, and cached
otherwise. That goes for text that is known by its length only, too: the engine cannot know that nobody will ask for it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import islice

from sim.memory.interface import Occupancy
from sim.memory.radix_tree import Content, Node, RadixTree
from sim.memory.unforked import Unforked
from sim.sequence import Sequence
from workloads.errors import UserError
from workloads.request import HashIds, Request, TokenIds

_run_through = deque[None](maxlen=0).extend  # an iterator, for its effects


@dataclass(slots=True)
class Held:
    """What a live sequence holds of the tree.

    Args:
        content: what it says.
        node: has its last page in the tree.
        pages: how many there are: the first blocks of its table.
    """

    content: Content
    node: Node
    pages: int


class RadixMemory(Unforked):
    """A pool of pages, the list of free ones, and the tree.

    Freed pages go to the end of the list, and those at its front are handed out.

    Args:
        num_blocks: pages in the pool.
        block_size: tokens in a page; SGLang's `page_size`.
        prefix_caching: False keeps nothing beyond the sequence that computed it; SGLang's `disable_radix_cache`.

    Raises:
        UserError: a size below 1.
    """

    def __init__(self, num_blocks: int, block_size: int = 1, prefix_caching: bool = True) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise UserError(f"memory.{name} is {value}; expected a whole number of at least 1.")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caches_prefixes = prefix_caching
        self.tree = RadixTree()
        self._free = deque(range(num_blocks))
        self._live: dict[Sequence, Held] = {}
        self._computed = 0  # tokens stored, summed over the live sequences
        self._held_pages = 0  # of the tree, summed over the live sequences
        self._internal = 0  # slots held beyond the last that is filled

    @property
    def num_slots(self) -> int:
        """All of them can be handed out; SGLang has one more for tokens that pad a batch."""
        return self.num_blocks * self.block_size

    @property
    def num_free_blocks(self) -> int:
        """Free pages, and those of the tree that nobody holds."""
        return len(self._free) + self.num_cached_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Pages of the tree that nobody holds."""
        return self.tree.num_blocks - self.tree.num_locked

    def free_list(self) -> list[int]:
        """Free pages, next to be handed out first; those of the tree are not among them."""
        return list(self._free)

    def never_fits(self, sequence: Sequence) -> str | None:
        """Says so if it would hold more at its end than the pool has."""
        need = self._pages_for(sequence.final - 1)
        if need <= self.num_blocks:
            return None
        return f"needs {need} pages of {self.block_size} at its end, the pool has {self.num_blocks}"

    def table_entries(self, sequence: Sequence) -> int:
        """One for each page that holds a token."""
        return self._pages_for(sequence.computed)

    def lookup(self, sequence: Sequence) -> list[int]:
        """Pages of the longest beginning in the tree that leaves a token to compute."""
        blocks: list[int] = []
        if self.caches_prefixes:
            pages = (sequence.known - 1) // self.block_size
            for node, same in self.tree.match(content_of(sequence, self.block_size), pages):
                blocks += node.blocks[:same]
        return blocks

    def admit(self, sequence: Sequence, hit: list[int], num_tokens: int, room_for: int, others_run: bool) -> bool:
        """What the hit locks can no longer be evicted, and so is no room any more."""
        content = content_of(sequence, self.block_size) if self.caches_prefixes else Content([], 0)
        path = self.tree.match(content, len(hit))
        locked_anew = sum(same for node, same in path if not node.locks)
        if self._pages_for(room_for) - len(hit) + locked_anew > self.num_free_blocks:
            return False
        node = self.tree.use(path)
        self.tree.lock(node, self.tree.root)
        self._live[sequence] = Held(content, node, len(hit))
        self._held_pages += len(hit)
        sequence.blocks = hit + self._take(self._pages_for(num_tokens) - len(hit))
        self._computed += num_tokens
        self._internal += self._beyond_end(sequence)
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """The missing pages, if there are enough."""
        missing = self.missing_blocks(sequence, num_tokens)
        if missing > 0:
            if missing > self.num_free_blocks:
                return False
            self._internal -= self._beyond_end(sequence)
            assert isinstance(sequence.blocks, list)
            sequence.blocks += self._take(missing)
            self._internal += self._beyond_end(sequence)
        self._computed += num_tokens - sequence.computed
        return True

    def make_room(self, num_blocks: int) -> None:
        """Evicts if fewer pages than that are free: leaves with as many, whatever is free already, as SGLang does."""
        if len(self._free) < num_blocks:
            self._free.extend(self.tree.evict(num_blocks))

    def missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Pages for all tokens, less those it has."""
        return self._pages_for(num_tokens) - len(sequence.blocks)

    def room_left(self, sequence: Sequence) -> int:
        """Empty slots of its last page."""
        return len(sequence.blocks) * self.block_size - sequence.computed

    def decode(self, tables: list[list[int]], num_tokens: int, never_filled: int) -> int:
        """Pages come from the front of the free list."""
        self._computed += num_tokens
        self._internal += never_filled
        from_cache = max(0, len(tables) - len(self._free))
        _run_through(map(list.append, tables, self._take(len(tables))))
        return from_cache

    def complete(self, sequence: Sequence) -> None:
        """A full page is the tree's only when its request has finished."""

    def keep(self, sequence: Sequence) -> None:
        """The tree takes over all full pages of what the sequence has computed; it goes on holding them."""
        full = sequence.computed // self.block_size
        held = self._live[sequence]
        if not self.caches_prefixes or full == held.pages:
            return
        table = sequence.blocks
        assert isinstance(table, list)
        before, start = held.node, held.pages
        held.node, there = self.tree.insert(held.content, full, table, before, start)
        self.tree.lock(held.node, before)
        self._held_pages += full - start
        held.pages = full
        if there > start:  # another table, for whoever has copied the old one knows it by identity
            self._free.extend(table[start:there])
            in_tree = self._last_blocks(held.node, full - start)[: there - start]
            sequence.blocks = table[:start] + in_tree + table[there:]

    def release(self, sequence: Sequence) -> None:
        """A finished request leaves its full pages to the tree; one that comes back, what the tree has already."""
        self._computed -= sequence.computed
        self._internal -= self._beyond_end(sequence)
        if sequence.known == sequence.final:
            self.keep(sequence)
        held = self._live.pop(sequence)
        self._held_pages -= held.pages
        self._free.extend(sequence.blocks[held.pages :])
        self.tree.unlock(held.node)
        sequence.blocks = []

    @property
    def can_leap(self) -> bool:
        """Whoever decodes takes one page now and then, and gives none back."""
        return True

    def take_back(self, sequence: Sequence, num_tokens: int) -> None:
        """The pages that were given since go back; the tree has none of them."""
        table = sequence.blocks
        assert isinstance(table, list)
        self._internal -= self._beyond_end(sequence)
        kept = self._pages_for(num_tokens)
        self._free.extend(table[kept:])
        del table[kept:]
        self._internal += self._beyond_end(sequence)
        self._computed -= sequence.computed - num_tokens
        sequence.computed = num_tokens

    def occupancy(self, head: Sequence | None) -> Occupancy:
        """Any page serves any table, so nothing free is ever *external*."""
        size = self.block_size
        idle = len(self._free) * size
        cached = self.num_cached_blocks * size
        saved = (self._held_pages - self.tree.num_locked) * size
        used = self._computed - saved
        reserved = self.num_slots - idle - cached - used - self._internal
        return Occupancy(used, reserved, self._internal, cached, 0, idle, idle + cached, saved)

    def _take(self, count: int) -> list[int]:
        """Takes `count` pages from the front of the free list; so many are there, or can be evicted."""
        if count > len(self._free):
            self._free.extend(self.tree.evict(count - len(self._free)))
        return list(islice(iter(self._free.popleft, None), count))

    def _last_blocks(self, node: Node, count: int) -> list[int]:
        """Blocks of the last `count` pages of the path that ends with `node`."""
        parts = []
        while count > 0:
            parts.append(node.blocks[-count:])
            count -= len(parts[-1])
            assert node.parent is not None
            node = node.parent
        return [block for part in reversed(parts) for block in part]

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _beyond_end(self, sequence: Sequence) -> int:
        return max(0, len(sequence.blocks) * self.block_size - (sequence.final - 1))


def content_of(sequence: Sequence, page_size: int) -> Content:
    """What the sequence says, page by page; told as far as prompt and output are known beforehand.

    Numbers of pages that are a request's own are larger than any token's, those of hash ids below 0.

    Raises:
        UserError: prompt known by hash ids of blocks that neither divide a page nor are a multiple of it.
    """
    if sequence.keys is None:
        match sequence.request.prompt:
            case None:
                sequence.keys = []
            case TokenIds(ids):
                sequence.keys = list(ids) if page_size == 1 else _whole_pages(ids, page_size)
            case HashIds(ids, hash_block):
                sequence.keys = _from_hash_ids(sequence.request, ids, hash_block, page_size)
    return Content(sequence.keys, (sequence.request.request_id + 1) << 64)


def _whole_pages(ids: tuple[int, ...], page_size: int) -> list[Hashable]:
    values = array("q", ids)
    return [values[end - page_size : end].tobytes() for end in range(page_size, len(ids) + 1, page_size)]


def _from_hash_ids(request: Request, ids: tuple[int, ...], hash_block: int, page_size: int) -> list[Hashable]:
    """Chained ids stand for all tokens before them, so the last id that reaches into a page tells it."""
    full = request.prompt_tokens // page_size
    if hash_block % page_size == 0:
        per_id = hash_block // page_size
        pages: list[Hashable] = []
        for position, id_ in enumerate(ids):
            last = -((id_ << 32) + position * per_id) - 1
            pages.extend(range(last, last - per_id, -1))
        return pages[:full]
    if page_size % hash_block == 0:
        per_page = page_size // hash_block
        return [-((ids[(page + 1) * per_page - 1] << 32) + page) - 1 for page in range(full)]
    raise UserError(
        f"request {request.request_id} knows its prompt by hash ids of {hash_block} tokens, which memory.block_size="
        f"{page_size} neither divides nor is a multiple of; choose such a size or memory.prefix_caching=false."
    )
