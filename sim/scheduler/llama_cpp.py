"""llama.cpp's server: requests take turns at a few slots, and nobody is ever preempted (July 2025, `server.cpp`).

A request waits until a slot is vacant, and keeps it to its end. In each step all slots that generate compute a token,
and prompts get the rest of the batch: the loop of `continuous.py`, with the number of slots (--parallel) as
`max_num_seqs` and the batch size (--batch-size) as its budget. A prompt that fills its slot's limit is refused, and an
answer that reaches it is cut off, for context shift is off by default.
"""

from __future__ import annotations

from collections import Counter

from sim.memory.interface import KVMemory
from sim.memory.unified import UnifiedCells
from sim.plan import StepPlan
from sim.scheduler.continuous import ContinuousBatching
from sim.scheduler.queues import QueuePolicy
from sim.sequence import Sequence
from workloads.errors import UserError


class SlotServer(ContinuousBatching):
    """Each slot has an equal share of the context to itself.

    Args:
        memory: sets a share aside for each slot.
        max_model_len: most tokens of one request by the model; a slot's share may be less.
        policy: the waiting queue.
        max_num_seqs: slots.
        max_num_batched_tokens: tokens of one step; None: the model limit.
        leap: see `ContinuousBatching`.

    Raises:
        UserError: a number out of range, or a share without room for a prompt and a token.
    """

    def __init__(
        self,
        memory: KVMemory,
        max_model_len: int,
        policy: QueuePolicy,
        max_num_seqs: int = 1,
        max_num_batched_tokens: int | None = 2048,
        leap: bool = False,
    ) -> None:
        share = memory.num_slots // memory.block_size // max(1, max_num_seqs) * memory.block_size
        if share < 2:
            raise UserError(
                f"scheduler.max_num_seqs is {max_num_seqs}, which leaves a slot {share} of {memory.num_slots} cells; "
                "choose fewer, or a larger memory.num_blocks."
            )
        limit = min(max_model_len, share)
        super().__init__(memory, limit, policy, max_num_seqs, max_num_batched_tokens, leap=leap)


class UnifiedServer(ContinuousBatching):
    """All slots share the cells of the context, and each may use all of them.

    Nothing keeps room for what running requests will still generate. When their next tokens need more cells than are
    free, the server can place none of its batch, even halved to single tokens, and ends every request that it runs with
    an error. That a prompt waits here until there are cells for all of it is ours: the server takes it as soon as a
    slot is vacant, and then ends everyone. (Its caches are left out: it keeps the cells of a finished request for the
    next in its slot.)

    Where the cells of a token are depends on all others of its step, so steps are planned one by one: there is no leap.

    Args:
        memory: the cells.
        max_model_len: most tokens of one request by the model; it is cut off where the pool ends, too.
        policy: the waiting queue.
        max_num_seqs: slots.
        max_num_batched_tokens: tokens of one step; None: the model limit.

    Raises:
        UserError: a number out of range.
    """

    def __init__(
        self,
        memory: UnifiedCells,
        max_model_len: int,
        policy: QueuePolicy,
        max_num_seqs: int = 1,
        max_num_batched_tokens: int | None = 2048,
    ) -> None:
        limit = min(max_model_len, memory.num_slots)
        super().__init__(memory, limit, policy, max_num_seqs, max_num_batched_tokens)
        self._cells = memory

    def schedule(self, max_steps: int = 1) -> StepPlan:
        """Plans one step, however many are asked for."""
        self._cells.begin_step()
        plan = super().schedule(1)
        self._cells.end_step()
        if moved := self._cells.take_copies():
            plan.copies = tuple((source, destination) for _, source, destination in moved)
            plan.moved = tuple(Counter(sequence for sequence, _, _ in moved).items())
            plan.work.copied_slots = len(moved)
        return plan

    def commit(self, plan: StepPlan) -> list[Sequence]:
        """Ends everyone who runs, if there are not enough cells for the step after this one."""
        finished = super().commit(plan)
        next_tokens = sum(sequence.known - sequence.computed for sequence in self.running)
        if min(next_tokens, self.max_num_batched_tokens) > self.memory.num_free_blocks:
            plan.aborted = tuple(self.running)
            self._let_go(plan.aborted)
        return finished
