"""The cells of a llama.cpp context: each holds the KV of one token, and a search finds a run of free ones.

As `llama_kv_cache_unified::find_slot` and `seq_rm` had it until August 2025 (llama.cpp, July 2025), when placement in
scattered cells came. Who asks for how many at once is `placement.py`, who moves them `defragmentation.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

FREE, HELD, FRESH = 0, 1, 2  # fresh: taken in the step being planned, so nothing is stored in it yet


class Cells:
    """A row of cells and the place where the next search begins, the head.

    Args:
        num_cells: at least 1.

    Attributes:
        num_cells: as given.
        num_used: those that are not free.
    """

    def __init__(self, num_cells: int) -> None:
        self.num_cells = num_cells
        self.num_used = 0
        self._state = bytearray(num_cells)
        self._head = 0

    @property
    def num_free(self) -> int:
        """Free cells."""
        return self.num_cells - self.num_used

    @property
    def end(self) -> int:
        """One beyond the last cell that is used: what llama.cpp's attention reads up to (n_kv, without padding)."""
        return len(self._state.rstrip(b"\0"))

    @property
    def states(self) -> NDArray[np.uint8]:
        """Shape (num_cells,): free, held or fresh; a view."""
        return np.frombuffer(self._state, np.uint8)

    def largest_free_run(self) -> int:
        """Cells in the longest run of free ones."""
        used = np.flatnonzero(self.states)
        return int(np.diff(used, prepend=-1, append=self.num_cells).max()) - 1

    def take_run(self, num_cells: int) -> range | None:
        """The first run of so many free cells from the head on, then from the bottom; None, and nothing has changed.

        If far more cells lie below the head than are used, the search begins at the bottom: there must be holes.
        """
        start = self._head if self._head <= self.num_used + 2 * num_cells else 0
        needle = bytes(num_cells)
        first = self._state.find(needle, start)
        if first < 0:  # no run goes around the end, but one may begin below the place and end beyond it
            first = self._state.find(needle, 0, start + num_cells - 1)
        if first < 0:
            return None
        run = range(first, first + num_cells)
        self._state[run.start : run.stop] = bytes((FRESH,)) * num_cells
        self.num_used += num_cells
        self._head = run.stop
        return run

    def take_runs(self, sizes: Sequence[int]) -> list[range] | None:
        """A run of each size, one search after the other; None, and nothing has changed, if one is not found."""
        head, runs = self._head, list[range]()
        for size in sizes:
            run = self.take_run(size)
            if run is None:
                for taken in runs:
                    self._state[taken.start : taken.stop] = bytes(len(taken))
                    self.num_used -= len(taken)
                self._head = head
                return None
            runs.append(run)
        return runs

    def settle(self) -> None:
        """The step is over: whatever was taken in it is stored."""
        self._state = self._state.replace(bytes((FRESH,)), bytes((HELD,)))

    def free(self, cells: Iterable[int]) -> None:
        """Frees cells; the head goes back to the lowest of them."""
        state, count, lowest = self._state, 0, self._head
        for cell in cells:
            state[cell] = FREE
            count += 1
            if cell < lowest:
                lowest = cell
        self.num_used -= count
        self._head = lowest

    def move(self, moves: Iterable[tuple[int, int]]) -> None:
        """Held cells go to free ones, (source, destination) each; the next search begins at the bottom."""
        for source, destination in moves:
            self._state[source] = FREE
            self._state[destination] = HELD
        self._head = 0
