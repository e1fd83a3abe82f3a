"""What a contiguous memory policy may ask of an allocator. A unit is a block of the policy: a slot, where blocks are 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Allocator(Protocol):
    """Hands out units 0 … num_units - 1 of a pool and takes them back."""

    def rounded(self, num_units: int) -> int:
        """Units that a request for `num_units` takes."""

    def allocate(self, num_units: int) -> Sequence[int] | None:
        """`rounded(num_units)` free units in table order, or None if no place is large enough; nothing has changed then."""

    def free(self, units: Sequence[int]) -> None:
        """Takes back exactly what one `allocate` gave."""

    @property
    def num_free(self) -> int:
        """Free units in all."""

    @property
    def largest_free(self) -> int:
        """The largest request that `allocate` would grant now."""
