"""vLLM's v0 scheduler: steps worked out on paper, a witness that only counts, and laws that hold for any workload."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_audit import audit_paged
from test_leap import assert_same, observed, records, samplings, workloads

from sim.cli import main
from sim.memory.allocators.exact import ExactSlots
from sim.memory.contiguous import ContiguousMemory
from sim.memory.paged import PagedMemory
from sim.memory.reservation import OracleReservation
from sim.plan import StepPlan
from sim.scheduler.prefill_first import PrefillFirst
from sim.scheduler.recovery import Auto, Recompute, Swap
from sim.sequence import Sequence
from workloads.errors import UserError
from workloads.request import Request
from workloads.sampling import ParallelSampling, Sampling

MODEL_LIMIT = 64


def engine(num_blocks: int, block_size: int = 4, watermark: float = 0.0, host: int = 0, **knobs: Any) -> PrefillFirst:
    memory = PagedMemory(num_blocks, block_size, watermark, False, 0, host)
    return PrefillFirst(memory, MODEL_LIMIT, **{"recovery": Auto(), **knobs})


def arrive(scheduler: PrefillFirst, letter: str, prompt: int, output: int, sampling: Sampling | None = None) -> None:
    number = ord(letter) - ord("A")
    _, reason = scheduler.arrive(Request(number, float(number), prompt, output, sampling=sampling))
    assert reason is None


def letters(sequences: Any) -> str:
    return "".join(chr(ord("A") + sequence.request.request_id) for sequence in sequences)


def audit(scheduler: PrefillFirst) -> None:
    head = scheduler.waiting.head() if scheduler.waiting else None
    memory = scheduler.memory
    assert isinstance(memory, PagedMemory)
    audit_paged(memory, list(scheduler.running), head)


def step(scheduler: PrefillFirst) -> tuple[str, str, str, str]:
    """What one step computes, who is preempted in it, who waits during it, and who is done after it."""
    plan = scheduler.schedule()
    audit(scheduler)
    batch = " ".join(f"{letters([sequence])}{tokens}" for sequence, tokens in plan.batch)
    preempted, waiting = letters(event.victim for event in plan.preemptions), letters(scheduler.waiting)
    return batch, preempted, waiting, letters(scheduler.commit(plan))


def tables(scheduler: PrefillFirst) -> dict[str, list[int]]:
    return {letters([sequence]): list(sequence.blocks) for sequence in scheduler.running}


# ------------------------------------------------------------------------------------------------------------- on paper


def test_a_step_is_prefill_or_decode_and_a_decode_asks_for_a_free_block_even_where_none_is_needed() -> None:
    # 5 blocks of 4, of which an admission leaves int(0.2 * 5) = 1 free. A and B take a block each for their 4 prompt
    # tokens, C one for 3, D one for 4; then 1 is free, and E, of 1 token, would leave none.
    scheduler = engine(5, watermark=0.2)
    for letter, prompt, output in (("A", 4, 4), ("B", 4, 5), ("C", 3, 2), ("D", 4, 3), ("E", 1, 1)):
        arrive(scheduler, letter, prompt, output)
    assert step(scheduler) == ("A4 B4 C3 D4", "", "E", "")
    assert tables(scheduler) == {"A": [0], "B": [1], "C": [2], "D": [3]}
    # The fifth tokens of A and B need a block. A gets block 4; for B the latest, D, has to go. Then none is free, and
    # C, though its fourth token has room, is the last that runs and goes itself. Both stand in order of arrival again.
    assert step(scheduler) == ("A1 B1", "DC", "CDE", "")
    assert tables(scheduler) == {"A": [0, 4], "B": [1, 3]}
    # C knows 4 tokens now, a block; 1 is free and has to stay so. A and B decode: a free block is there, none is taken.
    assert step(scheduler) == ("A1 B1", "", "CDE", "")
    assert step(scheduler) == ("A1 B1", "", "CDE", "A")
    # A has freed 0 and 4: 3 are free, and C comes back with one; D, 5 tokens, needs two and would leave none. B pauses.
    assert step(scheduler) == ("C4", "", "DE", "C")
    assert step(scheduler) == ("D5", "", "E", "")
    assert tables(scheduler) == {"B": [1, 3], "D": [4, 0]}
    assert step(scheduler) == ("B1 D1", "", "E", "BD")
    assert step(scheduler) == ("E1", "", "", "E")
    assert scheduler.idle


def test_the_watermark_counts_when_nobody_runs() -> None:
    # 10 blocks, 2 of them for the watermark. A prompt of 8 blocks leaves just that; one of 9 can never come in.
    scheduler = engine(10, watermark=0.2)
    arrive(scheduler, "A", 32, 1)
    assert scheduler.arrive(Request(1, 1.0, 33, 1))[1] == "needs 9 blocks at its end and 2 left free, the pool has 10"
    assert step(scheduler)[0] == "A32"


def test_a_prompt_is_never_cut() -> None:
    # A budget of 64: the prompts of A and B are 60 tokens, that of C would make it 65.
    scheduler = engine(60, max_num_batched_tokens=64, max_num_seqs=8)
    for letter, prompt in (("A", 30), ("B", 30), ("C", 5), ("D", 1)):
        arrive(scheduler, letter, prompt, 3)
    assert step(scheduler)[0] == "A30 B30"
    assert step(scheduler)[0] == "C5 D1"
    assert step(scheduler)[0] == "A1 B1 C1 D1"


def test_a_group_goes_to_the_host_and_nobody_comes_in_before_it_is_back() -> None:
    # 6 blocks of 4, watermark int(0.17 * 6) = 1. A needs a block for 4 tokens, the group B of two outputs one for both.
    # Their fifth tokens take 1 and 2 blocks, so 1 is left. B's sequences have room for the sixth, but ask for 2 free
    # ones: they go, with the 3 blocks that they hold.
    scheduler = engine(6, watermark=0.17, host=10)
    arrive(scheduler, "A", 4, 5)
    arrive(scheduler, "B", 4, 5, ParallelSampling(2))
    assert step(scheduler) == ("A4 B4", "", "", "")
    assert step(scheduler) == ("A1 B1 B1", "", "", "")
    plan = scheduler.schedule()
    assert (len(plan.swap_outs), [event.recovery for event in plan.preemptions]) == (3, ["swap"])
    scheduler.commit(plan)
    # C, a single token, would fit, but B is swapped out. For B itself, its 3 blocks, 2 to go on with and 1 to be left
    # have to be free: all 6, so not before A has ended.
    arrive(scheduler, "C", 1, 1)
    assert step(scheduler) == ("A1", "", "BC", "")
    assert step(scheduler) == ("A1", "", "BC", "A")
    plan = scheduler.schedule()
    assert (len(plan.swap_ins), letters(one for one, _ in plan.batch)) == (3, "BB")
    scheduler.commit(plan)
    assert step(scheduler) == ("C1", "", "", "C")
    assert step(scheduler)[0] == "B1 B1"
    assert step(scheduler) == ("B1 B1", "", "", "B")
    assert scheduler.idle


def test_the_latest_arrival_goes_though_it_was_back_first() -> None:
    # 8 blocks of 4, no watermark. A, B and the group C take a block each for their prompts, and 1 + 1 + 2 for the fifth
    # tokens: 1 is left. In the third step C asks for 2 and goes to the host with 3 blocks.
    scheduler = engine(8, host=10)
    arrive(scheduler, "A", 4, 11)
    arrive(scheduler, "B", 4, 13)
    arrive(scheduler, "C", 4, 5, ParallelSampling(2))
    assert step(scheduler)[0] == "A4 B4 C4"
    assert step(scheduler)[0] == "A1 B1 C1 C1"
    assert step(scheduler) == ("A1 B1", "C", "C", "")
    # C would need 3 + 2, and at most 4 are free. In steps 6 and 10, A and B begin their third and fourth blocks.
    for _ in range(4, 11):
        assert step(scheduler) == ("A1 B1", "", "C", "")
    # None is left: for the 14th token of A, which has room, B loses its blocks. Then A has ended, and C is first.
    assert step(scheduler) == ("A1", "B", "CB", "A")
    assert step(scheduler) == ("C1 C1", "", "B", "")
    assert step(scheduler) == ("B14", "", "", "")
    # Of 8 blocks C holds 3 and B 4. C asks for 2 once more; it is the last to have come, if not to have been admitted.
    assert step(scheduler) == ("B1", "C", "C", "")


def test_nobody_is_swapped_in_in_a_step_that_preempts() -> None:
    # 14 blocks of 4: A 4 tokens, B 20, the group C 4 for both, so 1 + 5 + 1. The next ones take 1 + 1 + 2: 3 are left.
    scheduler = engine(14, host=10)
    arrive(scheduler, "A", 4, 20)
    arrive(scheduler, "B", 20, 16)
    arrive(scheduler, "C", 4, 9, ParallelSampling(2))
    for _ in range(5):
        step(scheduler)
    # In steps 6, 10 and 14, A and B begin a block each. In the first of them 1 is left for C, which goes with 3 blocks
    # and would need 5 of the 4, then 2, then 0 that are free.
    assert step(scheduler) == ("A1 B1", "C", "C", "")
    for _ in range(7, 15):
        assert step(scheduler) == ("A1 B1", "", "C", "")
    # For A's 18th token B goes, which holds 9 blocks. They would do for C, but it comes back one step later.
    assert step(scheduler) == ("A1", "B", "CB", "")
    assert step(scheduler) == ("A1 C1 C1", "", "B", "")


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"max_num_batched_tokens": 63}, "scheduler.max_num_batched_tokens is 63, max_model_len is 64"),
        ({"max_num_seqs": 4096}, "scheduler.max_num_batched_tokens is 2048, scheduler.max_num_seqs is 4096"),
    ],
)
def test_a_budget_below_a_limit_is_refused(knobs: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        engine(10, **knobs)


def test_regions_are_refused() -> None:
    memory: Any = ContiguousMemory(100, MODEL_LIMIT, OracleReservation(), ExactSlots(100))
    with pytest.raises(UserError, match="choose memory=paged"):
        PrefillFirst(memory, MODEL_LIMIT, Auto())


# ---------------------------------------------------------------------------------------- a witness that counts blocks


def counted(requests: list[tuple[int, int]], num_blocks: int, size: int, watermark: int, seats: int) -> list[str]:
    """The steps of v0 with integers alone: no tables, no free list, no leaps; every request waits from the start."""

    def blocks(tokens: int) -> int:
        return (tokens + size - 1) // size

    known = [prompt for prompt, _ in requests]
    waiting, running, held, steps = deque(range(len(requests))), list[int](), dict[int, int](), list[str]()
    while waiting or running:
        free = num_blocks - sum(held.values())
        batch, budget = list[int](), 2048
        while waiting and len(running) + len(batch) < seats and known[waiting[0]] <= budget:
            need = blocks(known[waiting[0]])
            if free - need < watermark:
                break
            first = waiting.popleft()
            batch.append(first)
            held[first], free, budget = need, free - need, budget - known[first]
        if batch:
            running += batch
            steps.append(f"prefill {batch}")
        else:
            queue, victims = running, list[int]()
            running = []
            while queue:
                first = queue.pop(0)
                while free < 1:
                    victim = queue.pop() if queue else first
                    free += held.pop(victim)
                    victims.append(victim)
                    waiting.appendleft(victim)
                    if victim == first:
                        break
                else:
                    free -= blocks(known[first]) - held[first]
                    held[first] = blocks(known[first])
                    running.append(first)
            batch = list(running)
            steps.append(f"decode {batch} without {victims}")
        for one in batch:
            known[one] += 1
            if known[one] == sum(requests[one]):
                running.remove(one)
                del held[one]
    return steps


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=30),
    st.integers(20, 40),
    st.sampled_from([2, 4, 8]),
    st.integers(0, 4),
    st.integers(1, 12),
)
def test_every_step_is_that_of_a_witness_that_only_counts(
    lengths: list[tuple[int, int]], num_blocks: int, size: int, watermark: int, seats: int
) -> None:
    scheduler = engine(num_blocks, size, (watermark + 0.5) / num_blocks, max_num_seqs=seats)
    lengths = [pair for pair in lengths if -(-(sum(pair) - 1) // size) + max(1, watermark) <= num_blocks]
    for number, (prompt, output) in enumerate(lengths):
        assert scheduler.arrive(Request(number, 0.0, prompt, output))[1] is None
    steps = []
    while not scheduler.idle:
        plan = scheduler.schedule()
        audit(scheduler)
        batch = [sequence.request.request_id for sequence, _ in plan.batch]
        victims = [event.victim.request.request_id for event in plan.preemptions]
        prefill = bool(plan.admitted or plan.resumed)
        steps.append(f"prefill {batch}" if prefill else f"decode {batch} without {victims}")
        scheduler.commit(plan)
    assert steps == counted(lengths, num_blocks, size, watermark, seats)


# ----------------------------------------------------------------------------------------------------------------- laws

pools = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(8, 60),
        "block_size": st.sampled_from([1, 2, 4, 8]),
        "watermark": st.sampled_from([0.0, 0.1]),
        "prefix_caching": st.booleans(),
        "num_reserved_blocks": st.integers(0, 1),
        "num_host_blocks": st.sampled_from([0, 4, 40]),
    }
)


@settings(max_examples=250, deadline=None)
@given(
    workloads(),
    st.lists(samplings, min_size=24, max_size=24),
    st.booleans(),
    pools,
    st.integers(1, 12),
    st.sampled_from([Recompute, Swap, Auto]),
    records,
)
def test_a_run_that_leaps_equals_one_that_steps_and_everyone_ends(
    requests: list[Request],
    asked: list[Sampling | None],
    several: bool,
    pool: dict[str, Any],
    max_num_seqs: int,
    recovery: type,
    record: Any,
) -> None:
    if several:
        requests = [request._replace(sampling=sampling) for request, sampling in zip(requests, asked, strict=False)]
    runs = []
    for leap in (True, False):
        memory = PagedMemory(**pool)
        scheduler = PrefillFirst(memory, MODEL_LIMIT, recovery(), max_num_seqs, leap=leap)
        runs.append(observed(memory, scheduler, requests, record))  # type: ignore[arg-type]
        assert memory.num_free_blocks == memory.num_usable_blocks
        assert memory.host.num_free == pool["num_host_blocks"]
        assert runs[-1]["summary"]["completed"] + runs[-1]["summary"]["failed"] == len(requests)
    assert_same(*runs)


@settings(max_examples=60, deadline=None)
@given(workloads(), st.lists(samplings, min_size=24, max_size=24), pools, st.sampled_from([Recompute, Swap, Auto]))
def test_every_slot_has_one_name_in_every_step(
    requests: list[Request], asked: list[Sampling | None], pool: dict[str, Any], recovery: type
) -> None:
    memory = PagedMemory(**pool)
    scheduler = PrefillFirst(memory, MODEL_LIMIT, recovery())
    for request, sampling in zip(requests, asked, strict=False):
        scheduler.arrive(request._replace(sampling=sampling))
        check_step(scheduler)
    while not scheduler.idle:
        check_step(scheduler)


def check_step(scheduler: PrefillFirst) -> None:
    plan = scheduler.schedule()
    audit(scheduler)
    one_kind(scheduler, plan)
    scheduler.commit(plan)
    audit(scheduler)


def one_kind(scheduler: PrefillFirst, plan: StepPlan) -> None:
    """A prefill step computes nothing but what it admits, and preempts nobody."""
    admitted: set[Sequence] = {*plan.admitted, *plan.resumed}
    if admitted:
        assert {sequence for sequence, _ in plan.batch} == admitted
        assert not plan.preemptions
        assert not plan.steady
    orders = [sequence.order for sequence in scheduler.running]
    assert orders == sorted(orders)


# -------------------------------------------------------------------------------------------------------------- command


def test_the_preset_runs(tmp_path: Path) -> None:
    options = ["engine=vllm_v0", "workload=synthetic", "workload.num_requests=50", "plots=false"]
    assert main(["sim", *options, f"hydra.run.dir={tmp_path / 'a'}"]) == 0
    assert main(["sim", *options, f"hydra.run.dir={tmp_path / 'b'}"]) == 0
    for name in ("requests.parquet", "steps.parquet", "events.parquet"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
