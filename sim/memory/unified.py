"""One pool of cells for all requests, a cell for each token: llama.cpp's unified KV cache (July 2025).

No cell is set aside and none is shared: a request holds as many cells as it has tokens, wherever a search has found
them. What a prompt waits for is cells enough, and where it must lie in one run, such a run. The cells of running
requests are found all at once at the end of a step's plan, by `end_step`, as the server places their tokens in one
batch; so this memory needs the scheduler that calls it (`scheduler/llama_cpp.py`), which also says what happens when
the cells run out.
"""

from __future__ import annotations

from sim.memory.cells import Cells
from sim.memory.defragmentation import Defragmentation
from sim.memory.interface import Occupancy
from sim.memory.placement import Pieces, Placement
from sim.memory.unforked import Unforked
from sim.sequence import Sequence
from workloads.errors import UserError


class UnifiedCells(Unforked):
    """A pool of cells.

    Args:
        num_blocks: cells in the pool: llama.cpp's --ctx-size.
        pieces: how a batch is laid down.
        block_size: 1: a block is a cell.
        prompts: how the first tokens of a prompt are laid down instead, or None.
        defragmentation: moves cells together, or None.

    Raises:
        UserError: a block of several tokens, or no cell.
    """

    def __init__(
        self,
        num_blocks: int,
        pieces: Pieces,
        block_size: int = 1,
        prompts: Placement | None = None,
        defragmentation: Defragmentation | None = None,
    ) -> None:
        if block_size != 1:
            raise UserError(f"memory.block_size is {block_size}; a cell of llama.cpp holds one token, so expected 1.")
        if num_blocks < 1:
            raise UserError(f"memory.num_blocks is {num_blocks}; expected a whole number of at least 1.")
        self.num_blocks = num_blocks
        self._cells = Cells(num_blocks)
        self._pieces = pieces
        self._prompts: Placement = pieces if prompts is None else prompts
        self._defragmentation = defragmentation
        self._live: dict[Sequence, list[int]] = {}  # block tables, in order of admission
        self._unplaced: list[Sequence] = []  # decode in the step being planned; a cell is set aside for each
        self._boundary: int | None = None  # of the moves of the step being planned
        self._moved: list[tuple[Sequence, int, int]] = []  # whose cell went from where to where

    @property
    def block_size(self) -> int:
        """A block is a cell."""
        return 1

    @property
    def num_slots(self) -> int:
        """Cells in the pool."""
        return self.num_blocks

    @property
    def caches_prefixes(self) -> bool:
        """Cells are freed with their request."""
        return False

    @property
    def num_free_blocks(self) -> int:
        """Cells that nobody has or is about to get."""
        return self._cells.num_free - len(self._unplaced)

    @property
    def num_cached_blocks(self) -> int:
        """None."""
        return 0

    @property
    def can_leap(self) -> bool:
        """Where the cells of a token are depends on all others of its step."""
        return False

    def begin_step(self) -> None:
        """A step is planned from here on: cells are moved if there are many holes."""
        self._cells.settle()
        self._boundary = None
        if self._defragmentation is not None and self._defragmentation.is_due(self._cells):
            self._make_run()

    def end_step(self) -> None:
        """The step is planned: those who decode get their cells, unless they have them."""
        self._place_decodes()

    def never_fits(self, sequence: Sequence) -> str | None:
        """Says so if its prompt is more than the pool; a request is cut off where the pool ends."""
        if sequence.request.prompt_tokens < self.num_blocks:
            return None
        return f"prompt of {sequence.request.prompt_tokens} tokens leaves no cell of {self.num_blocks} for the output"

    def table_entries(self, sequence: Sequence) -> int:
        """None: attention reads all cells up to the last used one, and masks those of others."""
        return 0

    def lookup(self, sequence: Sequence) -> list[int]:
        """Nothing is shared."""
        return []

    def admit(self, sequence: Sequence, hit: list[int], num_tokens: int, room_for: int, others_run: bool) -> bool:
        """Finds cells for the tokens, behind those of the running requests."""
        if room_for > self.num_free_blocks:
            return False
        self._place_decodes()
        table = self._prompts.place(self._cells, num_tokens, self._make_run)
        if table is None:
            return False
        sequence.blocks = self._live[sequence] = table
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Sets aside a cell for a single token, or finds cells for what is left of a prompt."""
        missing = self.missing_blocks(sequence, num_tokens)
        if missing > self.num_free_blocks:
            return False
        if missing == 1:
            self._unplaced.append(sequence)
        elif missing > 1:
            found = self._pieces.place(self._cells, missing, self._make_run)
            assert found is not None
            self._live[sequence] += found
        return True

    def missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """One for each token beyond those that are computed."""
        return num_tokens - sequence.computed

    def room_left(self, sequence: Sequence) -> int:
        """None: no cell is set aside for what is to come."""
        return 0

    def decode(self, tables: list[list[int]], num_tokens: int, never_filled: int) -> int:
        """Never asked for: where a token goes depends on all others of its step."""
        raise AssertionError("cells are found step by step; the scheduler must not leap")

    def complete(self, sequence: Sequence) -> None:
        """A full cell is nothing to note."""

    def release(self, sequence: Sequence) -> None:
        """Frees its cells."""
        self._cells.free(self._live.pop(sequence))
        sequence.blocks = []

    def take_copies(self) -> list[tuple[Sequence, int, int]]:
        """Whose cells were moved in this step."""
        moved, self._moved = self._moved, []
        return moved

    def take_back(self, sequence: Sequence, num_tokens: int) -> None:
        """Never asked for: nobody is preempted."""
        raise AssertionError("llama.cpp preempts nobody")

    def occupancy(self, head: Sequence | None) -> Occupancy:
        """Free cells are external if there are enough for the head and yet not in the run that it needs."""
        if self._unplaced:
            raise UserError("this memory is llama.cpp's and needs its scheduler; choose scheduler=llama_cpp_unified.")
        cells = self._cells
        free, largest = cells.num_free, cells.largest_free_run()
        stranded = head is not None and head.known <= free and self._prompts.longest_run(head.known) > largest
        external = free if stranded else 0
        return Occupancy(cells.num_used, 0, 0, 0, external, free - external, largest)

    def _place_decodes(self) -> None:
        if not self._unplaced:
            return
        decoding, self._unplaced = self._unplaced, []
        found = self._pieces.place(self._cells, len(decoding), self._make_run)
        assert found is not None
        for sequence, cell in zip(decoding, found, strict=True):
            self._live[sequence].append(cell)

    def _make_run(self) -> bool:
        """One pass of moves, if there is anything to move."""
        if self._defragmentation is None:
            return False
        if self._boundary is None:
            self._boundary = self._cells.num_used
        moves = self._defragmentation.moves(self._cells, self._boundary)
        if not moves:
            return False
        self._cells.move(moves)
        went = dict(moves)
        for sequence, table in self._live.items():
            for index, cell in enumerate(table):
                if (destination := went.get(cell)) is not None:
                    table[index] = destination
                    self._moved.append((sequence, cell, destination))
        return True
