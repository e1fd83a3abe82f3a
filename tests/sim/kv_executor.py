"""Executes plans on a pool of tokens instead of KV, and so sees whether every sequence would read what it has written.

It takes nothing from the simulator but plans and block tables. What a slot holds is the token that was written there.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from pool_audit import tokens_up_to

from sim.plan import StepPlan
from sim.scheduler.base import Scheduler
from sim.sequence import Sequence
from workloads.sampling import BeamSearch

Tokens = list[Hashable]


@dataclass(slots=True)
class Executor:
    """A device pool, a host pool, and what every sequence has to say so far.

    Args:
        engine: whose plans, of one step each, are executed.
    """

    engine: Scheduler
    said: dict[Sequence, Tokens] = field(default_factory=dict)
    copies: int = 0
    swaps: int = 0
    _device: dict[tuple[int, int], Hashable] = field(default_factory=dict)  # (block, offset) -> token
    _host: dict[tuple[int, int], Hashable] = field(default_factory=dict)

    def execute(self, plan: StepPlan) -> None:
        """Does what the plan says, in the order that it prescribes. Call before the plan is committed."""
        assert plan.repeat == 1
        self._fork(plan)
        self._move(plan)
        batch = self.engine.full_batch(plan)
        written: set[tuple[int, int]] = set()
        for sequence, tokens in batch:
            said = self._said(sequence)
            for position in range(sequence.computed - tokens, sequence.computed):
                slot = self._slot(sequence, position)
                assert slot not in written, "two sequences wrote to one slot"
                written.add(slot)
                self._device[slot] = said[position]
        for sequence in self.engine.running:
            assert self._read(sequence) == self._said(sequence)[: sequence.computed], "reads what it has not written"

    def committed(self, finished: list[Sequence]) -> None:
        """Learns of the tokens that the plan has gained. Call after it is committed, with what `commit` returned."""
        for sequence in (*self.engine.running, *(one for first in self.engine.waiting for one in first.together)):
            self._say(sequence)
        gone = {one for first in finished for one in (first.group.sequences if first.group else [first])}
        self.said = {sequence: said for sequence, said in self.said.items() if sequence not in gone}

    def _fork(self, plan: StepPlan) -> None:
        """A child has said what its parent has, but for the last token, of which each has its own."""
        parents = {parent: self.said[parent] for parent, _ in plan.forks}
        assert parents.keys().isdisjoint(child for _, child in plan.forks)
        for parent, child in plan.forks:
            common = parents[parent][:-1]
            self.said[child] = [*common, (child, len(common))]

    def _move(self, plan: StepPlan) -> None:
        size = self.engine.memory.block_size
        for source, target, pairs in (
            (self._device, self._host, plan.swap_outs),
            (self._host, self._device, plan.swap_ins),
            (self._device, self._device, plan.copies),
        ):
            sources, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            assert len(set(targets)) == len(targets)
            assert source is not target or set(sources).isdisjoint(targets)
            for old, new in pairs:
                for offset in range(size):
                    target.pop((new, offset), None)
                    if (old, offset) in source:
                        target[new, offset] = source[old, offset]
        self.copies += len(plan.copies)
        self.swaps += len(plan.swap_outs)

    def _slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        size = self.engine.memory.block_size
        return sequence.blocks[position // size], position % size

    def _read(self, sequence: Sequence) -> Tokens:
        return [self._device[self._slot(sequence, position)] for position in range(sequence.computed)]

    def _said(self, sequence: Sequence) -> Tokens:
        if sequence not in self.said:
            self.said[sequence] = list(tokens_up_to(sequence, sequence.request.prompt_tokens))
        return self.said[sequence]

    def _say(self, sequence: Sequence) -> None:
        """Adds the tokens that it has gained: told beforehand, or like no other's."""
        said = self._said(sequence)
        group = sequence.group
        told = group is None or (sequence is group.first and not isinstance(sequence.request.sampling, BeamSearch))
        while len(said) < sequence.known:
            position = len(said)
            said.append(tokens_up_to(sequence, position + 1)[-1] if told else (sequence, position))
