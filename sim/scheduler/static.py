"""Static batching: NVIDIA's FasterTransformer behind a front end that forms batches (Kwon et al., SOSP 2023, §6.1).

When the engine is free, the earliest requests form a batch, as many as memory permits. Their prompts are padded to the
longest and computed in one step; then all decode until the longest output is complete. Nobody joins or leaves, and
results are returned when the batch is done. Each member holds a region of the full limit to the end, and computes to
the end: a decode reads the padded prompt and a token for each step, for every member, whether it is done or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from sim.memory.contiguous import ContiguousMemory
from sim.memory.interface import KVMemory
from sim.plan import StepPlan, StepWork
from sim.scheduler.base import Scheduler
from sim.scheduler.queues import QueuePolicy
from sim.sequence import Sequence
from workloads.errors import UserError


class StaticBatching(Scheduler):
    """One batch after the other. The running queue is those members that still have tokens to generate.

    Args:
        memory: one region a member, held until the batch is done.
        max_model_len: most tokens of one request, prompt and output together.
        policy: the waiting queue.
        max_num_seqs: most members of a batch; FasterTransformer's `max_batch_size`.
        reject_oversize: as for every `Scheduler`.
        leap: as for every `Scheduler`.

    Raises:
        UserError: a number out of range, or a memory that keeps no regions.
    """

    _serves_several_outputs = False

    def __init__(
        self,
        memory: KVMemory,
        max_model_len: int,
        policy: QueuePolicy,
        max_num_seqs: int = 256,
        reject_oversize: bool = True,
        leap: bool = False,
    ) -> None:
        super().__init__(memory, max_model_len, policy, max_num_seqs, None, reject_oversize, leap=leap)
        if not isinstance(memory, ContiguousMemory):
            raise UserError("static batching keeps a region for each member of a batch; choose memory=contiguous.")
        self._regions = memory
        self._members = 0  # of the batch
        self._padded_prompt = 0  # tokens of its longest
        self._done: list[Sequence] = []  # members that are complete, and wait for the others

    @property
    def streams_tokens(self) -> bool:
        """Results are returned whole."""
        return False

    def schedule(self, max_steps: int = 1) -> StepPlan:
        plan = super().schedule(max_steps)
        if plan.work.num_tokens:
            plan.work = self._padded_work(plan)
        return plan

    def commit(self, plan: StepPlan) -> list[Sequence]:
        self._done += super().commit(plan)
        if self.running:
            return []
        returned, self._done = sorted(self._done, key=attrgetter("order")), []
        for sequence in returned:
            self.memory.release(sequence)
        return returned

    def unfinished(self) -> list[Sequence]:
        return [*self._done, *super().unfinished()]

    def _fill(self, plan: StepPlan) -> None:
        if self.running:
            self._decode_everyone(plan)
            return
        while self.waiting and len(self.running) < self._max_num_seqs:
            known = self.waiting.head().known
            if not self._admit(plan, [], known, known):
                break
        self._members = len(plan.batch)
        self._padded_prompt = max((tokens for _, tokens in plan.batch), default=0)

    def _let_go(self, finished: Iterable[Sequence]) -> None:
        for sequence in finished:
            self._regions.retire(sequence)
            del self.running[sequence]
            self._others.pop(sequence, None)

    def _padded_work(self, plan: StepPlan) -> StepWork:
        """The sums of the plan's first step, padding and completed members included."""
        members, padded, generated = self._members, self._padded_prompt, plan.work.num_generated
        if plan.admitted and padded > 1:
            tokens = members * padded
            return StepWork(members, tokens, tokens, tokens * (padded + 1) // 2, tokens, num_generated=generated)
        anyone = next(iter(self.running))
        context = padded + anyone.computed - anyone.request.prompt_tokens
        return StepWork(
            num_sequences=members,
            num_tokens=members,
            decode_sequences=members,
            decode_context=members * context,
            num_generated=generated,
            decode_longest=context,
        )
