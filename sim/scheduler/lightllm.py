"""Admission by a predicted peak, as LightLLM's router does it (early 2024: `router/req_queue.py`, `router/manager.py`).

A step is either the prefill of new requests, during which those that run pause, or a decode of everyone. The router
looks at the queue when nobody runs and else after every `router_max_wait_tokens` decodes. A request comes in if the
most tokens that the pool will ever hold then are fewer than it has. If everyone generates all that the client allows,
that most is reached when one of them ends: sorted by what they have left, most first, the k-th ends after left_k more
steps, in which the first k have stored that many tokens each. So the peak is the largest of

    left_k * k + tokens that the first k have by now

and since it is foreseen, growth never fails and nobody is preempted. With token attention (a block is one slot)
nothing is lost inside blocks either.
"""

from __future__ import annotations

import bisect
from itertools import islice

from sim.memory.interface import KVMemory
from sim.plan import StepPlan
from sim.scheduler.base import Scheduler
from sim.scheduler.queues import QueuePolicy
from sim.sequence import Sequence
from workloads.errors import UserError


class Forecast:
    """What the pool will hold at most if everyone generates all that is allowed.

    Attributes:
        peak: most tokens.
        until_peak: steps until they are reached.
    """

    def __init__(self) -> None:
        self.peak = 0
        self.until_peak = 0
        self._entries: list[tuple[int, int]] = []  # (minus what it has left, tokens it has by now), most left first

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, tokens: int, limit: int) -> None:
        """One more that has `tokens` by now, its last generated one included, and ends with at most `limit`."""
        bisect.insort(self._entries, (-max(0, limit - tokens - 1), tokens))

    def look_ahead(self) -> None:
        """Brings the peak up to date."""
        self.peak = self.until_peak = held = 0
        for k, (minus_left, tokens) in enumerate(self._entries, start=1):
            held += tokens
            if held - minus_left * k > self.peak:
                self.peak, self.until_peak = held - minus_left * k, -minus_left


class LightLLM(Scheduler):
    """A prefill of those whose peak the pool can hold, every so many decodes, else a decode of those who run.

    Args:
        memory: grows as it is filled; a block should be one slot.
        max_model_len: most tokens of one request, prompt and output together; LightLLM's `max_req_total_len`.
        policy: the waiting queue.
        max_num_seqs: most requests that run; LightLLM's `running_max_req_size`.
        max_num_batched_tokens: most prompt tokens of one prefill; LightLLM's `batch_max_tokens`. None: a sixth of the
            pool, or the model limit where that is more.
        router_max_wait_tokens: decodes between two looks at the queue; at least 1.
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
        max_num_seqs: int = 1000,
        max_num_batched_tokens: int | None = None,
        router_max_wait_tokens: int = 10,
        reject_oversize: bool = True,
        leap: bool = False,
    ) -> None:
        if max_num_batched_tokens is None:
            max_num_batched_tokens = max(memory.num_slots // 6, max_model_len)
        super().__init__(
            memory, max_model_len, policy, max_num_seqs, max_num_batched_tokens, reject_oversize, leap=leap
        )
        if memory.block_size != 1:
            raise UserError(f"memory.block_size is {memory.block_size}, but the peak is predicted in tokens; choose 1.")
        if router_max_wait_tokens < 1:
            raise UserError(
                f"scheduler.router_max_wait_tokens is {router_max_wait_tokens}; expected a whole number of at least 1."
            )
        self._every = router_max_wait_tokens
        self._decodes = 0  # since the router last looked at the queue
        self._hopeless = 0  # steps after this one for which the look at the queue in it says that nobody comes in

    def _fill(self, plan: StepPlan) -> None:
        self._hopeless = 0
        if not self.running or self._decodes >= self._every:
            self._decodes = 0
            newcomers = self._newcomers()
            if newcomers:
                self._pause(plan)
                for _ in range(newcomers):
                    known = self.waiting.head().known
                    admitted = self._admit(plan, [], known, known)
                    assert admitted, "the peak was foreseen and yet there is no room"
                return
        if self.running:
            self._decode_everyone(plan)

    def commit(self, plan: StepPlan) -> list[Sequence]:
        if not plan.admitted:  # in a leap the router has looked in vain every so many steps
            self._decodes = (self._decodes + plan.repeat - 1) % self._every + 1
        return super().commit(plan)

    def _newcomers(self) -> int:
        """How many from the front of the queue come in now."""
        seats = self._max_num_seqs - len(self.running)
        if not self.waiting or not seats:
            self._hopeless = self.max_model_len  # until somebody ends or arrives
            return 0
        forecast, budget = Forecast(), self._budget
        for sequence in self.running:
            forecast.add(sequence.known, sequence.limit(self.max_model_len))
        count = 0
        for sequence in islice(self.waiting, seats):
            budget -= sequence.known
            if budget < 0:
                break
            # The prefill gives it its first output token.
            forecast.add(sequence.known + 1, sequence.limit(self.max_model_len))
            forecast.look_ahead()
            if forecast.peak >= self.memory.num_slots:
                # Each step that it waits longer takes one token off that peak, as long as the peak is still to come.
                self._hopeless = min(forecast.peak - self.memory.num_slots, forecast.until_peak)
                break
            count += 1
        return count

    def _steps_before_decision(self, max_steps: int) -> int:
        """Up to the first look at the queue that may let somebody in."""
        if not self.waiting:
            return max_steps
        looks = (self._decodes + self._hopeless) // self._every + 1
        return min(max_steps, looks * self._every - self._decodes)

    def _reason_to_reject(self, sequence: Sequence) -> str | None:
        prompt = sequence.known
        if prompt > self._budget:
            return (
                f"prompt of {prompt} tokens exceeds scheduler.max_num_batched_tokens {self._budget}, and is not split"
            )
        alone = Forecast()
        alone.add(prompt + 1, sequence.limit(self.max_model_len))
        alone.look_ahead()
        if alone.peak >= self.memory.num_slots:
            return f"may hold {alone.peak} tokens at its end; the pool must have more, and has {self.memory.num_slots}"
        return super()._reason_to_reject(sequence)
