"""Which block goes next of those that hold a reusable prefix and belong to nobody.

Nearly every engine takes the least recently used one. TensorRT-LLM (1.0, docs/source/features/kvcache.md) takes leaves
of its tree of prefixes only: of those the one with the lowest priority, and of equal ones the least recently used.

With equal priorities both are the same: a table is given up from its end, so whatever follows a block was given up
before it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from copy import deepcopy
from itertools import islice
from typing import Protocol

from sim.sequence import Sequence

SWEPT_FROM = 64  # entries that are out of date


class EvictionOrder(Protocol):
    """The blocks that wait to be evicted.

    Attributes:
        blocks: those that wait; only to be read.
    """

    blocks: set[int]

    def __iter__(self) -> Iterator[int]:
        """Those that wait, next to go first."""

    def add(self, sequence: Sequence, blocks: list[int]) -> None:
        """Blocks of the sequence's table that nobody holds any more, the last of the table first."""

    def remove(self, blocks: Iterable[int]) -> None:
        """Blocks that wait are held again."""

    def take(self, count: int) -> list[int]:
        """Takes the next `count` to go; there are as many."""

    def priority(self, block: int) -> int:
        """What the block had when it was last added: 0 is worth least, 100 most."""


class LeastRecentlyUsed:
    """First given up, first evicted. A block costs as much as an entry of a queue.

    Args:
        block_priority: of every block.
    """

    def __init__(self, block_priority: int = 35) -> None:
        self.blocks: set[int] = set()
        self._queue: deque[int] = deque()  # the same, next to go first, among entries that are out of date:
        self._outdated: dict[int, int] = {}  # how many entries of a block, the first ones, are
        self._block_priority = block_priority

    def __iter__(self) -> Iterator[int]:
        """As they stand in the queue."""
        outdated = dict(self._outdated)
        for block in self._queue:
            if outdated.get(block, 0):
                outdated[block] -= 1
            else:
                yield block

    def add(self, sequence: Sequence, blocks: list[int]) -> None:
        """They join the queue."""
        self.blocks.update(blocks)
        self._queue.extend(blocks)

    def remove(self, blocks: Iterable[int]) -> None:
        """Each leaves the queue wherever it stands."""
        for block in blocks:
            self.blocks.remove(block)
            self._outdated[block] = self._outdated.get(block, 0) + 1

    def take(self, count: int) -> list[int]:
        """From the front of the queue."""
        if self._outdated:
            taken = [self._next() for _ in range(count)]
        else:
            taken = list(islice(iter(self._queue.popleft, None), count))
        self.blocks.difference_update(taken)
        return taken

    def priority(self, block: int) -> int:
        """That of every block."""
        return self._block_priority

    def _next(self) -> int:
        block = self._queue.popleft()
        while block in self._outdated:
            self._pass_over(block)
            block = self._queue.popleft()
        return block

    def _pass_over(self, block: int) -> None:
        left = self._outdated[block] - 1
        if left:
            self._outdated[block] = left
        else:
            del self._outdated[block]


class LowestPriorityLeaf:
    """The least recently used block of the lowest priority among those that no waiting block follows.

    A block costs as much as an entry of a heap; those that are out of date are swept out when they are most.

    Args:
        block_size: tokens in a block.
        prompt_priority: of blocks whose first token is the prompt's; from 0 to 100.
        output_priority: of those behind.
    """

    def __init__(self, block_size: int, prompt_priority: int, output_priority: int) -> None:
        self.blocks: set[int] = set()
        self._size = block_size
        self._prompt_priority = prompt_priority
        self._output_priority = output_priority
        self._added = 0
        self._priorities: dict[int, int] = {}
        self._entries: dict[int, tuple[int, int, int]] = {}  # of those that wait: priority, when they were added, block
        self._leaves: list[tuple[int, int, int]] = []  # a heap of entries, among others that are out of date
        self._parents: dict[int, int] = {}  # of those that wait: the block before it in its table, held or waiting
        self._children: dict[int, int] = {}  # how many waiting blocks have this one for a parent

    def __iter__(self) -> Iterator[int]:
        """As they would go if nothing else happened."""
        rest = deepcopy(self)
        while rest.blocks:
            yield from rest.take(1)

    def add(self, sequence: Sequence, blocks: list[int]) -> None:
        """Who is followed by others has to wait for them; they were added before it."""
        table = sequence.blocks
        if len(self._leaves) > 2 * len(self._entries) + SWEPT_FROM:
            self._leaves = [entry for block, entry in self._entries.items() if block not in self._children]
            heapq.heapify(self._leaves)
        places = {block: place for place, block in enumerate(table)}
        prompt_blocks = -(-sequence.request.prompt_tokens // self._size)
        for block in blocks:
            place = places[block]
            self._added += 1
            self._priorities[block] = self._prompt_priority if place < prompt_blocks else self._output_priority
            entry = self._entries[block] = (self._priorities[block], self._added, block)
            self.blocks.add(block)
            if block not in self._children:
                heapq.heappush(self._leaves, entry)
            if place:
                parent = self._parents[block] = table[place - 1]
                self._children[parent] = self._children.get(parent, 0) + 1

    def remove(self, blocks: Iterable[int]) -> None:
        """Their entries are out of date."""
        for block in blocks:
            self._leave(block)

    def take(self, count: int) -> list[int]:
        """Leaves; who is a leaf only when another has gone may be among them."""
        taken: list[int] = []
        while len(taken) < count:
            entry = heapq.heappop(self._leaves)
            block = entry[2]
            if self._entries.get(block) == entry:
                self._leave(block)
                taken.append(block)
        return taken

    def priority(self, block: int) -> int:
        """By its place in the table of who gave it up last."""
        return self._priorities[block]

    def _leave(self, block: int) -> None:
        self.blocks.remove(block)
        del self._entries[block]
        parent = self._parents.pop(block, None)
        if parent is None:
            return
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            if parent in self._entries:
                heapq.heappush(self._leaves, self._entries[parent])
