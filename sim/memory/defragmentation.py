"""When llama.cpp moves cells together, and which go where (llama.cpp, July 2025: `init_update`, `defrag_prepare`).

The last used cells fill the holes, the lowest hole first, so that what is used becomes one run at the bottom. One pass
makes a limited number of moves, for each takes nodes of a compute graph; what calls it repeats passes while they help.
"""

from __future__ import annotations

import numpy as np

from sim.memory.cells import FREE, HELD, Cells
from workloads.errors import UserError


class Defragmentation:
    """Fills holes below a boundary with cells from beyond it.

    Args:
        defrag_thold: share of holes up to the last used cell above which cells are moved before a step, without waiting
            for a search to fail; llama.cpp's --defrag-thold, 0.1 there.
        max_moves: most runs of neighbouring cells that one pass moves.
        min_cells: contexts used up to fewer cells than this are left alone before a step.
        padding: cells that count as used on top, since attention reads up to a multiple of as many.

    Raises:
        UserError: a number out of range.
    """

    def __init__(
        self, defrag_thold: float = 0.1, max_moves: int = 341, min_cells: int = 2048, padding: int = 32
    ) -> None:
        if not 0 < defrag_thold < 1:
            raise UserError(
                f"memory.defragmentation.defrag_thold is {defrag_thold}; expected a share above 0 and below 1. Without "
                "defragmentation: ~memory/defragmentation."
            )
        if max_moves < 1:
            raise UserError(f"memory.defragmentation.max_moves is {max_moves}; expected at least 1.")
        self._threshold = defrag_thold
        self._max_moves = max_moves
        self._min_cells = min_cells
        self._padding = padding

    def is_due(self, cells: Cells) -> bool:
        """Whether there are so many holes that cells are moved before a step."""
        end = cells.end
        return end >= self._min_cells and end - cells.num_used - self._padding > self._threshold * end

    def moves(self, cells: Cells, boundary: int) -> list[tuple[int, int]]:
        """One pass: (source, destination) of each cell to move.

        Args:
            cells: are not changed. What is fresh stays where it is.
            boundary: sources lie at or beyond it, destinations below it. A step that keeps to one boundary never moves
                a cell to where another came from or went, however many passes it makes.
        """
        states = cells.states
        holes = np.flatnonzero(states[:boundary] == FREE)
        sources = np.flatnonzero(states[boundary:] == HELD) + boundary
        count = min(len(holes), len(sources))
        if not count:
            return []
        holes = holes[:count]
        # Each hole takes the last sources that those before it have left, in ascending order.
        ends = np.append(np.flatnonzero(np.diff(holes) > 1) + 1, count)
        sizes = np.diff(ends, prepend=0)
        place = np.arange(count)  # of a cell of a hole, among all of them
        from_end = np.repeat(ends, sizes) - (place - np.repeat(ends - sizes, sizes))
        taken = sources[len(sources) - from_end]
        in_limit = np.cumsum(np.diff(taken, prepend=-2) != 1) <= self._max_moves  # by the run to which each belongs
        return list(zip(taken[in_limit].tolist(), holes[in_limit].tolist(), strict=True))
