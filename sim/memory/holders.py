"""Reference counts: in how many block tables a block stands (Kwon et al., SOSP 2023, §4.4)."""

from __future__ import annotations


class Holders:
    """The blocks that stand in more than one table. A block in one table only is not listed.

    Attributes:
        shared: table entries beyond the first of each block: the blocks that sharing saves.
    """

    __slots__ = ("_tables", "shared")

    def __init__(self) -> None:
        self._tables: dict[int, int] = {}  # how many a block stands in
        self.shared = 0

    def __contains__(self, block: int) -> bool:
        """Whether the block stands in several tables."""
        return block in self._tables

    def add(self, block: int) -> None:
        """One table more for a block that stands in one already."""
        self._tables[block] = self._tables.get(block, 1) + 1
        self.shared += 1

    def leave(self, block: int) -> bool:
        """One table less for the block; False, and nothing changed, if it stands in one only: then it is not shared."""
        tables = self._tables.get(block)
        if tables is None:
            return False
        self.shared -= 1
        if tables > 2:
            self._tables[block] = tables - 1
        else:
            del self._tables[block]
        return True
