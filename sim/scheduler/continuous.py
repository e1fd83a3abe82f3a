"""Iteration-level (continuous) batching as vLLM's v1 scheduler does it (0.33).

Decides in each step which sequences compute how many tokens, who is admitted, and who is preempted when the pool is
full. Rule numbers are those of the vLLM conformance cases. What a sequence holds is the memory policy's business; in
which order they wait and who the victim is, the queue policy's.

Orca's iteration-level scheduling (OSDI 2022) is the same loop over a memory that reserves all room at admission: then
growth never fails and nobody is preempted.
"""

from __future__ import annotations

from operator import attrgetter

from sim.memory.interface import KVMemory
from sim.plan import Preemption, StepPlan, StepWork
from sim.scheduler.queues import QueuePolicy
from sim.scheduler.steady import SteadyDecodes
from sim.sequence import Sequence
from workloads.errors import UserError
from workloads.request import Request


class ContinuousBatching:
    """Running sequences first, then the waiting head while there is room; preemption by recompute.

    Args:
        memory: who holds which slots.
        max_model_len: most tokens of one request, prompt and output together.
        policy: the waiting queue and the choice of a victim.
        max_num_seqs: most sequences in the running queue.
        max_num_batched_tokens: token budget of one step; None: the model limit, so that any prompt fits into one.
        chunked_prefill: a waiting sequence may start with only a part of its tokens.
        long_prefill_token_threshold: most tokens that one sequence gets in a step; 0 means no such cap.
        long_prefill_token_threshold_adaptive: raise the cap to the budget's even share where that is larger.
        scheduler_reserve_full_isl: admit only if all known tokens fit now, not just the first chunk.
        reject_oversize: turn away at arrival what could never finish; without it such a request blocks the queue for
            ever, as in the real engine (rule 17).
        leap: do not plan sequences one by one in steps in which nothing about them is decided (`steady.py`). Decisions
            are the same with and without.

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
        leap: bool = False,
    ) -> None:
        if max_num_batched_tokens is None:
            max_num_batched_tokens = max_model_len
        for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
            if value < 1:
                raise UserError(f"scheduler.{name} is {value}; expected a whole number of at least 1.")
        if long_prefill_token_threshold < 0:
            raise UserError(
                f"scheduler.long_prefill_token_threshold is {long_prefill_token_threshold}; "
                "expected at least 0 (0 is no cap)."
            )
        self.memory = memory
        self.max_model_len = max_model_len
        self.waiting = policy
        self.running: dict[Sequence, None] = {}  # in order of admission
        self._steady = SteadyDecodes(memory)
        self._others: dict[Sequence, None] = {}  # the running ones that are not steady, in order of admission
        self._admissions = 0
        self._leap = leap
        self._max_num_seqs = max_num_seqs
        self._budget = max_num_batched_tokens
        self._chunked_prefill = chunked_prefill
        self._cap = long_prefill_token_threshold
        self._adaptive_cap = long_prefill_token_threshold_adaptive
        self._reserve_full_isl = scheduler_reserve_full_isl
        self._reject_oversize = reject_oversize

    @property
    def idle(self) -> bool:
        """Nobody runs and nobody waits."""
        return not self.running and not self.waiting

    def arrive(self, request: Request) -> tuple[Sequence, str | None]:
        """Queues a request.

        Returns:
            Its sequence, and why it was turned away instead, or None.
        """
        sequence = Sequence.of(request, self.max_model_len)
        reason = self._reason_to_reject(sequence) if self._reject_oversize else None
        if reason is None:
            self.waiting.arrive(sequence)
        return sequence, reason

    def schedule(self, max_steps: int = 1) -> StepPlan:
        """Plans one step, or up to `max_steps` if nothing needs a decision in those after it.

        The plan's batch is empty, and nobody is steady, if nothing could be scheduled.
        """
        plan, steady, cap = StepPlan(), self._steady, self._cap_of_this_step()
        budget = self._budget
        if steady.count:
            if self._steady_can_go_on(cap):
                plan.steady = steady.count
                budget -= steady.count
                steady.schedule()
            else:
                plan.woken = steady.dissolve(self.running)
                self._others = self.running.copy()
        if self._others:
            budget = self._schedule_others(plan, cap, budget)
        if self.waiting and not plan.preemptions:  # rule 12
            self._schedule_waiting(plan, cap, budget)
        if max_steps > 1 and plan.steady and not plan.batch and not (self.waiting and steady.tellers):
            plan.needs = steady.leap(max_steps - 1)
        self._sum_up(plan)
        return plan

    def full_batch(self, plan: StepPlan) -> list[tuple[Sequence, int]]:
        """Every sequence of a plan with the tokens it computes, in batch order; only before the plan is committed."""
        one_by_one = dict(plan.batch)
        return [
            (sequence, one_by_one.get(sequence, 1))
            for sequence in self.running
            if sequence in one_by_one or sequence in self._steady
        ]

    def commit(self, plan: StepPlan) -> list[Sequence]:
        """Applies what the plan has computed: whoever has caught up gets one token, and finishes if it was the last.

        Args:
            plan: has been executed, and cut to the steps that were. What became of the blocks it took is filled in.

        Returns:
            The finished sequences, in the order in which their blocks were freed (rule 16).
        """
        finished: list[Sequence] = []
        if plan.steady:
            if plan.needs:
                self._steady.go_on(plan)
            finished = self._steady.commit()
        num_steady = len(finished)
        for sequence, _ in plan.batch:
            known = sequence.known
            if sequence.computed == known:
                plan.gained.append(sequence)
                sequence.known = known + 1
                if known + 1 == sequence.final:
                    finished.append(sequence)
                elif self._leap:
                    del self._others[sequence]
                    self._steady.join(sequence)
        if num_steady and len(finished) > num_steady:
            finished.sort(key=attrgetter("order"))
        for sequence in finished:
            self.memory.release(sequence)
            del self.running[sequence]
            self._others.pop(sequence, None)
        return finished

    def explain_stall(self) -> str:
        """Who waits for what, when nobody gains a token any more: whoever was preempted most, or the head."""
        live = [*self.waiting, *self.running]
        sequence = max(live, key=attrgetter("preemptions"))  # the head, if nobody ever was
        occupancy = self.memory.occupancy(sequence)
        free = occupancy.idle + occupancy.cached + occupancy.external
        if sequence in self.running:
            where = "runs"
        else:
            where = f"waits at the head of {len(self.waiting)}" if sequence is live[0] else "waits"
        often = f", {sequence.preemptions} times preempted" if sequence.preemptions else ""
        return (
            f"request {sequence.request.request_id} {where} with {sequence.known} tokens to place{often}; {free} of "
            f"{self.memory.num_slots} slots are free, the largest run {occupancy.largest_free_run}, and "
            f"{len(self.running)} requests run"
        )

    def _reason_to_reject(self, sequence: Sequence) -> str | None:
        prompt = sequence.request.prompt_tokens
        if prompt >= self.max_model_len:
            return f"prompt of {prompt} tokens leaves no room for output under max_model_len {self.max_model_len}"
        # One that is preempted just before its last token comes back with all tokens but that one to compute at once.
        most = sequence.final - 1
        if not self._chunked_prefill and most > self._budget:
            return f"needs {most} tokens in one step without chunked prefill, the budget is {self._budget}"
        return self.memory.never_fits(sequence)

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
            missing, limit = sequence.known - sequence.computed, self.max_model_len - 1 - sequence.computed
            tokens = min(missing, cap, budget, limit)
            while tokens > 0:
                if self.memory.grow(sequence, sequence.computed + tokens):
                    sequence.computed += tokens
                    plan.batch.append((sequence, tokens))
                    budget -= tokens
                    break
                victim = self.waiting.victim(self.running)
                budget += self._preempt(plan, victim, because=sequence)
                if victim is sequence:  # rule 10
                    break
        return budget

    def _preempt(self, plan: StepPlan, victim: Sequence, because: Sequence) -> int:
        """Rules 9 and 11; returns the tokens that go back to the budget."""
        refund = next((tokens for sequence, tokens in plan.batch if sequence is victim), 0)
        if refund:
            plan.batch.remove((victim, refund))
        plan.preemptions.append(Preemption(victim, because, len(victim.blocks), victim.computed - refund))
        del self.running[victim], self._others[victim]
        self.memory.release(victim)
        victim.computed = 0
        victim.preemptions += 1
        self.waiting.return_preempted(victim)
        return refund

    def _schedule_waiting(self, plan: StepPlan, cap: int, budget: int) -> None:
        """Rules 13 and 14: the head, again and again; if it cannot go, nobody behind it does."""
        while self.waiting and budget > 0 and len(self.running) < self._max_num_seqs:
            sequence = self.waiting.head()
            hit = self.memory.lookup(sequence)
            hit_tokens = len(hit) * self.memory.block_size
            tokens = min(sequence.known - hit_tokens, cap)
            if tokens > budget and not self._chunked_prefill:
                return
            tokens = min(tokens, budget)
            room_for = sequence.known if self._reserve_full_isl else hit_tokens + tokens
            if not self.memory.admit(sequence, hit, hit_tokens + tokens, room_for, others_run=bool(self.running)):
                return
            self.waiting.pop()
            self._admissions += 1
            sequence.order = self._admissions
            self.running[sequence] = self._others[sequence] = None
            sequence.computed = hit_tokens + tokens
            budget -= tokens
            (plan.resumed if sequence.preemptions else plan.admitted).append(sequence)
            plan.hits.append((sequence, hit_tokens))
            if sequence.hit_tokens is None:
                sequence.hit_tokens = hit_tokens
            plan.batch.append((sequence, tokens))

    def _sum_up(self, plan: StepPlan) -> None:
        steady, count = self._steady, plan.steady
        if not plan.batch:
            plan.work = StepWork(count, count, 0, 0, 0, count, steady.context, steady.entries, count)
            return
        decodes, decode_context, decode_blocks, generated = count, steady.context, steady.entries, count
        prefill_tokens = prefill_pairs = prefill_context = 0
        for sequence, tokens in plan.batch:
            context = sequence.computed
            generated += context == sequence.known
            if tokens == 1:
                decodes += 1
                decode_context += context
                decode_blocks += self.memory.table_entries(sequence)
            else:
                prefill_tokens += tokens
                prefill_context += context
                prefill_pairs += tokens * (context - tokens) + tokens * (tokens + 1) // 2
        plan.work = StepWork(
            count + len(plan.batch),
            decodes + prefill_tokens,
            prefill_tokens,
            prefill_pairs,
            prefill_context,
            decodes,
            decode_context,
            decode_blocks,
            generated,
        )
