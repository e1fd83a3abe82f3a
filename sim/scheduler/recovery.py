"""How a preempted request gets its KV back: computed again, or swapped out to the host and in again.

Swapping needs room on the host; a request that finds none there is computed again all the same.
"""

from __future__ import annotations

from typing import Protocol

from sim.scheduler.queues import QueuePolicy, Swapped, SwappedFirst


class RecoveryPolicy(Protocol):
    """The choice between recompute and swap."""

    def swaps(self, num_sequences: int) -> bool:
        """Whether a request with so many live sequences is to be swapped out."""

    def queue(self, policy: QueuePolicy, swapped: Swapped) -> QueuePolicy:
        """What the scheduler takes for its waiting queue: `policy`, and whoever may be `swapped` out."""


class Recompute:
    """Always computed again: vLLM's v1 engine."""

    def swaps(self, num_sequences: int) -> bool:
        return False

    def queue(self, policy: QueuePolicy, swapped: Swapped) -> QueuePolicy:
        return policy


class Swap:
    """Swapped: vLLM v0 with `preemption_mode=swap`."""

    def swaps(self, num_sequences: int) -> bool:
        return True

    def queue(self, policy: QueuePolicy, swapped: Swapped) -> QueuePolicy:
        return SwappedFirst(policy, swapped)


class Auto:
    """One live sequence is computed again, several are swapped: vLLM v0's default."""

    def swaps(self, num_sequences: int) -> bool:
        return num_sequences > 1

    def queue(self, policy: QueuePolicy, swapped: Swapped) -> QueuePolicy:
        return SwappedFirst(policy, swapped)
