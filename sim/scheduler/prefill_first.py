"""Prefill first: a step computes prompts or decodes, never both, as vLLM's v0 scheduler does it (0.5.0).

A step is a prefill whenever the waiting head fits; everyone else pauses in it. Otherwise everyone decodes. The rules
are those of the engine of Kwon et al., SOSP 2023 (§4.5): first come, first served, the latest arrival is preempted
first, and while somebody is swapped out nobody is admitted.

Two rules cost room on purpose. An admission leaves the watermark free, even when nobody runs. And a decode asks for a
free block for each sequence, even where the last block has room: so somebody is preempted before the pool is full.
"""

from __future__ import annotations

from operator import attrgetter

from sim.memory.paged import PagedMemory
from sim.plan import StepPlan
from sim.scheduler.base import Scheduler
from sim.scheduler.groups import tokens_to_place
from sim.scheduler.queues import Fcfs
from sim.scheduler.recovery import RecoveryPolicy
from sim.sequence import Sequence
from workloads.errors import UserError
from workloads.request import Request

LEAST_BUDGET = 2048  # tokens of one step, however short the model limit is


class PrefillFirst(Scheduler):
    """Prompts of whoever fits, or else one token for everyone who runs.

    Args:
        memory: blocks, as v0 has nothing else.
        max_model_len: most tokens of one request, prompt and output together.
        max_num_seqs: as for every `Scheduler`, and so is `leap`.
        max_num_batched_tokens: token budget of one step; None: the model limit, at least 2,048.
        recovery: how a preempted request gets its KV back.

    Raises:
        UserError: a number out of range, a budget below one of the limits, or another memory.
    """

    def __init__(
        self,
        memory: PagedMemory,
        max_model_len: int,
        recovery: RecoveryPolicy,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        leap: bool = False,
    ) -> None:
        if not isinstance(memory, PagedMemory):
            raise UserError("scheduler=prefill_first hands out blocks one at a time; choose memory=paged.")
        if max_num_batched_tokens is None:
            max_num_batched_tokens = max(max_model_len, LEAST_BUDGET)
        for name, least in (("max_model_len", max_model_len), ("scheduler.max_num_seqs", max_num_seqs)):
            if max_num_batched_tokens < least:
                raise UserError(
                    f"scheduler.max_num_batched_tokens is {max_num_batched_tokens}, {name} is {least}; the budget of a "
                    "step must be at least that, for prompts and decodes are never cut."
                )
        super().__init__(
            memory, max_model_len, Fcfs(), max_num_seqs, max_num_batched_tokens, recovery=recovery, leap=leap
        )
        self._spare_blocks = 1
        self._paged = memory
        self._arrivals = 0  # sequences that have arrived, those of all outputs

    @property
    def _watermark_counts(self) -> bool:
        """Always."""
        return True

    def arrive(self, request: Request) -> tuple[Sequence, str | None]:
        """Queues a request; `order` of its sequences is that of arrival, whenever they come to run."""
        sequence, reason = super().arrive(request)
        sequence.order = self._arrivals
        self._arrivals += request.num_outputs
        if reason is None:
            self._spare_blocks = max(self._spare_blocks, request.num_outputs)
        return sequence, reason

    def _fill(self, plan: StepPlan) -> None:
        if not self._swapped:
            self._prefill(plan)
            if plan.batch:
                return
        self._decode(plan)
        if self._swapped and not plan.preemptions:
            self._bring_back(plan, self._budget, self._budget - plan.steady - sum(tokens for _, tokens in plan.batch))

    def _prefill(self, plan: StepPlan) -> None:
        """The waiting head, again and again, with all its tokens; if it cannot go, nobody behind it does."""
        budget = self._budget
        while self.waiting:
            sequence = self.waiting.head()
            group = sequence.group
            if not self._seats_for(1 if group is None else group.width):
                break
            hit = self.memory.lookup(sequence)
            tokens = room_for = sequence.known
            tokens -= len(hit) * self.memory.block_size
            if group is not None and group.known > sequence.known:
                room_for = tokens_to_place(group, self.memory.block_size)
            if tokens > budget or not self._admit(plan, hit, tokens, room_for):
                break
            budget -= tokens
        if plan.batch:
            self._pause(plan)

    def _decode(self, plan: StepPlan) -> None:
        """A token for everyone, oldest first. Where there is no free block for each of its sequences, the latest goes.

        Nobody but a group that had to start over has more than one token to compute.
        """
        steady = self._steady
        if steady.count:
            if not self._others and steady.due() + self._spare_blocks <= self.memory.num_free_blocks:
                self._go_on(plan)
                return
            self._wake(plan)
        budget = self._budget
        for first in list(self._others):
            if first in self.running and first is first.together[0] and self._has_room(plan, first, budget):
                for sequence in first.together:
                    tokens = self._tokens_for(sequence, budget)
                    if tokens and self._take(plan, sequence, tokens):
                        budget -= tokens

    def _has_room(self, plan: StepPlan, first: Sequence, budget: int) -> bool:
        """Preempts until the sequences of a request have a free block each, or more if they need more.

        Returns:
            False if they had to go themselves.
        """
        need = 1
        if first.group is not None:
            goals = [(one, one.computed + self._tokens_for(one, budget)) for one in first.together]
            need = sum(max(1, self.memory.missing_blocks(one, goal)) for one, goal in goals)
        while self.memory.num_free_blocks < need:
            self._make_room(plan, because=first)
            if first not in self.running:
                return False
        return True

    def _may_come_back(self, first: Sequence) -> bool:
        """Blocks for what it has, one more for each sequence, and the watermark."""
        blocks = {block for sequence in first.together for block in self._paged.host_table(sequence)}
        need = len(blocks) + len(first.together) + self._paged.watermark_blocks
        return need <= self.memory.num_free_blocks and super()._may_come_back(first)

    def _line_up(self, first: Sequence) -> None:
        """Puts a request where it belongs by its arrival, as v0 sorts the running queue before each decode.

        Nearly always that is the end. But while somebody is swapped out, who arrived before may wait to be computed
        again.
        """
        order, is_last = first.order, not self.running or next(reversed(self.running)).order < first.order
        super()._line_up(first)
        for place, sequence in enumerate(first.together):
            sequence.order = order + place
        if not is_last:
            self.running = dict.fromkeys(sorted(self.running, key=attrgetter("order")))
            self._others = dict.fromkeys(sorted(self._others, key=attrgetter("order")))

    def _reason_to_reject(self, sequence: Sequence) -> str | None:
        """It must be able to come back, however many tokens it has then, and to decode up to its last one."""
        reason = super()._reason_to_reject(sequence)
        outputs, watermark = sequence.request.num_outputs, self._paged.watermark_blocks
        spare = outputs + watermark if self._recovery.swaps(outputs) else max(outputs, watermark)
        most, blocks = self._paged.most_blocks(sequence), self._paged.num_usable_blocks
        if reason is None and most + spare > blocks:
            return f"needs {most} blocks at its end and {spare} left free, the pool has {blocks}"
        return reason
