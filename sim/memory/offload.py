"""Paged KV memory with TensorRT-LLM's (1.0) priorities of eviction and its host cache.

Full blocks that nobody holds are evicted leaf by leaf, those of the lowest priority first (`eviction.py`). If there is
a host cache, what is evicted moves to the host unless its priority is too low, and a prompt that begins with it gets it
back into a block of the device. It is found by the same keys as on the device, of which it is the continuation.

On the host the least recently evicted block is dropped first, whatever its priority. A step starts when its moves are
done. What of the retention policy differs from request to request, ranges of tokens and durations, is left out: one
priority stands for all prompts, another for all outputs.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import count, islice

from sim.memory.eviction import EvictionOrder, LeastRecentlyUsed, LowestPriorityLeaf
from sim.memory.holders import Holders
from sim.memory.host_cache import HostCache
from sim.memory.paged import PagedMemory
from sim.memory.prefix import PrefixCache, comparable_keys, prefix_keys
from sim.plan import NO_BLOCKS, NO_PAIRS, Blocks, Pairs
from sim.sequence import Sequence
from workloads.errors import UserError

DEFAULT_PRIORITY = 35
HIGHEST_PRIORITY = 100


class OffloadingMemory(PagedMemory):
    """Paged memory that evicts by priority, to the host if there is room for that.

    In a hit, ~id stands for a host block; those follow the blocks of the device.

    Args:
        num_blocks: as for `PagedMemory`, and so are the next five.
        prompt_priority: of blocks whose first token is the prompt's, for eviction: from 0, which goes first, to 100.
        output_priority: of those behind.
        num_host_cache_blocks: blocks of host memory for what is evicted; 0: it is lost.
        secondary_offload_min_priority: least priority of what moves to the host.

    Raises:
        UserError: as for `PagedMemory`, a priority out of range, or a host cache without prefix caching.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 32,
        watermark: float = 0.0,
        prefix_caching: bool = True,
        num_reserved_blocks: int = 0,
        num_host_blocks: int = 0,
        prompt_priority: int = DEFAULT_PRIORITY,
        output_priority: int = DEFAULT_PRIORITY,
        num_host_cache_blocks: int = 0,
        secondary_offload_min_priority: int = DEFAULT_PRIORITY,
    ) -> None:
        super().__init__(num_blocks, block_size, watermark, prefix_caching, num_reserved_blocks, num_host_blocks)
        for name, priority in (
            ("prompt_priority", prompt_priority),
            ("output_priority", output_priority),
            ("secondary_offload_min_priority", secondary_offload_min_priority),
        ):
            if not 0 <= priority <= HIGHEST_PRIORITY:
                raise UserError(f"memory.{name} is {priority}; expected a whole number from 0 to {HIGHEST_PRIORITY}.")
        if num_host_cache_blocks < 0:
            raise UserError(f"memory.num_host_cache_blocks is {num_host_cache_blocks}; expected at least 0.")
        if num_host_cache_blocks and not prefix_caching:
            raise UserError(
                "memory.host_cache_size is of use to prefix caching only; set memory.prefix_caching=true or "
                "memory.host_cache_size=0."
            )
        self.host_cache = HostCache(num_host_cache_blocks) if num_host_cache_blocks else None
        self._returned: Blocks = NO_BLOCKS
        if not prefix_caching:
            return
        order: EvictionOrder = (
            LeastRecentlyUsed(prompt_priority)
            if prompt_priority == output_priority
            else LowestPriorityLeaf(block_size, prompt_priority, output_priority)
        )
        if self.host_cache is None:
            self.prefix = PrefixCache(block_size, self.holders, order)
        else:
            self.prefix = OffloadingPrefixCache(
                block_size, self.holders, order, self.host_cache, secondary_offload_min_priority
            )

    def admit(self, sequence: Sequence, hit: list[int], num_tokens: int, room_for: int, others_run: bool) -> bool:
        """What lies on the host takes blocks of the device like tokens to compute, and is not computed."""
        if not hit or hit[-1] >= 0:
            return super().admit(sequence, hit, num_tokens, room_for, others_run)
        on_device = [block for block in hit if block >= 0]
        if not self._has_room(sequence, on_device, room_for, others_run):
            return False
        assert self.host_cache is not None
        on_host = [~block for block in hit[len(on_device) :]]
        self.host_cache.claim(on_host)  # before what is evicted for this very admission pushes it out
        admitted = super().admit(sequence, on_device, num_tokens, room_for, others_run)
        assert admitted
        self.host_cache.bring_back(on_host, list(sequence.blocks[len(on_device) : len(hit)]))
        self._returned += ((sequence, len(on_host)),)
        return True

    def take_moves(self) -> tuple[Pairs, Pairs, Blocks]:
        """What moves between device and host in one plan: everything since the last call.

        Returns:
            (device block, host block) of each block that is evicted to the host, (host block, device block) of each
            that comes back after that, and for whom how many come back.
        """
        if self.host_cache is None:
            return NO_PAIRS, NO_PAIRS, NO_BLOCKS
        assert isinstance(self.prefix, OffloadingPrefixCache)
        self.prefix.settle()
        returned, self._returned = self._returned, NO_BLOCKS
        return *self.host_cache.take_moves(), returned


class OffloadingPrefixCache(PrefixCache):
    """Moves what it evicts to the host. Content with a key is on the device or on the host, and on both in no step.

    What happens on the host is settled once for each plan, from all that the plan has evicted and registered: so it
    does not depend on the order in which the sequences of a batch were looked at.

    Args:
        block_size: as for `PrefixCache`, and so are the next two.
        host: where it goes.
        least_priority: of what goes there.
    """

    def __init__(
        self, block_size: int, holders: Holders, order: EvictionOrder, host: HostCache, least_priority: int
    ) -> None:
        super().__init__(block_size, holders, order)
        self._host = host
        self._least_priority = least_priority
        self._nameless = count()  # numbers blocks that nobody will ask for, of which the engine knows nothing
        self._evicted: list[tuple[int, Hashable]] = []  # block and key, since this was settled
        self._registered: list[Hashable] = []  # keys that may be on the host, since then

    def lookup(self, sequence: Sequence) -> list[int]:
        """Blocks of the device, and ~id of those of the host that continue them."""
        hit = super().lookup(sequence)
        keys = islice(prefix_keys(sequence, self.block_size), len(hit), (sequence.known - 1) // self.block_size)
        return hit + [~block for block in self._host.find(keys)]

    def register(self, sequence: Sequence, start: int, num_tokens: int) -> None:
        """What is on the device now need not lie on the host."""
        super().register(sequence, start, num_tokens)
        if len(self._host):
            self._registered += comparable_keys(sequence, self.block_size)[start : num_tokens // self.block_size]

    def settle(self) -> None:
        """Ends a plan: drops from the host what is on the device again, and moves there what has left it."""
        self._host.drop(self._registered)
        self._registered.clear()
        for block, key in self._evicted:
            if key not in self._blocks_of and key not in self._host:
                self._host.store(block, key)
        self._evicted.clear()

    def _note(self, block: int, key: Hashable) -> None:
        super()._note(block, key)
        self._registered.append(key)

    def _lose_keys(self, evicted: list[int]) -> None:
        for block in evicted:
            if self._order.priority(block) >= self._least_priority and not self._host.awaited(block):
                self._evicted.append((block, self._key_of.get(block, ("nameless", next(self._nameless)))))
        super()._lose_keys(evicted)
