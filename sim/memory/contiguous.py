"""Contiguous KV memory: one region for each request, set aside at admission and kept to its end.

This is the memory of systems before paging, and the Orca baselines of Kwon et al., SOSP 2023, §6.1. How much is set
aside is the reservation's rule (`reservation.py`), where it lies the allocator's (`allocators/`).
"""

from __future__ import annotations

from typing import Literal

from sim.memory.allocators.interface import Allocator
from sim.memory.interface import Occupancy
from sim.memory.reservation import Reservation
from sim.memory.unforked import Unforked
from sim.sequence import Sequence
from workloads.errors import UserError


class ContiguousMemory(Unforked):
    """A pool in which each sequence holds one region that never grows.

    Args:
        num_blocks: blocks in the pool.
        max_model_len: most tokens of one request.
        reservation: tokens to set aside for a request.
        allocator: finds the regions, over `num_blocks` blocks; all free.
        block_size: slots in a block: regions begin and end at multiples of it.
        charge_rounding_to: which waste the allocator's rounding (a buddy's power of two) counts as. Kwon et al.,
            Fig. 2, only adds up with `external`: Orca (Oracle) shows no internal fragmentation there.

    Raises:
        UserError: a size below 1.
    """

    def __init__(
        self,
        num_blocks: int,
        max_model_len: int,
        reservation: Reservation,
        allocator: Allocator,
        block_size: int = 1,
        charge_rounding_to: Literal["internal", "external"] = "external",
    ) -> None:
        for name, value in (("block_size", block_size), ("num_blocks", num_blocks)):
            if value < 1:
                raise UserError(f"memory.{name} is {value}; expected a whole number of at least 1.")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._max_model_len = max_model_len
        self._reservation = reservation
        self._allocator = allocator
        self._largest_possible = self._allocator.largest_free
        self._charge_rounding_to_external = charge_rounding_to == "external"
        self._computed = 0  # tokens stored, summed over the live sequences
        self._to_fill = 0  # slots they will have filled at their end, summed
        self._retired: set[Sequence] = set()  # have finished, but hold their regions
        self._rounding = 0  # slots their regions hold beyond their reservations, summed

    @property
    def num_slots(self) -> int:
        """Slots in the pool."""
        return self.num_blocks * self.block_size

    @property
    def caches_prefixes(self) -> bool:
        """Regions are not kept."""
        return False

    def never_fits(self, sequence: Sequence) -> str | None:
        """Says so if its region is larger than any in an empty pool."""
        need = self._blocks_for(sequence)
        if self._allocator.rounded(need) <= self._largest_possible:
            return None
        return (
            f"needs a region of {self._allocator.rounded(need) * self.block_size} slots, "
            f"the largest of the empty pool is {self._largest_possible * self.block_size}"
        )

    def table_entries(self, sequence: Sequence) -> int:
        """A contiguous region is addressed by its start alone."""
        return 0

    def lookup(self, sequence: Sequence) -> list[int]:
        """Regions are not shared."""
        return []

    def admit(self, sequence: Sequence, hit: list[int], num_tokens: int, room_for: int, others_run: bool) -> bool:
        """Takes the whole region, whatever the first chunk needs."""
        blocks = self._allocator.allocate(self._blocks_for(sequence))
        if blocks is None:
            return False
        sequence.blocks = blocks
        self._computed += num_tokens
        self._to_fill += sequence.final - 1
        self._rounding += self._rounding_of(sequence)
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Always: the room was set aside at admission."""
        self._computed += num_tokens - sequence.computed
        return True

    @property
    def num_free_blocks(self) -> int:
        """Blocks of no region."""
        return self._allocator.num_free

    @property
    def num_cached_blocks(self) -> int:
        """None: regions are not kept."""
        return 0

    def missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """None: a region never grows."""
        return 0

    def room_left(self, sequence: Sequence) -> int:
        """What is left of its region, which its last token does not exceed."""
        return len(sequence.blocks) * self.block_size - sequence.computed

    def decode(self, tables: list[list[int]], num_tokens: int, never_filled: int) -> int:
        """One slot each; a region has room for all that its sequence will store."""
        assert not tables
        self._computed += num_tokens
        return 0

    def complete(self, sequence: Sequence) -> None:
        """A full region is nothing to note."""

    def retire(self, sequence: Sequence) -> None:
        """The sequence has finished, but holds its region until it is released: all of that is internal from now on."""
        self._computed -= sequence.computed
        self._to_fill -= sequence.final - 1
        self._retired.add(sequence)

    def release(self, sequence: Sequence) -> None:
        """Frees the region."""
        if sequence in self._retired:
            self._retired.remove(sequence)
        else:
            self._computed -= sequence.computed
            self._to_fill -= sequence.final - 1
        self._rounding -= self._rounding_of(sequence)
        self._allocator.free(sequence.blocks)
        sequence.blocks = []

    @property
    def can_leap(self) -> bool:
        """Whoever decodes takes nothing."""
        return True

    def take_back(self, sequence: Sequence, num_tokens: int) -> None:
        """Never asked for: nobody is preempted."""
        raise AssertionError("the holder of a contiguous region is not preempted")

    def occupancy(self, head: Sequence | None) -> Occupancy:
        """Free slots are external if the head's reservation is no more than they are, and yet no region can hold it."""
        size = self.block_size
        free = self._allocator.num_free * size
        held = self.num_slots - free
        largest = self._allocator.largest_free * size
        external = 0
        if head is not None:
            need = self._blocks_for(head)
            if need * size <= free and self._allocator.rounded(need) * size > largest:
                external = free
        rounding = self._rounding if self._charge_rounding_to_external else 0
        return Occupancy(
            used=self._computed,
            reserved=self._to_fill - self._computed,
            internal=held - self._to_fill - rounding,
            cached=0,
            external=external + rounding,
            idle=free - external,
            largest_free_run=largest,
        )

    def _blocks_for(self, sequence: Sequence) -> int:
        return -(-self._reservation.tokens(sequence, self._max_model_len) // self.block_size)

    def _rounding_of(self, sequence: Sequence) -> int:
        return (len(sequence.blocks) - self._blocks_for(sequence)) * self.block_size
