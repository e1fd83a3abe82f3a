"""Any free units serve any request, as in Orca's own slot counting (Yu et al., OSDI 2022, §4.2): no external fragmentation."""

from __future__ import annotations

from collections.abc import Sequence


class ExactSlots:
    """A stack of free units, lowest first at the start, last freed first used afterwards.

    Args:
        num_units: size of the pool; at least 1.
    """

    def __init__(self, num_units: int) -> None:
        self._free = list(range(num_units - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Free units."""
        return len(self._free)

    @property
    def largest_free(self) -> int:
        """All that is free: units need not be neighbours."""
        return len(self._free)

    def rounded(self, num_units: int) -> int:
        """No rounding."""
        return num_units

    def allocate(self, num_units: int) -> list[int] | None:
        """The last freed units first."""
        if num_units > len(self._free):
            return None
        units = self._free[: -num_units - 1 : -1]
        del self._free[len(self._free) - num_units :]
        return units

    def free(self, units: Sequence[int]) -> None:
        """Puts them back so that the first of the table is used last."""
        self._free.extend(units)
