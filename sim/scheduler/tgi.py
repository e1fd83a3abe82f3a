"""Batching as Hugging Face's Text Generation Inference does it (TGI 2.2, the router's `infer/v3`).

A step is either the prefill of new requests, during which those that run pause, or a decode of everyone. All blocks
that a request may ever need are taken at its admission (`reservation.LimitReservation`), so nothing grows and nobody is
preempted. Between two decodes the router looks at the queue once:

- too few wait: fewer than `waiting_served_ratio` times those that run. They are let in only together, so that the pause
  is worth it, or once `max_waiting_tokens` decodes have passed since somebody last came in.
- else from the front of the queue, first come, first served, whoever fits: whole prompts within
  `max_batch_prefill_tokens`, prompts and allowed outputs within the tokens that the pool has left, and blocks.
"""

from __future__ import annotations

from sim.memory.interface import KVMemory
from sim.plan import StepPlan
from sim.scheduler.base import Scheduler
from sim.scheduler.queues import QueuePolicy
from sim.sequence import Sequence
from workloads.errors import UserError


class TextGenerationInference(Scheduler):
    """A prefill of those who wait, if that is worth the pause, else a decode of those who run.

    Args:
        memory: gives a request at its admission all that it may need.
        max_model_len: most tokens of one request, prompt and output together; TGI's `max_total_tokens`.
        policy: the waiting queue.
        max_num_seqs: most requests that run; TGI's `max_batch_size`.
        max_num_batched_tokens: most prompt tokens of one prefill, rounded up to whole blocks; TGI's
            `max_batch_prefill_tokens`. None: the model limit.
        waiting_served_ratio: how many must wait for each that runs; at least 0.
        max_waiting_tokens: decodes after which any number is enough; at least 1.
        reject_oversize: as for every `Scheduler`.
        leap: as for every `Scheduler`.

    Raises:
        UserError: a number out of range.
    """

    _serves_several_outputs = False  # best_of is as many requests

    def __init__(
        self,
        memory: KVMemory,
        max_model_len: int,
        policy: QueuePolicy,
        max_num_seqs: int = 128,
        max_num_batched_tokens: int | None = 4096,
        waiting_served_ratio: float = 0.3,
        max_waiting_tokens: int = 20,
        reject_oversize: bool = True,
        leap: bool = False,
    ) -> None:
        super().__init__(
            memory, max_model_len, policy, max_num_seqs, max_num_batched_tokens, reject_oversize, leap=leap
        )
        if waiting_served_ratio < 0:
            raise UserError(f"scheduler.waiting_served_ratio is {waiting_served_ratio}; expected a number, 0 or more.")
        if max_waiting_tokens < 1:
            raise UserError(
                f"scheduler.max_waiting_tokens is {max_waiting_tokens}; expected a whole number of at least 1."
            )
        self._ratio = waiting_served_ratio
        self._max_waiting_tokens = max_waiting_tokens
        self._waiting_tokens = 0  # tokens that those who run have gained since somebody came in
        self._looked = True  # whether the queue was looked at in this step
        self._must_decode = False  # those who run have paused once since their last token

    def _fill(self, plan: StepPlan) -> None:
        self._looked = not self._must_decode
        newcomers = self._newcomers() if self._looked and self.waiting else 0
        if newcomers:
            self._must_decode = bool(self.running)
            self._pause(plan)
            for _ in range(newcomers):
                known = self.waiting.head().known
                admitted = self._admit(plan, [], known, known)
                assert admitted
        elif self.running:
            self._must_decode = False
            self._decode_everyone(plan)

    def commit(self, plan: StepPlan) -> list[Sequence]:
        self._waiting_tokens = 1 if plan.admitted else self._waiting_tokens + plan.repeat
        return super().commit(plan)

    def _newcomers(self) -> int:
        """How many from the front of the queue come in now."""
        least = 1
        if self.running and self._waiting_tokens < self._max_waiting_tokens:
            least = max(1, int(len(self.running) * self._ratio))
        if len(self.waiting) < least:
            return 0
        count = self._fitting()
        return count if count >= least else 0

    def _fitting(self) -> int:
        """How many from the front of the queue there is room for."""
        size = self.memory.block_size
        free = self.memory.num_free_blocks
        # The router counts the block that it keeps for health checks among the tokens of the pool, but not as free.
        tokens_left = (free + 1) * size
        prefill_left = self._prefill_budget
        seats = self._max_num_seqs - len(self.running)
        count = 0
        for sequence in self.waiting:
            limit = sequence.limit(self.max_model_len)
            prefill_left -= sequence.known
            tokens_left -= limit
            free -= -(-(limit - 1) // size)
            if count == seats or prefill_left < 0 or tokens_left < 0 or free < 0:
                break
            count += 1
        return count

    @property
    def _prefill_budget(self) -> int:
        size = self.memory.block_size
        return -(-self._budget // size) * size

    def _reason_to_reject(self, sequence: Sequence) -> str | None:
        prompt = sequence.known
        if prompt > self._prefill_budget:
            return (
                f"prompt of {prompt} tokens exceeds scheduler.max_num_batched_tokens {self._budget}, and is not split"
            )
        return super()._reason_to_reject(sequence)

    def _steps_before_decision(self, max_steps: int) -> int:
        """The pool and the queues stay as they are: once looked at, only `max_waiting_tokens` can let somebody in."""
        if self.waiting and not self._looked:
            return 1
        if self.waiting and self._waiting_tokens < self._max_waiting_tokens:
            return min(max_steps, self._max_waiting_tokens - self._waiting_tokens)
        return max_steps
