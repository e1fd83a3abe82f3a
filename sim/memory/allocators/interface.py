"""What a contiguous memory policy may ask of an allocator. Its block is a single slot where the block size is 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Allocator(Protocol):
    """Hands out blocks 0 … num_blocks - 1 of a pool and takes them back."""

    def rounded(self, num_blocks: int) -> int:
        """Blocks that a request for `num_blocks` takes."""

    def allocate(self, num_blocks: int) -> Sequence[int] | None:
        """`rounded(num_blocks)` free blocks in table order; None, and nothing has changed, if no place is so large."""

    def free(self, blocks: Sequence[int]) -> None:
        """Takes back exactly what one `allocate` gave."""

    @property
    def num_free(self) -> int:
        """Free blocks in all."""

    @property
    def largest_free(self) -> int:
        """The largest request that `allocate` would grant now."""
