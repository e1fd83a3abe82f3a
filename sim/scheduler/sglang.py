"""SGLang's scheduler (0.5, without overlap): prefill first, admission by a guess of the output, retraction if it fails.

Each step is either a prefill of whoever can be let in, while the others pause, or a decode of everyone. A request is
let in if its prompt and all that it may generate fit beside what the running ones are guessed to generate yet: what
they may, times the new-token ratio. If a decode step finds no room after all, requests are retracted until the next
token of the others fits, and wait behind the rest. (`Scheduler.get_next_batch_to_run`, `PrefillAdder` and
`ScheduleBatch.retract_decode`.)

Once memory or seats were found to be full, nobody is tried until a request has finished or was retracted. So it has no
consequence meanwhile that the ratio falls with every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, inf
from typing import Protocol

from sim.memory.interface import KVMemory
from sim.memory.radix import RadixMemory
from sim.plan import StepPlan
from sim.scheduler.base import Scheduler
from sim.scheduler.new_token_ratio import NewTokenRatio
from sim.scheduler.queues import QueuePolicy
from sim.sequence import Sequence
from workloads.errors import UserError
from workloads.request import Request


class SchedulePolicy(QueuePolicy, Protocol):
    """A waiting queue that is put in order before each prefill."""

    def arrange(self, memory: KVMemory, max_model_len: int) -> None:
        """Puts those in front that are to be tried first."""


@dataclass(slots=True)
class Budget:
    """What a prefill may still take, in tokens.

    Args:
        reserved: output that running and chosen requests are reckoned with.
        input_left: before the prefill is long enough.
        chunk_left: before it is as long as it can be.
        promised: tokens of those chosen, in whole pages, for which no page has been taken yet.
    """

    reserved: float
    input_left: int
    chunk_left: float
    promised: int = 0

    @property
    def spent(self) -> bool:
        """Whether nobody can join the prefill any more."""
        return self.input_left <= 0 or self.chunk_left <= 0

    def charge(self, tokens: int) -> None:
        """Somebody computes so many tokens, in whole pages."""
        self.promised += tokens
        self.input_left -= tokens
        self.chunk_left -= tokens


class SGLang(Scheduler):
    """Prefill first, decode otherwise.

    Args:
        memory: a radix memory.
        max_model_len: most tokens of one request, prompt and output together. A request never gets longer than the pool
            less two tokens either, and is cut off there.
        schedule_policy: the order of the waiting queue.
        max_num_seqs: SGLang's `max_running_requests`.
        max_prefill_tokens: tokens of one prefill, from which on no further request joins it.
        chunked_prefill_size: most tokens of one prefill; a longer prompt is spread over several, in which nobody
            decodes. None: no prompt is spread.
        schedule_conservativeness: of the new-token ratio, as the next three (`NewTokenRatio`).
        clip_max_new_tokens: most output tokens of one request that are reckoned with;
            SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION.
        retract_decode_steps: steps for which a retraction looks ahead; SGLANG_RETRACT_DECODE_STEPS.
        reject_oversize: as for every `Scheduler`, and so is `leap`.

    Raises:
        UserError: a number out of range, or another memory.
    """

    def __init__(
        self,
        memory: KVMemory,
        max_model_len: int,
        schedule_policy: SchedulePolicy,
        max_num_seqs: int = 2048,
        max_prefill_tokens: int = 16384,
        chunked_prefill_size: int | None = 8192,
        schedule_conservativeness: float = 1.0,
        init_new_token_ratio: float = 0.7,
        min_new_token_ratio_factor: float = 0.14,
        new_token_ratio_decay_steps: int = 600,
        clip_max_new_tokens: int = 4096,
        retract_decode_steps: int = 20,
        reject_oversize: bool = True,
        leap: bool = False,
    ) -> None:
        if not isinstance(memory, RadixMemory):
            raise UserError("scheduler=sglang caches prompts in a radix tree; choose memory=radix with it.")
        size = memory.block_size
        if chunked_prefill_size is not None and (chunked_prefill_size < 1 or chunked_prefill_size % size):
            raise UserError(
                f"scheduler.chunked_prefill_size is {chunked_prefill_size}; expected a multiple of memory.block_size="
                f"{size}, at least 1, or null."
            )
        for name, value, least in (
            ("max_prefill_tokens", max_prefill_tokens, 1),
            ("clip_max_new_tokens", clip_max_new_tokens, 1),
            ("retract_decode_steps", retract_decode_steps, 0),
        ):
            if value < least:
                raise UserError(f"scheduler.{name} is {value}; expected a whole number of at least {least}.")
        longest = min(max_model_len, memory.num_slots - 2)
        most = max(longest, max_prefill_tokens) if chunked_prefill_size is None else chunked_prefill_size
        super().__init__(
            memory,
            longest,
            schedule_policy,
            max_num_seqs,
            max(most, max_num_seqs),
            reject_oversize,
            leap=leap,
        )
        self._radix = memory
        self._order = schedule_policy
        self._ratio = NewTokenRatio(
            schedule_conservativeness, init_new_token_ratio, min_new_token_ratio_factor, new_token_ratio_decay_steps
        )
        self._max_prefill_tokens = max_prefill_tokens
        self._chunk = inf if chunked_prefill_size is None else chunked_prefill_size
        self._clip = clip_max_new_tokens
        self._look_ahead = retract_decode_steps
        self._chunked: Sequence | None = None  # has a part of its prompt still to compute
        self._full = False  # the last attempt found no room, and nobody has left since
        self._left = False  # somebody has finished in a decode step
        self._prefilling = False  # what the plan being executed is
        self._decoding = 0  # running requests that pause in it

    def arrive(self, request: Request) -> tuple[Sequence, str | None]:
        """Queues a request.

        Raises:
            UserError: it asks for several outputs.
        """
        if request.num_outputs > 1:
            raise UserError(
                f"request {request.request_id} asks for {request.num_outputs} outputs of one prompt, which SGLang "
                "serves as requests of their own; leave workload.sampling out."
            )
        return super().arrive(request)

    def commit(self, plan: StepPlan) -> list[Sequence]:
        """What a prefill has computed becomes the tree's."""
        if self._prefilling:
            for sequence, _ in plan.batch:
                self._radix.keep(sequence)
        else:
            self._ratio.fall(len(plan.needs))
        finished = super().commit(plan)
        if not self._prefilling:
            self._left = self._left or bool(finished)
        elif finished or self._chunked is not None or not self._decoding:
            self._full = False
        return finished

    def _fill(self, plan: StepPlan) -> None:
        if not self.running and (self._full or not self.waiting):  # a turn without anything to run
            self._ratio.reset()
            self._full = False
        self._prefilling = self._prefill(plan)
        if not self._prefilling and self.running:
            self._decode(plan)

    def _left_free(self) -> int:
        return self.memory.num_cached_blocks  # a step that evicts is the first of a plan

    def _steps_before_decision(self, max_steps: int) -> int:
        return 1 if self.waiting and not self._full else max_steps

    def _prefill(self, plan: StepPlan) -> bool:
        """Forms a prefill, of the prompt that is under way and of whoever waits and fits; False if there is none."""
        if self._chunked is None and (self._full or not self.waiting):
            return False
        self._decoding = len(self.running) - (self._chunked is not None)
        self._order.arrange(self.memory, self.max_model_len)
        chosen = self._choose(plan)
        if not chosen:
            return False
        self._pause(plan)
        # All have what they hit; only now is room made for the rest, so that it costs none of them its hit.
        plan.batch.clear()
        self._radix.make_room(
            sum(self.memory.missing_blocks(sequence, sequence.computed + tokens) for sequence, tokens in chosen)
        )
        for sequence, tokens in chosen:
            taken = self._take(plan, sequence, tokens)
            assert taken
        return True

    def _choose(self, plan: StepPlan) -> list[tuple[Sequence, int]]:
        """Who computes how many tokens in a prefill; those from the waiting queue have come in with what they hit."""
        under_way, size = self._chunked, self.memory.block_size
        to_come = sum(self._to_come(one) for one in self.running if one is not under_way)
        budget = Budget(self._ratio.value * to_come, self._max_prefill_tokens, self._chunk)
        chosen: list[tuple[Sequence, int]] = []
        if under_way is not None:
            chosen.append((under_way, self._part(under_way, budget)))
        while self.waiting:
            if not self._seats_for(1):
                self._full = True
                break
            sequence = self.waiting.head()
            hit = self.memory.lookup(sequence)
            hit_tokens = len(hit) * size
            need = budget.promised + budget.reserved + sequence.known - hit_tokens + self._to_come(sequence)
            if need >= self.memory.num_free_blocks * size:
                self._full = True
                break
            in_pages = self._in_pages(sequence.known - hit_tokens)
            if (chosen and in_pages >= budget.input_left) or in_pages > budget.chunk_left < size:
                break
            if not self._admit(plan, hit, 0, room_for=hit_tokens + floor(need) + 1):  # what it hits is free no more
                self._full = True
                break
            chosen.append((sequence, self._part(sequence, budget)))
            if budget.promised + budget.reserved >= self.memory.num_free_blocks * size:
                self._full = True
                break
            if budget.spent:
                break
        return chosen

    def _part(self, sequence: Sequence, budget: Budget) -> int:
        """Tokens that a chosen request computes in this prefill: all that are missing, or a chunk of whole pages."""
        missing, size = sequence.known - sequence.computed, self.memory.block_size
        if self._in_pages(missing) <= budget.chunk_left:
            tokens, self._chunked = missing, None
            budget.reserved += min(sequence.limit(self.max_model_len) - sequence.request.prompt_tokens, self._clip)
        else:
            tokens, self._chunked = int(budget.chunk_left) // size * size, sequence
        budget.charge(self._in_pages(tokens))
        return tokens

    def _in_pages(self, tokens: int) -> int:
        size = self.memory.block_size
        return -(-tokens // size) * size

    def _decode(self, plan: StepPlan) -> None:
        """Everyone computes a token, once there is room for it."""
        if self._others and self._steady.count:  # some paused: pages are handed out in the order of the running queue
            self._wake(plan)
        need = self._due()
        if need > self.memory.num_free_blocks:
            need = self._retract(plan)
        else:
            self._ratio.fall(1)
        if self._left:
            self._full = self._left = False
        self._radix.make_room(need)
        if self._steady.count:
            self._go_on(plan)
        for sequence in list(self._others):
            taken = self._take(plan, sequence, 1)
            assert taken

    def _due(self) -> int:
        """Pages that the next token of everyone takes."""
        return self._steady.due() + sum(self.memory.missing_blocks(one, one.computed + 1) for one in self._others)

    def _retract(self, plan: StepPlan) -> int:
        """Retracts until the next token of the others fits; returns the pages that it takes.

        At least one does, and one stays: it is never longer than the pool, of which it can have all.
        """
        if self._steady.count:
            self._wake(plan)
        need = inf
        while need > self.memory.num_free_blocks:
            keeper = max(self.running, key=_worth)
            self._preempt(plan, self._victims.victim(self.running), because=keeper)
            self._radix.make_room(-(-len(self.running) * self._look_ahead // self.memory.block_size))
            need = self._due()
        self._full = False
        prompts = sum(one.request.prompt_tokens for one in self.running)
        self._ratio.after_retraction(
            sum(one.generated for one in self.running),
            len(self.running),
            sum(one.limit(self.max_model_len) for one in self.running) - prompts,
            self._look_ahead,
        )
        return int(need)

    def _to_come(self, sequence: Sequence) -> int:
        """Output tokens that it may still generate, as far as they are reckoned with."""
        return min(sequence.limit(self.max_model_len) - sequence.known, self._clip)


def _worth(sequence: Sequence) -> tuple[int, int, int]:
    """Who is retracted last: most output, then the shortest prompt, then the earliest."""
    return sequence.generated, -sequence.request.prompt_tokens, -sequence.order
