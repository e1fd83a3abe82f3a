"""Blocks of host memory that keep what the pool on the device has evicted (TensorRT-LLM's secondary blocks).

Decides which host block is written, which is read, and which content is dropped when all are in use: the least recently
written one. What comes and what is asked for again is the prefix cache's business (`offload.py`).

A plan moves all blocks to the host first, and reads after that (`StepPlan`). So a block that is read in a plan is
written again in the next one at the earliest, and one that is written twice in a plan only keeps what came last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable

from sim.memory.host import HostPool
from sim.plan import Pairs


class HostCache:
    """What lies on the host, and what a plan moves there and back.

    Args:
        num_blocks: host blocks; 1 or more.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._pool = HostPool(num_blocks)
        self._keys: OrderedDict[int, Hashable] = OrderedDict()  # of the host blocks in use, next to be dropped first
        self._blocks: dict[Hashable, int] = {}  # the other way round
        self._writes: dict[int, int] = {}  # host block -> the device block that it gets, since the last plan
        self._reads: dict[int, int] = {}  # device block -> the host block that it gets, since the last plan

    def __len__(self) -> int:
        """Host blocks that hold something."""
        return len(self._keys)

    def contents(self) -> dict[Hashable, int]:
        """The keys of what is here and the host blocks that hold it, next to be dropped first."""
        return {key: block for block, key in self._keys.items()}

    def find(self, keys: Iterable[Hashable]) -> list[int]:
        """Host blocks of the first keys, up to one that is not here. Changes nothing."""
        found: list[int] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def __contains__(self, key: Hashable) -> bool:
        """Whether it is here."""
        return key in self._blocks

    def awaited(self, device_block: int) -> bool:
        """Whether the content of a device block has yet to come from here in the next plan."""
        return device_block in self._reads

    def store(self, device_block: int, key: Hashable) -> None:
        """A device block loses its content, which is not here yet: it moves here if there is room.

        There is none only while all host blocks are being read.
        """
        if self._pool.num_free:
            (block,) = self._pool.take(1)
        elif self._keys:
            block, dropped = self._keys.popitem(last=False)
            del self._blocks[dropped]
        else:
            return
        self._keys[block] = key
        self._blocks[key] = block
        self._writes[block] = device_block

    def drop(self, keys: Iterable[Hashable]) -> None:
        """These are on the device again, computed anew: what is here of them is of no use."""
        for key in keys:
            block = self._blocks.pop(key, None)
            if block is not None:
                del self._keys[block]
                self._pool.give_back([block])

    def claim(self, blocks: list[int]) -> None:
        """These will be read in the next plan; nothing pushes them out before, and nothing is here afterwards."""
        for block in blocks:
            del self._blocks[self._keys.pop(block)]

    def bring_back(self, blocks: list[int], device_blocks: list[int]) -> None:
        """Claimed blocks go to these device blocks, one to one."""
        self._reads.update(zip(device_blocks, blocks, strict=True))

    def take_moves(self) -> tuple[Pairs, Pairs]:
        """(device block, host block) of what moves here and (host block, device block) of what moves back.

        Since the last call; that is, in one plan.
        """
        outs = tuple((device_block, block) for block, device_block in self._writes.items())
        ins = tuple((block, device_block) for device_block, block in self._reads.items())
        self._pool.give_back(self._reads.values())
        self._writes.clear()
        self._reads.clear()
        return outs, ins
