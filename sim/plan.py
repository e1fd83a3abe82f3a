"""What one step does. A scheduler makes it, a timer prices it, the engine commits it, an executor needs no more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import Literal, Protocol

from mypy_extensions import mypyc_attr

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
        copied_slots: slots of the blocks that are copied to others before anything is computed.
        decode_longest: KV tokens that the longest of the decodes reads, the new one included; 0 without decodes.
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
    copied_slots: int = 0
    decode_longest: int = 0


NO_WORK = StepWork()


@dataclass(frozen=True, slots=True)
class Preemption:
    """A running request has lost its blocks: it will compute its tokens again, or has them moved to the host.

    Args:
        victim: who lost them; of several sequences of a request the first, for they come and go together.
        because: who needed the room; may be the victim itself, or another sequence of its request.
        blocks: how many blocks they held; a block that they share counts once, and goes to the host once.
        tokens: how many of their tokens were stored in them, likewise.
        recovery: how it gets them back.
    """

    victim: Sequence
    because: Sequence
    blocks: int
    tokens: int
    recovery: Literal["recompute", "swap"] = "recompute"


Pairs = tuple[tuple[int, int], ...]
Blocks = tuple[tuple[Sequence, int], ...]
Forks = tuple[tuple[Sequence, Sequence], ...]
NO_PAIRS: Pairs = ()
NO_BLOCKS: Blocks = ()
NO_FORKS: Forks = ()


class StepPlan:
    """One step, or `repeat` decode steps that differ in nothing but lengths and in the blocks that fall due.

    Attributes:
        batch: sequences planned one by one, each with the tokens it computes, in the order in which the batch was
            filled. Its block table is in `sequence.blocks`; its tokens are the last of its computed ones.
        steady: how many further sequences compute one token each. They are those that decode in every step, and are
            not listed: the scheduler's `full_batch` does that. A scheduler that does not leap lists everyone.
        paused: how many sequences that decode in every other step compute nothing in this one, for prompts come first.
        admitted: taken from the waiting queue for the first time, in that order.
        resumed: taken from the waiting queue after a preemption, in that order.
        hits: prefix-cache hit in tokens of each admitted or resumed sequence, admission by admission.
        preemptions: in the order in which they happened.
        swap_outs: (device block, host block) of each block that is moved to the host, of a request that is swapped out
            or because it is evicted to a host cache; a run has one or the other. An executor does this first: the
            device blocks may be handed out again in this very plan.
        swap_ins: (host block, device block) of each block that is moved back, after that.
        copies: (source, destination) of each block that is copied on the device, after that and before anything is
            computed. No block is both, and none is a destination twice.
        forks: (parent, child) of each fork since the plan before: the child goes on from what the parent has said. No
            parent is a child. Sequences that share what they had in common again after a preemption are not among them:
            each goes on from its own.
        returned: whose blocks were moved back, and how many.
        offloaded: how many blocks are evicted to a host cache.
        onboarded: who comes in with how many blocks from there.
        copied: how many blocks were copied for whom, because it writes to one that it shared.
        moved: how many blocks were copied for whom, because they are moved to where neighbours are.
        woken: sequences that decoded in every step so far and have to be planned one by one in this one.
        gained: sequences of the batch that have gained a token; known once the plan is committed.
        aborted: sequences that have lost their blocks for good, with what they had said; known once the plan is
            committed.
        needs: blocks that fall due in each step after the first; one entry each.
        evicted: how many of those blocks, the last ones, held a reusable prefix until then; known once the plan is
            committed, as is the next.
        unfilled: slots of those blocks that their sequences will never fill, as (index in `needs`, slots).
        work: the sums that a timer prices, of the first step.
    """

    __slots__ = (
        "aborted",
        "admitted",
        "batch",
        "copied",
        "copies",
        "evicted",
        "forks",
        "gained",
        "hits",
        "moved",
        "needs",
        "offloaded",
        "onboarded",
        "paused",
        "preemptions",
        "resumed",
        "returned",
        "steady",
        "swap_ins",
        "swap_outs",
        "unfilled",
        "woken",
        "work",
    )

    def __init__(self) -> None:
        self.batch: list[tuple[Sequence, int]] = []
        self.steady = 0
        self.paused = 0
        self.admitted: list[Sequence] = []
        self.resumed: list[Sequence] = []
        self.hits: list[tuple[Sequence, int]] = []
        self.preemptions: list[Preemption] = []
        # Most plans move no block; they share the emptiness.
        self.swap_outs: Pairs = NO_PAIRS
        self.swap_ins: Pairs = NO_PAIRS
        self.copies: Pairs = NO_PAIRS
        self.forks: Forks = NO_FORKS
        self.returned: Blocks = NO_BLOCKS
        self.offloaded = 0
        self.onboarded: Blocks = NO_BLOCKS
        self.copied: Blocks = NO_BLOCKS
        self.moved: Blocks = NO_BLOCKS
        self.woken: list[Sequence] = []
        self.gained: list[Sequence] = []
        self.aborted: tuple[Sequence, ...] = ()
        self.needs: list[int] = []
        self.evicted = 0
        self.unfilled: list[tuple[int, int]] = []
        self.work = NO_WORK

    @property
    def repeat(self) -> int:
        """Steps that the plan stands for."""
        return 1 + len(self.needs)

    def cut(self, num_steps: int) -> None:
        """Keeps only the first `num_steps` steps."""
        del self.needs[num_steps - 1 :]

    def works(self) -> Iterator[StepWork]:
        """The sums of each step; the object yielded changes with the next."""
        work = copy(self.work)
        tables = work.decode_blocks > 0  # else kernels look nothing up
        yield work
        for need in self.needs:
            work.decode_context += work.decode_sequences
            work.decode_blocks += need * tables
            work.decode_longest += 1
            yield work


class StepTimer(Protocol):
    """Says how long steps take: by arithmetic, or by doing them."""

    def durations(self, plan: StepPlan) -> list[float]:
        """Seconds of each of the plan's steps; above 0 for a step with any work."""


@mypyc_attr(allow_interpreted_subclasses=True)
class WorkTimer(ABC):
    """A timer for which the sums of a step are all that counts."""

    @abstractmethod
    def seconds(self, work: StepWork) -> float:
        """Duration of one step in seconds."""

    def durations(self, plan: StepPlan) -> list[float]:
        """Seconds of each of the plan's steps."""
        if not plan.needs:
            return [self.seconds(plan.work)]
        return [self.seconds(work) for work in plan.works()]
