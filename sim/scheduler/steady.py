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

    def due(self) -> int:
        """How many need a block in the next step."""
        tick = self._clock.scheduled + 1
        bucket = self._due.get(tick)
        if bucket is None:
            return 0
        # Someone who finished in the last step may stand here for the block it completed then.
        bucket = [sequence for sequence in bucket if sequence.clock is self._clock]
        if bucket:
            self._due[tick] = bucket
        else:
            del self._due[tick]
        return len(bucket)

    def schedule(self) -> None:
        """One step: everyone computes a token; there is a free block for each that needs one."""
        self._clock.scheduled = tick = self._clock.scheduled + 1
        if tick in self._due:
            self._extend(tick)
        if tick + 1 in self._due:
            self._memory.complete(self._due[tick + 1])
        self.context += self.count
        self._memory.store(self.count)

    def go_on(self, needs: list[int]) -> list[Take]:
        """Further steps, one for each of the `needs` that `leap` foresaw."""
        memory, due, start = self._memory, self._due, self._clock.scheduled
        takes = []
        for step, need in enumerate(needs, 1):
            tick = start + step
            if need:
                before = memory.num_cached_blocks
                internal = self._extend(tick)
                slots, evicted = need * memory.block_size, (before - memory.num_cached_blocks) * memory.block_size
                takes.append(Take(step, slots, internal, evicted))
            if tick + 1 in due:
                memory.complete(due[tick + 1])
        steps = len(needs)
        self._clock.scheduled = start + steps
        self.context += steps * self.count
        memory.store(steps * self.count)
        return takes

    def _extend(self, tick: int) -> int:
        """Gives blocks to those who need one at `tick`.

        Returns:
            Slots among the new blocks that their sequence will never fill.
        """
        due = self._due.pop(tick)
        if len(due) > 1:
            due.sort(key=_order)
        self.entries += len(due)
        filling, internal = self._memory.extend(due)
        if filling:
            self._fall_due(tick + self._memory.block_size, filling)
        return internal

    def leap(self, max_steps: int) -> list[int]:
        """How the steps go on after the one that is scheduled, as far as nothing needs a decision.

        Args:
            max_steps: most steps to look ahead.

        Returns:
            Blocks that each further step needs: fewer entries where a sequence finishes or the pool runs dry.
        """
        tick, due, size = self._clock.scheduled, self._due, self._memory.block_size
        free = self._memory.num_free_blocks
        needs: list[int] = []
        for step in range(min(max_steps, self._finishing[0][0] - tick)):
            bucket = due.get(tick + 1 + step)
            need = len(bucket) if bucket else 0
            if step >= size:  # those that will have taken a block after this look ahead fall due again
                need += needs[step - size]
            if need:
                free -= need
                if free < 0:
                    break
            needs.append(need)
        return needs

    def _fall_due(self, tick: int, sequences: list[Sequence]) -> None:
        if tick in self._due:
            self._due[tick] += sequences
        else:
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
