"""How the tokens of a batch come to lie in cells: in pieces, as llama.cpp's server lays them, or in one run.

Both were there at once (llama.cpp, July 2025): the server halves a batch that finds no room and tries again, down to
single tokens (`server.cpp`, `update_slots`), but a saved slot is restored to one run or not at all
(`llama_kv_cache_unified::state_read_meta`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Protocol

from sim.memory.cells import Cells
from workloads.errors import UserError


class Placement(Protocol):
    """Finds cells for tokens."""

    def longest_run(self, num_tokens: int) -> int:
        """Cells in the longest run that there must be for so many tokens, of which as many cells are free."""

    def place(self, cells: Cells, num_tokens: int, make_run: Callable[[], bool]) -> list[int] | None:
        """Takes a cell for each token, in order.

        Args:
            cells: have as many free ones.
            num_tokens: at least 1.
            make_run: moves free cells together; False if it has moved nothing, and then trying again is no use.

        Returns:
            None if there is no run that is long enough; then nothing is taken.
        """


class Pieces:
    """Batch by batch, each in micro-batches of one run. A batch that finds none is halved, and so are those after it.

    Before that, cells are moved, if that is on (llama.cpp, from June 2025; before, only between steps).

    Args:
        n_batch: tokens of a batch; llama.cpp's --batch-size.
        n_ubatch: most tokens of a micro-batch, which lie in one run; llama.cpp's --ubatch-size.

    Raises:
        UserError: a number below 1.
    """

    def __init__(self, n_batch: int = 2048, n_ubatch: int = 512) -> None:
        for name, value in (("n_batch", n_batch), ("n_ubatch", n_ubatch)):
            if value < 1:
                raise UserError(f"memory.pieces.{name} is {value}; expected a whole number of at least 1.")
        self._n_batch = n_batch
        self._n_ubatch = n_ubatch

    def longest_run(self, num_tokens: int) -> int:
        """One cell: a batch is halved until it fits."""
        return 1

    def place(self, cells: Cells, num_tokens: int, make_run: Callable[[], bool]) -> list[int] | None:
        """Always finds room, as there are cells enough."""
        assert num_tokens <= cells.num_free
        placed: list[int] = []
        n_batch = self._n_batch
        while len(placed) < num_tokens:
            batch = min(n_batch, num_tokens - len(placed))
            full, rest = divmod(batch, self._n_ubatch)
            runs = cells.take_runs([self._n_ubatch] * full + [rest] * (rest > 0))
            if runs is not None:
                placed += chain.from_iterable(runs)
            elif not make_run():
                n_batch //= 2
        return placed


class OneRun:
    """All in one run, after moving cells until there is one, if that is on."""

    def longest_run(self, num_tokens: int) -> int:
        """As many cells as tokens."""
        return num_tokens

    def place(self, cells: Cells, num_tokens: int, make_run: Callable[[], bool]) -> list[int] | None:
        """The first run that is long enough."""
        while (run := cells.take_run(num_tokens)) is None:
            if not make_run():
                return None
        return list(run)
