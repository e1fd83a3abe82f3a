"""Decoding at no cost per sequence: what many steps in which nothing is decided have in common.

A sequence is *steady* while it computes one token in every step. All that can happen to it then is known beforehand:
when it needs a block, and when it finishes. So steps are counted by a clock, blocks fall due in the step that is
written down for them, and finishes come from a heap. What happens is exactly what planning each of them would do.
"""

from __future__ import annotations

import heapq
from bisect import bisect, bisect_left
from itertools import accumulate, chain

from sim.memory.interface import KVMemory
from sim.plan import StepPlan
from sim.sequence import STILL, Clock, Sequence
from workloads.request import TokenIds


class SteadyDecodes:
    """The steady sequences of a running queue.

    Each takes a block whenever `block_size` more ticks have passed. So those that do it in the same ticks stand
    together as long as they are steady, and nothing is written down anew when a block is taken.

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
        self._size = memory.block_size
        self._clock = Clock()
        # By the tick, modulo the block size, whose token begins a new block: the block tables, in running order.
        self._tables: list[list[list[int]]] = [[] for _ in range(self._size)]
        self._orders: list[list[int]] = [[] for _ in range(self._size)]  # of the same sequences
        self._needs = [0] * self._size  # how many they are
        self._unfilled: dict[int, int] = {}  # tick -> slots of the blocks taken then that will never be filled
        # tick -> the tellers whose block is full after it, each with its order and the tick after which it finishes
        self._completing: dict[int, list[tuple[int, int, Sequence]]] = {}
        # A heap of (tick after which it finishes, order, where it takes its blocks or -1 if it needs none, who).
        self._finishing: list[tuple[int, int, int, Sequence]] = []
        # A heap of (minus the context it would have had at tick 0, admission, who); whoever has left is still in it.
        self._longest: list[tuple[int, int, Sequence]] = []

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.clock is self._clock

    def join(self, sequence: Sequence) -> None:
        """Takes in a sequence that has just gained a token and is one token short, as it will be from now on."""
        clock, order = self._clock, sequence.order
        self.count += 1
        self.context += sequence.computed
        self.entries += self._memory.table_entries(sequence)
        if order > self.last_order:
            self.last_order = order
        last = clock.committed + sequence.final - sequence.known
        due = clock.scheduled + 1 + self._memory.room_left(sequence)
        sequence.keep_time(clock)
        heapq.heappush(self._longest, (clock.scheduled - sequence.computed, order, sequence))
        if _tells(sequence):
            self.tellers += 1
            full = clock.scheduled + (-sequence.computed % self._size or self._size)
            self._fills_by(full, (order, last, sequence))
        if due > last:
            heapq.heappush(self._finishing, (last, order, -1, sequence))
            return
        place = due % self._size
        heapq.heappush(self._finishing, (last, order, place, sequence))
        orders, tables = self._orders[place], self._tables[place]
        at = bisect(orders, order)
        orders.insert(at, order)
        tables.insert(at, sequence.blocks)  # type: ignore[arg-type]  # a table that grows is a list
        self._needs[place] += 1
        in_last_block = (last - due) % self._size + 1
        if unfilled := self._size - in_last_block:
            begun = last - in_last_block + 1
            self._unfilled[begun] = self._unfilled.get(begun, 0) + unfilled

    def dissolve(self, running: dict[Sequence, None]) -> list[Sequence]:
        """Lets everyone go; returns them in running order."""
        gone = [sequence for sequence in running if sequence.clock is self._clock]
        for sequence in gone:
            sequence.keep_time(STILL)
        self.count = self.context = self.entries = self.last_order = self.tellers = 0
        self._finishing.clear()
        self._longest.clear()
        self._unfilled.clear()
        self._completing.clear()
        for place, need in enumerate(self._needs):
            if need:
                self._needs[place] = 0
                self._tables[place].clear()
                self._orders[place].clear()
        return gone

    def longest(self) -> int:
        """Computed tokens of the one that has most of them; 0 if nobody is steady."""
        heap = self._longest
        while heap and heap[0][2] not in self:
            heapq.heappop(heap)
        return self._clock.scheduled - heap[0][0] if heap else 0

    def due(self) -> int:
        """How many need a block in the next step."""
        return self._needs[(self._clock.scheduled + 1) % self._size]

    def schedule(self) -> None:
        """One step: everyone computes a token; there is a free block for each that needs one."""
        tick = self._clock.scheduled + 1
        self._advance(tick, self._unfilled.pop(tick, 0))
        if tick in self._completing:
            self._complete(tick)

    def leap(self, max_steps: int, spare: int = 0) -> list[int]:
        """How the steps go on after the one that is scheduled, as far as nothing needs a decision.

        Args:
            max_steps: most steps to look ahead.
            spare: blocks that must be left free after each of them.

        Returns:
            Blocks that each further step needs: fewer entries where a sequence finishes or the pool runs dry.
        """
        tick, size = self._clock.scheduled, self._size
        steps = min(max_steps, self._finishing[0][0] - tick)
        first = (tick + 1) % size
        needs = self._needs[first : first + steps]
        if len(needs) < steps:
            needs += (self._needs * (steps // size + 1))[: steps - len(needs)]
        free = self._memory.num_free_blocks - spare
        if sum(needs) > free:
            del needs[bisect(list(accumulate(needs)), free) :]
        return needs

    def go_on(self, plan: StepPlan) -> None:
        """The further steps of a plan, which `leap` foresaw. Fills in what became of the blocks that fell due."""
        first = self._clock.scheduled + 1
        ticks = range(first, first + len(plan.needs))
        never_filled = 0
        for tick in sorted(self._unfilled.keys() & ticks):
            slots = self._unfilled.pop(tick)
            never_filled += slots
            plan.unfilled.append((tick - first, slots))
        for tick in ticks if self._completing else ():
            if tick in self._completing:
                plan.evicted += self._advance(tick, 0)
                self._complete(tick)
        plan.evicted += self._advance(ticks[-1], never_filled)

    def commit(self) -> list[Sequence]:
        """The scheduled steps are over; returns who has finished with the last of them, in running order."""
        clock, heap = self._clock, self._finishing
        tick = clock.committed = clock.scheduled
        finished: list[Sequence] = []
        while heap and heap[0][0] == tick:
            _, order, place, sequence = heapq.heappop(heap)
            if place >= 0:
                at = bisect_left(self._orders[place], order)
                del self._orders[place][at], self._tables[place][at]
                self._needs[place] -= 1
            if self.tellers:
                self.tellers -= _tells(sequence)
            self.count -= 1
            self.context -= sequence.computed
            self.entries -= self._memory.table_entries(sequence)
            sequence.keep_time(STILL)
            finished.append(sequence)
        return finished

    def _advance(self, tick: int, never_filled: int) -> int:
        """The steps up to `tick`, in which that many slots are taken that will never be filled.

        Returns:
            How many of the blocks taken held a reusable prefix until then.
        """
        size, clock = self._size, self._clock
        steps = tick - clock.scheduled
        begin = (clock.scheduled + 1) % size
        clock.scheduled = tick
        tables = self._tables[begin]
        if steps != 1:  # those of one tick after those of another: this is the order in which they get their blocks
            turns = self._tables[begin:]
            if len(turns) < steps:
                turns += self._tables * (steps // size + 1)
            tables = list(chain.from_iterable(turns[:steps]))
        if self.entries:  # else kernels look nothing up: everyone who is steady has a block
            self.entries += len(tables)
        self.context += steps * self.count
        return self._memory.decode(tables, steps * self.count, never_filled)

    def _fills_by(self, tick: int, teller: tuple[int, int, Sequence]) -> None:
        """Notes that a teller's block is full after `tick`, if it gets that far: others may begin with the same."""
        if tick <= teller[1]:
            self._completing.setdefault(tick, []).append(teller)

    def _complete(self, tick: int) -> None:
        for teller in sorted(self._completing.pop(tick)):
            self._memory.complete(teller[2])
            self._fills_by(tick + self._size, teller)


def _tells(sequence: Sequence) -> bool:
    prompt = sequence.request.prompt
    return isinstance(prompt, TokenIds) and len(prompt.ids) > sequence.request.prompt_tokens
