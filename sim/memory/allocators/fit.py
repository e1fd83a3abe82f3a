"""First fit, best fit and next fit over a list of free runs (Knuth, TAOCP 1, 2.5); neighbours merge when freed."""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Sequence


class _FreeRuns(ABC):
    """The free runs of a pool in order of address; which of them serves a request is the subclass's rule.

    Args:
        num_blocks: size of the pool; at least 1.
    """

    def __init__(self, num_blocks: int) -> None:
        self._starts = [0]
        self._sizes = [num_blocks]
        self.num_free = num_blocks

    @property
    def largest_free(self) -> int:
        """The largest free run."""
        return max(self._sizes, default=0)

    def rounded(self, num_blocks: int) -> int:
        """No rounding."""
        return num_blocks

    def allocate(self, num_blocks: int) -> range | None:
        """The beginning of the chosen run."""
        index = self._choose(num_blocks)
        if index is None:
            return None
        start = self._starts[index]
        if self._sizes[index] == num_blocks:
            del self._starts[index], self._sizes[index]
        else:
            self._starts[index] += num_blocks
            self._sizes[index] -= num_blocks
        self.num_free -= num_blocks
        return range(start, start + num_blocks)

    def free(self, blocks: Sequence[int]) -> None:
        """Frees a run and merges it with free neighbours."""
        start, size = blocks[0], len(blocks)
        self.num_free += size
        index = bisect.bisect(self._starts, start)
        if index < len(self._starts) and self._starts[index] == start + size:
            size += self._sizes[index]
            del self._starts[index], self._sizes[index]
        if index and self._starts[index - 1] + self._sizes[index - 1] == start:
            self._sizes[index - 1] += size
        else:
            self._starts.insert(index, start)
            self._sizes.insert(index, size)

    @abstractmethod
    def _choose(self, num_blocks: int) -> int | None:
        """Index of the run to take from, or None if none is large enough."""


class FirstFit(_FreeRuns):
    """The run with the lowest address that is large enough."""

    def _choose(self, num_blocks: int) -> int | None:
        return next((index for index, size in enumerate(self._sizes) if size >= num_blocks), None)


class BestFit(_FreeRuns):
    """The smallest run that is large enough, the lowest address of several."""

    def _choose(self, num_blocks: int) -> int | None:
        fitting = [(size, index) for index, size in enumerate(self._sizes) if size >= num_blocks]
        return min(fitting)[1] if fitting else None


class NextFit(_FreeRuns):
    """First fit that goes on from where the last allocation ended, and begins again at the bottom."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._rover = 0  # address after the last allocation

    def allocate(self, num_blocks: int) -> range | None:
        """The beginning of the chosen run; the next search goes on behind it."""
        region = super().allocate(num_blocks)
        if region is not None:
            self._rover = region.stop
        return region

    def _choose(self, num_blocks: int) -> int | None:
        # A run that merged across the rover counts as lying below it.
        first = bisect.bisect_left(self._starts, self._rover)
        order = [*range(first, len(self._starts)), *range(first)]
        return next((index for index in order if self._sizes[index] >= num_blocks), None)
