"""vAttention: KV contiguous in virtual memory, physical pages mapped as it grows (Prabhu et al., ASPLOS 2025).

Every request of the batch owns a place of the model limit in 2 * layers virtual buffers, K and V of each layer, which
costs no memory. All buffers grow together, so what is handed out is a *page group*, one page for each of them; here it
is a block, and how many tokens it holds is `kv_layout.page_group_tokens`. Kernels see contiguous tensors and read no
block table. Which pages stay mapped to the place of a request that has finished follows the authors' allocator
(microsoft/vattention, `vattention.cu`); who runs and who is preempted is the scheduler's business.
"""

from __future__ import annotations

from collections import deque

from sim.memory.interface import Occupancy
from sim.memory.paged import PagedMemory
from sim.sequence import Sequence
from workloads.errors import UserError

VMM_CALL_S = 40e-6  # for one call of CUDA's virtual memory management, about what the paper gives


class VAttentionMemory(PagedMemory):
    """A pool of page groups. One that is mapped to a place whose request does not need it is as free as any other.

    Args:
        num_blocks: page groups in the pool.
        block_size: tokens in a page group.
        max_batch_size: places for requests; as many as the scheduler runs at once.
        num_layers: of the model: a page group is mapped with two calls for each.
        deferred_reclamation: page groups stay mapped when their request has finished, for the next in its place, until
            others need them; without, they are unmapped at once.

    Attributes:
        num_mapped: page groups that were mapped so far.

    Raises:
        UserError: a number below 1.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_batch_size: int,
        num_layers: int,
        deferred_reclamation: bool = True,
    ) -> None:
        super().__init__(num_blocks, block_size, prefix_caching=False, num_reserved_blocks=0)
        if max_batch_size < 1:
            raise UserError(f"memory.max_batch_size is {max_batch_size}; expected a whole number of at least 1.")
        self.num_mapped = 0
        self._num_layers = num_layers
        self._deferred = deferred_reclamation
        # By place, what is mapped beyond the table of the request that it has, if any, in order of virtual address.
        self._surplus: list[deque[int]] = [deque() for _ in range(max_batch_size)]
        self._num_surplus = 0
        self._vacant = [True] * max_batch_size
        self._place: dict[Sequence, int] = {}
        self._place_of_table: dict[int, int] = {}  # by the identity of a block table, which lives as long as its place

    @property
    def num_free_blocks(self) -> int:
        """Page groups that no request needs, mapped or not."""
        return len(self._free) + self._num_surplus

    @property
    def can_share(self) -> bool:
        """A page is mapped to one place."""
        return False

    def mappings(self) -> dict[str, float]:
        """What mapping took: page groups, calls on each GPU, and their seconds, which no step is charged with."""
        calls = self.num_mapped * 2 * self._num_layers
        return {"page_groups_mapped": self.num_mapped, "vmm_calls": calls, "vmm_s": calls * VMM_CALL_S}

    def free_list(self) -> list[int]:
        """Free page groups: the unmapped ones, next to be mapped first, then those in the order of reclamation."""
        return self._free[::-1] + [group for place in reversed(self._surplus) for group in reversed(place)]

    def table_entries(self, sequence: Sequence) -> int:
        """None: a kernel reads through virtual addresses."""
        return 0

    def admit(self, sequence: Sequence, hit: list[int], num_tokens: int, room_for: int, others_run: bool) -> bool:
        """Takes a vacant place, and maps what its last request has not left there."""
        if self._blocks_for(room_for) > self.num_free_blocks:
            return False
        place = self._choose_place(self._blocks_for(sequence.known))
        self._vacant[place] = False
        self._place[sequence] = place
        table: list[int] = []
        sequence.blocks = table
        self._place_of_table[id(table)] = place
        self._extend(table, self._blocks_for(num_tokens))
        self._computed += num_tokens
        self._internal += self._beyond_end(sequence)
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """The missing page groups, if there are enough."""
        missing = self.missing_blocks(sequence, num_tokens)
        if missing > self.num_free_blocks:
            return False
        if missing > 0:
            assert isinstance(sequence.blocks, list)
            self._internal -= self._beyond_end(sequence)
            self._extend(sequence.blocks, missing)
            self._internal += self._beyond_end(sequence)
        self._computed += num_tokens - sequence.computed
        return True

    def decode(self, tables: list[list[int]], num_tokens: int, never_filled: int) -> int:
        """Each place uses what it has mapped, and maps more after that."""
        self._computed += num_tokens
        self._internal += never_filled
        for table in tables:
            self._extend(table, 1)
        return 0

    def release(self, sequence: Sequence) -> None:
        """Vacates the place. What is mapped there stays, if reclamation is deferred."""
        self._computed -= sequence.computed
        self._internal -= self._beyond_end(sequence)
        place = self._place.pop(sequence)
        del self._place_of_table[id(sequence.blocks)]
        self._vacant[place] = True
        surplus = self._surplus[place]
        surplus.extendleft(reversed(sequence.blocks))
        self._num_surplus += len(sequence.blocks)
        sequence.blocks = []
        if not self._deferred:
            self._unmap(place)

    def take_back(self, sequence: Sequence, num_tokens: int) -> None:
        """What was given since stays mapped, but is not needed any more."""
        table = sequence.blocks
        assert isinstance(table, list)
        self._internal -= self._beyond_end(sequence)
        kept = self._blocks_for(num_tokens)
        self._surplus[self._place[sequence]].extendleft(reversed(table[kept:]))
        self._num_surplus += len(table) - kept
        del table[kept:]
        self._computed -= sequence.computed - num_tokens
        sequence.computed = num_tokens
        self._internal += self._beyond_end(sequence)

    def occupancy(self, head: Sequence | None) -> Occupancy:
        """Any free page group can be mapped anywhere, so nothing free is ever *external*."""
        idle = self.num_free_blocks * self.block_size
        reserved = self.num_slots - idle - self._computed - self._internal
        return Occupancy(self._computed, reserved, self._internal, 0, 0, idle, idle)

    def _choose_place(self, need: int) -> int:
        """The first vacant place, unless another has enough mapped as well, and less than that one (best fit)."""
        vacant = [place for place, is_vacant in enumerate(self._vacant) if is_vacant]
        best = vacant[0]
        for place in vacant:
            if need <= len(self._surplus[place]) < len(self._surplus[best]):
                best = place
        return best

    def _extend(self, table: list[int], count: int) -> None:
        """Adds page groups to a table; there are as many."""
        place = self._place_of_table[id(table)]
        surplus, free = self._surplus[place], self._free
        for _ in range(count):
            if surplus:
                table.append(surplus.popleft())
                self._num_surplus -= 1
                continue
            if not free:
                self._reclaim()
            table.append(free.pop())
            self.num_mapped += 1

    def _reclaim(self) -> None:
        """Unmaps what the last place that has any surplus does not need."""
        self._unmap(next(place for place in reversed(range(len(self._surplus))) if self._surplus[place]))

    def _unmap(self, place: int) -> None:
        """Unmaps the surplus of a place, the highest address first."""
        surplus = self._surplus[place]
        self._num_surplus -= len(surplus)
        self._free.extend(reversed(surplus))
        surplus.clear()
