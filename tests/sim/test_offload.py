"""TensorRT-LLM's priorities of eviction and its host cache.

Blocks hold 2 tokens. Those of the device are numbered from 0, and so are those of the host.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import simpy
from hypothesis import event, given, settings
from hypothesis import strategies as st
from kv_executor import Executor
from pool_audit import audit_paged
from test_leap import assert_same, observed, workloads

from sim.cli import main
from sim.engine import Arrivals, Engine
from sim.link import Link
from sim.memory.eviction import LeastRecentlyUsed, LowestPriorityLeaf
from sim.memory.host_cache import HostCache
from sim.memory.offload import OffloadingMemory
from sim.memory.paged import PagedMemory
from sim.memory.prefix import PrefixCache
from sim.recorder import Record, Recorder
from sim.scheduler.base import Scheduler
from sim.scheduler.continuous import ContinuousBatching
from sim.scheduler.no_evict import GuaranteedNoEvict
from sim.scheduler.prefill_first import PrefillFirst
from sim.scheduler.queues import Fcfs, Priority
from sim.scheduler.recovery import Auto, Recompute, Swap
from sim.scheduler.victims import FewestOutputTokens
from sim.sequence import Sequence
from sim.timing.constant import Constant
from workloads.errors import UserError
from workloads.request import Request, TokenIds
from workloads.sampling import ParallelSampling

LIMIT = 64
ENOUGH_STEPS = 20_000


def told(prompt: int, *ids: int, request_id: int = 0) -> Sequence:
    """A request whose first `prompt` tokens are the prompt; the others are its output, and one more ends it."""
    return Sequence.of(Request(request_id, 0.0, prompt, len(ids) - prompt + 1, prompt=TokenIds(ids)), LIMIT)


def untold(prompt: int) -> Sequence:
    """A request of which nobody knows what it says."""
    return Sequence.of(Request(99, 0.0, prompt, 1), LIMIT)


def let_in(memory: PagedMemory, newcomer: Sequence) -> list[int]:
    """Computes all tokens but the last one at once; returns the hit."""
    hit = memory.lookup(newcomer)
    prompt = newcomer.known
    assert memory.admit(newcomer, hit, prompt, prompt, others_run=False)
    newcomer.computed = prompt
    while newcomer.known < newcomer.final:
        newcomer.known += 1
        if newcomer.known < newcomer.final:
            assert memory.grow(newcomer, newcomer.computed + 1)
            newcomer.computed += 1
    return hit


def pool(blocks: int, prompt: int = 35, output: int = 35, host: int = 0, least: int = 35) -> OffloadingMemory:
    return OffloadingMemory(
        blocks,
        2,
        prompt_priority=prompt,
        output_priority=output,
        num_host_cache_blocks=host,
        secondary_offload_min_priority=least,
    )


def evictable(memory: PagedMemory) -> list[int]:
    assert memory.prefix is not None
    return list(memory.prefix.evictable())


# ----------------------------------------------------------------------------------------------- which block goes first


@pytest.mark.parametrize(
    ("prompt", "output", "order"),
    [
        (35, 35, [1, 0, 3, 2, 4]),  # who was given up first, from the end of its table
        (80, 20, [1, 3, 0, 2, 4]),  # all outputs before any prompt
        (20, 80, [4, 1, 0, 3, 2]),  # C's prompt; those of A and B have to wait until what follows them has gone
    ],
)
def test_of_three_requests_the_leaf_of_lowest_priority_goes_first(prompt: int, output: int, order: list[int]) -> None:
    # A holds 0 (prompt) and 1 (output), B 2 and 3, C only 4 (prompt). They end in that order.
    memory = pool(6, prompt, output)
    sequences = [told(2, 1, 2, 3, 4), told(2, 5, 6, 7, 8), told(2, 9, 10)]
    for one in sequences:
        let_in(memory, one)
    assert [list(one.blocks) for one in sequences] == [[0, 1], [2, 3], [4]]
    for one in sequences:
        memory.release(one)
    assert evictable(memory) == order
    # Those that are taken in turn are those that were foretold; 5 is free before all of them.
    taker = untold(12)
    let_in(memory, taker)
    assert list(taker.blocks) == [5, *order]


def test_a_shared_parent_waits_for_all_that_follow_it() -> None:
    # A and B begin with block 0, worth 20 like C's prompt, 3. Their outputs, 1 and 2, are worth 80 and follow it. B is
    # one that has said a token already, so that its whole prompt can be hit.
    memory = pool(5, prompt=20, output=80)
    a, b, c = told(2, 1, 2, 3, 4), told(2, 1, 2, 5, 6), told(2, 7, 8)
    b.known = 3
    let_in(memory, a)
    assert let_in(memory, b) == [0]
    let_in(memory, c)
    for one in (a, b, c):
        memory.release(one)
    assert evictable(memory) == [3, 1, 2, 0]


def test_a_block_that_begins_in_the_prompt_is_the_prompts() -> None:
    # As before, but 1 and 2 begin with the third token of a prompt of 3: all are worth 20, and go by their age.
    memory = pool(5, prompt=20, output=80)
    sequences = [told(3, 1, 2, 3, 4), told(3, 1, 2, 5, 6), told(2, 7, 8)]
    for one in sequences:
        let_in(memory, one)
    assert [list(one.blocks) for one in sequences] == [[0, 1], [0, 2], [3]]
    for one in sequences:
        memory.release(one)
    assert evictable(memory) == [1, 2, 0, 3]


def test_a_block_that_is_hit_again_gets_the_priority_of_its_new_place() -> None:
    # Block 1 is A's output, 20, and then the end of B's prompt, 80: C's output, 3, goes before it, and B's own, 2.
    memory = pool(5, prompt=80, output=20)
    a, b, c = told(2, 1, 2, 3, 4), told(5, 1, 2, 3, 4, 5, 6), told(2, 7, 8, 9, 10)
    let_in(memory, a)
    memory.release(a)
    assert let_in(memory, b) == [0, 1]
    let_in(memory, c)
    memory.release(b)
    memory.release(c)
    # B's third block, 2, begins in its prompt: 80. So does everything but C's output, 4.
    assert evictable(memory) == [4, 2, 1, 0, 3]


@settings(max_examples=60, deadline=None)
@given(workloads(), st.integers(8, 40), st.sampled_from([1, 2, 4]), st.booleans())
def test_leaves_of_equal_priority_are_the_least_recently_used(requests, num_blocks, size, leap):
    runs = []
    for order in (LeastRecentlyUsed(), LowestPriorityLeaf(size, 35, 35)):
        memory = PagedMemory(num_blocks, size)
        memory.prefix = PrefixCache(size, memory.holders, order)
        engine = ContinuousBatching(memory, LIMIT, Fcfs(), 8, leap=leap)
        runs.append(observed(memory, engine, requests, Record()))
    assert_same(*runs)


# ------------------------------------------------------------------------------------------------------ the host's part


def test_what_is_evicted_is_found_on_the_host_and_comes_back() -> None:
    # A leaves 1 and 0, in this order. B takes 2 and then 1, which moves to the host.
    memory = pool(3, host=2)
    a, b = told(4, 1, 2, 3, 4), untold(4)
    let_in(memory, a)
    memory.release(a)
    assert memory.take_moves() == ((), (), ())
    let_in(memory, b)
    assert list(b.blocks) == [2, 1]
    assert memory.take_moves() == (((1, 0),), (), ())
    memory.release(b)
    # C begins as A did: 0 is on the device and host block 0 goes on. Its own two blocks are 1 and 2, which B leaves in
    # this order; both move to the host, where 0 is being read: the second takes the place of the first.
    c = told(5, 1, 2, 3, 4, 5)
    assert let_in(memory, c) == [0, ~0]
    assert list(c.blocks) == [0, 1, 2]
    assert memory.take_moves() == (((2, 1),), ((0, 1),), ((c, 1),))
    # Now 0 is free again. A prompt that goes on where C's does finds all on the device.
    assert memory.lookup(told(5, 1, 2, 3, 4, 6)) == [0, 1]
    memory.release(c)
    let_in(memory, untold(2))
    assert memory.take_moves()[0] == ()  # 2 was not full and carries no key


def test_a_hit_on_the_host_needs_a_block_of_the_device() -> None:
    # 1 is on the host, as above. B stays and holds 2 and 1, so that only A's 0 is free: C needs 2 blocks besides.
    memory = pool(3, host=2)
    a, b, c = told(4, 1, 2, 3, 4), untold(4), told(5, 1, 2, 3, 4, 5)
    let_in(memory, a)
    memory.release(a)
    let_in(memory, b)
    memory.take_moves()
    assert memory.host_cache is not None
    before = memory.host_cache.contents()
    assert not memory.admit(c, memory.lookup(c), 5, 5, others_run=True)
    assert (memory.host_cache.contents(), memory.take_moves()) == (before, ((), (), ()))
    assert memory.lookup(c) == [0, ~0]


@pytest.mark.parametrize(("least", "moved"), [(20, ((1, 0), (0, 1))), (21, ((1, 0),)), (81, ())])
def test_what_is_worth_too_little_is_lost_instead(least: int, moved: tuple[tuple[int, int], ...]) -> None:
    # A's output, 1, is worth 80, and goes first, for it is followed by nothing; then its prompt, 0, worth 20.
    memory = pool(2, prompt=20, output=80, host=4, least=least)
    a = told(2, 1, 2, 3, 4)
    let_in(memory, a)
    memory.release(a)
    let_in(memory, untold(4))
    assert memory.take_moves()[0] == moved


def test_what_is_computed_anew_is_dropped_from_the_host() -> None:
    # Both blocks of A are on the host. A prompt that ends with the second must compute it: a token has to be left.
    memory = pool(2, host=4)
    a, b = told(4, 1, 2, 3, 4), untold(4)
    let_in(memory, a)
    memory.release(a)
    let_in(memory, b)
    assert memory.take_moves()[0] == ((1, 0), (0, 1))
    memory.release(b)
    again = told(4, 1, 2, 3, 4)
    assert let_in(memory, again) == [~1]
    outs, ins, _ = memory.take_moves()
    assert ins == ((1, again.blocks[0]),)
    # Host block 0, dropped, is used again at once, by one of B's; 1 is being read.
    assert memory.host_cache is not None
    assert [block for _, block in outs] == [0, 2] and len(memory.host_cache) == 2


def test_the_host_drops_what_came_first() -> None:
    cache = HostCache(2)
    cache.store(7, "a")
    cache.store(8, "b")
    assert cache.take_moves() == (((7, 0), (8, 1)), ())
    cache.store(9, "c")
    assert cache.contents() == {"b": 1, "c": 0}
    assert cache.find(["b", "a", "c"]) == [1]
    cache.claim([1])
    cache.bring_back([1], [7])
    assert cache.awaited(7) and not cache.awaited(5)
    cache.store(5, "d")  # 1 is being read; c makes room, which was to be written in this plan
    assert cache.contents() == {"d": 0}
    assert cache.take_moves() == (((5, 0),), ((1, 7),))
    cache.store(6, "e")
    assert cache.take_moves() == (((6, 1),), ())


class ThreeSeconds:
    """A block takes 3 s."""

    def seconds(self, num_blocks: int) -> float:
        return 3.0 * num_blocks


def run(engine: Scheduler, requests: list[Request], folder: Path) -> dict[str, Any]:
    """Steps of 1 s, a block on the link 3 s."""
    recorder = Recorder(folder, engine.memory.num_slots, engine.memory.block_size)
    recorder.metrics.block_bytes = 10
    env = simpy.Environment()
    server = Engine(
        env, Arrivals(iter(requests)), engine, Constant(1.0), recorder, lambda *_: None, Link(env, ThreeSeconds())
    )
    env.process(server.serve())
    env.run()
    return recorder.close("complete", {})


def test_a_hit_on_the_host_costs_its_transfer_and_the_summary_says_so(tmp_path: Path) -> None:
    # The first case above, one after the other. A: 0 to 1 s. B: one block moves out, 2 to 2 + 3 + 1 s. C: one out, one
    # back, and one token to compute: 10 to 10 + 6 + 1 s, of which the first token is there at the end.
    a = Request(0, 0.0, 4, 1, prompt=TokenIds((1, 2, 3, 4)))
    b = Request(1, 2.0, 4, 1)
    c = Request(2, 10.0, 5, 1, prompt=TokenIds((1, 2, 3, 4, 5)))
    summary = run(ContinuousBatching(pool(3, host=2), LIMIT, Fcfs(), leap=True), [a, b, c], tmp_path)
    assert (summary["duration"], summary["swap_s"], summary["scheduled_tokens"]) == (17, 9, 4 + 4 + 1)
    assert (summary["prefix_hit_tokens"], summary["host_hit_tokens"]) == (4, 2)
    assert (summary["offloaded_bytes"], summary["onboarded_bytes"]) == (20, 10)
    assert (summary["swap_outs"], summary["swapped_out_bytes"], summary["preemptions"]) == (0, 0, 0)


# ----------------------------------------------------------------------------------------------------------------- laws


@st.composite
def memories(draw: st.DrawFn, smallest: int = 6) -> dict[str, Any]:
    prompt, output = draw(st.sampled_from([(35, 35), (35, 35), (20, 80), (80, 20)]))
    return {
        "num_blocks": draw(st.integers(smallest, 40)),
        "block_size": draw(st.sampled_from([1, 2, 4, 8])),
        "num_reserved_blocks": draw(st.integers(0, 1)),
        "prompt_priority": prompt,
        "output_priority": output,
        "num_host_cache_blocks": draw(st.sampled_from([1, 2, 5, 30, 1000])),
        "secondary_offload_min_priority": draw(st.sampled_from([0, 35, 35, 70])),
    }


def continuous(memory: PagedMemory, leap: bool) -> Scheduler:
    return ContinuousBatching(memory, LIMIT, Fcfs(), 8, 64, leap=leap)


def in_small_chunks(memory: PagedMemory, leap: bool) -> Scheduler:
    return ContinuousBatching(memory, LIMIT, Fcfs(), 5, 11, leap=leap)


def ahead(memory: PagedMemory, leap: bool) -> Scheduler:
    return ContinuousBatching(memory, LIMIT, Fcfs(), 8, 64, leap=leap, async_scheduling=True)


def by_priority(memory: PagedMemory, leap: bool) -> Scheduler:
    return ContinuousBatching(memory, LIMIT, Priority(), 8, 64, leap=leap)


def other_victims(memory: PagedMemory, leap: bool) -> Scheduler:
    return ContinuousBatching(memory, LIMIT, Fcfs(), 8, 64, leap=leap, victim=FewestOutputTokens())


def no_evict(memory: PagedMemory, leap: bool) -> Scheduler:
    return GuaranteedNoEvict(memory, LIMIT, Fcfs(), 8, 64, leap=leap)


def prefill_first(memory: PagedMemory, leap: bool) -> Scheduler:
    return PrefillFirst(memory, LIMIT, Recompute(), 8, leap=leap)


engines = st.sampled_from([continuous, in_small_chunks, ahead, by_priority, other_victims, no_evict, prefill_first])
several = st.lists(st.sampled_from([None, None, None, ParallelSampling(2)]), min_size=24, max_size=24)


@settings(max_examples=120, deadline=None)
@given(workloads(), several, memories(), engines)
def test_everybody_reads_what_was_written_and_nothing_is_held_twice(requests, asked, memory, engine_of):
    pool_ = OffloadingMemory(**memory)
    engine = engine_of(pool_, leap=False)
    if engine_of is not no_evict:
        requests = [one._replace(sampling=sampling) for one, sampling in zip(requests, asked, strict=False)]
    cache, prefix = pool_.host_cache, pool_.prefix
    assert cache is not None and prefix is not None
    executor = Executor(engine)
    to_come, came_back = list(requests), 0
    for step in range(ENOUGH_STEPS):
        while to_come and to_come[0].arrival_s <= step * 0.2:
            engine.arrive(to_come.pop(0))
        if engine.idle:
            if not to_come:
                break
            continue
        plan = engine.schedule()
        executor.execute(plan)
        came_back += len(plan.swap_ins)
        for after in (False, True):
            if after:
                executor.committed(engine.commit(plan))
            leaving = [] if after else list(engine._leaving)
            live = [*engine.running, *leaving]
            audit_paged(pool_, live, engine.waiting.head() if engine.waiting else None)
            on_host = cache.contents()
            assert len(set(on_host.values())) == len(on_host) == len(cache) <= cache.num_blocks
            assert prefix._blocks_of.keys().isdisjoint(on_host)
    assert engine.idle
    occupancy = pool_.occupancy(None)
    assert occupancy.idle + occupancy.cached == pool_.num_slots
    event(f"came back from the host: {'some' if came_back else 'none'}")


@settings(max_examples=120, deadline=None)
@given(workloads(), memories(), engines, st.none() | st.integers(1, 8))
def test_a_run_with_a_host_cache_that_leaps_equals_one_that_steps(requests, memory, engine_of, concurrency):
    runs, hosts = [], []
    for leap in (True, False):
        pool_ = OffloadingMemory(**memory)
        runs.append(observed(pool_, engine_of(pool_, leap), requests, Record(), concurrency))
        assert pool_.host_cache is not None
        hosts.append(list(pool_.host_cache.contents().items()))
    assert_same(*runs)
    assert hosts[0] == hosts[1]


@settings(max_examples=60, deadline=None)
@given(workloads(), st.integers(1, 9), st.sampled_from([1, 2, 4]), st.sampled_from([(35, 35), (20, 80), (80, 20)]))
def test_with_room_on_the_host_for_all_the_hits_are_those_of_an_unbounded_pool(requests, spare, size, priorities):
    # One request of at most 60 tokens at a time, which fits. What was ever computed is on the device or on the host.
    hits = []
    for memory in (
        OffloadingMemory(
            60 // size + spare,
            size,
            prompt_priority=priorities[0],
            output_priority=priorities[1],
            num_host_cache_blocks=5000,
            secondary_offload_min_priority=0,
        ),
        PagedMemory(5000, size),
    ):
        engine = ContinuousBatching(memory, LIMIT, Fcfs(), max_num_seqs=1)
        rows = observed(memory, engine, requests, Record())["requests"]
        hits.append({row["request_id"]: row["hit_tokens"] for row in rows})
    assert hits[0] == hits[1]


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("recovery", [Swap(), Auto()])
def test_swapped_requests_and_a_host_cache_are_refused_together(recovery: Any) -> None:
    with pytest.raises(UserError, match=r"memory\.host_cache_size and swapped requests .*/recovery=recompute"):
        ContinuousBatching(pool(4, host=1), LIMIT, Fcfs(), recovery=recovery)
    ContinuousBatching(pool(4), LIMIT, Fcfs(), recovery=recovery)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_priority": 101}, r"memory\.prompt_priority is 101; expected a whole number from 0 to 100"),
        ({"output_priority": -1}, r"memory\.output_priority is -1"),
        ({"secondary_offload_min_priority": 200}, r"memory\.secondary_offload_min_priority is 200"),
        ({"num_host_cache_blocks": -1}, r"memory\.num_host_cache_blocks is -1"),
        ({"num_host_cache_blocks": 1, "prefix_caching": False}, r"of use to prefix caching only"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        OffloadingMemory(4, 2, **options)


# -------------------------------------------------------------------------------------------------------------- presets


@pytest.mark.parametrize("policy", ["no_evict", "max_utilization"])
def test_the_presets_take_a_host_cache_in_gib(simulate: Callable[..., Path], policy: str) -> None:
    # llama-3.1-8b: 131,072 bytes of KV a token, so 4 MiB a block of 32; 0.25 GiB are 64 blocks. Ten prefixes of
    # 256 tokens, each with prompts of its own behind it, in a pool of 3,200.
    options = ["workload=prefix_repetition", "workload.num_requests=40", "memory.num_blocks=100"]
    off, on = (
        json.loads(
            (simulate(f"engine=tensorrt_llm_{policy}", *options, *more) / "summary.json").read_text(encoding="utf-8")
        )
        for more in ([], ["memory.host_cache_size=0.25"])
    )
    assert (off["completed"], on["completed"]) == (40, 40)
    assert off["host_hit_tokens"] == off["offloaded_bytes"] == off["onboarded_bytes"] == off["swap_s"] == 0
    assert on["offloaded_bytes"] > 0 and on["swap_s"] > 0
    assert on["offloaded_bytes"] % (32 * 131_072) == on["onboarded_bytes"] % (32 * 131_072) == 0


def test_other_memories_have_no_host_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "engine=vllm_v1", "+memory.host_cache_size=1", f"hydra.run.dir={tmp_path}"]) == 2
    assert "memory.host_cache_size is not an option of PagedMemory" in capsys.readouterr().err
