"""Who must go when the pool is full. A request with several sequences goes whole, whichever of them is chosen.

Without any of these, the queue policy says who: vLLM has no other rule.
"""

from __future__ import annotations

from typing import Protocol

from sim.sequence import Sequence


class VictimPolicy(Protocol):
    """The choice of a victim."""

    def victim(self, running: dict[Sequence, None]) -> Sequence:
        """The running sequence to preempt; `running` is in order of admission and not empty."""


class Latest:
    """The last of the running queue: first come, first served (Kwon et al., SOSP 2023, §4.5)."""

    def victim(self, running: dict[Sequence, None]) -> Sequence:
        return next(reversed(running))


class LowestPriority:
    """The largest priority number, of several the latest arrival: vLLM's rule under its priority policy."""

    def victim(self, running: dict[Sequence, None]) -> Sequence:
        return max(running, key=rank)


class FewestOutputTokens:
    """The request that has generated least, of several the longest prompt, of several the latest: SGLang's retraction.

    Tokens count over all its outputs.
    """

    def victim(self, running: dict[Sequence, None]) -> Sequence:
        return min(running, key=lambda one: (one.generated_in_all, -one.request.prompt_tokens, -one.order))


class MostBlocks:
    """The request that holds most blocks, of several the latest; a block that its sequences share counts once."""

    def victim(self, running: dict[Sequence, None]) -> Sequence:
        return max(running, key=lambda one: (num_blocks(one.together), one.order))


class LongestRemaining:
    """The request with most tokens still to generate over all its outputs, of several the latest: an oracle's rule."""

    def victim(self, running: dict[Sequence, None]) -> Sequence:
        return max(running, key=lambda one: (_remaining(one), one.order))


def rank(sequence: Sequence) -> tuple[float, float, int]:
    """Its place under a priority policy: smaller priority first, then earlier arrival, then the lower id."""
    request = sequence.request
    return request.priority, request.arrival_s, request.request_id


def num_blocks(sequences: list[Sequence]) -> int:
    """Blocks that they hold; a shared one counts once."""
    if len(sequences) == 1:
        return len(sequences[0].blocks)
    return len({block for sequence in sequences for block in sequence.blocks})


def _remaining(sequence: Sequence) -> int:
    of_each = sequence.final - sequence.request.prompt_tokens
    return sequence.request.num_outputs * of_each - sequence.generated_in_all
