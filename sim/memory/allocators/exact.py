"""Any free blocks serve any request, as in Orca's slot counting (Yu et al., OSDI 2022, §4.2): nothing is external."""

from __future__ import annotations

from collections.abc import Sequence


class ExactSlots:
    """A stack of free blocks, lowest first at the start, last freed first used afterwards.

    Args:
        num_blocks: size of the pool; at least 1.
    """

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Free blocks."""
        return len(self._free)

    @property
    def largest_free(self) -> int:
        """All that is free: blocks need not be neighbours."""
        return len(self._free)

    def rounded(self, num_blocks: int) -> int:
        """No rounding."""
        return num_blocks

    def allocate(self, num_blocks: int) -> list[int] | None:
        """The last freed blocks first."""
        if num_blocks > len(self._free):
            return None
        blocks = self._free[: -num_blocks - 1 : -1]
        del self._free[len(self._free) - num_blocks :]
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Puts them back so that the first of the table is used last."""
        self._free.extend(blocks)
