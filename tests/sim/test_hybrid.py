"""Hybrid paged memory: one table for each group of layers, windows that give blocks back, hits that all groups have."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import conformance
from sim.layer_groups import LayerGroup
from sim.memory.block_pool import BlockPool
from sim.memory.hybrid import GroupTables, HybridPagedMemory
from sim.memory.interface import Occupancy
from sim.sequence import Sequence
from workloads.errors import UserError
from workloads.request import Request, TokenIds

CASES = sorted(path.parent for path in (Path(__file__).parents[1] / "data" / "conformance").glob("*/config.json"))
RECORDINGS = sorted((Path(__file__).parents[1] / "data" / "hybrid").glob("*.jsonl.gz"))
LONG = 1_000_000  # a model limit that nothing here reaches


def groups(*windows: int | None) -> tuple[LayerGroup, ...]:
    """Groups of one layer each."""
    return tuple(LayerGroup((layer,), window) for layer, window in enumerate(windows))


def hybrid(num_blocks: int, windows: Iterable[int | None], **options: Any) -> HybridPagedMemory:
    return HybridPagedMemory(num_blocks, groups(*windows), LONG, **options)


def sequence(prompt: int, output: int = 1000, number: int = 0, tokens: Iterable[int] | None = None) -> Sequence:
    told = None if tokens is None else TokenIds(tuple(tokens))
    return Sequence.of(Request(number, 0.0, prompt, output, prompt=told), LONG)


def admit(memory: HybridPagedMemory, one: Sequence, num_tokens: int | None = None, others_run: bool = False) -> bool:
    """Admits a sequence with what it hits, and computes all it knows or its first `num_tokens` tokens."""
    num_tokens = one.known if num_tokens is None else num_tokens
    admitted = memory.admit(one, memory.lookup(one), num_tokens, one.known, others_run)
    if admitted:
        one.computed = num_tokens
    return admitted


def grow(memory: HybridPagedMemory, one: Sequence, num_tokens: int) -> None:
    assert memory.grow(one, num_tokens)
    one.computed = num_tokens


def held(one: Sequence) -> GroupTables:
    assert isinstance(one.blocks, GroupTables)
    return one.blocks


# ------------------------------------------------------------------------------------------------------ worked examples


def test_ten_full_and_twenty_sliding_layers_hold_eleven_blocks_at_112_tokens():
    # vLLM's example: three groups of ten layers, one full and two with a window of 32; blocks of 16. The 112th token
    # reads those from 112 - 32 = 80 on, which is where the sixth block begins: 7 full blocks and twice 2.
    memory = hybrid(100, [None, 32, 32])
    one = sequence(111)
    assert admit(memory, one)
    grow(memory, one, 112)
    assert [len(table) for table in held(one).tables] == [7, 2, 2]
    assert len(one.blocks) == 11 == memory.num_usable_blocks - memory.num_free_blocks


def test_a_step_gives_back_before_it_takes():
    # Blocks of 2, a full group and one with a window of 4, which for token c, from 0, reads those from c - 3 on.
    memory = hybrid(20, [None, 4], block_size=2, prefix_caching=False)
    one = sequence(5, 10)
    assert admit(memory, one)
    assert held(one).tables == [[1, 2, 3], [4, 5, 6]]  # group after group
    grow(memory, one, 6)  # token 5 reads from 2 on: tokens 0 and 1 are behind, and so is block 4
    assert held(one).tables == [[1, 2, 3], [5, 6]]
    assert memory.pool.free_list()[:2] == [4, 7]
    grow(memory, one, 7)  # token 6 reads from 3 on: block 5 still holds that; 4 was freed last and is taken first
    assert held(one).tables == [[1, 2, 3, 4], [5, 6, 7]]
    # 7 tokens in the full group; in the sliding one tokens 3 to 6, while token 2 in block 5 is read no more. The 7 held
    # blocks of 2 leave one slot in each last block, and 14 - 7 - 4 - 1 = 2 is what the 8th token takes.
    assert memory.occupancy(None) == Occupancy(11, 2, 1, 0, 0, 24, 24, 0)
    grow(memory, one, 8)  # token 7 reads from 4 on
    assert held(one).tables == [[1, 2, 3, 4], [6, 7]]
    grow(memory, one, 9)  # 5 is free again; the sliding group gets the next, which never was
    assert held(one).tables == [[1, 2, 3, 4, 5], [6, 7, 8]]
    memory.release(one)
    # One table after another, each from its end: the last group's first block was freed last of all groups, and of a
    # table the last block comes first.
    assert memory.pool.free_list()[:8] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert memory.occupancy(None) == Occupancy(0, 0, 0, 0, 0, 38, 38, 0)


def test_slots_behind_the_end_are_internal_in_every_group():
    # Prompt 3 and output 2: the last token is never stored, so 4 slots of each table are filled, of 2 blocks of 3.
    memory = hybrid(20, [None, 8], block_size=3)
    one = sequence(3, 2)
    assert admit(memory, one)
    grow(memory, one, 4)
    assert memory.occupancy(None) == Occupancy(8, 0, 4, 0, 0, 45, 45, 0)


@pytest.mark.parametrize(
    ("window", "block_size", "tokens", "most"), [(4, 4, 1, 2), (128, 16, 1, 9), (1024, 16, 2048, 193)]
)
def test_a_window_straddles_block_boundaries(window: int, block_size: int, tokens: int, most: int) -> None:
    # ceil((window - 1 + tokens) / block) + 1: ceil(4 / 4) + 1, ceil(128 / 16) + 1, ceil(3,071 / 16) + 1.
    memory = hybrid(2000, [window], block_size=block_size, max_num_batched_tokens=tokens)
    one = sequence(10_000)
    assert memory.never_fits(one) is None
    assert admit(memory, one, num_tokens=1)
    held_at_most = 0
    for _ in range(4 * window // tokens + 3):
        grow(memory, one, one.computed + tokens)
        held_at_most = max(held_at_most, len(one.blocks))
    assert held_at_most == most
    small = hybrid(most, [window], block_size=block_size, max_num_batched_tokens=tokens)
    assert small.never_fits(one) == (
        f"needs {most} blocks of {block_size} at once over 1 groups of layers, the pool has {most - 1}"
    )


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 20), st.data())
def test_a_sliding_group_never_holds_more_than_its_bound(window, block_size, budget, data):
    memory = hybrid(500, [None, window], block_size=block_size, max_num_batched_tokens=budget)
    one = sequence(200)
    assert admit(memory, one, num_tokens=data.draw(st.integers(1, budget)))
    for tokens in data.draw(st.lists(st.integers(1, budget), max_size=12)):
        before = one.computed
        grow(memory, one, before + tokens)
        full, sliding = held(one).tables
        assert len(sliding) <= -(-(window - 1 + budget) // block_size) + 1
        # Exactly the blocks that the step reads or writes: from the window of its first token on.
        assert len(full) - len(sliding) == max(0, before - window + 1) // block_size


# ------------------------------------------------------------------------------------------------------------ admission


def test_admission_asks_for_the_blocks_of_all_groups():
    # A prompt of 8 in blocks of 2 is 4 blocks a group: 12 of 11 usable ones are too many, 12 of 12 are not.
    for num_blocks, expected in ((12, False), (13, True)):
        assert admit(hybrid(num_blocks, [None, 40, 40], block_size=2), sequence(8)) is expected


def test_a_sliding_group_is_asked_for_no_more_than_it_ever_holds():
    # Prompt 100, blocks of 2, steps of 4 tokens, window 3: 50 full blocks, and at most ceil((2 + 4) / 2) + 1 = 4.
    for usable, expected in ((53, False), (54, True)):
        memory = hybrid(usable + 1, [None, 3], block_size=2, max_num_batched_tokens=4)
        one = sequence(100, 1)
        assert admit(memory, one, num_tokens=4) is expected
        assert (memory.never_fits(one) is None) is expected
        while expected and one.computed < 100:
            grow(memory, one, one.computed + 4)


def test_the_watermark_is_kept_while_others_run():
    # 6 of 20 usable blocks are asked for and int(0.7 * 21) = 14 kept; with int(0.72 * 21) = 15 kept, it is too many.
    for watermark, expected in ((0.7, True), (0.72, False)):
        memory = hybrid(21, [None, 40], block_size=2, watermark=watermark)
        assert admit(memory, sequence(6), others_run=True) is expected
        assert admit(memory, sequence(6, number=1), others_run=False)


# ----------------------------------------------------------------------------------------------------------------- hits


def test_a_prefix_shorter_than_a_block_hits_nothing():
    # 240 common tokens against blocks of 784, as large states of other layers make them.
    memory = hybrid(50, [None, 1024], block_size=784)
    first = sequence(2000, number=0, tokens=range(2000))
    assert admit(memory, first)
    memory.release(first)
    assert memory.lookup(sequence(2000, number=1, tokens=[*range(240), *range(5000, 6760)])) == []
    assert len(memory.lookup(sequence(2000, number=2, tokens=range(2000)))) == 2


@pytest.mark.parametrize("interval", [None, 0])
def test_a_hit_takes_of_a_sliding_group_only_the_window(interval: int | None) -> None:
    # Blocks of 4, window 8: a hit must end with ceil(7 / 4) = 2 blocks. 40 known tokens leave one to compute: 9 blocks.
    memory = hybrid(100, [None, 8], block_size=4, prefix_cache_retention_interval=interval)
    first = sequence(40, number=0, tokens=range(40))
    assert admit(memory, first)  # full: 1 to 10, sliding: 11 to 20
    grow(memory, first, 41)  # token 40 reads from 33 on
    assert held(first).skipped == 8
    memory.release(first)
    second = sequence(40, number=1, tokens=range(40))
    assert memory.lookup(second) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert admit(memory, second)
    full, sliding = held(second).tables
    assert full[:9] == [1, 2, 3, 4, 5, 6, 7, 8, 9] and len(full) == 10
    assert sliding[:2] == [18, 19] and len(sliding) == 3


def test_a_hit_ends_where_the_sliding_group_still_has_a_window():
    # As above, every block kept. Block 18, the sliding group's eighth, is lost: the longest run of two before is that
    # of its sixth and seventh, 28 tokens, though the full group has 36.
    memory = hybrid(100, [None, 8], block_size=4, prefix_cache_retention_interval=None)
    first = sequence(40, number=0, tokens=range(40))
    assert admit(memory, first)
    memory.release(first)
    memory.pool.unregister(18)
    assert len(memory.lookup(sequence(40, number=1, tokens=range(40)))) == 7
    # Only a run that begins the prompt may be shorter than the window.
    for block in (12, 14, 16):
        memory.pool.unregister(block)
    assert len(memory.lookup(sequence(40, number=1, tokens=range(40)))) == 1


def test_groups_of_one_type_must_agree():
    memory = hybrid(100, [8, 8, None], block_size=4, prefix_cache_retention_interval=None)
    first = sequence(20, number=0, tokens=range(20))
    assert admit(memory, first)  # 1 to 5, 6 to 10, 11 to 15
    memory.release(first)
    again = sequence(21, number=1, tokens=range(21))
    assert len(memory.lookup(again)) == 5
    memory.pool.unregister(5)  # the first group's last: 3 and 4 are its last two, and the others' are there too
    assert len(memory.lookup(again)) == 4
    memory.pool.unregister(8)  # the second group's third: 6 and 7 are a run, and the first group's 1 and 2
    assert len(memory.lookup(again)) == 2


def test_by_default_a_prefix_is_kept_where_a_second_request_has_shown_that_it_is_shared():
    # Blocks of 4, window 8. The first prompt of 40 keeps, of the sliding group, what a hit of 36 tokens ends with. The
    # second has 20 tokens in common with it: the full group has them, the sliding one not. It keeps what a hit of 20
    # ends with, and the third hits that.
    memory = hybrid(200, [None, 8], block_size=4)
    sequences = [sequence(40, number=i, tokens=[*range(20), *range(1000 * i, 1000 * i + 20)]) for i in range(3)]
    lengths = []
    for one in sequences:
        lengths.append(len(memory.lookup(one)))
        assert admit(memory, one)
        memory.release(one)
    assert lengths == [0, 0, 5]


def test_an_interval_keeps_a_window_before_each_of_its_multiples():
    # Blocks of 2, window 4 (2 blocks), every 8 tokens: of each 4 blocks the last two; and those before token 20 of 21.
    memory = hybrid(100, [4], block_size=2, prefix_cache_retention_interval=8)
    one = sequence(21, tokens=range(21))
    assert admit(memory, one)
    table = held(one).tables[0]
    assert memory.pool.registered() == [table[position] for position in (2, 3, 6, 7, 8, 9)]


def test_blocks_behind_the_window_keep_what_they_hold_until_they_are_taken():
    # Every block kept: the first prompt's blocks behind the window are free and hit all the same.
    memory = hybrid(100, [8], block_size=4, prefix_cache_retention_interval=None)
    first = sequence(40, number=0, tokens=range(40))
    assert admit(memory, first)
    grow(memory, first, 41)
    assert memory.num_cached_blocks == 8
    second = sequence(13, number=1, tokens=range(13))
    # 3 blocks are hit, and token 12 reads from 5 on: the first is not taken, the listing has block 0 in its place.
    assert memory.lookup(second) == [0, 2, 3]
    assert admit(memory, second)
    assert memory.num_cached_blocks == 6
    # Freed last block first: 8 would be evicted first.
    assert memory.pool.free_list()[-6:] == [8, 7, 6, 5, 4, 1]


def test_a_slot_that_one_of_two_holders_reads_is_used():
    # Blocks of 4, window 6: a hit ends with 2 blocks. Both sequences hold the block of tokens 8 to 11; the first reads
    # from 14 - 5 = 9 on while it computes token 14, the second from 13 - 5 = 8 on while it computes tokens 12 and 13.
    memory = hybrid(100, [6], block_size=4, prefix_cache_retention_interval=None)
    first = sequence(14, number=0, tokens=range(14))
    assert admit(memory, first)
    second = sequence(14, number=1, tokens=range(14))
    assert admit(memory, second)
    assert held(second).tables[0][:2] == held(first).tables[0][1:3] == [2, 3]
    grow(memory, first, 15)  # reads from 9 on: block 3 is its first; block 2 is the second's alone
    # The first's 3 is shared and read whole; the second reads tokens from 12 - 5 = 7 on, so 3 of the 4 of block 2 are
    # internal. Blocks 2, 3 and one last block each are held.
    occupancy = memory.occupancy(None)
    assert occupancy.internal == 3 and occupancy.saved == 4
    assert occupancy.used == 1 + 4 + 3 + 2
    grow(memory, second, 15)  # now both read from 9 on: token 8 is read by nobody, and the block counts once
    occupancy = memory.occupancy(None)
    assert occupancy.internal == 1 and occupancy.used == 3 + 3 + 3


# --------------------------------------------------------------------------------------------------- refusals, and vLLM


def test_an_interval_at_which_no_block_ends_is_refused():
    with pytest.raises(UserError, match="prefix_cache_retention_interval is 24; expected null, 0 or a multiple of mem"):
        hybrid(10, [8], prefix_cache_retention_interval=24)


class OneFullGroup(HybridPagedMemory):
    """As `PagedMemory` is built and looked at by a recorded case."""

    def __init__(self, num_blocks: int, block_size: int, watermark: float, prefix_caching: bool) -> None:
        super().__init__(num_blocks, groups(None), LONG, None, block_size, watermark, prefix_caching)

    @property
    def prefix(self) -> BlockPool | None:
        return self.pool if self.caches_prefixes else None

    def free_list(self) -> list[int]:
        return self.pool.free_list()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_full_group_decides_as_vllm_does(case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "PagedMemory", OneFullGroup)
    assert conformance.check_case(case).difference is None


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.name.partition(".")[0])
def test_every_call_has_the_outcome_that_vllm_recorded(recording: Path) -> None:
    with gzip.open(recording, "rt", encoding="utf-8") as stream:
        config, *calls = map(json.loads, stream)
    limit = config["max_model_len"]
    memory = HybridPagedMemory(
        config["num_gpu_blocks"],
        groups(*config["windows"]),
        limit,
        config["max_num_batched_tokens"],
        config["block_size"],
        config["watermark"],
        config["enable_prefix_caching"],
        config["prefix_cache_retention_interval"],
    )
    sequences = []
    for number, line in enumerate(config["requests"]):
        told = None if line["token_ids"] is None else TokenIds(tuple(line["token_ids"]))
        request = Request(number, 0.0, line["prompt_tokens"], line["output_tokens"], prompt=told)
        sequences.append(Sequence.of(request, limit))
    assert len(calls) > 300
    for number, call in enumerate(calls):
        assert _outcome(memory, sequences[call["request"]], call) == _recorded(call), f"call {number}: {call['call']}"


def _outcome(memory: HybridPagedMemory, one: Sequence, call: dict[str, Any]) -> dict[str, Any]:
    """Does what a recorded call did; returns what came of it, under the names of the recording."""
    one.known = call["known"]
    outcome: dict[str, Any] = {}
    match call["call"]:
        case "lookup":
            return {"hit_tokens": len(memory.lookup(one)) * memory.block_size}
        case "admit":
            others_run = call["others_run"]
            given = memory.admit(one, memory.lookup(one), call["num_tokens"], call["room_for"], others_run)
            if not given:
                return {"given": False}
            outcome["given"], one.computed = given, call["num_tokens"]
        case "grow":
            one.computed = call["computed"]
            outcome["given"] = given = memory.grow(one, call["num_tokens"])
            if given:
                one.computed = call["num_tokens"]
        case "release":
            memory.release(one)
            one.computed = 0
    if one.blocks:
        tables = held(one)
        outcome["tables"] = [[0] * (tables.end - len(table)) + table for table in tables.tables]
    return outcome | {"free": memory.pool.free_list(), "keyed": memory.pool.registered()}


def _recorded(call: dict[str, Any]) -> dict[str, Any]:
    return {name: call[name] for name in ("hit_tokens", "given", "tables", "free", "keyed") if name in call}
