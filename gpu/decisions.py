"""What a run decided, step by step, as a digest: two runs can then be compared block by block.

A step's digest covers its batch in order, each sequence with the tokens that it computes, its context and its whole
block table, and every preemption, swap, copy and fork. Times do not enter.
"""

from __future__ import annotations

import hashlib
from array import array

from sim.plan import StepPlan, StepTimer
from sim.sequence import Sequence


class Decisions:
    """Takes down plans of a scheduler that lists everyone (`leap=False`), before they are committed.

    Attributes:
        digests: of each step with anything to do, 16 bytes.
    """

    def __init__(self) -> None:
        self.digests: list[bytes] = []

    def add(self, plan: StepPlan) -> None:
        """One step more."""
        numbers = array("q")
        for sequence, tokens in plan.batch:
            numbers.extend((_request(sequence), tokens, sequence.computed, len(sequence.blocks), *sequence.blocks))
        for preemption in plan.preemptions:
            numbers.extend((-1, _request(preemption.victim), _request(preemption.because), preemption.blocks))
        for kind, pairs in ((-2, plan.swap_outs), (-3, plan.swap_ins), (-4, plan.copies)):
            for pair in pairs:
                numbers.extend((kind, *pair))
        for parent, child in plan.forks:
            numbers.extend((-5, _request(parent), _request(child)))
        self.digests.append(hashlib.blake2b(numbers.tobytes(), digest_size=16).digest())

    @property
    def digest(self) -> str:
        """Of the whole run."""
        return hashlib.blake2b(b"".join(self.digests), digest_size=16).hexdigest()

    def first_difference(self, other: Decisions) -> int | None:
        """The first step, from 0, that is not the same in both runs or that only one has; None if they are equal."""
        pairs = zip(self.digests, other.digests, strict=False)
        for step, (ours, theirs) in enumerate(pairs):
            if ours != theirs:
                return step
        shorter, longer = sorted((len(self.digests), len(other.digests)))
        return None if shorter == longer else shorter


class WatchedTimer:
    """A timer that lets decisions be taken down.

    Args:
        timer: says how long steps take.
        decisions: gets every plan that it is asked about.
    """

    def __init__(self, timer: StepTimer, decisions: Decisions) -> None:
        self._timer = timer
        self._decisions = decisions

    def durations(self, plan: StepPlan) -> list[float]:
        """Those of the timer."""
        self._decisions.add(plan)
        return self._timer.durations(plan)

    @property
    def notices(self) -> list[str]:
        """Those of the timer."""
        return list(getattr(self._timer, "notices", []))


def _request(sequence: Sequence) -> int:
    return sequence.request.request_id
