"""In-flight batching that never pauses anybody: TensorRT-LLM's GUARANTEED_NO_EVICT (1.0, `capacityScheduler.cpp`).

Blocks are taken as they are filled, but the waiting head comes in only if all blocks that it may still take, up to
ceil((prompt + max_tokens) / tokens_per_block), are free beside those that the running ones may still take. A prompt
is computed in one step with the decodes of the others (in-flight batching), those first; with chunked context it may
be spread over steps, in multiples of a block.
"""

from __future__ import annotations

from collections.abc import Iterable

from sim.memory.interface import KVMemory
from sim.plan import StepPlan
from sim.scheduler.base import Scheduler
from sim.scheduler.queues import QueuePolicy
from sim.sequence import Sequence
from workloads.errors import UserError


class GuaranteedNoEvict(Scheduler):
    """Whoever comes in can run to its end.

    Args:
        memory: grows as it is filled.
        max_model_len: most tokens of one request, prompt and output together.
        policy: the waiting queue.
        max_num_seqs: most requests that run; TensorRT-LLM's `max_batch_size`.
        max_num_batched_tokens: token budget of one step; TensorRT-LLM's `max_num_tokens`. None: the model limit, or
            `max_num_seqs` where that is more.
        chunked_prefill: a prompt may be spread over steps; TensorRT-LLM's `enable_chunked_prefill`.
        reject_oversize: as for every `Scheduler`.
        leap: as for every `Scheduler`.

    Raises:
        UserError: a number out of range.
    """

    _serves_several_outputs = False

    def __init__(
        self,
        memory: KVMemory,
        max_model_len: int,
        policy: QueuePolicy,
        max_num_seqs: int = 2048,
        max_num_batched_tokens: int | None = 8192,
        chunked_prefill: bool = False,
        reject_oversize: bool = True,
        leap: bool = False,
    ) -> None:
        if max_num_batched_tokens is None:
            max_num_batched_tokens = max(max_model_len, max_num_seqs)
        super().__init__(
            memory, max_model_len, policy, max_num_seqs, max_num_batched_tokens, reject_oversize, leap=leap
        )
        if max_num_batched_tokens < max_num_seqs:
            raise UserError(
                f"scheduler.max_num_batched_tokens is {max_num_batched_tokens}, too few for a decode of "
                f"scheduler.max_num_seqs={max_num_seqs}; choose at least as many."
            )
        self._chunked_prefill = chunked_prefill
        self._promised = 0  # blocks that the running ones hold or may still take, summed; a shared one each time

    def _fill(self, plan: StepPlan) -> None:
        budget = self._budget
        if self._steady.count:  # all of them were let in before those that still have a prompt to compute
            self._go_on(plan)
            budget -= plan.steady
        for sequence in self._others:
            tokens = self._chunk(sequence.known - sequence.computed, budget)
            if tokens:
                taken = self._take(plan, sequence, tokens)
                assert taken, "an admission has promised room that is not there"
                budget -= tokens
        while self.waiting and len(self.running) < self._max_num_seqs:
            tokens = self._let_in(plan, budget)
            if not tokens:
                return
            budget -= tokens

    def _let_in(self, plan: StepPlan, budget: int) -> int:
        """The waiting head comes in if it can run to its end; returns the tokens that it computes now, 0 if not."""
        sequence = self.waiting.head()
        hit = self.memory.lookup(sequence)
        tokens = self._chunk(sequence.known - len(hit) * self.memory.block_size, budget)
        if not tokens:
            return 0
        at_its_end = self._most_blocks(sequence)
        room_for = (at_its_end + self._still_to_take()) * self.memory.block_size
        if not self._admit(plan, hit, tokens, room_for):
            return 0
        self._promised += at_its_end
        return tokens

    def _still_to_take(self) -> int:
        held = self._steady.entries + sum(self.memory.table_entries(sequence) for sequence in self._others)
        return self._promised - held

    def _chunk(self, tokens: int, budget: int) -> int:
        """How many of so many tokens are computed in this step: all, whole blocks of them, or none."""
        if tokens <= budget:
            return tokens
        return budget // self.memory.block_size * self.memory.block_size if self._chunked_prefill else 0

    def _most_blocks(self, sequence: Sequence) -> int:
        return -(-sequence.limit(self.max_model_len) // self.memory.block_size)

    def _let_go(self, finished: Iterable[Sequence]) -> None:
        gone = list(finished)
        self._promised -= sum(map(self._most_blocks, gone))
        super()._let_go(gone)

    def _reason_to_reject(self, sequence: Sequence) -> str | None:
        prompt, need = sequence.known, self._most_blocks(sequence)
        size, blocks = self.memory.block_size, self.memory.num_slots // self.memory.block_size
        if need > blocks:
            return f"may need {need} blocks of {size} by its limit, the pool has {blocks}"
        if prompt > self._budget and not self._chunked_prefill:
            return f"prompt of {prompt} tokens exceeds scheduler.max_num_batched_tokens {self._budget} without chunks"
        return super()._reason_to_reject(sequence)
