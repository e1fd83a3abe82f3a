"""Buddy allocation (Knuth, TAOCP 1, 2.5), as in the Orca baselines of Kwon et al., SOSP 2023, §6.1.

Regions are powers of two in size and aligned to it. A pool whose size is no power of two is split by its binary
digits, largest first, so that every region is aligned. The free region with the lowest address is taken first.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence


class Buddy:
    """Hands out aligned power-of-two regions.

    Args:
        num_blocks: size of the pool; at least 1.
    """

    def __init__(self, num_blocks: int) -> None:
        self._free: dict[int, list[int]] = {}  # size -> starts, ascending
        self.num_free = num_blocks
        start = 0
        for bit in reversed(range(num_blocks.bit_length())):
            self._free[1 << bit] = []
            if num_blocks >> bit & 1:
                self._free[1 << bit].append(start)
                start += 1 << bit

    @property
    def largest_free(self) -> int:
        """The largest free region."""
        return max((size for size, starts in self._free.items() if starts), default=0)

    def rounded(self, num_blocks: int) -> int:
        """The next power of two."""
        return 1 << (num_blocks - 1).bit_length()

    def allocate(self, num_blocks: int) -> range | None:
        """The lowest of the smallest free regions that are large enough; the halves that it leaves become free."""
        wanted = size = self.rounded(num_blocks)
        while not self._free.get(size):
            size *= 2
            if size not in self._free:
                return None
        start = self._free[size].pop(0)
        while size > wanted:
            size //= 2
            bisect.insort(self._free[size], start + size)
        self.num_free -= wanted
        return range(start, start + wanted)

    def free(self, blocks: Sequence[int]) -> None:
        """Frees a region and merges it with its buddy as long as that is free too."""
        start, size = blocks[0], len(blocks)
        self.num_free += size
        # A region at the pool's ragged end has no buddy of its own size there, so a merge never leaves the pool.
        while (starts := self._free.get(size)) and (buddy := start ^ size) in starts:
            starts.remove(buddy)
            start, size = min(start, buddy), size * 2
        bisect.insort(self._free.setdefault(size, []), start)
