"""The scheduler, rule by rule; rule numbers are those of the vLLM conformance cases.

Requests are told apart by their id, in order of arrival from 0. Blocks are numbered from 1, the first to be handed out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import simpy

from sim.engine import Arrivals, Engine, NoProgress
from sim.memory.allocators.fit import FirstFit
from sim.memory.contiguous import ContiguousMemory
from sim.memory.paged import PagedMemory
from sim.memory.reservation import MaxReservation
from sim.plan import StepPlan, StepWork
from sim.recorder import Recorder
from sim.scheduler.continuous import ContinuousBatching
from sim.scheduler.queues import Fcfs, Priority
from sim.sequence import Sequence
from sim.timing.constant import Constant
from workloads.errors import UserError
from workloads.request import Request, TokenIds

AMPLE = 100  # blocks, more than any test here fills


def scheduler(
    usable: int = AMPLE,
    block_size: int = 1,
    policy: type[Fcfs] | type[Priority] = Fcfs,
    prefix_caching: bool = False,
    max_model_len: int = 64,
    **knobs: Any,
) -> ContinuousBatching:
    memory = PagedMemory(usable + 1, block_size, prefix_caching=prefix_caching)
    return ContinuousBatching(memory, max_model_len, policy(), **knobs)


def arrive(
    engine: ContinuousBatching,
    request_id: int,
    prompt: int,
    output: int,
    priority: int = 0,
    ids: tuple[int, ...] | None = None,
) -> Sequence:
    told = TokenIds(ids) if ids is not None else None
    sequence, reason = engine.arrive(Request(request_id, float(request_id), prompt, output, priority, told))
    assert reason is None
    return sequence


def ids(sequences: Any) -> list[int]:
    return [sequence.request.request_id for sequence in sequences]


def batch(plan: StepPlan) -> list[tuple[int, int]]:
    return [(sequence.request.request_id, tokens) for sequence, tokens in plan.batch]


def step(engine: ContinuousBatching) -> tuple[StepPlan, list[int]]:
    """Plans and commits one step; returns the plan and who finished."""
    plan = engine.schedule()
    return plan, ids(engine.commit(plan))


# ------------------------------------------------------------------------------------------------------ a step's tokens


def test_a_sequence_catches_up_and_then_gains_one_token_a_step() -> None:
    # 3 + 2: the prompt's step gives the first token, one more step the second, which is never computed.
    engine = scheduler()
    sequence = arrive(engine, 0, prompt=3, output=2)
    assert [(batch(plan), finished) for plan, finished in (step(engine), step(engine))] == [
        ([(0, 3)], []),
        ([(0, 1)], [0]),
    ]
    assert (sequence.generated, sequence.computed) == (2, 4)
    assert engine.idle


def test_a_request_is_cut_off_at_the_model_limit() -> None:
    # Rule 16: 3 prompt tokens under a limit of 5 leave 2, whatever was asked for.
    engine = scheduler(max_model_len=5)
    sequence = arrive(engine, 0, prompt=3, output=10)
    assert [step(engine)[1] for _ in range(2)] == [[], [0]]
    assert sequence.generated == 2


def test_a_prompt_at_the_model_limit_still_yields_the_token_of_its_prefill() -> None:
    engine = scheduler(max_model_len=5, reject_oversize=False)
    sequence = arrive(engine, 0, prompt=5, output=10)
    assert step(engine)[1] == [0]
    assert sequence.generated == 1


def test_the_budget_splits_a_prompt_over_steps_and_running_sequences_come_first() -> None:
    # Budget 4. Step 1: 0 takes all. Step 2: 0 needs its last 2; 1 gets 2 of its 3. Step 3: one token of output for 0,
    # the last prompt token for 1; 2 gets the rest, 2 of 5.
    engine = scheduler(max_num_batched_tokens=4)
    for request_id, prompt in ((0, 6), (1, 3), (2, 5)):
        arrive(engine, request_id, prompt, output=4)
    assert [batch(step(engine)[0]) for _ in range(3)] == [[(0, 4)], [(0, 2), (1, 2)], [(0, 1), (1, 1), (2, 2)]]


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_has_room_for_all_of_it() -> None:
    # Rule 13, budget 4: after 3 tokens one is left, too few for 2; and the single token behind it may not pass.
    engine = scheduler(max_num_batched_tokens=4, chunked_prefill=False)
    for request_id, prompt in ((0, 3), (1, 2), (2, 1)):
        arrive(engine, request_id, prompt, output=2)
    assert [batch(step(engine)[0]) for _ in range(2)] == [[(0, 3)], [(0, 1), (1, 2), (2, 1)]]


def test_max_num_seqs_counts_those_already_running() -> None:
    # nano-vllm once counted only those of the present step. Two run; a third waits until one of them has gone.
    engine = scheduler(max_num_seqs=2)
    arrive(engine, 0, prompt=1, output=3)
    step(engine)
    arrive(engine, 1, prompt=1, output=3)
    arrive(engine, 2, prompt=1, output=3)
    assert [batch(step(engine)[0]) for _ in range(3)] == [[(0, 1), (1, 1)], [(0, 1), (1, 1)], [(1, 1), (2, 1)]]


# -------------------------------------------------------------------------------------------------------------- the cap


def test_the_cap_on_long_prefills_is_off_while_a_request_is_alone() -> None:
    # Rule 6: alone, all 8 tokens of the budget; with another one in either queue, 3.
    engine = scheduler(max_num_batched_tokens=8, long_prefill_token_threshold=3)
    arrive(engine, 0, prompt=20, output=1)
    assert batch(step(engine)[0]) == [(0, 8)]
    arrive(engine, 1, prompt=20, output=1)
    assert batch(step(engine)[0]) == [(0, 3), (1, 3)]


def test_the_adaptive_cap_rises_to_the_budgets_even_share() -> None:
    # Rule 6: 2 requests share 8: max(3, 4) = 4. 4 share it: max(3, 2) = 3.
    engine = scheduler(
        max_num_batched_tokens=8, long_prefill_token_threshold=3, long_prefill_token_threshold_adaptive=True
    )
    arrive(engine, 0, prompt=30, output=1)
    arrive(engine, 1, prompt=30, output=1)
    assert batch(step(engine)[0]) == [(0, 4), (1, 4)]
    arrive(engine, 2, prompt=30, output=1)
    arrive(engine, 3, prompt=30, output=1)
    assert batch(step(engine)[0]) == [(0, 3), (1, 3), (2, 2)]


# ----------------------------------------------------------------------------------------------------------- preemption


def test_fcfs_preempts_the_last_of_the_running_queue_and_frees_all_its_blocks() -> None:
    # Rules 9 and 11. 4 blocks: 0 holds 1, 1 holds 3. 0 asks for a second: 1 goes, with 3 tokens in 3 blocks.
    engine = scheduler(usable=4)
    first, second = arrive(engine, 0, prompt=1, output=4), arrive(engine, 1, prompt=3, output=2)
    step(engine)
    assert (len(first.blocks), len(second.blocks)) == (1, 3)
    plan, _ = step(engine)
    (event,) = plan.preemptions
    assert (event.victim, event.because, event.blocks, event.tokens) == (second, first, 3, 3)
    assert (len(second.blocks), second.computed, second.known, second.preemptions) == (0, 0, 4, 1)
    assert batch(plan) == [(0, 1)]
    assert engine.memory.occupancy(None).idle == 4 - 2
    assert (ids(engine.running), ids(engine.waiting)) == ([0], [1])


def test_of_several_victims_of_one_step_the_last_comes_first() -> None:
    # Rule 11. 6 blocks, cap 3: 3 + 1 + 1, one free. 0 then asks for its other 3 and finds 1: 2 goes, then 1.
    engine = scheduler(usable=6, long_prefill_token_threshold=3)
    arrive(engine, 0, prompt=6, output=1)
    arrive(engine, 1, prompt=1, output=3)
    arrive(engine, 2, prompt=1, output=3)
    assert batch(step(engine)[0]) == [(0, 3), (1, 1), (2, 1)]
    plan = engine.schedule()
    assert ids(event.victim for event in plan.preemptions) == [2, 1]
    assert ids(event.because for event in plan.preemptions) == [0, 0]
    assert (batch(plan), ids(engine.waiting)) == ([(0, 3)], [1, 2])
    assert engine.running and list(next(iter(engine.running)).blocks) == [1, 2, 3, 4, 5, 6]


def test_the_last_may_have_to_preempt_itself_and_then_gets_nothing() -> None:
    # Rules 9 and 10. 3 blocks: 0 holds 1, 1 holds 1, one is free and goes to 0; 1 finds none and is itself the last.
    engine = scheduler(usable=3)
    arrive(engine, 0, prompt=1, output=3)
    second = arrive(engine, 1, prompt=1, output=3)
    step(engine)
    plan, _ = step(engine)
    assert [(event.victim, event.because) for event in plan.preemptions] == [(second, second)]
    assert (batch(plan), ids(engine.waiting)) == ([(0, 1)], [1])


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    # Rule 12. As above: 1 gives way to itself and leaves one block. By priority 2, which needs just one, is now the
    # head of the queue, and has to wait for the next step all the same.
    engine = scheduler(usable=3, policy=Priority)
    arrive(engine, 0, prompt=1, output=2, priority=0)
    arrive(engine, 1, prompt=1, output=3, priority=2)
    step(engine)
    arrive(engine, 2, prompt=1, output=1, priority=1)
    plan, finished = step(engine)
    assert (ids(event.victim for event in plan.preemptions), ids(engine.waiting)) == ([1], [2, 1])
    assert (batch(plan), ids(plan.admitted), finished) == ([(0, 1)], [], [0])
    # 0 has ended, so 3 blocks are free: 2, and then 1 with its 2 tokens.
    plan, _ = step(engine)
    assert (ids(plan.admitted), ids(plan.resumed), batch(plan)) == ([2], [1], [(2, 1), (1, 2)])


def test_a_resumed_sequence_computes_its_output_again_like_a_prompt_and_keeps_it() -> None:
    # Rule 11. 3 blocks, as above: the victim had 1 + 1 tokens; it comes back for both and then gains its second.
    engine = scheduler(usable=3)
    arrive(engine, 0, prompt=1, output=2)
    victim = arrive(engine, 1, prompt=1, output=3)
    step(engine)
    step(engine)
    assert (victim.generated, victim.computed) == (1, 0)
    plan, _ = step(engine)
    assert batch(plan) == [(1, 2)]
    assert victim.generated == 2


def test_priority_preempts_the_worst_even_if_it_stands_in_front_and_the_walk_goes_on() -> None:
    # Rules 9 and 10. 5 blocks: 0, the worse one, runs in front with 3, then 1 with 2. 0 asks for a fourth, is itself
    # the worst, and goes; 1 still gets its token.
    engine = scheduler(usable=5, policy=Priority)
    worse = arrive(engine, 0, prompt=2, output=4, priority=1)
    step(engine)
    arrive(engine, 1, prompt=2, output=4, priority=0)
    assert batch(step(engine)[0]) == [(0, 1), (1, 2)]
    plan, _ = step(engine)
    assert [(event.victim, event.because) for event in plan.preemptions] == [(worse, worse)]
    assert (batch(plan), ids(engine.running), ids(engine.waiting)) == ([(1, 1)], [1], [0])


def test_a_victim_that_the_step_had_already_scheduled_leaves_the_batch_and_its_tokens_go_back() -> None:
    # Rule 9, blocks of 2, 4 of them, budget 4, priorities 2, 0, 1.
    # Step 1: 0 computes 2 in block 1. Step 2: 0 its third in block 2; 1 its 2 in block 3; the one token left goes to 2,
    # in block 4. Step 3: 0 computes a fourth in block 2: 3 are left. 1 needs a block and there is none: 0 goes, and
    # its token comes back: 4, of which 1 takes one. 2 asks for 4 and gets the other 3, in blocks 4 and 1.
    engine = scheduler(
        usable=4, block_size=2, policy=Priority, max_num_batched_tokens=4, scheduler_reserve_full_isl=False
    )
    worst = arrive(engine, 0, prompt=2, output=4, priority=2)
    step(engine)
    urgent = arrive(engine, 1, prompt=2, output=3, priority=0)
    other = arrive(engine, 2, prompt=5, output=2, priority=1)
    assert batch(step(engine)[0]) == [(0, 1), (1, 2), (2, 1)]
    plan = engine.schedule()
    (event,) = plan.preemptions
    # Of its 4 tokens 3 were stored; the fourth had only been planned.
    assert (event.victim, event.because, event.blocks, event.tokens) == (worst, urgent, 2, 3)
    assert batch(plan) == [(1, 1), (2, 3)]
    assert (list(urgent.blocks), list(other.blocks), ids(engine.waiting)) == ([3, 2], [4, 1], [0])
    # 1 decodes over 3 tokens in 2 blocks and gains one; 2 prefills 3 after 1: 3 * 1 + (1 + 2 + 3) pairs, 4 tokens read.
    assert plan.work == StepWork(
        num_sequences=2,
        num_tokens=4,
        prefill_tokens=3,
        prefill_pairs=9,
        prefill_context=4,
        decode_sequences=1,
        decode_context=3,
        decode_blocks=2,
        num_generated=1,
    )


def test_priority_orders_who_waits_but_not_who_runs_and_never_preempts_for_a_waiting_one() -> None:
    # Rule 15. 2 blocks, both held; the most urgent newcomer waits until they are free.
    engine = scheduler(usable=2, policy=Priority)
    arrive(engine, 0, prompt=2, output=1, priority=5)
    arrive(engine, 1, prompt=2, output=1, priority=9)
    step_one, _ = step(engine)
    assert batch(step_one) == [(0, 2)]
    arrive(engine, 2, prompt=1, output=1, priority=0)
    assert ids(engine.waiting) == [2, 1]
    assert batch(step(engine)[0]) == [(2, 1)]


# ------------------------------------------------------------------------------------------------------------ admission


def test_the_head_of_the_queue_blocks_whoever_would_fit_behind_it() -> None:
    # Rule 13. 3 blocks: 0 takes 2; the head needs 2, the one behind it 1.
    engine = scheduler(usable=3)
    arrive(engine, 0, prompt=2, output=1)
    arrive(engine, 1, prompt=2, output=1)
    arrive(engine, 2, prompt=1, output=1)
    assert batch(step(engine)[0]) == [(0, 2)]
    assert batch(step(engine)[0]) == [(1, 2), (2, 1)]


def test_freed_blocks_are_there_for_the_next_step_but_not_for_the_one_in_which_their_holder_finished() -> None:
    # Rule 16: 0 finishes in step 1, and 1 is admitted only in step 2.
    engine = scheduler(usable=2)
    arrive(engine, 0, prompt=2, output=1)
    arrive(engine, 1, prompt=2, output=1)
    plan, finished = step(engine)
    assert (batch(plan), finished) == ([(0, 2)], [0])
    assert batch(step(engine)[0]) == [(1, 2)]


def test_room_for_the_whole_prompt_is_asked_for_unless_told_otherwise() -> None:
    # Rule 13. 5 blocks, budget 4: 0 takes 3; 1 has 3 tokens to place, 2 blocks are free, and 1 token of budget is left.
    cautious = scheduler(usable=5, max_num_batched_tokens=4)
    hasty = scheduler(usable=5, max_num_batched_tokens=4, scheduler_reserve_full_isl=False)
    for engine in (cautious, hasty):
        arrive(engine, 0, prompt=3, output=1)
        arrive(engine, 1, prompt=3, output=1)
    assert batch(step(cautious)[0]) == [(0, 3)]
    assert batch(step(hasty)[0]) == [(0, 3), (1, 1)]


TOLD = (1, 2, 3, 4, 5, 6, 7)
LONGER = (*TOLD, 11, 12, 13, 14, 15)


def test_hits_are_counted_once_for_each_admission_and_not_again_on_each_chunk() -> None:
    # Blocks of 2, budget 4. Step 1: 4 tokens of 0. Step 2: its other 3, which complete block 3; 1 hits these three
    # blocks, 6 tokens, and gets the one token that is left. Step 3: the last of 0, and 3 more of 1. Step 4: the last 2
    # of its prompt. Step 5: its second token.
    engine = scheduler(block_size=2, prefix_caching=True, max_num_batched_tokens=4)
    arrive(engine, 0, prompt=7, output=2, ids=TOLD)
    second = arrive(engine, 1, prompt=12, output=2, ids=LONGER)
    plans = [step(engine)[0] for _ in range(5)]
    assert [batch(plan) for plan in plans] == [[(0, 4)], [(0, 3), (1, 1)], [(0, 1), (1, 3)], [(1, 2)], [(1, 1)]]
    hits = [[(sequence.request.request_id, tokens) for sequence, tokens in plan.hits] for plan in plans]
    assert hits == [[(0, 0)], [(1, 6)], [], [], []]
    assert second.hit_tokens == 6
    assert engine.idle


def test_a_resumed_sequence_may_hit_its_own_blocks_without_changing_its_first_hit() -> None:
    # Blocks of 2, 3 of them. 0 and 1 have 2 tokens each. In step 2 0 takes the third block; 1 needs one too, is itself
    # the last, and goes. Its block, number 2, stays cached.
    engine = scheduler(usable=3, block_size=2, prefix_caching=True)
    arrive(engine, 0, prompt=2, output=3)
    victim = arrive(engine, 1, prompt=2, output=3)
    step(engine)
    plan, _ = step(engine)
    assert ids(event.victim for event in plan.preemptions) == [1]
    # Step 3: 0 computes its last in block 3 and ends. 1 has 3 known tokens: block 2 is hit, but the third token needs a
    # second block, so it waits. Step 4: hit of 2 tokens, one to compute.
    plan, finished = step(engine)
    assert (batch(plan), finished) == ([(0, 1)], [0])
    plan, _ = step(engine)
    assert [(sequence.request.request_id, tokens) for sequence, tokens in plan.hits] == [(1, 2)]
    assert (batch(plan), victim.hit_tokens) == ([(1, 1)], 0)


def test_a_contiguous_pool_never_preempts() -> None:
    # Two regions of 4 in 9 slots; both sequences grow to the limit.
    memory = ContiguousMemory(9, 4, MaxReservation(), FirstFit(9))
    engine = ContinuousBatching(memory, 4, Fcfs(), max_num_batched_tokens=9)
    for request_id in range(3):
        arrive(engine, request_id, prompt=1, output=3)
    plans = [step(engine)[0] for _ in range(6)]
    assert [batch(plan) for plan in plans] == [[(0, 1), (1, 1)]] * 3 + [[(2, 1)]] * 3
    assert engine.idle
    assert not any(plan.preemptions for plan in plans)


# ------------------------------------------------------------------------------------------------ what can never finish


@pytest.mark.parametrize(
    ("knobs", "prompt", "output", "reason"),
    [
        # 3 blocks of 2: 5 + 2 store 6, 5 + 3 store 7.
        ({}, 5, 3, "needs 4 blocks of 2 at its end, the pool has 3"),
        ({"max_model_len": 5}, 5, 1, "prompt of 5 tokens leaves no room for output under max_model_len 5"),
        # Preempted just before its last token, 2 + 4 comes back with 5 tokens to compute at once.
        (
            {"max_num_batched_tokens": 4, "chunked_prefill": False},
            2,
            4,
            "needs 5 tokens in one step without chunked prefill, the budget is 4",
        ),
    ],
)
def test_what_can_never_finish_is_rejected_with_the_reason(
    knobs: dict[str, Any], prompt: int, output: int, reason: str
) -> None:
    engine = scheduler(usable=3, block_size=2, **knobs)
    assert engine.arrive(Request(0, 0.0, prompt, output))[1] == reason
    assert engine.idle


@pytest.mark.parametrize(
    ("knobs", "prompt", "output"),
    [
        ({}, 5, 2),
        ({"max_model_len": 6}, 5, 9),  # cut off at 6: stores 5
        ({"max_num_batched_tokens": 4, "chunked_prefill": False}, 2, 3),
        ({"max_num_batched_tokens": 1}, 5, 2),
    ],
)
def test_what_just_fits_is_not_rejected_and_finishes(knobs: dict[str, Any], prompt: int, output: int) -> None:
    engine = scheduler(usable=3, block_size=2, **knobs)
    arrive(engine, 0, prompt, output)
    finished = [request_id for _ in range(20) if not engine.idle for request_id in step(engine)[1]]
    assert finished == [0]


def test_without_rejection_an_oversize_prompt_blocks_the_queue_and_says_who_waits() -> None:
    # Rule 17: 4 blocks of 1, a prompt of 5, and one behind it that would fit.
    engine = scheduler(usable=4, reject_oversize=False)
    arrive(engine, 3, prompt=5, output=1)
    arrive(engine, 4, prompt=1, output=1)
    plan = engine.schedule()
    assert (plan.batch, plan.preemptions) == ([], [])
    assert engine.explain_stall() == (
        "request 3 waits at the head of 2 with 5 tokens to place; 4 of 4 slots are free, the largest run 4, "
        "and 0 requests run"
    )


@pytest.mark.parametrize(
    ("knobs", "line"),
    [
        ({"max_num_seqs": 0}, "scheduler.max_num_seqs is 0; expected a whole number of at least 1."),
        (
            {"max_num_batched_tokens": -1},
            "scheduler.max_num_batched_tokens is -1; expected a whole number of at least 1.",
        ),
        (
            {"long_prefill_token_threshold": -2},
            "scheduler.long_prefill_token_threshold is -2; expected at least 0 (0 is no cap).",
        ),
    ],
)
def test_a_number_out_of_range_is_one_clear_line(knobs: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        scheduler(**knobs)
    assert str(caught.value) == line


# -------------------------------------------------------------------------------------------------- in the whole engine


def run(engine: ContinuousBatching, requests: list[Request], folder: Path) -> dict[str, Any]:
    """Serves the requests, each step taking one second; returns the summary."""
    recorder = Recorder(folder, engine.memory.num_slots, engine.memory.block_size)
    env = simpy.Environment()
    serving = Engine(env, Arrivals(iter(requests)), engine, Constant(1.0), recorder, lambda ended, now: None)
    env.process(serving.serve())
    env.run()
    return recorder.close("complete", {})


def rows(folder: Path, table: str, *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in columns) for row in pq.read_table(folder / f"{table}.parquet").to_pylist()]


def test_ttft_stays_that_of_the_first_token_after_a_preemption(tmp_path: Path) -> None:
    # The steps of test_paged_growth_preempts_the_latest_which_resumes_first (test_tiny_cases.py), one second each: 1
    # has its first token at 1 s, is preempted at 2 s and resumes at 4 s. 2 arrives at 0.5 s and is served last.
    requests = [Request(0, 0.0, 3, 4), Request(1, 0.0, 2, 3), Request(2, 0.5, 1, 1)]
    summary = run(scheduler(usable=4, block_size=2), requests, tmp_path)
    assert rows(
        tmp_path, "requests", "request_id", "first_scheduled_s", "first_token_s", "finish_s", "preemptions"
    ) == [
        (0, 0.0, 1.0, 4.0, 0),
        (1, 0.0, 1.0, 5.0, 1),
        (2, 4.0, 5.0, 5.0, 0),
    ]
    assert summary["mean_ttft_ms"] == pytest.approx((1 + 1 + 4.5) / 3 * 1000)
    # Tokens of 0 at 1, 2, 3, 4 s, of 1 at 1, 2 and 5 s: intervals 1, 1, 1, 1 and 3.
    assert summary["mean_itl_ms"] == pytest.approx(1400)
    # 1 lost the 3 tokens that it had stored, and the resumption computed 4.
    assert (summary["preemptions"], summary["tokens_recomputed"]) == (1, 3)
    assert rows(tmp_path, "events", "time_s", "event", "request_id", "because_of", "blocks", "tokens") == [
        (2.0, "preemption", 1, 0, 2, 3)
    ]


def test_hit_tokens_of_the_summary_count_each_first_admission_once(tmp_path: Path) -> None:
    # The steps of the chunk test above: 6 of the 7 + 12 tokens looked up are hits, though 1 takes three chunks.
    requests = [Request(0, 0.0, 7, 2, prompt=TokenIds(TOLD)), Request(1, 0.0, 12, 2, prompt=TokenIds(LONGER))]
    summary = run(scheduler(block_size=2, prefix_caching=True, max_num_batched_tokens=4), requests, tmp_path)
    assert (summary["prefix_hit_tokens"], summary["prefix_queried_tokens"]) == (6, 19)


def test_a_request_larger_than_the_pool_is_rejected_and_the_run_goes_on(tmp_path: Path) -> None:
    requests = [Request(0, 0.0, 1, 2), Request(1, 0.0, 9, 9), Request(2, 0.0, 1, 2)]
    summary = run(scheduler(usable=4), requests, tmp_path)
    assert (summary["completed"], summary["failed"]) == (2, 1)
    reason = "needs 17 blocks of 1 at its end, the pool has 4"  # 9 + 9 store 17
    assert sorted(rows(tmp_path, "requests", "request_id", "status", "finish_reason")) == [
        (0, "finished", "stop"),
        (1, "rejected", reason),
        (2, "finished", "stop"),
    ]
    assert rows(tmp_path, "events", "event", "request_id", "cause") == [("rejection", 1, reason)]


@pytest.mark.parametrize(
    ("prompt", "budget", "full_isl", "says"),
    [
        # The prompt alone is too large: never admitted.
        (5, 64, True, "nothing can be scheduled any more"),
        # It outgrows the 4 blocks with its second token, goes to the head of the queue, and 5 tokens never fit again.
        (4, 64, True, "nothing can be scheduled any more"),
        # Admitted for its first chunk, it grows, preempts itself and is admitted again, for ever.
        (5, 2, False, "tokens were computed and none was gained"),
        (4, 2, False, "tokens were computed and none was gained"),
    ],
)
def test_an_undersized_pool_ends_in_an_error_that_says_who_waits(
    prompt: int, budget: int, full_isl: bool, says: str, tmp_path: Path
) -> None:
    engine = scheduler(
        usable=4, max_num_batched_tokens=budget, scheduler_reserve_full_isl=full_isl, reject_oversize=False
    )
    with pytest.raises(NoProgress, match=says) as caught:
        run(engine, [Request(0, 0.0, prompt, 9), Request(1, 0.0, 1, 1)], tmp_path)
    line = str(caught.value)
    assert "request 0" in line  # not the innocent one behind it
    assert "\n" not in line


def test_a_request_that_preempts_itself_for_ever_ends_in_an_error_even_when_it_is_alone(tmp_path: Path) -> None:
    engine = scheduler(usable=4, max_num_batched_tokens=2, scheduler_reserve_full_isl=False, reject_oversize=False)
    with pytest.raises(NoProgress, match="request 0"):
        run(engine, [Request(0, 0.0, 5, 1)], tmp_path)
