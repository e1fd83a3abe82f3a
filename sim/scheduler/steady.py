"""Decoding at no cost per sequence: what many steps in which nothing is decided have in common.

A sequence is *steady* while it computes one token in every step. All that can happen to it then is known beforehand:
when it needs a block, and when it finishes. So steps are counted by a clock, blocks fall due in the step that is
written down for them, and finishes come from a heap. What happens is exactly what planning each of them would do.
"""

from __future__ import annotations

import heapq
from operator import attrgetter

from sim.memory.interface import KVMemory
from sim.plan import Take
from sim.sequence import STILL, Clock, Sequence
from workloads.request import TokenIds

_order = attrgetter("order")


class SteadyDecodes:
    """The steady sequences of a running queue.

    Args:
        memory: who holds which slots.

    Attributes:
        count: how many they are.
        context: their computed tokens together.
        entries: their block-table entries together.
        last_order: the admission order of the latest of them, or of one that has finished since.
        tellers: how many have an output that is known beforehand, so that the blocks they fill may be what a waiting
            sequence begins with.
    """

    def __init__(self, memory: KVMemory) -> None:
        self.count = 0
        self.context = 0
        self.entries = 0
        self.last_order = 0
        self.tellers = 0
        self._memory = memory
        self._clock = Clock()
        self._due: dict[int, list[Sequence]] = {}  # tick -> who needs a block for the token of that tick
        self._finishing: list[tuple[int, int, Sequence]] = []  # heap of (tick after which it finishes, order, who)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.clock is self._clock

    def join(self, sequence: Sequence) -> None:
        """Takes in a sequence that has just gained a token and is one token short, as it will be from now on."""
        clock = self._clock
        self.count += 1
        self.context += sequence.computed
        self.entries += self._memory.table_entries(sequence)
        self.last_order = max(self.last_order, sequence.order)
        self.tellers += _tells(sequence)
        last = clock.committed + sequence.final - sequence.known
        sequence.keep_time(clock)
        heapq.heappush(self._finishing, (last, sequence.order, sequence))
        due = clock.scheduled + 1 + self._memory.room_left(sequence)
        if due <= last + 1:  # in the tick before, its block is complete, even if it takes no other
            self._fall_due(due, [sequence])

    def dissolve(self, running: dict[Sequence, None]) -> list[Sequence]:
        """Lets everyone go; returns them in running order."""
        gone = [sequence for sequence in running if sequence.clock is self._clock]
        for sequence in gone:
            sequence.keep_time(STILL)
        self.count = self.context = self.entries = self.last_order = self.tellers = 0
        self._due.clear()
        self._finishing.clear()
        return gone

    def due(self) -> list[Sequence]:
        """Who needs a block in the next step, in running order."""
        tick = self._clock.scheduled + 1
        bucket = self._due.get(tick)
        if not bucket:
            return []
        # Someone who finished in the last step may stand here for the block it completed then.
        bucket = [sequence for sequence in bucket if sequence.clock is self._clock]
        bucket.sort(key=_order)
        self._due[tick] = bucket
        return bucket

    def schedule(self) -> None:
        """One step: everyone computes a token; there is a free block for each that needs one."""
        self._clock.scheduled = tick = self._clock.scheduled + 1
        self._fill(tick)
        self.context += self.count
        self._memory.store(self.count)

    def go_on(self, needs: list[int]) -> list[Take]:
        """Further steps, one for each of the `needs` that `leap` foresaw."""
        memory, steps, start = self._memory, len(needs), self._clock.scheduled
        size = memory.block_size
        takes = []
        for step, need in enumerate(needs, 1):
            if need:
                before = memory.num_cached_blocks
                internal = self._fill(start + step)
                takes.append(Take(step, need * size, internal, (before - memory.num_cached_blocks) * size))
            elif start + step + 1 in self._due:
                memory.complete(self._due[start + step + 1])
        self._clock.scheduled = start + steps
        self.context += steps * self.count
        memory.store(steps * self.count)
        return takes

    def _fill(self, tick: int) -> int:
        """Gives blocks to those who need one at `tick`, and takes note of the blocks that its tokens fill.

        Returns:
            Slots among the new blocks that their sequence will never fill.
        """
        due, internal, memory = self._due.pop(tick, None), 0, self._memory
        if due:
            if len(due) > 1:
                due.sort(key=_order)
            self.entries += len(due)
            filling, internal = memory.extend(due)
            self._fall_due(tick + memory.block_size, filling)
        if tick + 1 in self._due:
            memory.complete(self._due[tick + 1])
        return internal

    def leap(self, max_steps: int) -> list[int]:
        """How the steps go on after the one that is scheduled, as far as nothing needs a decision.

        Args:
            max_steps: most steps to look ahead.

        Returns:
            Blocks that each further step needs: fewer entries where a sequence finishes or the pool runs dry.
        """
        tick, due = self._clock.scheduled, self._due
        free = self._memory.num_free_blocks
        needs: list[int] = []
        for later in range(tick + 1, min(tick + max_steps, self._finishing[0][0]) + 1):
            bucket = due.get(later)
            need = len(bucket) if bucket else 0
            # Those that will have taken a block after this look ahead fall due again one block later.
            if later - tick > self._memory.block_size:
                need += needs[later - tick - 1 - self._memory.block_size]
            free -= need
            if free < 0:
                break
            needs.append(need)
        return needs

    def _fall_due(self, tick: int, sequences: list[Sequence]) -> None:
        if tick in self._due:
            self._due[tick] += sequences
        elif sequences:
            self._due[tick] = sequences

    def commit(self) -> list[Sequence]:
        """The scheduled steps are over; returns who has finished with the last of them, in running order."""
        clock = self._clock
        tick = clock.committed = clock.scheduled
        finished: list[Sequence] = []
        heap = self._finishing
        while heap and heap[0][0] == tick:
            sequence = heapq.heappop(heap)[2]
            self.count -= 1
            self.tellers -= _tells(sequence)
            self.context -= sequence.computed
            self.entries -= self._memory.table_entries(sequence)
            sequence.keep_time(STILL)
            finished.append(sequence)
        return finished


def _tells(sequence: Sequence) -> bool:
    prompt = sequence.request.prompt
    return isinstance(prompt, TokenIds) and len(prompt.ids) > sequence.request.prompt_tokens
