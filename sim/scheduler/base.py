"""What all schedulers here have in common: the queues, and what becomes of a plan.

A scheduler turns its queues into a step plan: who computes how many tokens, who is admitted, who loses its blocks. That
is each policy's own file; the steps themselves are iteration-level batching as Orca introduced it (OSDI 2022). What a
sequence holds is the memory policy's business; in which order they wait, the queue policy's; who the victim is, that
one's too unless another rule is given; and whether it is computed again or swapped, the recovery policy's.

The sequences of a request with several outputs come and go together (Kwon et al., SOSP 2023, §4.5): one of them
computes the prompt, and when it gains its first token the others fork from it. All then gain their tokens in the same
steps. After a preemption by recompute, what they had in common is computed once, and then each computes the rest.

Under asynchronous scheduling (vLLM's default since 0.14) a step is planned while the one before it runs. That all its
sequences will have gained a token by then is foreseen, and so is who will be done; but what those hold is free only
when it really has ended, which is after the next plan.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from operator import attrgetter
from typing import ClassVar

from mypy_extensions import mypyc_attr

from sim.memory.interface import KVMemory
from sim.memory.offload import OffloadingMemory
from sim.plan import Preemption, StepPlan
from sim.scheduler.groups import common_tokens
from sim.scheduler.queues import QueuePolicy, Swapped
from sim.scheduler.recovery import Recompute, RecoveryPolicy
from sim.scheduler.steady import SteadyDecodes
from sim.scheduler.victims import VictimPolicy, num_blocks
from sim.scheduler.work import work_of
from sim.sequence import Group, Sequence
from workloads.errors import UserError
from workloads.request import Request


@mypyc_attr(allow_interpreted_subclasses=True)
class Scheduler(ABC):
    """The queues, and the way of a request through them. A policy is a subclass that fills the plans.

    Args:
        memory: who holds which slots.
        max_model_len: most tokens of one request, prompt and output together.
        policy: the waiting queue, and the choice of a victim unless `victim` makes it.
        max_num_seqs: most sequences in the running queue; each output of a request is one, from its admission on.
        max_num_batched_tokens: token budget of one step; None: the model limit, so that any prompt fits into one.
        reject_oversize: turn away at arrival what could never finish; without it such a request blocks the queue for
            ever, as in the real engine (rule 17).
        victim: who must go when the pool is full; None: whom the queue policy names.
        recovery: whether a victim is computed again or swapped out; None: computed again. Whoever is swapped out comes
            back before anybody else is admitted.
        async_scheduling: plan each step while the one before it runs: who finishes keeps blocks and seat for one plan
            more. The engine lets requests join one step later then.
        leap: do not plan sequences one by one in steps in which nothing about them is decided (`steady.py`). Decisions
            are the same with and without.

    Raises:
        UserError: a number out of range.
    """

    _serves_several_outputs: ClassVar[bool] = True  # of one request, which share its prompt

    def __init__(
        self,
        memory: KVMemory,
        max_model_len: int,
        policy: QueuePolicy,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        reject_oversize: bool = True,
        victim: VictimPolicy | None = None,
        recovery: RecoveryPolicy | None = None,
        leap: bool = False,
        async_scheduling: bool = False,
    ) -> None:
        if max_num_batched_tokens is None:
            max_num_batched_tokens = max_model_len
        for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
            if value < 1:
                raise UserError(f"scheduler.{name} is {value}; expected a whole number of at least 1.")
        self.memory = memory
        self.max_model_len = max_model_len
        self._victims = policy if victim is None else victim
        self._recovery = Recompute() if recovery is None else recovery
        # What a plan had given a victim is taken back before the victim goes. vLLM does not, and leaves prefix keys on
        # blocks that are never computed; only its priority policy has such victims, and by itself that is done
        # likewise.
        self._offloading = memory if isinstance(memory, OffloadingMemory) and memory.host_cache is not None else None
        self._takes_back = (
            victim is not None or not isinstance(self._recovery, Recompute) or self._offloading is not None
        )
        if self._offloading is not None and self.may_swap:
            raise UserError(
                "memory.host_cache_size and swapped requests would share the host's memory; set "
                "memory.host_cache_size=0 or choose scheduler/recovery=recompute."
            )
        self._swapped = Swapped()
        self.waiting = self._recovery.queue(policy, self._swapped)
        self.running: dict[Sequence, None] = {}  # in order of admission
        self._steady = SteadyDecodes(memory)
        self._spare_blocks = 0  # that must be free after a step in which everyone decodes
        self._others: dict[Sequence, None] = {}  # the running ones that are not steady, in order of admission
        self._admissions = 0  # sequences, those included that an admitted group has yet to fork into
        self._seats_kept = 0  # of the running queue, for the latter
        self._groups = 0  # live requests with several outputs
        self._forks: list[tuple[Sequence, Sequence]] = []  # since the last plan
        self.async_scheduling = async_scheduling
        self._leaving: dict[Sequence, None] = {}  # have finished, but hold what they held until after the next plan
        self._leap = leap and memory.can_leap
        self._max_num_seqs = max_num_seqs
        self._budget = max_num_batched_tokens
        self._reject_oversize = reject_oversize

    @abstractmethod
    def _fill(self, plan: StepPlan) -> None:
        """Decides one step: sets what `plan` says of it, and brings queues and memory to where they are in it.

        Whoever is steady computes a token (`_go_on`), or none this time (`_pause`), or is planned one by one from
        then on (`_wake`).
        """

    def _steps_before_decision(self, max_steps: int) -> int:
        """How many steps, at most `max_steps`, a plan of steady sequences alone may stand for.

        A policy whose own numbers change from step to step says here when one of them makes a difference.
        """
        return max_steps

    def _left_free(self) -> int:
        """Blocks that further steps of a plan leave free: the cached ones, if a step that evicts must be the first."""
        if self._offloading is None:
            return self._spare_blocks
        return max(self._spare_blocks, self.memory.num_cached_blocks)

    @property
    def _watermark_counts(self) -> bool:
        """Whether an admission now has to leave the watermark free: while others run (vLLM v1)."""
        return bool(self.running)

    @property
    def max_num_seqs(self) -> int:
        """Most sequences in the running queue."""
        return self._max_num_seqs

    @property
    def max_num_batched_tokens(self) -> int:
        """Token budget of one step."""
        return self._budget

    @property
    def may_swap(self) -> bool:
        """Whether a preempted request may be swapped to the host."""
        return self._recovery.swaps(2)

    @property
    def uses_host(self) -> bool:
        """Whether blocks may move to the host: those of preempted requests, or those that are evicted."""
        return self.may_swap or self._offloading is not None

    @property
    def streams_tokens(self) -> bool:
        """Whether a client gets each token when it is there, and not all of them when the last one is."""
        return True

    @property
    def idle(self) -> bool:
        """Nobody runs and nobody waits."""
        return not self.running and not self.waiting

    def arrive(self, request: Request) -> tuple[Sequence, str | None]:
        """Queues a request.

        Returns:
            Its sequence, and why it was turned away instead, or None.

        Raises:
            UserError: it asks for several outputs, and the policy has none or the memory cannot share their prompt.
        """
        sequence = Sequence.of(request, self.max_model_len)
        if sequence.group is not None and not self._serves_several_outputs:
            raise UserError(
                f"request {request.request_id} asks for {request.num_outputs} outputs of one prompt, which this engine "
                "serves as that many requests; leave workload.sampling out."
            )
        if sequence.group is not None and not self.memory.can_share:
            raise UserError(
                f"request {request.request_id} asks for {request.num_outputs} outputs of one prompt, which this "
                "memory cannot share; choose memory=paged or leave workload.sampling out."
            )
        reason = self._reason_to_reject(sequence) if self._reject_oversize else None
        if reason is None:
            self.waiting.arrive(sequence)
            self._groups += sequence.group is not None
        return sequence, reason

    def schedule(self, max_steps: int = 1) -> StepPlan:
        """Plans one step, or up to `max_steps` if nothing needs a decision in those after it.

        The plan's batch is empty, and nobody is steady, if nothing could be scheduled.
        """
        plan, steady = StepPlan(), self._steady
        self._fill(plan)
        if self._leaving:
            if self.waiting:  # what they free may be enough for the head
                max_steps = 1
            self._let_go(self._leaving)
            self._leaving = {}
        if self._offloading is not None:
            plan.swap_outs, plan.swap_ins, plan.onboarded = self._offloading.take_moves()
            plan.offloaded = len(plan.swap_outs)
            if plan.offloaded:  # a step that moves blocks is a plan of its own
                max_steps = 1
        if max_steps > 1 and plan.steady and not plan.batch and not (self.waiting and steady.tellers):
            max_steps = self._steps_before_decision(max_steps)
            if max_steps > 1:
                plan.needs = steady.leap(max_steps - 1, self._left_free())
        if self._groups:
            plan.forks, self._forks = tuple(self._forks), []
            if plan.batch:
                self._note_copies(plan)
        plan.work = work_of(plan, steady, self.memory)
        return plan

    def full_batch(self, plan: StepPlan) -> list[tuple[Sequence, int]]:
        """Every sequence of a plan with the tokens it computes, in batch order; only before the plan is committed."""
        one_by_one = dict(plan.batch)
        return [
            (sequence, one_by_one.get(sequence, 1))
            for sequence in self.running
            if sequence in one_by_one or (plan.steady and sequence in self._steady)
        ]

    def commit(self, plan: StepPlan) -> list[Sequence]:
        """Applies what the plan has computed: whoever has caught up gets one token, and finishes if it was the last.

        Args:
            plan: has been executed, and cut to the steps that were. What became of the blocks it took is filled in.

        Returns:
            The finished requests, each by its first sequence, in the order in which their blocks were freed (rule 16).
        """
        finished: list[Sequence] = []
        groups: dict[Group, None] = {}
        if plan.steady:
            if plan.needs:
                self._steady.go_on(plan)
            finished = self._steady.commit()
        num_steady = len(finished)
        for sequence, _ in plan.batch:
            known = sequence.known
            if sequence.computed == known:
                if sequence.group is not None:
                    groups[sequence.group] = None
                    continue
                plan.gained.append(sequence)
                sequence.known = known + 1
                if known + 1 == sequence.final:
                    finished.append(sequence)
                elif self._leap:
                    del self._others[sequence]
                    self._steady.join(sequence)
        for group in groups:
            if group.caught_up:
                finished += self._advance(plan, group)
        if groups or (num_steady and len(finished) > num_steady):
            finished.sort(key=attrgetter("order"))
        if self.async_scheduling:
            self._leaving = dict.fromkeys(finished)
            for sequence in finished:
                self._others.pop(sequence, None)
        else:
            self._let_go(finished)
        return self._requests_of(finished) if self._groups else finished

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

    def unfinished(self) -> list[Sequence]:
        """The requests that run or wait, each by its first sequence."""
        live = [one for one in (*self.running, *self.waiting) if one not in self._leaving]
        return [one for one in live if one is one.together[0]]

    def _let_go(self, finished: Iterable[Sequence]) -> None:
        for sequence in finished:
            self.memory.release(sequence)
            del self.running[sequence]
            self._others.pop(sequence, None)

    def _reason_to_reject(self, sequence: Sequence) -> str | None:
        prompt = sequence.request.prompt_tokens
        if prompt >= self.max_model_len:
            return f"prompt of {prompt} tokens leaves no room for output under max_model_len {self.max_model_len}"
        if sequence.request.num_outputs > self._max_num_seqs:
            return f"needs {sequence.request.num_outputs} sequences at once, max_num_seqs is {self._max_num_seqs}"
        return self.memory.never_fits(sequence)

    def _go_on(self, plan: StepPlan) -> None:
        """Every steady sequence computes a token; there is a free block for each that needs one."""
        plan.steady = self._steady.count
        self._steady.schedule()

    def _pause(self, plan: StepPlan) -> None:
        """Whoever is steady computes nothing in this step, and goes on in a later one as if it had not been."""
        plan.paused = self._steady.count

    def _decode_everyone(self, plan: StepPlan) -> None:
        """Everyone who runs computes a token: under policies that have room for it for sure."""
        if self._steady.count and not self._others:
            self._go_on(plan)
            return
        if self._steady.count:  # others were let in before some of them, and get their blocks before them
            self._wake(plan)
        for sequence in self._others:
            taken = self._take(plan, sequence, 1)
            assert taken, "an admission has promised room that is not there"

    def _wake(self, plan: StepPlan) -> None:
        """Whoever was steady is planned one by one from now on."""
        plan.woken = self._steady.dissolve(self.running)
        self._others = {one: None for one in self.running if one not in self._leaving}

    def _tokens_for(self, sequence: Sequence, most: int) -> int:
        """Rule 7: what a running sequence has left to compute, within the limits."""
        return min(sequence.known - sequence.computed, most, self.max_model_len - 1 - sequence.computed)

    def _take(self, plan: StepPlan, sequence: Sequence, tokens: int) -> bool:
        """Lets a running sequence compute so many tokens; False if there is no room, and nothing has changed."""
        if not self.memory.grow(sequence, sequence.computed + tokens):
            return False
        sequence.computed += tokens
        plan.batch.append((sequence, tokens))
        return True

    def _make_room(self, plan: StepPlan, because: Sequence) -> int:
        """Lets a victim go; returns the tokens that the plan no longer computes."""
        victim = self._victims.victim(self.running)
        if victim in self._leaving:  # nothing is lost with it
            del self._leaving[victim]
            self._let_go([victim])
            return 0
        return self._preempt(plan, victim, because)

    def _admit(self, plan: StepPlan, hit: list[int], tokens: int, room_for: int) -> bool:
        """The waiting head gets its hit and room for `tokens` more, and runs; False if there is no room."""
        sequence = self.waiting.head()
        hit_tokens = len(hit) * self.memory.block_size
        if not self.memory.admit(sequence, hit, hit_tokens + tokens, room_for, others_run=self._watermark_counts):
            return False
        self.waiting.pop()
        self._line_up(sequence)
        sequence.computed = hit_tokens + tokens
        (plan.resumed if sequence.preemptions else plan.admitted).append(sequence)
        plan.hits.append((sequence, hit_tokens))
        if sequence.hit_tokens is None:
            sequence.hit_tokens = hit_tokens
        plan.batch.append((sequence, tokens))
        return True

    def _preempt(self, plan: StepPlan, victim: Sequence, because: Sequence) -> int:
        """Rules 9 and 11, for all sequences of the victim's request; returns the tokens that go back to the budget."""
        sequences = victim.together
        first = sequences[0]
        refunds = {sequence: tokens for sequence, tokens in plan.batch if sequence in sequences}
        if refunds:
            plan.batch = [entry for entry in plan.batch if entry[0] not in refunds]
        tokens = self._stored(sequences, refunds)
        if self._takes_back:
            for sequence, refund in refunds.items():
                self.memory.take_back(sequence, sequence.computed - refund)
        blocks = num_blocks(sequences)
        for sequence in sequences:
            del self.running[sequence], self._others[sequence]
        if first.group is not None and not first.group.forked:
            self._seats_kept -= first.group.width - 1
        first.preemptions += 1
        if self._recovery.swaps(len(sequences)) and (pairs := self.memory.swap_out(sequences)) is not None:
            plan.swap_outs += tuple(pairs)
            plan.preemptions.append(Preemption(first, because, blocks, tokens, "swap"))
            self._swapped.add(first)
        else:
            plan.preemptions.append(Preemption(first, because, blocks, tokens))
            self._start_over(sequences)
            self.waiting.return_preempted(first)
        return sum(refunds.values())

    def _stored(self, sequences: list[Sequence], planned: dict[Sequence, int]) -> int:
        """Tokens that the sequences of a request have in the pool, without those planned for this step.

        What they have in common counts once.
        """
        computed = sum(sequence.computed for sequence in sequences) - sum(planned.values())
        if len(sequences) == 1:
            return computed
        return computed - (len(sequences) - 1) * common_tokens(sequences, self.memory.block_size)

    def _start_over(self, sequences: list[Sequence]) -> None:
        """Recompute: all tokens known so far are computed again like a prompt."""
        group = sequences[0].group
        if group is not None and group.forked:
            group.start_over(max(group.common, common_tokens(sequences, self.memory.block_size)))
        for sequence in sequences:
            self.memory.release(sequence)
            sequence.computed = 0

    def _bring_back(self, plan: StepPlan, cap: int, budget: int) -> int:
        """Swapped requests come back in order of arrival and go on at once (vLLM v0); returns the budget left.

        Args:
            plan: gets their blocks and tokens.
            cap: most tokens of one sequence.
            budget: most tokens of all.
        """
        while self._swapped and budget > 0:
            first = self._swapped[0]
            sequences = first.together
            if not self._may_come_back(first):
                break
            shares, left = [], budget
            for sequence in sequences:
                shares.append(self._tokens_for(sequence, min(cap, left)))
                left -= shares[-1]
            goals = [sequence.computed + tokens for sequence, tokens in zip(sequences, shares, strict=True)]
            pairs = self.memory.swap_in(sequences, goals, others_run=self._watermark_counts)
            if pairs is None:
                break
            self._swapped.pop(0)
            self._line_up(first)
            plan.swap_ins += tuple(pairs)
            plan.returned += ((first, len(pairs)),)
            for sequence, tokens, goal in zip(sequences, shares, goals, strict=True):
                if tokens:
                    grown = self.memory.grow(sequence, goal)
                    assert grown
                    sequence.computed = goal
                    plan.batch.append((sequence, tokens))
            budget = left
        return budget

    def _may_come_back(self, first: Sequence) -> bool:
        """Whether a request that is swapped out may run, if the memory has room for it."""
        return self._seats_for(first.request.num_outputs)

    def _seats_for(self, num_sequences: int) -> bool:
        return len(self.running) + self._seats_kept + num_sequences <= self._max_num_seqs

    def _line_up(self, first: Sequence) -> None:
        """Puts a request at the end of the running queue, with all its live sequences and seats for the others."""
        group = first.group
        self._admissions += 1
        first.order = self._admissions
        self.running[first] = self._others[first] = None
        if group is None:
            return
        self._admissions += group.width - 1
        if not group.forked:
            self._seats_kept += group.width - 1
            return
        for place, sequence in enumerate(group.sequences):
            sequence.order = first.order + place
            self.running[sequence] = self._others[sequence] = None

    def _advance(self, plan: StepPlan, group: Group) -> list[Sequence]:
        """A group has computed all it was to compute: it forks, or gains a token for each sequence, or both.

        Returns:
            Its sequences if that was their last token.
        """
        just_forked = not group.forked
        if just_forked:
            again = group.known > group.first.known  # what they have in common is there again; each has its rest to do
            self._fork(group)
            if again:
                return []
        known = group.known + 1
        for sequence in group.sequences:
            sequence.known = known
        plan.gained += group.sequences
        if known == group.first.final:
            return group.sequences
        if just_forked:
            self._forks += ((group.first, other) for other in group.sequences[1:])
        elif group.beams is not None:
            self._choose_beams(group)
        # After a fork, the first to write in the block that they share copy it; beams fork in every step.
        if self._leap and not just_forked and group.beams is None:
            for sequence in group.sequences:
                del self._others[sequence]
                self._steady.join(sequence)
        return []

    def _fork(self, group: Group) -> None:
        """The sequences of a group take their seats in the running queue, right behind the first."""
        others = group.fork()
        self.memory.fork(group.first, others)
        self._seats_kept -= len(others)
        is_last = next(reversed(self.running)) is group.first
        for sequence in others:
            self.running[sequence] = self._others[sequence] = None
        if not is_last:
            self.running = dict.fromkeys(sorted(self.running, key=attrgetter("order")))
            self._others = dict.fromkeys(sorted(self._others, key=attrgetter("order")))

    def _choose_beams(self, group: Group) -> None:
        """Beams without survivors free their blocks; in their place fork those that have several (§4.4, Fig. 9)."""
        assert group.beams is not None
        for dead, parent in group.beams.replaced():
            self.memory.release(group.sequences[dead])
            self.memory.fork(group.sequences[parent], [group.sequences[dead]])
            self._forks.append((group.sequences[parent], group.sequences[dead]))

    def _requests_of(self, finished: list[Sequence]) -> list[Sequence]:
        """Each request of `finished` once: all sequences of a group finish together."""
        self._groups -= sum(sequence.group is not None and sequence is sequence.group.first for sequence in finished)
        return [sequence for sequence in finished if sequence.group is None or sequence is sequence.group.first]

    def _note_copies(self, plan: StepPlan) -> None:
        copies = self.memory.take_copies()
        plan.copies = tuple((source, destination) for _, source, destination in copies)
        plan.copied = tuple(Counter(sequence.together[0] for sequence, _, _ in copies).items())
