"""The host's part of a swap: blocks in host memory with ids of their own (Kwon et al., SOSP 2023, §4.5)."""

from __future__ import annotations

from collections.abc import Iterable

from workloads.errors import UserError


class HostPool:
    """Hands out host blocks, last freed first used.

    Args:
        num_blocks: blocks in the pool; 0 or more.

    Raises:
        UserError: a negative size.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise UserError(f"memory.num_host_blocks is {num_blocks}; expected a whole number of at least 0.")
        self.num_blocks = num_blocks
        self._free: list[int] = []  # the next one is at the end
        self._untouched = 0  # blocks from this id on were never handed out

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out."""
        return len(self._free) + self.num_blocks - self._untouched

    def take(self, count: int) -> list[int]:
        """`count` blocks; there are as many."""
        freed = min(count, len(self._free))
        blocks = [self._free.pop() for _ in range(freed)]
        first, self._untouched = self._untouched, self._untouched + count - freed
        return blocks + list(range(first, self._untouched))

    def give_back(self, blocks: Iterable[int]) -> None:
        """Takes blocks back, whose content is no longer needed."""
        self._free.extend(blocks)
