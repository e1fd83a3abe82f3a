"""Swapping out and in, the link that carries it, and who is chosen to go.

Blocks of the device are numbered from 1, those of the host from 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import simpy

from sim.engine import Arrivals, Engine
from sim.hardware import Deployment, Hardware
from sim.kv_layout import ModelSpec, host_blocks
from sim.link import Free, Link, PCIe
from sim.memory.host import HostPool
from sim.memory.paged import PagedMemory
from sim.plan import Preemption, StepPlan
from sim.recorder import Recorder
from sim.scheduler.continuous import ContinuousBatching
from sim.scheduler.queues import Fcfs
from sim.scheduler.recovery import Auto, Recompute, Swap
from sim.scheduler.victims import FewestOutputTokens, Latest, LongestRemaining, LowestPriority, MostBlocks
from sim.sequence import Sequence
from sim.timing.constant import Constant
from workloads.errors import UserError
from workloads.request import Request
from workloads.sampling import ParallelSampling, Sampling

MODEL = ModelSpec("toy", 3, 64, 4, 2, 16, 128, 1000, 2048)  # KV of a token: 3 layers * 2 * 2 heads * 16 * 2 bytes = 384
GPU = Hardware("toy", 1 << 30, 1e12, 1e12, 1e12, host_bandwidth=1e6)


def scheduler(usable: int, block_size: int = 1, host: int = 100, **knobs: Any) -> ContinuousBatching:
    memory = PagedMemory(usable + 1, block_size, prefix_caching=False, num_host_blocks=host)
    return ContinuousBatching(memory, 64, Fcfs(), **{"recovery": Swap(), **knobs})


def arrive(
    engine: ContinuousBatching,
    number: int,
    prompt: int,
    output: int,
    priority: int = 0,
    sampling: Sampling | None = None,
) -> Sequence:
    first, reason = engine.arrive(Request(number, float(number), prompt, output, priority, sampling=sampling))
    assert reason is None
    return first


def step(engine: ContinuousBatching) -> tuple[StepPlan, list[Sequence]]:
    plan = engine.schedule()
    return plan, engine.commit(plan)


def ids(sequences: Any) -> list[int]:
    return [sequence.request.request_id for sequence in sequences]


# ----------------------------------------------------------------------------------------------------- out and in again


def test_a_victim_keeps_its_tokens_on_the_host_and_goes_on_where_it_stopped() -> None:
    # 5 blocks of 1: A stores 2 tokens, B 2. In the second step A takes the fifth block, and B, the last, has to go with
    # the 2 it has computed. A, 2 + 2, ends in that step and frees 1, 2 and 5, of which 5 is handed out first. Then B
    # comes back and computes its third token: its 2 prompt tokens are not computed again.
    engine = scheduler(usable=5)
    a, b = arrive(engine, 0, 2, 2), arrive(engine, 1, 2, 3)
    step(engine)
    assert (list(a.blocks), list(b.blocks)) == ([1, 2], [3, 4])
    plan, finished = step(engine)
    assert plan.swap_outs == ((3, 0), (4, 1))
    (event,) = plan.preemptions
    assert (event.victim, event.because, event.recovery, event.blocks, event.tokens) == (b, b, "swap", 2, 2)
    assert (ids(finished), b.computed, b.generated, list(b.blocks)) == ([0], 2, 1, [])
    assert ids(engine.waiting) == [1]
    plan, _ = step(engine)
    assert (plan.swap_ins, plan.returned) == (((0, 5), (1, 2)), ((b, 2),))
    assert [(one.request.request_id, tokens) for one, tokens in plan.batch] == [(1, 1)]
    assert not engine.waiting


def test_a_block_that_two_outputs_share_goes_to_the_host_once_and_is_shared_again() -> None:
    # Blocks of 2. A, 2 + 6, holds 1; B, two outputs of a prompt of 3, holds 2 and 3 and then copies 3. When A needs
    # room B goes with 3 blocks for 2 * 4 tokens: 2 of the prompt once, 2 of each. It comes back the same.
    engine = scheduler(usable=5, block_size=2)
    arrive(engine, 0, 2, 6)
    b = arrive(engine, 1, 3, 4, sampling=ParallelSampling(2))
    step(engine)
    step(engine)
    assert [list(one.blocks) for one in b.together] == [[2, 5], [2, 3]]  # A took 4 before
    plan, _ = step(engine)
    assert plan.swap_outs == ((2, 0), (5, 1), (3, 2))
    (event,) = plan.preemptions
    assert (event.blocks, event.tokens) == (3, 2 + 2 * 2)
    plans = []
    while engine.waiting:
        plans.append(step(engine)[0])
    back = plans[-1]
    assert len(back.swap_ins) == 3 and len(back.batch) == 2
    tables = [list(one.blocks) for one in b.together]
    assert tables[0][0] == tables[1][0] and tables[0][1] != tables[1][1]
    assert engine.memory.occupancy(None).saved == 2


def test_nobody_new_is_admitted_while_somebody_is_swapped_out() -> None:
    # 6 blocks of 1. A, 2 + 5, pushes B, 3 + 4, out in the second step. C, one token, would fit at once, but B is before
    # it; B needs 3 blocks and one more.
    engine = scheduler(usable=6)
    arrive(engine, 0, 2, 5)
    arrive(engine, 1, 3, 4)
    step(engine)
    assert step(engine)[0].swap_outs
    arrive(engine, 2, 1, 1)
    plan, _ = step(engine)
    assert (engine.memory.num_free_blocks, ids(plan.admitted), ids(engine.waiting)) == (2, [], [1, 2])


def test_a_full_host_pool_falls_back_to_recompute() -> None:
    # The case of the first test with one host block for B's two.
    engine = scheduler(usable=5, host=1)
    arrive(engine, 0, 2, 2)
    b = arrive(engine, 1, 2, 3)
    step(engine)
    plan, _ = step(engine)
    (event,) = plan.preemptions
    assert (event.recovery, event.tokens, plan.swap_outs, b.computed) == ("recompute", 2, (), 0)
    plan, _ = step(engine)
    assert (ids(plan.resumed), plan.swap_ins, plan.batch) == ([1], (), [(b, 3)])


@pytest.mark.parametrize(("outputs", "recovery"), [(1, "recompute"), (2, "swap")])
def test_auto_swaps_several_sequences_and_computes_one_again(outputs: int, recovery: str) -> None:
    # 6 blocks of 1 are full when the last request wants more: A's two tokens and B's three or four.
    engine = scheduler(usable=6, recovery=Auto())
    arrive(engine, 0, 2, 4)
    arrive(engine, 1, 2, 3, sampling=ParallelSampling(outputs))
    events: list[Preemption] = []
    while not events:
        events = step(engine)[0].preemptions
    assert [(event.victim.request.request_id, event.recovery) for event in events] == [(1, recovery)]


def test_only_what_is_computed_is_swapped_not_what_the_plan_had_given() -> None:
    # 7 blocks of 1, the victim is who holds most. A holds 3 and takes a fourth, B holds 3 and finds none: A goes with
    # the three that are written, and B takes the block that A was given.
    engine = scheduler(usable=7, victim=MostBlocks())
    a, b = arrive(engine, 0, 3, 3), arrive(engine, 1, 3, 3)
    step(engine)
    plan, _ = step(engine)
    assert plan.swap_outs == ((1, 0), (2, 1), (3, 2))
    assert [(one.request.request_id, tokens) for one, tokens in plan.batch] == [(1, 1)]
    assert (a.computed, list(b.blocks)[:3]) == (3, [4, 5, 6])


# ----------------------------------------------------------------------------------------------------------- the victim


@pytest.mark.parametrize(
    ("victim", "expected"),
    [(Latest(), 3), (LowestPriority(), 1), (FewestOutputTokens(), 2), (MostBlocks(), 0), (LongestRemaining(), 1)],
)
def test_each_rule_names_its_victim(victim: Any, expected: int) -> None:
    # number: prompt, output, priority. Blocks of 1, so a request holds as many as it has computed.
    engine = ContinuousBatching(PagedMemory(101, 1, prefix_caching=False), 64, Fcfs())
    arrive(engine, 0, 12, 8)
    step(engine)
    arrive(engine, 1, 3, 30, priority=5)
    step(engine)
    arrive(engine, 2, 6, 8)
    arrive(engine, 3, 2, 9)
    step(engine)
    # Generated: 3, 2, 1, 1; of the last two the longer prompt goes. Stored: 14, 4, 6, 2. Left: 5, 28, 7, 8.
    assert victim.victim(engine.running).request.request_id == expected


def test_a_shared_block_counts_once_among_most_blocks_and_tokens_of_all_outputs_count() -> None:
    # A: three outputs of a prompt of 6 in blocks of 2, which share 3 blocks. B holds 4. A has 3 tokens, B one.
    engine = ContinuousBatching(PagedMemory(101, 2, prefix_caching=False), 64, Fcfs())
    a = arrive(engine, 0, 6, 4, sampling=ParallelSampling(3))
    b = arrive(engine, 1, 8, 10)
    step(engine)
    assert MostBlocks().victim(engine.running) is b
    assert FewestOutputTokens().victim(engine.running) is b
    # A has 3 * 3 left, B 9: the later one goes.
    assert LongestRemaining().victim(engine.running) is b
    assert LowestPriority().victim(engine.running) is b
    assert a.group is not None and Latest().victim(engine.running) is b


# ------------------------------------------------------------------------------------------------------------- the link


def test_a_swap_costs_a_latency_for_each_layers_keys_and_values_besides_its_bytes() -> None:
    # A block of 4 tokens has 4 * 384 = 1536 bytes and 3 layers * 2 pieces. At half of 1e6 bytes/s that is 3.072 ms and
    # 6 * 0.1 ms: 5 blocks take 5 * 3.672 = 18.36 ms; in one piece each, 5 * (3.072 + 0.1) = 15.86 ms.
    options: dict[str, Any] = {"latency": 1e-4, "efficiency": 0.5}
    by_layer = PCIe(MODEL, GPU, Deployment(), 4, layout="layer", **options)
    whole = PCIe(MODEL, GPU, Deployment(), 4, layout="block", **options)
    given = PCIe(MODEL, GPU, Deployment(), 4, layout="layer", transfers_per_block=2, **options)
    assert (by_layer.transfers_per_block, whole.transfers_per_block, by_layer.block_bytes) == (6, 1, 1536)
    assert by_layer.seconds(5) == pytest.approx(18.36e-3)
    assert whole.seconds(5) == pytest.approx(15.86e-3)
    assert given.seconds(1) == pytest.approx(3.272e-3)
    assert Free().seconds(1000) == 0


def test_every_gpu_moves_its_own_share_over_a_link_of_its_own() -> None:
    # Two GPUs hold one KV head each: half the bytes, as many pieces. Two stages of 3 layers hold 2 and 1 (or 1 and 2).
    options: dict[str, Any] = {"latency": 1e-4, "efficiency": 1.0, "layout": "layer"}
    halves = PCIe(MODEL, GPU, Deployment(tensor_parallel=2), 4, **options)
    staged = PCIe(MODEL, GPU, Deployment(pipeline_parallel=2), 4, **options)
    assert (halves.block_bytes, halves.transfers_per_block) == (768, 6)
    assert (staged.block_bytes, staged.transfers_per_block) == (1024, 4)


def test_swapping_the_same_tokens_is_dear_in_small_blocks_and_recompute_does_not_care() -> None:
    # Kwon et al., Fig. 19. 1024 tokens of 384 bytes in blocks of s: 1024 / s * 6 transfers. The bytes are the same.
    def price(size: int) -> float:
        return PCIe(MODEL, GPU, Deployment(), size, latency=1e-3, efficiency=1.0, layout="layer").seconds(1024 // size)

    prices = [price(size) for size in (1, 2, 4, 8, 16, 32, 64)]
    assert prices == sorted(prices, reverse=True)
    latencies = [value - 1024 * 384 / 1e6 for value in prices]
    assert latencies == pytest.approx([6.144 / 2**k for k in range(7)])


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"latency": -1.0}, "link.latency is -1.0; expected a number of seconds, 0 or more."),
        ({"efficiency": 0.0}, "link.efficiency is 0.0; expected a share above 0 and at most 1."),
        ({"transfers_per_block": 0}, "link.transfers_per_block is 0; expected at least 1, or null."),
    ],
)
def test_a_link_out_of_range_is_one_clear_line(change: dict[str, Any], line: str) -> None:
    options = {"latency": 0.0, "efficiency": 1.0, "layout": "block", **change}
    with pytest.raises(UserError) as error:
        PCIe(MODEL, GPU, Deployment(), 4, **options)
    assert str(error.value) == line


def test_hardware_without_a_host_link_says_which_option_is_missing() -> None:
    gpu = Hardware("bare", 1, 1.0, 1.0, 1.0)
    with pytest.raises(UserError, match="hardware bare has no host_bandwidth; give it as"):
        PCIe(MODEL, gpu, Deployment(), 4, latency=0.0, efficiency=1.0, layout="block")


class ThreeSeconds:
    def seconds(self, num_blocks: int) -> float:
        return 3.0 * num_blocks


def test_swaps_queue_at_the_link() -> None:
    # Both ask at 1 s, for 2 blocks and for 1: the second waits 6 s for the first and takes 3.
    env = simpy.Environment()
    link, took = Link(env, ThreeSeconds()), []

    def swap(blocks: int) -> Any:
        yield env.timeout(1)
        took.append((blocks, (yield from link.move(blocks)), env.now))

    env.process(swap(2))
    env.process(swap(1))
    env.run()
    assert took == [(2, 6.0, 7.0), (1, 9.0, 10.0)]


def test_swap_space_is_counted_in_blocks_of_one_gpu() -> None:
    # 1 GiB over 16 * 384 bytes = 174,762 blocks and a rest; two GPUs hold half a block each, so twice as many.
    assert host_blocks(MODEL, Deployment(), 16, 1.0) == (1 << 30) // 6144 == 174_762
    assert host_blocks(MODEL, Deployment(tensor_parallel=2), 16, 1.0) == (1 << 30) // 3072
    with pytest.raises(UserError, match=r"memory\.swap_space is -1\.0"):
        host_blocks(MODEL, Deployment(), 16, -1.0)


def test_host_blocks_are_handed_out_in_order_and_the_last_freed_first() -> None:
    pool = HostPool(4)
    assert pool.take(3) == [0, 1, 2]
    pool.give_back([0, 1])
    assert (pool.take(3), pool.num_free) == ([1, 0, 3], 0)
    with pytest.raises(UserError, match=r"memory\.num_host_blocks is -1"):
        HostPool(-1)


# ------------------------------------------------------------------------------------------------------ tables of a run


def run(engine: ContinuousBatching, requests: list[Request], folder: Path) -> dict[str, Any]:
    """Steps of 1 s, a swap of 3 s a block."""
    recorder = Recorder(folder, engine.memory.num_slots, engine.memory.block_size)
    recorder.metrics.block_bytes = 10
    env = simpy.Environment()
    server = Engine(
        env, Arrivals(iter(requests)), engine, Constant(1.0), recorder, lambda *_: None, Link(env, ThreeSeconds())
    )
    env.process(server.serve())
    env.run()
    return recorder.close("complete", {})


def rows(folder: Path, table: str) -> list[dict[str, Any]]:
    return pq.read_table(folder / f"{table}.parquet").to_pylist()  # type: ignore[no-any-return]


def test_a_step_starts_when_its_swaps_are_done_and_the_tables_say_what_moved(tmp_path: Path) -> None:
    # The first case above. Step 0 from 0 to 1 s. Step 1 moves 2 blocks out, 6 s, and computes 1 s: A is done at 8 s.
    # Step 2 moves them back, 6 s, and ends at 15 s; step 3 gives B its last token at 16 s.
    summary = run(scheduler(usable=5), [Request(0, 0.0, 2, 2), Request(1, 0.0, 2, 3)], tmp_path)
    assert [(row["start_s"], row["duration_s"]) for row in rows(tmp_path, "steps")] == [(0, 1), (1, 7), (8, 7), (15, 1)]
    assert [row["finish_s"] for row in rows(tmp_path, "requests")] == [8, 16]
    columns = ("time_s", "step", "event", "request_id", "cause", "because_of", "blocks", "tokens")
    assert [tuple(row[name] for name in columns) for row in rows(tmp_path, "events")] == [
        (1, 1, "preemption", 1, "itself", 1, 2, 0),
        (1, 1, "swap_out", 1, "itself", 1, 2, 2),
        (8, 2, "swap_in", 1, "room again", None, 2, 0),
    ]
    figures = ("preemptions", "tokens_recomputed", "swap_outs", "swap_ins", "swapped_out_bytes", "swapped_in_bytes")
    assert [summary[name] for name in figures] == [1, 0, 1, 1, 20, 20]
    assert summary["swap_s"] == 12
    assert (rows(tmp_path, "requests")[1]["preemptions"], summary["duration"]) == (1, 16)


def test_a_request_with_several_outputs_is_one_row_and_its_copies_are_events(tmp_path: Path) -> None:
    # Three outputs of 5 tokens of a prompt of 20 in blocks of 16, steps of 1 s: first token at 1 s, the last at 5 s.
    engine = scheduler(usable=10, block_size=16, recovery=Recompute())
    summary = run(engine, [Request(0, 0.0, 20, 5, sampling=ParallelSampling(3))], tmp_path)
    (row,) = rows(tmp_path, "requests")
    assert (row["first_token_s"], row["finish_s"], row["output_tokens"], row["generated_tokens"]) == (1, 5, 5, 15)
    (event,) = rows(tmp_path, "events")
    assert (event["time_s"], event["event"], event["request_id"], event["blocks"]) == (1, "copy", 0, 2)
    assert (summary["total_output_tokens"], summary["completed"], summary["cut_off"]) == (15, 1, 0)
    assert (summary["blocks_copied"], summary["copied_bytes"]) == (2, 20)
    assert (summary["mean_tpot_ms"], summary["mean_itl_ms"], summary["max_running"]) == (1000, 1000, 3)
    # Step 0 holds 2 blocks, alone. In the other four 4 are held and 2 saved: over time 8 of (2 + 4 * 4) + 8.
    assert summary["saved_by_sharing"] == pytest.approx(8 / 26)
