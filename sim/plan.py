"""What one step does. A scheduler makes it, a timer prices it, the engine commits it, an executor needs no more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from sim.sequence import Sequence


@dataclass(slots=True)
class StepWork:
    """The arithmetic of a step, summed over its batch: all that a timer needs to know of it.

    A sequence that computes one token counts as decode, one that computes more as prefill: kernels see it that way too.

    Args:
        num_sequences: sequences in the batch; each yields one row of logits.
        num_tokens: tokens through the dense layers, prefill and decode together.
        prefill_tokens: tokens of the prefill chunks.
        prefill_pairs: query-key pairs of the prefill chunks under the causal mask: a chunk of q tokens after c
            computed ones has q * c + q * (q + 1) / 2.
        prefill_context: KV tokens that the prefill chunks read, c + q each.
        decode_sequences: sequences that compute one token.
        decode_context: KV tokens that the decodes read, the new one included.
        decode_blocks: blocks that hold them: the block-table entries a paged kernel looks up, 0 for contiguous memory.
        num_generated: sequences that have then computed all their known tokens and so gain one.
    """

    num_sequences: int = 0
    num_tokens: int = 0
    prefill_tokens: int = 0
    prefill_pairs: int = 0
    prefill_context: int = 0
    decode_sequences: int = 0
    decode_context: int = 0
    decode_blocks: int = 0
    num_generated: int = 0


@dataclass(frozen=True, slots=True)
class Preemption:
    """A running sequence has lost its blocks and will compute its tokens again.

    Args:
        victim: who lost them.
        because: who needed the room; may be the victim itself.
        blocks: how many blocks it held.
        tokens: how many of its tokens were stored in them.
    """

    victim: Sequence
    because: Sequence
    blocks: int
    tokens: int


@dataclass(slots=True)
class StepPlan:
    """One step: which sequences compute how many tokens, and what had to happen for it.

    Args:
        batch: each sequence with the tokens it computes, in the order in which the batch was filled. Its block table
            is in `sequence.blocks`; its tokens are the last of its computed ones.
        admitted: taken from the waiting queue for the first time, in that order.
        resumed: taken from the waiting queue after a preemption, in that order.
        hits: prefix-cache hit in tokens of each admitted or resumed sequence, admission by admission.
        preemptions: in the order in which they happened.
        work: the sums that a timer prices.
    """

    batch: list[tuple[Sequence, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    resumed: list[Sequence] = field(default_factory=list)
    hits: list[tuple[Sequence, int]] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    work: StepWork = field(default_factory=StepWork)


class StepTimer(Protocol):
    """Says how long a step takes: by arithmetic, or by doing it."""

    def seconds(self, work: StepWork) -> float:
        """Duration of one step in seconds; above 0 for a step with any work."""
