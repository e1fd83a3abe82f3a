"""Leaping over steps must change nothing: not a time, not a decision, not a block id."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow.parquet as pq
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.clients import ClosedLoop
from sim.conformance import check_case
from sim.engine import Arrivals, Engine
from sim.link import Link
from sim.memory.allocators.buddy import Buddy
from sim.memory.allocators.exact import ExactSlots
from sim.memory.allocators.fit import BestFit, FirstFit, NextFit
from sim.memory.contiguous import ContiguousMemory
from sim.memory.interface import KVMemory
from sim.memory.paged import PagedMemory
from sim.memory.reservation import MaxReservation, OracleReservation, Pow2Reservation
from sim.plan import StepWork, WorkTimer
from sim.recorder import Record, Recorder
from sim.scheduler.continuous import ContinuousBatching
from sim.scheduler.queues import Fcfs, Priority
from sim.scheduler.recovery import Auto, Recompute, Swap
from sim.scheduler.victims import FewestOutputTokens, Latest, LongestRemaining, LowestPriority, MostBlocks
from sim.sequence import Sequence
from workloads.request import HashIds, Request, TokenIds
from workloads.sampling import BeamSearch, ParallelSampling

CASES = sorted(path.parent for path in (Path(__file__).parents[1] / "data" / "conformance").glob("*/config.json"))
MODEL_LIMIT = 64
INTEGRALS = ("share_", "saved_by_sharing", "saturated_", "mean_running", "mean_waiting", "mean_itl", "std_itl")


class Uneven(WorkTimer):
    """Every figure of the work moves the time, by shares that no closed form of floats adds up to exactly."""

    def seconds(self, work: StepWork) -> float:
        return (
            0.1
            + work.num_tokens / 3000
            + work.decode_context / 70000
            + work.decode_blocks / 11000
            + work.decode_longest / 13000
            + work.prefill_pairs / 1e6
            + work.copied_slots / 13000
        )


class PerBlock:
    """Swaps that take a time of their own for each block."""

    def seconds(self, num_blocks: int) -> float:
        return num_blocks / 170


def observed(
    memory: KVMemory,
    scheduler: ContinuousBatching,
    requests: list[Request],
    record: Record,
    concurrency: int | None = None,
) -> dict:
    """Runs to the end; returns the tables, the summary, and what every sequence held when it let go."""
    released = []
    release = memory.release

    def watching(sequence: Sequence) -> None:
        released.append((sequence.request.request_id, list(sequence.blocks), sequence.computed, sequence.known))
        release(sequence)

    memory.release = watching  # type: ignore[method-assign]
    with TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder), memory.num_slots, memory.block_size, record)
        env = simpy.Environment()
        stream, link = iter(requests), Link(env, PerBlock())
        arrivals = Arrivals(stream) if concurrency is None else ClosedLoop(stream, concurrency)
        engine = Engine(env, arrivals, scheduler, Uneven(), recorder, lambda done, now: None, link)
        env.process(engine.serve())
        env.run()
        recorder.metrics.totals.never_sent = arrivals.num_never_sent
        summary = recorder.close("complete", {})
        tables = {name: pq.read_table(Path(folder) / f"{name}.parquet").to_pylist() for name in ("requests", "events")}
        steps = pq.read_table(Path(folder) / "steps.parquet").to_pylist()
    free = memory.free_list() if isinstance(memory, PagedMemory) else None
    return {"released": released, "free": free, "summary": summary, "steps": steps, **tables}


def assert_same(leaping: dict, stepping: dict) -> None:
    for name in ("requests", "events", "released", "free"):
        assert leaping[name] == stepping[name], name
    for name, value in stepping["summary"].items():
        # Integrals over time are summed in another order; every figure that counts or times something is equal.
        if value is not None and name.startswith(INTEGRALS):
            assert leaping["summary"][name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
        else:
            assert leaping["summary"][name] == value, name


def assert_never_more_in_flight(rows: list[dict], concurrency: int) -> None:
    """Whoever finishes when another is sent has left; who is turned away was never in."""
    served = [row for row in rows if row["status"] == "finished"]
    for row in served:
        now = row["arrival_s"]
        assert sum(other["arrival_s"] <= now < other["finish_s"] for other in served) <= concurrency


@st.composite
def workloads(draw: st.DrawFn) -> list[Request]:
    """Bursts and gaps; prompts share prefixes by tokens, with and without known output, by hash ids, or not at all."""
    now, requests = 0.0, []
    for index in range(draw(st.integers(1, 24))):
        now += draw(st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.7, 20.0]))
        prompt, output = draw(st.integers(1, 30)), draw(st.integers(1, 30))
        family = draw(st.integers(0, 2))
        content = {
            "none": None,
            "tokens": TokenIds(tuple(family * 1000 + j // 3 for j in range(prompt))),
            "told": TokenIds(tuple(family * 1000 + j // 3 for j in range(prompt + output))),
            "hashed": HashIds(tuple(family * 100 + j for j in range(-(-prompt // 4))), 4),
        }[draw(st.sampled_from(["none", "tokens", "told", "hashed"]))]
        requests.append(Request(index, now, prompt, output, draw(st.integers(0, 2)), content))
    return requests


@st.composite
def conversations(draw: st.DrawFn) -> list[Request]:
    """Turns among other requests: a prompt repeats all of an earlier turn, which may have others that follow it too."""
    now, requests = 0.0, []
    for index in range(draw(st.integers(1, 24))):
        now += draw(st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.7, 20.0]))
        new, output = draw(st.integers(1, 12)), draw(st.integers(1, 12))
        after = draw(st.none() | st.integers(0, index - 1)) if index else None
        before = requests[after].prompt.ids if after is not None else ()
        ids = (*before, *range(index * 100, index * 100 + new + output))
        think = draw(st.sampled_from([0.0, 0.05, 0.3, 4.0]))
        priority = draw(st.integers(0, 2))
        prompt = len(ids) - output
        requests.append(Request(index, now, prompt, output, priority, TokenIds(ids), after=after, think_s=think))
    return requests


def assert_sent_when_due(requests: list[Request], run: dict, concurrency: int | None) -> None:
    """By the definition: at its own time, or when the client has thought; and never if there was no answer."""
    rows = {row["request_id"]: row for row in run["requests"]}
    for request in requests:
        before = None if request.after is None else rows.get(request.after)
        unanswered = request.after is not None and (before is None or before["status"] != "finished")
        assert (request.request_id not in rows) == unanswered
        if unanswered:
            continue
        due = request.arrival_s if before is None else max(request.arrival_s, before["finish_s"] + request.think_s)
        sent = rows[request.request_id]["arrival_s"]
        assert sent >= due if concurrency else sent == due
    assert run["summary"]["never_sent"] == len(requests) - len(rows)


@st.composite
def paged(draw: st.DrawFn) -> dict:
    return {
        "num_blocks": draw(st.integers(4, 60)),
        "block_size": draw(st.sampled_from([1, 2, 4, 8])),
        "watermark": draw(st.sampled_from([0.0, 0.1])),
        "prefix_caching": draw(st.booleans()),
        "num_reserved_blocks": draw(st.integers(0, 1)),
    }


@st.composite
def schedulers(draw: st.DrawFn) -> dict:
    chunked = draw(st.booleans())
    return {
        "max_model_len": MODEL_LIMIT,
        "max_num_seqs": draw(st.integers(1, 12)),
        "max_num_batched_tokens": draw(st.integers(2, 80)) if chunked else MODEL_LIMIT,
        "chunked_prefill": chunked,
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 5])),
        "long_prefill_token_threshold_adaptive": draw(st.booleans()),
        # Without the check of the whole prompt, requests may preempt each other for ever; that is another test's.
        "scheduler_reserve_full_isl": True,
        "async_scheduling": draw(st.booleans()),
    }


concurrencies = st.none() | st.integers(1, 8)
records = st.sampled_from([Record(), Record(steps="sampled", sample_interval_s=0.7), Record(steps="none")])


@settings(max_examples=300, deadline=None)
@given(workloads(), paged(), schedulers(), st.sampled_from([Fcfs, Priority]), records, concurrencies)
def test_a_paged_run_that_leaps_equals_one_that_steps(requests, memory, scheduler, policy, record, concurrency):
    runs = []
    for leap in (True, False):
        pool = PagedMemory(**memory)
        engine = ContinuousBatching(pool, policy=policy(), leap=leap, **scheduler)
        runs.append(observed(pool, engine, requests, record, concurrency))
    assert_same(*runs)
    if concurrency is not None:
        for run in runs:
            assert_never_more_in_flight(run["requests"], concurrency)


@settings(max_examples=200, deadline=None)
@given(conversations(), paged(), schedulers(), st.sampled_from([Fcfs, Priority]), records, concurrencies)
def test_conversations_that_leap_equal_those_that_step(requests, memory, scheduler, policy, record, concurrency):
    runs = []
    for leap in (True, False):
        pool = PagedMemory(**memory)
        engine = ContinuousBatching(pool, policy=policy(), leap=leap, **scheduler)
        runs.append(observed(pool, engine, requests, record, concurrency))
        assert_sent_when_due(requests, runs[-1], concurrency)
    assert_same(*runs)
    if concurrency is not None:
        assert_never_more_in_flight(runs[0]["requests"], concurrency)


samplings = st.one_of(
    st.none(),
    st.builds(ParallelSampling, st.integers(2, 4)),
    st.builds(BeamSearch, st.integers(2, 3), st.just(1.0), st.just(7)),
)


@settings(max_examples=200, deadline=None)
@given(
    workloads(),
    st.lists(samplings, min_size=24, max_size=24),
    paged(),
    st.sampled_from([0, 4, 40]),
    schedulers(),
    st.sampled_from([Fcfs, Priority]),
    st.sampled_from([None, Latest, LowestPriority, FewestOutputTokens, MostBlocks, LongestRemaining]),
    st.sampled_from([Recompute, Swap, Auto]),
    concurrencies,
)
def test_a_run_with_forks_and_swaps_that_leaps_equals_one_that_steps(
    requests, asked, memory, host_blocks, scheduler, policy, victim, recovery, concurrency
):
    requests = [request._replace(sampling=sampling) for request, sampling in zip(requests, asked, strict=False)]
    runs = []
    for leap in (True, False):
        pool = PagedMemory(**memory, num_host_blocks=host_blocks)
        rules = {"policy": policy(), "victim": victim and victim(), "recovery": recovery()}
        engine = ContinuousBatching(pool, leap=leap, **rules, **scheduler)
        runs.append(observed(pool, engine, requests, Record(), concurrency))
        assert pool.host.num_free == host_blocks
    assert_same(*runs)


def test_leaps_happen_between_forks_that_have_written_their_own_block():
    # Three outputs of 30 tokens: the prompt's step, then one in which two of three copy the block of 4 that 5 tokens
    # have begun, and 28 steps in which nothing is decided.
    pool = PagedMemory(60, 4)
    requests = [Request(0, 0.0, 5, 30, sampling=ParallelSampling(3))]
    run = observed(pool, ContinuousBatching(pool, 64, Fcfs(), leap=True), requests, Record())
    assert [row["repeat"] for row in run["steps"]][:2] == [1, 1]
    assert sum(row["repeat"] for row in run["steps"]) == 30
    assert len(run["steps"]) <= 4


@settings(max_examples=60, deadline=None)
@given(
    workloads(),
    st.integers(8, 200),
    st.sampled_from([Buddy, FirstFit, BestFit, NextFit, ExactSlots]),
    st.sampled_from([MaxReservation, Pow2Reservation, OracleReservation]),
    schedulers(),
)
def test_a_contiguous_run_that_leaps_equals_one_that_steps(requests, num_blocks, allocator, reservation, scheduler):
    runs = []
    for leap in (True, False):
        pool = ContiguousMemory(num_blocks, MODEL_LIMIT, reservation(), allocator(num_blocks))
        engine = ContinuousBatching(pool, policy=Fcfs(), leap=leap, **scheduler)
        runs.append(observed(pool, engine, requests, Record()))
    assert_same(*runs)


def test_leaps_do_happen_and_rows_say_for_how_many_steps_they_stand():
    # One request, prompt 4 and output 30: a prefill step, then 29 decode steps until it finishes, in a single leap.
    pool = PagedMemory(10, 4)
    run = observed(pool, ContinuousBatching(pool, 64, Fcfs(), leap=True), [Request(0, 0.0, 4, 30)], Record())
    assert run["steps"][0]["repeat"] == 1
    assert sum(row["repeat"] for row in run["steps"]) == 30
    assert len(run["steps"]) <= 4  # the first leaps are short while the engine does not know how long a step takes


def test_leaps_of_a_closed_loop_end_where_a_request_finishes_and_the_next_is_sent():
    # One place: a prompt's step and 29 in which nothing is decided, then the second request, sent at that very time.
    pool = PagedMemory(30, 4)
    engine = ContinuousBatching(pool, 64, Fcfs(), leap=True)
    run = observed(pool, engine, [Request(0, 0.0, 4, 30), Request(1, 0.0, 4, 30)], Record(), concurrency=1)
    first, second = run["requests"]
    assert second["arrival_s"] == second["first_scheduled_s"] == first["finish_s"]
    assert sum(row["repeat"] for row in run["steps"]) == 60
    assert len(run["steps"]) <= 8


def test_an_arrival_cuts_a_leap_at_the_first_step_boundary_at_or_after_it():
    # Steps of a little over 0.1 s; the second request comes at 1.0 s, between two of them.
    pool = PagedMemory(100, 4)
    requests = [Request(0, 0.0, 4, 40), Request(1, 1.0, 4, 2)]
    run = observed(pool, ContinuousBatching(pool, 64, Fcfs(), leap=True), requests, Record())
    joined = next(row for row in run["requests"] if row["request_id"] == 1)["first_scheduled_s"]
    ends = [row["start_s"] + row["duration_s"] for row in run["steps"]]
    before = [end for end in ends if end < 1.0]
    assert joined in [row["start_s"] for row in run["steps"]]
    assert 1.0 <= joined < 1.0 + 0.2
    assert before


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_shortcut_decides_as_vllm_does(case: Path):
    assert check_case(case, leap=True).difference is None
