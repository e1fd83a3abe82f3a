"""vAttention: page groups by the paper's bytes, and which of them stay mapped; counted by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from pool_audit import audit_paged
from test_leap import assert_same, observed, schedulers, workloads
from test_memory_machine import KNOBS, LIMIT, AuditedRun, Serving

from sim.hardware import Deployment
from sim.kv_layout import ModelSpec, kv_bytes_per_token, page_group_tokens
from sim.memory.vattention import VMM_CALL_S, VAttentionMemory
from sim.recorder import Record
from sim.scheduler.continuous import ContinuousBatching
from sim.scheduler.queues import Fcfs, Priority
from sim.scheduler.victims import LongestRemaining
from sim.sequence import Sequence
from workloads.errors import UserError
from workloads.request import Request

KIB = 1024

# ------------------------------------------------------------------------------------------------------ bytes of a page


def model(num_layers: int, num_kv_heads: int, **others: Any) -> ModelSpec:
    shape = {"hidden_size": 4096, "num_heads": 32, "intermediate_size": 11008, "vocab_size": 64000}
    return ModelSpec(
        name="a model",
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        max_model_len=4096,
        dtype="bfloat16",
        **shape,
        **others,
    )


def deployment(tensor_parallel: int = 1, kv_cache_dtype: str = "auto") -> Deployment:
    return Deployment(
        tensor_parallel=tensor_parallel,
        pipeline_parallel=1,
        gpu_memory_utilization=0.9,
        kv_cache_memory_bytes=None,
        non_kv_memory_bytes=None,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=None,
    )


@pytest.mark.parametrize(
    ("layers", "heads", "kib_per_token", "of_64k", "of_2m"),
    [
        # KV of a token as Prabhu et al. give it: 2 * layers * heads * 128 * 2 bytes. In one buffer a token has heads *
        # 256 bytes: Yi-6B 1,024, the others 2,048, of which 64 KiB hold 64 and 32, 2 MiB 2,048 and 1,024.
        (32, 4, 64, 64, 2048),  # Yi-6B
        (32, 8, 128, 32, 1024),  # Llama-3-8B
        (60, 8, 240, 32, 1024),  # Yi-34B
    ],
)
def test_tokens_in_a_page_group_follow_from_the_papers_models(
    layers: int, heads: int, kib_per_token: int, of_64k: int, of_2m: int
) -> None:
    spec = model(layers, heads)
    assert kv_bytes_per_token(spec, deployment()) == kib_per_token * KIB
    assert page_group_tokens(spec, deployment(), 64 * KIB) == of_64k
    assert page_group_tokens(spec, deployment(), 128 * KIB) == 2 * of_64k
    assert page_group_tokens(spec, deployment(), 256 * KIB) == 4 * of_64k
    assert page_group_tokens(spec, deployment(), 2048 * KIB) == of_2m
    # Two GPUs have half the heads each, so a page of each holds twice as many tokens; so it does at half the bytes.
    assert page_group_tokens(spec, deployment(tensor_parallel=2), 2048 * KIB) == 2 * of_2m
    assert page_group_tokens(spec, deployment(kv_cache_dtype="fp8"), 2048 * KIB) == 2 * of_2m


def test_a_page_size_that_the_driver_does_not_map_is_refused() -> None:
    with pytest.raises(UserError, match="page_bytes is 4096; expected one of 65536, 131072, 262144, 2097152"):
        page_group_tokens(model(32, 8), deployment(), 4096)


def test_the_config_derives_the_block_size_of_the_pool_from_the_page(simulate: Callable[..., Any]) -> None:
    # Llama-3.1-8B has 131,072 bytes a token: 40 GiB are 327,680 tokens, in groups of 32 tokens 10,240, of 1,024 320.
    for page, block, blocks in ((64 * KIB, 32, 10_240), (2048 * KIB, 1024, 320)):
        folder = simulate(
            "engine=vattention", f"memory.page_bytes={page}", f"kv_cache_memory_bytes={40 << 30}",
            "workload.num_requests=3",
        )  # fmt: skip
        summary = json.loads((folder / "summary.json").read_text())
        assert (summary["block_size"], summary["pool_blocks"]) == (block, blocks)
        assert summary["vmm_calls"] == 64 * summary["page_groups_mapped"] > 0


# ----------------------------------------------------------------------------------------------------------- the places


def memory(num_groups: int, places: int = 4, deferred: bool = True, layers: int = 60) -> VAttentionMemory:
    return VAttentionMemory(num_groups, 4, places, layers, deferred)


def admitted(pool: VAttentionMemory, prompt: int, output: int = 50) -> Sequence:
    sequence = Sequence.of(Request(0, 0.0, prompt, output), 1000)
    assert pool.admit(sequence, [], prompt, prompt, others_run=False)
    sequence.computed = prompt
    return sequence


def test_a_page_group_of_yi_34b_takes_five_milliseconds_to_map() -> None:
    # Prabhu et al.: about 40 us a call, about 5 ms when K and V of 60 layers grow at once: 120 * 40 us = 4.8 ms.
    pool = memory(8, layers=60)
    admitted(pool, 4)
    assert pool.mappings() == {"page_groups_mapped": 1, "vmm_calls": 120, "vmm_s": pytest.approx(4.8e-3)}
    assert pytest.approx(40e-6) == VMM_CALL_S


def test_the_last_page_group_is_all_that_a_request_can_waste() -> None:
    # 6 + 5 tokens: 10 are stored, in groups of 4 that is 3, so 2 slots are never filled; 6 of the prompt are used.
    pool = memory(8)
    sequence = Sequence.of(Request(0, 0.0, 6, 5), 1000)
    pool.admit(sequence, [], 6, 6, others_run=False)
    sequence.computed = 6
    assert pool.occupancy(None)[:6] == (6, 2, 0, 0, 0, 24)
    pool.grow(sequence, 10)
    sequence.computed = 10
    assert pool.occupancy(None)[:6] == (10, 0, 2, 0, 0, 20)
    assert pool.table_entries(sequence) == 0


def test_the_next_request_in_a_place_finds_its_pages_mapped() -> None:
    # 9 tokens in 3 groups, then 5 in 2 and with 4 more in 3: all three are still mapped, in the same order.
    pool = memory(8)
    first = admitted(pool, 9)
    groups = list(first.blocks)
    pool.release(first)
    assert pool.num_free_blocks == 8
    second = admitted(pool, 5)
    assert list(second.blocks) == groups[:2]
    pool.grow(second, 9)
    assert list(second.blocks) == groups
    assert pool.num_mapped == 3


def test_without_deferred_reclamation_each_request_maps_its_own() -> None:
    pool = memory(8, deferred=False)
    pool.release(admitted(pool, 9))
    admitted(pool, 5)
    assert pool.num_mapped == 3 + 2


def test_others_get_what_is_mapped_where_nobody_needs_it_the_last_place_first() -> None:
    # 4 groups: two stay mapped in place 0, two in place 1. Three are needed in place 0, so place 1 gives its two back,
    # of which one is mapped again.
    pool = memory(4)
    both = [admitted(pool, 8), admitted(pool, 8)]
    of_last = set(both[1].blocks)
    for sequence in both:
        pool.release(sequence)
    third = admitted(pool, 12)
    assert set(third.blocks) - of_last and len(set(third.blocks) & of_last) == 1
    assert pool.num_mapped == 4 + 1
    assert pool.num_free_blocks == 1


def test_a_place_is_chosen_by_best_fit_among_those_that_are_vacant() -> None:
    # Places 0, 1 and 2 have 4, 2 and 3 groups mapped. For 2 groups place 1 fits best; for 3 then place 2.
    pool = memory(20)
    for sequence in [admitted(pool, 16), admitted(pool, 8), admitted(pool, 12)]:
        pool.release(sequence)
    assert pool.num_mapped == 9
    assert list(admitted(pool, 8).blocks) == [4, 5]
    assert list(admitted(pool, 12).blocks) == [6, 7, 8]
    assert pool.num_mapped == 9


# ------------------------------------------------------------------------------------------------------- random serving


class VAttentionServing(Serving):
    """Page groups that hold a request of the model limit and a little more; a twin does not leap."""

    @initialize(
        block_size=st.integers(1, 8),
        tiny=st.integers(1, 8) | st.none(),
        spare=st.integers(0, 3),
        policy=st.sampled_from([Fcfs, Priority]),
        leap=st.booleans(),
        deferred=st.booleans(),
        knobs=KNOBS,
    )
    def begin(
        self,
        block_size: int,
        tiny: int | None,
        spare: int,
        policy: type[Fcfs] | type[Priority],
        leap: bool,
        deferred: bool,
        knobs: dict[str, Any],
    ) -> None:
        self.number, self.per_id = 0, 1
        groups = tiny if tiny is not None else -(-LIMIT // block_size) + spare
        places = knobs["max_num_seqs"]
        self.pools = [VAttentionMemory(groups, block_size, places, 2, deferred) for _ in range(2)]
        engine = ContinuousBatching(self.pools[0], LIMIT, policy(), leap=leap, **knobs)
        twin = ContinuousBatching(self.pools[1], LIMIT, policy(), **knobs) if leap else None

        def audit(live: list[Sequence], head: Sequence | None, seen_all: bool) -> None:
            audit_paged(self.pools[0], live, head)

        self.run = AuditedRun(engine, twin, audit, each_preemption_pays=knobs["scheduler_reserve_full_isl"])

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "run") and self.run.leaps:
            assert self.pools[0].num_mapped == self.pools[1].num_mapped


TestVAttentionServing = VAttentionServing.TestCase
TestVAttentionServing.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)


@settings(max_examples=80, deadline=None)
@given(
    workloads(),
    st.integers(4, 60),
    st.sampled_from([1, 2, 4, 8]),
    st.booleans(),
    st.sampled_from([None, LongestRemaining]),
    schedulers(),
)
def test_a_run_that_leaps_equals_one_that_steps_to_the_number_of_mappings(
    requests: list[Request],
    groups: int,
    block_size: int,
    deferred: bool,
    victim: type[LongestRemaining] | None,
    scheduler: dict[str, Any],
) -> None:
    runs, mapped = [], []
    for leap in (True, False):
        pool = VAttentionMemory(groups, block_size, scheduler["max_num_seqs"], 2, deferred)
        engine = ContinuousBatching(pool, policy=Fcfs(), victim=victim and victim(), leap=leap, **scheduler)
        runs.append(observed(pool, engine, requests, Record()))
        mapped.append(pool.num_mapped)
    assert_same(*runs)
    assert mapped[0] == mapped[1]
