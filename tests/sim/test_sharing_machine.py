"""Forks, copy-on-write, beams, swaps and victims under random arrivals: no slot is lost, and nobody reads wrong KV.

The account of slots is kept by `pool_audit.py`, the content of slots by `kv_executor.py`; neither knows of reference
counts or of any of the policies' sums.
"""

from __future__ import annotations

from typing import Any

from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from kv_executor import Executor
from pool_audit import audit_paged

from sim.memory.paged import PagedMemory
from sim.scheduler.continuous import ContinuousBatching
from sim.scheduler.queues import Fcfs, Priority
from sim.scheduler.recovery import Auto, Recompute, Swap
from sim.scheduler.victims import FewestOutputTokens, Latest, LongestRemaining, LowestPriority, MostBlocks
from workloads.request import HashIds, Request, TokenIds
from workloads.sampling import BeamSearch, ParallelSampling, Sampling

LIMIT = 24  # tokens of one sequence
ENOUGH_STEPS = 5_000
VICTIMS = [None, Latest, LowestPriority, FewestOutputTokens, MostBlocks, LongestRemaining]

samplings = st.one_of(
    st.none(),
    st.builds(ParallelSampling, st.integers(1, 4)),
    st.builds(BeamSearch, st.integers(1, 4), st.sampled_from([0.1, 1.0, 10.0]), st.integers(0, 3)),
)


class Sharing(RuleBasedStateMachine):
    """Requests with one output or several come, steps pass."""

    engine: ContinuousBatching
    number: int  # of the next request

    @initialize(
        block_size=st.integers(1, 6),
        usable=st.integers(4, 30) | st.integers(4, 14),
        host_blocks=st.sampled_from([0, 3, 12, 100]),
        prefix_caching=st.booleans(),
        watermark=st.sampled_from([0.0, 0.0, 0.1]),
        policy=st.sampled_from([Fcfs, Priority]),
        victim=st.sampled_from(VICTIMS),
        recovery=st.sampled_from([Recompute, Swap, Auto]),
        leap=st.booleans(),
        knobs=st.fixed_dictionaries(
            {
                "max_num_seqs": st.integers(2, 9),
                "max_num_batched_tokens": st.integers(1, 40),
                "long_prefill_token_threshold": st.sampled_from([0, 0, 3]),
            }
        ),
    )
    def begin(
        self,
        block_size: int,
        usable: int,
        host_blocks: int,
        prefix_caching: bool,
        watermark: float,
        policy: type[Fcfs] | type[Priority],
        victim: Any,
        recovery: Any,
        leap: bool,
        knobs: dict[str, Any],
    ) -> None:
        self.number = 0
        if (
            policy is Priority and recovery is Recompute
        ):  # without a rule of its own, as vLLM: it reads what is not there
            victim = victim or LowestPriority
        self.memory = PagedMemory(usable + 1, block_size, watermark, prefix_caching, num_host_blocks=host_blocks)
        self.engine = ContinuousBatching(
            self.memory,
            LIMIT,
            policy(),
            victim=victim and victim(),
            recovery=recovery(),
            leap=leap,
            **knobs,
        )
        self.executor = Executor(self.engine)
        self.arrived = self.finished = self.generated = self.preemptions = self.wanted = 0

    @rule(
        data=st.data(),
        prompt=st.integers(1, LIMIT - 1),
        output=st.integers(1, LIMIT),
        priority=st.integers(0, 2),
        sampling=samplings,
        count=st.integers(1, 4),
    )
    def requests_arrive(
        self, data: st.DataObject, prompt: int, output: int, priority: int, sampling: Sampling | None, count: int
    ) -> None:
        for _ in range(count):
            number, common = self.number, data.draw(st.integers(0, prompt))
            self.number += 1
            content = {
                "length": None,
                "tokens": TokenIds(tuple(j if j < common else 1000 * number + j for j in range(prompt))),
                "told": TokenIds(tuple(j if j < common else 1000 * number + j for j in range(prompt + output))),
                "hashes": HashIds(tuple(j if j < common else 1000 * number + j for j in range(prompt)), 1),
            }[data.draw(st.sampled_from(["length", "tokens", "told", "hashes"]))]
            request = Request(number, float(number), prompt, output, priority, content, sampling)
            _, reason = self.engine.arrive(request)
            if reason is None:
                self.arrived += 1
                self.wanted += request.num_outputs * min(output, LIMIT - prompt)

    @rule(count=st.integers(1, 8))
    def steps_pass(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        if self.engine.idle:
            return
        plan = self.engine.schedule()
        assert plan.work.num_tokens or plan.preemptions
        assert len(plan.copies) == sum(blocks for _, blocks in plan.copied)
        assert len(plan.swap_ins) == sum(blocks for _, blocks in plan.returned)
        swapped = [event for event in plan.preemptions if event.recovery == "swap"]
        assert len(plan.swap_outs) == sum(event.blocks for event in swapped)
        assert not (plan.preemptions and (plan.admitted or plan.resumed or plan.returned))
        self.preemptions += len(plan.preemptions)
        self.audit()
        self.executor.execute(plan)
        finished = self.engine.commit(plan)
        self.executor.committed(finished)
        self.finished += len(finished)
        self.generated += sum(first.generated_in_all for first in finished)
        self.audit()

    def audit(self) -> None:
        engine, memory = self.engine, self.memory
        audit_paged(memory, list(engine.running), engine.waiting.head() if engine.waiting else None)
        waiting = [one for first in engine.waiting for one in first.together]
        assert not any(sequence.blocks for sequence in waiting)
        on_host = {block for one in waiting if memory.is_swapped(one) for block in memory.host_table(one)}
        assert len(on_host) == memory.host.num_blocks - memory.host.num_free
        seats = len(engine.running) + sum(
            one.group.width - 1 for one in engine.running if one.group and not one.group.forked
        )
        assert seats <= engine.max_num_seqs

    def teardown(self) -> None:
        if not hasattr(self, "executor"):
            return
        for _ in range(ENOUGH_STEPS):
            if self.engine.idle:
                break
            self.step()
        assert self.engine.idle, self.engine.explain_stall()
        assert (self.finished, self.generated) == (self.arrived, self.wanted)
        occupancy = self.memory.occupancy(None)
        assert occupancy.idle + occupancy.cached == self.memory.num_slots
        assert self.memory.host.num_free == self.memory.host.num_blocks
        event(f"copies: {'some' if self.executor.copies else 'none'}")
        event(f"swaps: {'some' if self.executor.swaps else 'none'}")
        event(f"preemptions: {min(self.preemptions, 3)}")


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=250, stateful_step_count=20, deadline=None)
