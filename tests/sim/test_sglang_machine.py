"""SGLang's scheduler over its tree under random workloads: every slot is accounted for, everyone ends, leaps change
nothing.
"""

from __future__ import annotations

from typing import Any

import pyarrow.parquet as pq
from hypothesis import event, given, settings
from hypothesis import strategies as st
from kv_executor import Executor
from radix_audit import RadixAudit, nodes_of, path_blocks
from test_leap import assert_same, observed

from sim.memory.radix import RadixMemory
from sim.recorder import Record
from sim.scheduler.schedule_policies import ArrivalOrder, LongestOutput, LongestPrefix
from sim.scheduler.sglang import SGLang
from sim.sequence import Sequence
from workloads.request import HashIds, Request, TokenIds

LIMIT = 40  # tokens of one request
ORDERS = [ArrivalOrder, LongestPrefix, LongestOutput]


@st.composite
def workloads(draw: st.DrawFn) -> list[Request]:
    """Bursts and gaps; prompts that share beginnings by tokens, with or without their output, by hash ids, or not."""
    now, requests = 0.0, []
    for index in range(draw(st.integers(1, 20))):
        now += draw(st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.7, 20.0]))
        prompt, output = draw(st.integers(1, 30)), draw(st.integers(1, 30))
        family, common = draw(st.integers(0, 2)), draw(st.integers(0, 60))
        told = [family * 1000 + j if j < common else 10_000 * (index + 1) + j for j in range(prompt + output)]
        content = {
            "none": None,
            "tokens": TokenIds(tuple(told[:prompt])),
            "told": TokenIds(tuple(told)),
            "hashed": HashIds(tuple(told[: -(-prompt // 4)]), 4),
        }[draw(st.sampled_from(["none", "tokens", "told", "hashed"]))]
        allowed = draw(st.sampled_from([None, output, output + 10]))
        requests.append(Request(index, now, prompt, output, 0, content, None, allowed))
    return requests


@st.composite
def setups(draw: st.DrawFn) -> dict[str, Any]:
    size = draw(st.sampled_from([1, 1, 2, 4]))
    return {
        "num_blocks": draw(st.integers(-(-8 // size), 100 // size)),
        "block_size": size,
        "prefix_caching": draw(st.sampled_from([True, True, False])),
        "order": draw(st.sampled_from(ORDERS)),
        "max_num_seqs": draw(st.integers(1, 12)),
        "max_prefill_tokens": draw(st.integers(1, 60)),
        "chunked_prefill_size": draw(st.sampled_from([None, size, 4, 8, 24])),
        "schedule_conservativeness": draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
        "new_token_ratio_decay_steps": draw(st.sampled_from([5, 600])),
        "clip_max_new_tokens": draw(st.sampled_from([4, 4096])),
        "retract_decode_steps": draw(st.sampled_from([0, 3, 20])),
    }


def built(setup: dict[str, Any], leap: bool) -> SGLang:
    knobs = dict(setup)
    memory = RadixMemory(*(knobs.pop(name) for name in ("num_blocks", "block_size", "prefix_caching")))
    return SGLang(memory, LIMIT, knobs.pop("order")(), leap=leap, **knobs)


@settings(max_examples=100, deadline=None)
@given(workloads(), setups(), st.integers(1, 4))
def test_every_slot_has_one_name_and_everyone_ends(requests: list[Request], setup: dict[str, Any], pace: int) -> None:
    """Requests come one every `pace` steps; the account is taken before and after each step's tokens are applied, and
    everyone reads what it has written, or another wrote that said the same."""
    engine = built(setup, leap=False)
    memory = engine.memory
    assert isinstance(memory, RadixMemory)
    audit, executor = RadixAudit(memory), Executor(engine)
    arrived: list[Sequence] = []
    finished: list[Sequence] = []
    retractions, number, coming = 0, 0, list(requests)
    while coming or not engine.idle:
        if coming and number % pace == 0:
            sequence, reason = engine.arrive(coming.pop(0))
            if reason is None:
                arrived.append(sequence)
        number += 1
        head = engine.waiting.head() if engine.waiting else None
        if head is not None and memory.caches_prefixes:
            audit.check_lookup(head)
        ran_before, under_way = set(engine.running), engine._chunked
        plan = engine.schedule()
        head = engine.waiting.head() if engine.waiting else None
        scheduled = {sequence for sequence, _ in plan.batch}
        victims = {preemption.victim for preemption in plan.preemptions}
        assert scheduled or engine.idle, "nothing is scheduled, and somebody is left"
        assert len(engine.running) <= setup["max_num_seqs"]
        if engine._prefilling:  # nobody decodes, and nobody is retracted
            assert not victims
            assert scheduled & ran_before <= {under_way}
            size = setup["chunked_prefill_size"]
            assert size is None or sum(tokens for _, tokens in plan.batch) <= size
        else:
            assert scheduled | victims == ran_before
            assert all(tokens == 1 for _, tokens in plan.batch)
        audit.look(list(engine.running), head)
        executor.execute(plan)
        done = engine.commit(plan)
        executor.committed(done)
        audit.look(list(engine.running), head)
        finished += done
        retractions += len(victims)
        assert all(not sequence.blocks for sequence in (*engine.waiting, *done))
        assert number < 5000, engine.explain_stall()
    assert set(finished) == set(arrived) and len(finished) == len(arrived)
    longest = min(LIMIT, memory.num_slots - 2)
    for sequence in finished:
        request = sequence.request
        assert sequence.generated == min(request.output_tokens, longest - request.prompt_tokens)
        assert sequence.hit_tokens is not None and sequence.hit_tokens < request.prompt_tokens  # not those of a return
    occupancy = memory.occupancy(None)
    assert occupancy.idle + occupancy.cached == memory.num_slots
    event(f"retractions: {'some' if retractions else 'none'}")


@settings(max_examples=100, deadline=None)
@given(workloads(), setups(), st.sampled_from([Record(), Record(steps="sampled", sample_interval_s=0.7)]))
def test_a_run_that_leaps_equals_one_that_steps(requests: list[Request], setup: dict[str, Any], record: Record) -> None:
    runs, trees = [], []
    for leap in (True, False):
        engine = built(setup, leap)
        memory = engine.memory
        assert isinstance(memory, RadixMemory)
        runs.append(observed(memory, engine, requests, record))  # type: ignore[arg-type]
        trees.append((memory.free_list(), sorted(path_blocks(node) for node in nodes_of(memory)), engine._ratio.value))
    assert_same(*runs)
    assert trees[0] == trees[1]
    event(f"retractions: {'some' if runs[0]['summary']['preemptions'] else 'none'}")
    event(f"leaps: {'some' if len(runs[0]['steps']) < len(runs[1]['steps']) else 'none'}")


def test_leaps_go_over_many_steps() -> None:
    # One request: a prefill, and 29 decode steps in a few leaps.
    engine = SGLang(RadixMemory(200), 100, ArrivalOrder(), leap=True)
    run = observed(engine.memory, engine, [Request(0, 0.0, 4, 30)], Record())  # type: ignore[arg-type]
    assert sum(row["repeat"] for row in run["steps"]) == 30
    assert len(run["steps"]) <= 6


def test_the_same_seed_gives_the_same_bytes(simulate: Any, tmp_path: Any) -> None:
    options = ["engine=sglang", "memory.num_blocks=3000", "workload=sharegpt_like", "workload.num_requests=60"]
    first, second = (simulate(*options, "workload.rate=20", f"+hydra.job.name={name}") for name in ("a", "b"))
    for table in ("requests", "steps", "events"):
        assert (first / f"{table}.parquet").read_bytes() == (second / f"{table}.parquet").read_bytes()
    assert pq.read_table(first / "events.parquet").num_rows > 0, "the pool is too large to retract anybody"
