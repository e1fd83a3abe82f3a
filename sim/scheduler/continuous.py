"""Iteration-level (continuous) batching as vLLM's v1 scheduler does it (0.33).

Running sequences first, then the waiting head while there is room, under one budget of tokens for both: a prompt may be
spread over steps in which others decode. Rule numbers are those of the vLLM conformance cases.

Orca's iteration-level scheduling (OSDI 2022) is the same loop over a memory that reserves all room at admission: then
growth never fails and nobody is preempted.
"""

from __future__ import annotations

from mypy_extensions import mypyc_attr

from sim.memory.interface import KVMemory
from sim.plan import StepPlan
from sim.scheduler.base import Scheduler
from sim.scheduler.groups import tokens_to_place
from sim.scheduler.queues import QueuePolicy
from sim.scheduler.recovery import RecoveryPolicy
from sim.scheduler.victims import VictimPolicy
from sim.sequence import Sequence
from workloads.errors import UserError


@mypyc_attr(allow_interpreted_subclasses=True)
class ContinuousBatching(Scheduler):
    """Running sequences first, then the waiting head while there is room.

    Args:
        memory: who holds which slots.
        max_model_len: most tokens of one request, prompt and output together.
        policy: the waiting queue, and the choice of a victim unless `victim` makes it.
        max_num_seqs: as for every `Scheduler`, and so are the others that are not named here.
        max_num_batched_tokens: token budget of one step; None: the model limit, so that any prompt fits into one.
        chunked_prefill: a waiting sequence may start with only a part of its tokens.
        long_prefill_token_threshold: most tokens that one sequence gets in a step; 0 means no such cap.
        long_prefill_token_threshold_adaptive: raise the cap to the budget's even share where that is larger.
        scheduler_reserve_full_isl: admit only if all known tokens fit now, not just the first chunk.

    Raises:
        UserError: a number out of range.
    """

    def __init__(
        self,
        memory: KVMemory,
        max_model_len: int,
        policy: QueuePolicy,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        long_prefill_token_threshold_adaptive: bool = False,
        scheduler_reserve_full_isl: bool = True,
        reject_oversize: bool = True,
        victim: VictimPolicy | None = None,
        recovery: RecoveryPolicy | None = None,
        leap: bool = False,
        async_scheduling: bool = False,
    ) -> None:
        super().__init__(
            memory,
            max_model_len,
            policy,
            max_num_seqs,
            max_num_batched_tokens,
            reject_oversize,
            victim,
            recovery,
            leap,
            async_scheduling,
        )
        if long_prefill_token_threshold < 0:
            raise UserError(
                f"scheduler.long_prefill_token_threshold is {long_prefill_token_threshold}; "
                "expected at least 0 (0 is no cap)."
            )
        self._chunked_prefill = chunked_prefill
        self._cap = long_prefill_token_threshold
        self._adaptive_cap = long_prefill_token_threshold_adaptive
        self._reserve_full_isl = scheduler_reserve_full_isl

    def _fill(self, plan: StepPlan) -> None:
        cap, budget = self._cap_of_this_step(), self._budget
        if self._steady.count:
            if self._steady_can_go_on(cap):
                self._go_on(plan)
                budget -= plan.steady
            else:
                self._wake(plan)
        if self._others:
            budget = self._schedule_others(plan, cap, budget)
        if self.waiting and not plan.preemptions:  # rule 12
            self._schedule_waiting(plan, cap, budget)

    def _reason_to_reject(self, sequence: Sequence) -> str | None:
        reason = super()._reason_to_reject(sequence)
        # One that is preempted just before its last token comes back with all tokens but that one to compute at once.
        most = sequence.final - 1
        if reason is None and not self._chunked_prefill and most > self._budget:
            return f"needs {most} tokens in one step without chunked prefill, the budget is {self._budget}"
        return reason

    def _cap_of_this_step(self) -> int:
        """Rule 6."""
        if not self._cap or (queued := len(self.running) + len(self.waiting)) <= 1:
            return self._budget
        return max(self._cap, self._budget // queued) if self._adaptive_cap else self._cap

    def _steady_can_go_on(self, cap: int) -> bool:
        """Whether planning everyone one by one would give each steady sequence its token and preempt nobody.

        They come first if the others were all admitted after them; then what the others get does not depend on them.
        """
        steady = self._steady
        if steady.count > self._budget:
            return False
        need = steady.due()
        if self._others:
            if next(iter(self._others)).order < steady.last_order:
                return False
            for other in self._others:
                tokens = min(other.known - other.computed, cap, self._budget)
                need += self.memory.missing_blocks(other, other.computed + tokens)
        return not need or need <= self.memory.num_free_blocks

    def _schedule_others(self, plan: StepPlan, cap: int, budget: int) -> int:
        """Rules 7 to 11 for everyone who is not steady; returns the budget left."""
        for sequence in list(self._others):
            if budget <= 0:
                break
            if sequence not in self.running:  # preempted by one before it
                continue
            tokens = self._tokens_for(sequence, min(cap, budget))
            while tokens > 0:
                if self._take(plan, sequence, tokens):
                    budget -= tokens
                    break
                budget += self._make_room(plan, because=sequence)
                if sequence not in self.running:  # rule 10
                    break
        return budget

    def _schedule_waiting(self, plan: StepPlan, cap: int, budget: int) -> None:
        """Rules 13 and 14: the head, again and again; if it cannot go, nobody behind it does."""
        if self._swapped:
            budget = self._bring_back(plan, cap, budget)
            if self._swapped:
                return
        while self.waiting and budget > 0 and len(self.running) + self._seats_kept < self._max_num_seqs:
            sequence = self.waiting.head()
            group = sequence.group
            if group is not None and not self._seats_for(group.width):
                return
            hit = self.memory.lookup(sequence)
            hit_tokens = len(hit) * self.memory.block_size
            tokens = min(sequence.known - hit_tokens, cap)
            if tokens > budget and not self._chunked_prefill:
                return
            tokens = min(tokens, budget)
            room_for = sequence.known if self._reserve_full_isl else hit_tokens + tokens
            if group is not None and self._reserve_full_isl and group.known > sequence.known:
                room_for = tokens_to_place(group, self.memory.block_size)
            if not self._admit(plan, hit, tokens, room_for):
                return
            budget -= tokens
