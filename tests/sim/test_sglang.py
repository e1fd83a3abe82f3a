"""SGLang's scheduler worked out on paper, step by step, and its rules one by one.

A state is that of the pool and the queues while the step runs. Requests are letters in order of arrival; the pool has
pages of one token unless it says so. A request stores prompt + output - 1 tokens: its last is never computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from test_tiny_cases import letters, request

from sim.cli import main
from sim.memory.paged import PagedMemory
from sim.memory.radix import RadixMemory
from sim.scheduler.new_token_ratio import NewTokenRatio
from sim.scheduler.schedule_policies import ArrivalOrder, LongestOutput, LongestPrefix
from sim.scheduler.sglang import SGLang
from sim.sequence import Sequence
from workloads.errors import UserError
from workloads.request import Request
from workloads.sampling import ParallelSampling


@dataclass(frozen=True)
class State:
    """One step.

    Args:
        batch: requests with the tokens they compute, in the order in which the batch was filled.
        used: slots that hold a token of a running request; the others are cached or idle.
        cached: slots that hold a reusable prefix and nobody's.
        waiting: the waiting queue, front first.
        new: taken from the waiting queue for the first time.
        resumed: taken from it after a retraction.
        retracted: who lost what it held, in that order.
        hits: cached tokens of those taken from the waiting queue, where there are any.
        tables: block tables of the running sequences, where the case is about them.
        done: who finishes with this step's tokens.
    """

    batch: str
    used: int
    cached: int = 0
    waiting: str = ""
    new: str = ""
    resumed: str = ""
    retracted: str = ""
    hits: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[int]] | None = None
    done: str = ""


def sglang(pool: int, page_size: int = 1, order: ArrivalOrder | None = None, **knobs: Any) -> SGLang:
    return SGLang(RadixMemory(pool, page_size), 1000, ArrivalOrder() if order is None else order, **knobs)


def observe(engine: SGLang, with_tables: bool) -> State:
    """Plans a step, looks, and applies its tokens."""
    plan = engine.schedule()
    occupancy = engine.memory.occupancy(engine.waiting.head() if engine.waiting else None)
    assert sum(occupancy[:6]) == engine.memory.num_slots
    waiting, tables = letters(engine.waiting), {letters([one]): list(one.blocks) for one in engine.running}
    return State(
        batch=" ".join(f"{letters([sequence])}{tokens}" for sequence, tokens in plan.batch),
        used=occupancy.used,
        cached=occupancy.cached,
        waiting=waiting,
        new=letters(plan.admitted),
        resumed=letters(plan.resumed),
        retracted=letters(event.victim for event in plan.preemptions),
        hits={letters([sequence]): tokens for sequence, tokens in plan.hits if tokens},
        tables=tables if with_tables else None,
        done=letters(engine.commit(plan)),
    )


def check(engine: SGLang, arrivals: dict[int, list[Request]], expected: Iterable[State]) -> None:
    """Runs until nobody is left; `arrivals` says who joins before which step, the first being 1."""
    for number, state in enumerate(expected, start=1):
        for newcomer in arrivals.get(number, []):
            assert engine.arrive(newcomer)[1] is None
        assert observe(engine, state.tables is not None) == state, f"step {number}"
    assert engine.idle


# ------------------------------------------------------------------------------------------------------- step by step


def test_a_request_is_let_in_by_what_the_running_are_guessed_to_generate_yet() -> None:
    # 20 slots. A and B have 4 tokens and may generate 6. B needs 4 + 6 beside A's 4 + 6: 20, and that is not below 20.
    # Once A runs, it is reckoned with 0.7 of the 5 it may still generate: 3.5 + 10 < 16 free slots.
    check(
        sglang(20),
        {1: [request("A", 4, 6), request("B", 4, 6)]},
        [
            State("A4", 4, waiting="B", new="A"),
            State("B4", 8, new="B"),  # A pauses
            State("A1 B1", 10),
            State("A1 B1", 12),
            State("A1 B1", 14),
            State("A1 B1", 16),
            # A has generated one in step 1 and five since; so has B.
            State("A1 B1", 18, done="AB"),
        ],
    )


def test_a_retracted_request_leaves_its_pages_waits_last_and_computes_everything_again() -> None:
    # 12 slots, and a ratio of 0: whoever runs is reckoned with nothing. A stores 2 + 6, B 3 + 5.
    engine = sglang(12, schedule_conservativeness=0.0)
    check(
        engine,
        {1: [request("A", 2, 7), request("B", 3, 6)]},
        [
            # A needs 2 + 7 < 12. In the same prefill it counts in full: B would need 2 + 7 + 3 + 6.
            State("A2", 2, waiting="B", new="A", tables={"A": [0, 1]}),
            State("B3", 5, new="B", tables={"A": [0, 1], "B": [2, 3, 4]}),  # 9 < 10
            State("A1 B1", 7, tables={"A": [0, 1, 5], "B": [2, 3, 4, 6]}),
            State("A1 B1", 9, tables={"A": [0, 1, 5, 7], "B": [2, 3, 4, 6, 8]}),
            State("A1 B1", 11, tables={"A": [0, 1, 5, 7, 9], "B": [2, 3, 4, 6, 8, 10]}),
            # Two slots are needed, one is free. Both have generated 4; B's prompt is longer, so it goes. Its 6, 8, 10
            # follow 11 in the free list; its prompt is the tree's, but 20 slots are to be made free: it goes too.
            State("A1", 6, waiting="B", retracted="B", tables={"A": [0, 1, 5, 7, 9, 11]}),
            # The ratio is now (4 + 20) / (7 + 1), at most 1. A is reckoned with 2; B needs 7 + 2 more; 6 are free.
            State("A1", 7, waiting="B", tables={"A": [0, 1, 5, 7, 9, 11, 6]}),
            State("A1", 8, waiting="B", done="A", tables={"A": [0, 1, 5, 7, 9, 11, 6, 8]}),
            # Free are 10, 2, 3, 4. B asks for 7, so A's output goes and, for one slot more, A's prompt.
            State("B7", 7, resumed="B", tables={"B": [10, 2, 3, 4, 5, 7, 9]}),
            State("B1", 8, done="B", tables={"B": [10, 2, 3, 4, 5, 7, 9, 11]}),
        ],
    )
    assert engine.memory.occupancy(None).cached == 8


def test_requests_of_one_prefill_do_not_find_each_other_and_later_ones_do() -> None:
    check(
        sglang(30),
        {
            1: [request("A", 4, 1, (1, 2, 3, 4)), request("B", 4, 2, (1, 2, 3, 5))],
            3: [request("C", 5, 1, (1, 2, 3, 5, 6))],
        },
        [
            State("A4 B4", 8, new="AB", tables={"A": [0, 1, 2, 3], "B": [4, 5, 6, 7]}, done="A"),
            # B has A's blocks for what they have in common. A's 4 is nobody's.
            State("B1", 5, cached=1, tables={"B": [0, 1, 2, 7, 8]}, done="B"),
            # C finds 1, 2, 3 and 5. A's 4 and B's output stay cached.
            State("C1", 5, cached=2, new="C", hits={"C": 4}, tables={"C": [0, 1, 2, 7, 9]}, done="C"),
        ],
    )


def test_while_a_long_prompt_is_computed_in_chunks_nobody_decodes() -> None:
    # Chunks of 4. B's output pauses from step 2 on, until C's prompt is done too.
    check(
        sglang(60, chunked_prefill_size=4),
        {1: [request("A", 2, 4)], 2: [request("B", 10, 2)], 3: [request("C", 3, 1)]},
        [
            State("A2", 2, new="A"),
            State("B4", 6, new="B"),
            State("B4", 10, waiting="C"),
            State("B2 C2", 14, new="C"),  # what is left of the chunk
            State("C1", 15, done="C"),
            State("A1 B1", 14, cached=3, done="B"),
            State("A1", 4, cached=14),
            State("A1", 5, cached=14, done="A"),
        ],
    )


def test_full_seats_are_tried_again_one_decode_step_after_somebody_has_finished() -> None:
    # That is when SGLang takes note of it: it forms a prefill first, and only then counts who decodes.
    check(
        sglang(60, max_num_seqs=2),
        {1: [request("A", 1, 2), request("B", 1, 4), request("C", 1, 1)]},
        [
            State("A1 B1", 2, waiting="C", new="AB"),
            State("A1 B1", 4, waiting="C", done="A"),
            State("B1", 3, cached=2, waiting="C"),
            State("C1", 4, cached=2, new="C", done="C"),
            State("B1", 4, cached=3, done="B"),
        ],
    )


def test_an_output_that_would_outgrow_the_pool_is_cut_off_two_tokens_below_it() -> None:
    # SGLang: at most pool - 1 tokens, one of them spare. 8 of 10 slots are 3 + 5; the last is not stored.
    engine = sglang(10)
    sequence, reason = engine.arrive(request("A", 3, 20))
    assert reason is None
    while not engine.idle:
        engine.commit(engine.schedule())
    assert sequence.generated == 5


def test_a_prompt_that_leaves_no_room_for_output_is_turned_away() -> None:
    assert sglang(10).arrive(request("A", 8, 1))[1] is not None
    assert sglang(10).arrive(request("A", 7, 1))[1] is None


def test_max_prefill_tokens_let_nobody_join_a_prefill_that_is_long_enough() -> None:
    check(
        sglang(60, max_prefill_tokens=5),
        {1: [request("A", 3, 1), request("B", 2, 1), request("C", 9, 1)]},
        [
            State("A3", 3, waiting="BC", new="A", done="A"),  # B's 2 would use up the 2 that are left
            State("B2", 2, cached=3, waiting="C", new="B", done="B"),
            State("C9", 9, cached=5, new="C", done="C"),  # alone it may be longer
        ],
    )


def test_outputs_are_reckoned_with_up_to_the_clip() -> None:
    # A may generate 30 and is reckoned with 4: 2 + 4 + B's 2 + 4 < 20.
    long = [request("A", 2, 3)._replace(max_tokens=15), request("B", 2, 3)._replace(max_tokens=15)]
    clipped, unclipped = sglang(20, clip_max_new_tokens=4), sglang(20)
    for engine, first in ((clipped, "AB"), (unclipped, "A")):
        for one in long:
            engine.arrive(one)
        assert letters(engine.schedule().admitted) == first


# ------------------------------------------------------------------------------------------------ the new-token ratio


def test_the_ratio_falls_to_a_seventh_of_its_beginning_in_six_hundred_steps() -> None:
    # 0.7 to 0.14 * 0.7 = 0.098.
    ratio = NewTokenRatio()
    ratio.fall(300)
    assert ratio.value == pytest.approx((0.7 + 0.098) / 2)
    ratio.fall(299)
    assert ratio.value > 0.0985
    ratio.fall(2)
    assert ratio.value == 0.7 * 0.14
    ratio.reset()
    assert ratio.value == 0.7


@pytest.mark.parametrize(("conservativeness", "start"), [(1.3, 0.91), (2.0, 1.0), (0.5, 0.35)])
def test_conservativeness_multiplies_the_ratio_up_to_one(conservativeness: float, start: float) -> None:
    assert NewTokenRatio(conservativeness).value == pytest.approx(start)


def test_a_retraction_sets_the_ratio_by_what_was_generated_of_what_may_be() -> None:
    # 3 requests have generated 120 of 600, and 20 steps are looked ahead: (120 + 60) / 601.
    ratio = NewTokenRatio()
    ratio.after_retraction(120, 3, 600, 20)
    assert ratio.value == 180 / 601
    ratio.after_retraction(590, 3, 600, 20)
    assert ratio.value == 1.0


def test_the_ratio_falls_in_decode_steps_only_and_begins_anew_when_nothing_is_left() -> None:
    engine = sglang(100)
    engine.arrive(request("A", 3, 4))
    values = []
    while not engine.idle:
        plan = engine.schedule()
        values.append(engine._ratio.value)
        engine.commit(plan)
    step = (0.7 - 0.098) / 600
    assert values == pytest.approx([0.7, 0.7 - step, 0.7 - 2 * step, 0.7 - 3 * step])
    assert not engine.schedule().batch
    assert engine._ratio.value == 0.7


@pytest.mark.parametrize(("late", "victim"), [([], "B"), ([request("D", 3, 20)], "D")])
def test_the_fewest_output_tokens_go_first_then_the_longest_prompt(late: list[Request], victim: str) -> None:
    # At a ratio of 0 all run until the pool is full. A, B and C have generated the same, and B has the longest prompt;
    # D comes five steps later, and so has generated less.
    engine = sglang(60, schedule_conservativeness=0.0)
    for one in (request("A", 4, 20), request("B", 6, 20), request("C", 5, 20)):
        engine.arrive(one)
    for number in range(100):
        for one in late if number == 6 else ():
            engine.arrive(one)
        plan = engine.schedule()
        engine.commit(plan)
        if plan.preemptions:
            break
    assert letters(event.victim for event in plan.preemptions) == victim
    assert engine.running


# ------------------------------------------------------------------------------------------------ order of the queue


def first_prefill(order: ArrivalOrder, waiting: list[Request], cached: Request | None = None) -> str:
    """Who is in the first prefill over a pool that has seen `cached`."""
    engine = sglang(200, order=order)
    if cached is not None:
        engine.arrive(cached)
        while not engine.idle:
            engine.commit(engine.schedule())
    for one in waiting:
        engine.arrive(one)
    return letters(engine.schedule().admitted)


def test_lpm_lets_the_longest_cached_prefix_go_first() -> None:
    cached = request("Z", 6, 1, (1, 2, 3, 4, 5, 6))
    waiting = [request("A", 4, 1, (9, 9, 9, 9)), request("B", 4, 1, (1, 2, 8, 8)), request("C", 5, 1, (1, 2, 3, 4, 7))]
    assert first_prefill(ArrivalOrder(), waiting, cached) == "ABC"
    assert first_prefill(LongestPrefix(), waiting, cached) == "CBA"


def test_lpm_lets_one_of_those_go_that_begin_alike_and_the_others_last() -> None:
    # 32 tokens in common, not cached yet: B would compute them too if it went together with A.
    common = tuple(range(32))
    waiting = [request("A", 33, 1, (*common, 100)), request("B", 33, 1, (*common, 101)), request("C", 2, 1, (200, 201))]
    assert first_prefill(LongestPrefix(), waiting) == "ACB"
    shorter = [one._replace(prompt=None) if one.request_id == 1 else one for one in waiting]
    assert first_prefill(LongestPrefix(), shorter) == "ABC"


def test_lpm_does_not_sort_a_long_queue() -> None:
    cached = request("A", 3, 1, (1, 2, 3))
    strangers = [Request(number, 0.0, 1, 1) for number in range(1, 129)]
    engine = sglang(2000, order=LongestPrefix())
    engine.arrive(cached)
    engine.commit(engine.schedule())
    for one in strangers:
        engine.arrive(one)
    engine.arrive(Request(129, 0.0, 4, 1, prompt=cached.prompt))
    assert engine.schedule().admitted[-1].request.request_id == 129


def test_lof_lets_the_longest_output_go_first() -> None:
    waiting = [request("A", 4, 2), request("B", 4, 3)._replace(max_tokens=9), request("C", 4, 5)]
    assert first_prefill(LongestOutput(), waiting) == "BCA"


def test_whoever_was_retracted_waits_behind_everyone() -> None:
    queue = ArrivalOrder()
    first, second = (Sequence.of(request(letter, 2, 2), 100) for letter in "AB")
    queue.arrive(first)
    queue.return_preempted(second)
    assert list(queue) == [first, second]


# ------------------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        (
            {"chunked_prefill_size": 0},
            "scheduler.chunked_prefill_size is 0; expected a multiple of memory.block_size=4",
        ),
        (
            {"chunked_prefill_size": 6},
            "scheduler.chunked_prefill_size is 6; expected a multiple of memory.block_size=4",
        ),
        ({"max_prefill_tokens": 0}, "scheduler.max_prefill_tokens is 0"),
        ({"clip_max_new_tokens": 0}, "scheduler.clip_max_new_tokens is 0"),
        ({"retract_decode_steps": -1}, "scheduler.retract_decode_steps is -1"),
        ({"schedule_conservativeness": -0.1}, "scheduler.schedule_conservativeness is -0.1"),
        ({"init_new_token_ratio": 1.5}, "scheduler.init_new_token_ratio is 1.5"),
        ({"min_new_token_ratio_factor": 2.0}, "scheduler.min_new_token_ratio_factor is 2.0"),
        ({"new_token_ratio_decay_steps": 0}, "scheduler.new_token_ratio_decay_steps is 0"),
    ],
)
def test_numbers_out_of_range_are_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        sglang(40, page_size=4, **knobs)


def test_another_memory_is_refused() -> None:
    with pytest.raises(UserError, match="choose memory=radix"):
        SGLang(PagedMemory(10), 100, ArrivalOrder())


def test_several_outputs_of_a_prompt_are_refused() -> None:
    with pytest.raises(UserError, match="request 0 asks for 2 outputs of one prompt"):
        sglang(40).arrive(Request(0, 0.0, 4, 4, sampling=ParallelSampling(2)))


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "lof"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_engine_runs_from_the_command(simulate: Callable[..., Path], policy: str, page_size: int) -> None:
    folder = simulate(
        "engine=sglang",
        f"memory.block_size={page_size}",
        f"scheduler/schedule_policy={policy}",
        "workload=synthetic",
        "workload.num_requests=50",
    )
    assert '"completed": 50' in (folder / "summary.json").read_text()


def test_the_preset_s_memory_is_weights_and_kv_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "engine=sglang", "--cfg", "job"]) == 0
    shown = capsys.readouterr().out
    assert "gpu_memory_utilization: 0.88" in shown
    assert "non_kv_memory_bytes: 0" in shown
