"""Scheduler and hybrid memory under random arrivals: every slot of every group has one name, and every request ends.

The account is kept apart from the policy's sums: it walks the pool slot by slot and gives each its name from the block
tables, the tokens computed, and the token with which the last step of each sequence began.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from pool_audit import NAMES, compare, name_of, tokens_up_to
from test_leap import assert_same, observed, schedulers, workloads
from test_memory_machine import KNOBS, LIMIT, AuditedRun, Serving

from sim.layer_groups import LayerGroup
from sim.memory.hybrid import GroupTables, HybridPagedMemory
from sim.recorder import Record
from sim.scheduler.continuous import ContinuousBatching
from sim.scheduler.queues import Fcfs, Priority
from sim.scheduler.recovery import Recompute, Swap
from sim.scheduler.victims import FewestOutputTokens, MostBlocks
from sim.sequence import Sequence


class Watched(HybridPagedMemory):
    """Notes with which token the last step of each sequence began, and what each block was last seen to hold."""

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.began: dict[Sequence, int] = {}
        self.contents: dict[int, Hashable] = {}

    def admit(self, sequence: Sequence, hit: list[int], num_tokens: int, room_for: int, others_run: bool) -> bool:
        admitted = super().admit(sequence, hit, num_tokens, room_for, others_run)
        if admitted:
            self.began[sequence] = len(hit) * self.block_size
            self._check_hit(sequence, len(hit))
            self._note(sequence, num_tokens)
        return admitted

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        self.began[sequence] = sequence.computed
        grown = super().grow(sequence, num_tokens)
        if grown:
            self._note(sequence, num_tokens)
        return grown

    def _note(self, sequence: Sequence, num_tokens: int) -> None:
        for group, _, first, table in tables_of(self, sequence):
            for position, block in enumerate(table, first):
                end = (position + 1) * self.block_size
                if end <= num_tokens:
                    self.contents[block] = (group, tokens_up_to(sequence, end))

    def _check_hit(self, sequence: Sequence, length: int) -> None:
        """Whatever is hit holds, in its group, the tokens up to its end; and all that the next token reads is there."""
        for group, window, first, table in tables_of(self, sequence):
            assert first * self.block_size <= (0 if window is None else max(0, length * self.block_size - window + 1))
            for position, block in enumerate(table[: length - first], first):
                assert self.contents[block] == (group, tokens_up_to(sequence, (position + 1) * self.block_size))


def tables_of(memory: HybridPagedMemory, sequence: Sequence) -> list[tuple[int, int | None, int, list[int]]]:
    """Of each group: its number, its window, the position of its first block, and its blocks."""
    held = sequence.blocks
    assert isinstance(held, GroupTables)
    windows = memory.windows
    return [(i, windows[i], held.end - len(table), table) for i, table in enumerate(held.tables)]


def audit(memory: Watched, live: list[Sequence], head: Sequence | None, seen_all: bool) -> None:
    """Fails if a slot has no name or not the one that the policy says, or a block is held without need."""
    size, free = memory.block_size, memory.pool.free_list()
    assert len(set(free)) == len(free) == memory.num_free_blocks
    names: dict[int, str] = {}
    contents: dict[int, Hashable] = {}
    entries = 0
    for sequence in live:
        began = memory.began[sequence]
        for group, window, first, table in tables_of(memory, sequence):
            read_from = 0 if window is None else max(0, began - window + 1)
            assert first == read_from // size and (first + len(table)) * size >= sequence.computed
            assert len(set(table)) == len(table)
            entries += len(table)
            for position, block in enumerate(table, first):
                end = (position + 1) * size
                content: Hashable = (group, tokens_up_to(sequence, end) if end <= sequence.computed else sequence)
                assert contents.setdefault(block, content) == content, f"block {block} is two things"
                for token in range(position * size, end):
                    name = "internal" if token < read_from else name_of(sequence, token)
                    slot = block * size + token % size
                    names[slot] = min(name, names.get(slot, name), key=NAMES.index)
    registered = set(memory.pool.registered())
    assert memory.caches_prefixes or not registered
    for block in free:
        for slot in range(block * size, (block + 1) * size):
            assert slot not in names, f"block {block} is free and held"
            names[slot] = "cached" if block in registered else "idle"
    first_usable = memory.num_blocks - memory.num_usable_blocks
    assert names.keys() == set(range(first_usable * size, memory.num_blocks * size)), "a block is lost"
    compare(memory, names, head, len(free) * size)
    assert memory.occupancy(head).saved == (entries - len(contents)) * size
    if not memory.caches_prefixes:
        assert entries == len(contents)
    kept = {block: content for block, content in memory.contents.items() if block in registered and block in free}
    assert not seen_all or registered <= kept.keys() | contents.keys()
    memory.contents = kept | contents


class HybridServing(Serving):
    """One to three groups, in pools that hold a request of the model limit and few blocks more."""

    @initialize(
        windows=st.sampled_from([[None], [4], [None, 4], [5, None], [3, 3, None], [None, None, 6], [None, 9, 9]]),
        block_size=st.integers(1, 6),
        spare=st.integers(0, 6),
        prefix_caching=st.booleans(),
        interval=st.sampled_from([None, 0, 0, 1, 3]),
        watermark=st.sampled_from([0.0, 0.0, 0.2]),
        victim=st.sampled_from([None, None, FewestOutputTokens, MostBlocks]),
        recovery=st.sampled_from([Recompute, Recompute, Swap]),
        knobs=KNOBS,
    )
    def begin(
        self,
        windows: list[int | None],
        block_size: int,
        spare: int,
        prefix_caching: bool,
        interval: int | None,
        watermark: float,
        victim: Any,
        recovery: Any,
        knobs: dict[str, Any],
    ) -> None:
        # Who is let in for a first chunk alone, and is the one to go for all it holds, may come and go for ever.
        assume(victim is None or knobs["scheduler_reserve_full_isl"])
        self.number, self.per_id = 0, block_size
        groups = tuple(LayerGroup((layer,), window) for layer, window in enumerate(windows))
        budget = knobs["max_num_batched_tokens"]
        memory = Watched(
            len(windows) * (-(-LIMIT // block_size) + 1) + spare,
            groups,
            LIMIT,
            budget,
            block_size,
            watermark,
            prefix_caching,
            interval and interval * block_size,
        )
        engine = ContinuousBatching(
            memory, LIMIT, Fcfs(), leap=True, victim=victim and victim(), recovery=recovery(), **knobs
        )
        pays = not prefix_caching and knobs["scheduler_reserve_full_isl"] and windows == [None]
        self.run = AuditedRun(
            engine, None, lambda live, head, seen_all: audit(memory, live, head, seen_all), each_preemption_pays=pays
        )


TestHybridServing = HybridServing.TestCase
TestHybridServing.settings = settings(max_examples=80, stateful_step_count=12, deadline=None)


@settings(max_examples=25, deadline=None)
@given(
    workloads(),
    st.sampled_from([[None, 7], [5, 5, None], [4]]),
    st.integers(140, 300),
    st.booleans(),
    schedulers(),
    st.sampled_from([Fcfs, Priority]),
)
def test_a_scheduler_that_may_leap_does_not_over_hybrid_memory_and_decides_the_same(
    requests, windows, num_blocks, caching, scheduler, policy
):
    scheduler["async_scheduling"] = False
    groups = tuple(LayerGroup((layer,), window) for layer, window in enumerate(windows))
    runs = []
    for leap in (True, False):
        pool = HybridPagedMemory(num_blocks, groups, 64, scheduler["max_num_batched_tokens"], 2, prefix_caching=caching)
        runs.append(
            observed(pool, ContinuousBatching(pool, policy=policy(), leap=leap, **scheduler), requests, Record())
        )
    assert_same(*runs)
    assert all(row["repeat"] == 1 for row in runs[0]["steps"])
