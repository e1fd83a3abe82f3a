"""Prefix hits on traces that name their prompts by hash ids: every hit block is accounted for, request by request.

The other account is taken from the rows of the trace alone. It knows neither blocks with ids nor free lists: only how
much of what an id stands for some earlier prompt has held, and for a bounded pool in which order things were last used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.cli import main
from sim.memory.paged import PagedMemory
from sim.scheduler.continuous import ContinuousBatching
from sim.scheduler.queues import Fcfs
from workloads.readers.mooncake import MooncakeTrace

CONVERSATION = Path(__file__).parents[2] / "../shared/traces/mooncake_conversation.jsonl"
STATES = ["used", "reserved", "internal", "cached", "external", "idle"]
LIMIT = 100_000  # tokens; no generated request comes near it

Row = dict[str, Any]
Simulate = Callable[..., Path]


# --------------------------------------------------------------------------------------------------- the other account


@dataclass(frozen=True)
class Account:
    """What an unbounded pool holds of one prompt, when requests come one after the other.

    Args:
        known: tokens in whole blocks that earlier prompts have left, from the prompt's beginning.
        taken: tokens of it that are computed again all the same, so that at least one token is computed.
    """

    known: int
    taken: int

    @property
    def hit(self) -> int:
        return self.known - self.taken


def accounts(rows: Iterable[Row], hash_block: int, block_size: int) -> list[Account]:
    """One account a row, in order. Ids are chained, so who has seen an id has seen all of the prompt before it too."""
    behind: dict[int, int] = {}  # id -> most tokens behind it that one prompt has had
    result = []
    for row in rows:
        known, goes_on = 0, True
        for position, hash_id in enumerate(row["hash_ids"]):
            own = min(hash_block, row["input_length"] - position * hash_block)
            shared = min(own, behind.get(hash_id, 0))
            known += shared if goes_on else 0
            goes_on = goes_on and shared == hash_block
            behind[hash_id] = max(own, behind.get(hash_id, 0))
        whole = known // block_size * block_size
        result.append(Account(whole, block_size if whole == row["input_length"] else 0))
    return result


def hits_of_a_pool(rows: Iterable[Row], hash_block: int, block_size: int, num_blocks: int) -> list[int]:
    """Hit tokens of each row, one after the other, in a pool of `num_blocks` blocks: the least recently used go.

    Of one prompt the end goes before the beginning: whoever needs the end needs the beginning too. The last output
    token is never stored, and output is nobody's prefix, but its whole blocks stay until they are the oldest.
    """
    content_of: dict[int, tuple[int, int] | None] = {}  # unused copies, least recently used first
    copies: dict[tuple[int, int], list[int]] = {}  # of what a prefix ends with, by its last id and its length
    born, result = 0, []
    for row in rows:
        prompt, stored = row["input_length"], row["input_length"] + row["output_length"] - 1
        ends = range(block_size, prompt + 1, block_size)
        prefixes = [(row["hash_ids"][(end - 1) // hash_block], end) for end in ends]
        table: list[int] = []
        for prefix in prefixes[: (prompt - 1) // block_size]:
            if not copies.get(prefix):
                break
            table.append(copies[prefix][0])
            del content_of[table[-1]]
        result.append(len(table) * block_size)
        missing = -(-stored // block_size) - len(table)
        for copy in list(content_of)[: max(0, missing - (num_blocks - len(content_of) - len(table)))]:
            if (gone := content_of.pop(copy)) is not None:
                copies[gone].remove(copy)
        for position in range(len(table), stored // block_size):
            table.append(born := born + 1)
            if position < len(prefixes):
                copies.setdefault(prefixes[position], []).append(born)
        known = dict(enumerate(prefixes))
        content_of |= {table[position]: known.get(position) for position in reversed(range(len(table)))}
    return result


def test_the_other_account_by_hand() -> None:
    # Ids stand for 4 tokens, blocks hold 2. The second prompt shares a whole id and 3 tokens of the next: 6 tokens in
    # whole blocks. The third is the second again up to a block's end: all 6 are known, and the last block is taken.
    rows = [
        {"input_length": 11, "output_length": 1, "hash_ids": [1, 2, 3]},
        {"input_length": 7, "output_length": 1, "hash_ids": [1, 2]},
        {"input_length": 6, "output_length": 1, "hash_ids": [1, 2]},
    ]
    assert accounts(rows, 4, 2) == [Account(0, 0), Account(6, 0), Account(6, 2)]
    # Five blocks are just enough for the first row; then the second finds its 3 blocks, the third 2 of them.
    assert hits_of_a_pool(rows, 4, 2, 6) == [0, 6, 4]
    # A stranger of 8 tokens between them needs 4 of the 6 blocks: one is empty, and of the prompt's 5 whole ones its
    # last 3 go. What is left of it are 4 tokens.
    stranger = {"input_length": 8, "output_length": 1, "hash_ids": [8, 9]}
    assert hits_of_a_pool([rows[0], stranger, rows[1]], 4, 2, 6) == [0, 0, 4]


# ----------------------------------------------------------------------------------------------------- generated traces


@st.composite
def traces(draw: st.DrawFn, hash_block: int) -> list[Row]:
    """Prompts along the branches of a random tree of ids, as a multi-turn service has them.

    A prompt goes some way along an earlier one, then on with new ids. Its last id may stand for fewer tokens; a later
    prompt that shares such an id has as many tokens behind it, or goes on beyond it.
    """
    rows: list[Row] = []
    fresh = 0
    for _ in range(draw(st.integers(1, 12))):
        trunk: list[int] = draw(st.sampled_from([[], *(row["hash_ids"] for row in rows)]))
        ids = trunk[: draw(st.integers(0, len(trunk)))]
        new = draw(st.integers(0, 1) | st.integers(2, 5)) or (0 if ids else 1)
        ids = [*ids, *range(fresh, fresh + new)]
        fresh += new
        edge = draw(st.sampled_from([0, hash_block // 2, hash_block])) + draw(st.integers(-1, 1))
        last = min(max(1, edge), hash_block) if draw(st.booleans()) else draw(st.integers(1, hash_block))
        length = (len(ids) - 1) * hash_block + last
        output = draw(st.integers(1, 40) | st.just(hash_block + 1))
        rows.append({"timestamp": 0, "input_length": length, "output_length": output, "hash_ids": ids})
    return rows


def simulated_hits(folder: Path, rows: list[Row], hash_block: int, block_size: int, num_blocks: int) -> list[int]:
    """Hit tokens of each row, through the reader, the scheduler and the memory, one request at a time."""
    file = folder / "trace.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    memory = PagedMemory(num_blocks, block_size, num_reserved_blocks=0)
    scheduler = ContinuousBatching(memory, LIMIT, Fcfs(), max_num_seqs=1, max_num_batched_tokens=700)
    sequences = []
    for request in MooncakeTrace(str(file), hash_block):
        sequence, reason = scheduler.arrive(request)
        assert reason is None
        sequences.append(sequence)
    while not scheduler.idle:
        plan = scheduler.schedule()
        occupancy = memory.occupancy(None)
        assert sum(getattr(occupancy, state) for state in STATES) == memory.num_slots
        scheduler.commit(plan)
    return [sequence.hit_tokens or 0 for sequence in sequences]


# Mooncake's ids stand for 512 tokens, Bailian's for 16; our blocks divide that, are that, or are twice that.
SIZES = [(512, 16), (512, 512), (512, 1024), (16, 8), (16, 16), (16, 32)]


@pytest.mark.parametrize(("hash_block", "block_size"), SIZES)
def test_every_hit_of_a_pool_that_never_evicts_is_accounted_for(
    tmp_path_factory: pytest.TempPathFactory, hash_block: int, block_size: int
) -> None:
    folder = tmp_path_factory.mktemp("trace")

    @settings(max_examples=25, deadline=None)
    @given(traces(hash_block))
    def law(rows: list[Row]) -> None:
        enough = sum(-(-(row["input_length"] + row["output_length"]) // block_size) for row in rows)
        hits = simulated_hits(folder, rows, hash_block, block_size, enough)
        assert hits == [account.hit for account in accounts(rows, hash_block, block_size)]

    law()


@pytest.mark.parametrize(("hash_block", "block_size"), SIZES)
def test_a_pool_that_evicts_hits_what_was_used_last(
    tmp_path_factory: pytest.TempPathFactory, hash_block: int, block_size: int
) -> None:
    folder = tmp_path_factory.mktemp("trace")

    @settings(max_examples=25, deadline=None)
    @given(traces(hash_block), st.integers(0, 40))
    def law(rows: list[Row], more: int) -> None:
        largest = max(-(-(row["input_length"] + row["output_length"] - 1) // block_size) for row in rows)
        hits = simulated_hits(folder, rows, hash_block, block_size, largest + more)
        assert hits == hits_of_a_pool(rows, hash_block, block_size, largest + more)

    law()


# ------------------------------------------------------------------------------------------------------ the whole trace

# Llama-3.1-8B's limit of 131,072 tokens holds every request (the largest has 126,527), and a number of blocks is given,
# so that neither model nor device matters; steps of a fixed time cost least.
ONE_AFTER_THE_OTHER = ["engine=vllm_v1", "model=llama-3.1-8b", "scheduler.max_num_seqs=1", "timing=constant"]


@pytest.fixture(scope="module")
def conversation() -> list[Row]:
    """The rows of the Mooncake conversation trace."""
    if not CONVERSATION.exists():
        pytest.skip("the Mooncake conversation trace is not beside the repository")
    return [json.loads(line) for line in CONVERSATION.read_text(encoding="utf-8").splitlines()]


def run(simulate: Simulate, block_size: int, num_blocks: int) -> Path:
    pool = [f"memory.block_size={block_size}", f"memory.num_blocks={num_blocks}", "memory.num_reserved_blocks=0"]
    return simulate("workload=mooncake", f"workload.path={CONVERSATION}", *ONE_AFTER_THE_OTHER, *pool)


def hit_tokens(folder: Path) -> list[int]:
    requests = pd.read_parquet(folder / "requests.parquet").sort_values("request_id")
    assert (requests["status"] == "finished").all()
    return [int(tokens) for tokens in requests["hit_tokens"]]


def check_every_step_names_every_slot(folder: Path, num_slots: int) -> None:
    steps = pd.read_parquet(folder / "steps.parquet", columns=STATES)
    assert len(steps) > 12_031  # more than a step a request
    assert (steps.sum(axis=1) == num_slots).all()
    assert (steps >= 0).all(axis=None)


def test_the_trace_is_the_one_that_the_numbers_are_of(conversation: list[Row]) -> None:
    assert len(conversation) == 12_031
    assert sum(row["input_length"] for row in conversation) == 144_793_823
    assert sum(row["output_length"] for row in conversation) == 4_122_048
    # Blocks that an earlier row has named, partial last ones included, and without them.
    seen: set[int] = set()
    named = full = 0
    for row in conversation:
        again = [hash_id in seen for hash_id in row["hash_ids"]]
        named += sum(again)
        full += sum(again[: row["input_length"] // 512])
        seen.update(row["hash_ids"])
    assert (named, sum(len(row["hash_ids"]) for row in conversation)) == (105_710, 288_500)
    assert (full, sum(row["input_length"] // 512 for row in conversation)) == (105_592, 276_491)


@pytest.mark.slow
def test_blocks_of_512_hit_every_full_block_that_an_earlier_prompt_has_left(
    simulate: Simulate, conversation: list[Row]
) -> None:
    # Never evicts: 276,491 - 105,592 = 170,899 blocks of prompts are computed; output fills at most 4,122,048 / 512 =
    # 8,050 more, and each of 12,031 prompts ends in at most one block that is neither: 190,980.
    folder = run(simulate, 512, 200_000)
    expected = accounts(conversation, 512, 512)
    # The rule that one token is left to compute takes nothing here: no prompt of a multiple of 512 tokens is known to
    # its end. The 118 hits of the other count (105,710) are partial last blocks, which an engine cannot share.
    assert sum(account.known for account in expected) == 105_592 * 512
    assert sum(account.taken for account in expected) == 0
    assert hit_tokens(folder) == [account.hit for account in expected]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert (summary["prefix_hit_tokens"], summary["prefix_queried_tokens"]) == (105_592 * 512, 144_793_823)
    check_every_step_names_every_slot(folder, 200_000 * 512)


@pytest.mark.slow
def test_blocks_of_16_hit_the_same_and_the_full_16s_of_partial_last_ids(
    simulate: Simulate, conversation: list[Row]
) -> None:
    # Each full id is 32 blocks: 105,592 * 32 = 3,378,944 hits. The 118 partial last ids that an earlier prompt has had
    # as well add the blocks of 16 that fit into them. Ids differ as soon as one token of 512 does, so what two prompts
    # share before that token nobody can know: finer blocks hit more in a real engine than the trace can tell.
    seen: set[int] = set()
    again = []  # tokens behind each partial last id that an earlier row has named
    for row in conversation:
        if row["input_length"] % 512 and row["hash_ids"][-1] in seen:
            again.append(row["input_length"] % 512)
        seen.update(row["hash_ids"])
    in_partial_ids = sum(tokens // 16 for tokens in again)
    assert (len(again), in_partial_ids) == (118, 2_153)
    expected = accounts(conversation, 512, 16)
    assert sum(account.known for account in expected) == (105_592 * 32 + in_partial_ids) * 16
    # Seven of those prompts are a multiple of 16 long, so their last block is computed again: 3,381,090 hits.
    assert sum(account.taken for account in expected) == sum(tokens % 16 == 0 for tokens in again) * 16 == 7 * 16
    # Never evicts: 144,793,823 prompt tokens less the hits fill at most 5,668,524 blocks, 4,122,048 output tokens at
    # most 257,628, and each of 12,031 requests ends in at most one block that is neither: 5,938,183.
    folder = run(simulate, 16, 6_000_000)
    assert hit_tokens(folder) == [account.hit for account in expected]
    assert sum(hit_tokens(folder)) == 3_381_090 * 16
    check_every_step_names_every_slot(folder, 6_000_000 * 16)


@pytest.mark.slow
def test_a_pool_of_10_000_blocks_of_512_hits_what_was_used_last(simulate: Simulate, conversation: list[Row]) -> None:
    folder = run(simulate, 512, 10_000)
    assert hit_tokens(folder) == hits_of_a_pool(conversation, 512, 512, 10_000)
    check_every_step_names_every_slot(folder, 10_000 * 512)


# ------------------------------------------------------------------------------------------------------------ the curve


def test_the_experiment_draws_hits_against_pool_sizes_beside_the_published_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two prompts of 1,030 tokens with a stranger between them, each 3 blocks of 512 with their output. Of 4 blocks the
    # stranger leaves the first prompt one, its first; 10 leave all. Hits are 512 and 1,024 of 3,090 tokens.
    monkeypatch.setattr("sim.plots.style.PNG_DPI", 30)
    trace, sweep = tmp_path / "trace.jsonl", tmp_path / "sweep"
    rows = [
        {"timestamp": time, "input_length": 1030, "output_length": 4, "hash_ids": ids}
        for time, ids in ((0, [1, 2, 3]), (5, [4, 5, 6]), (9, [1, 2, 7]))
    ]
    trace.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    sizes = "memory.num_reserved_blocks=0", "memory.num_blocks=4,10"
    argv = ["experiment=mooncake_hits", f"workload.path={trace}", f"hydra.sweep.dir={sweep}", *sizes]
    assert main(["sim", "-m", *argv]) == 0
    table = pd.read_parquet(sweep / "sweep.parquet")
    assert table["prefix_hit_tokens"].tolist() == [512, 1024]
    printed = capsys.readouterr().out
    assert ["prefix hits" in printed, "16.6%" in printed, "33.1%" in printed] == [True] * 3
    assert "ours / published" not in printed  # that table is of shares of the pool
    figure = sweep / "prefix_hit_rate.svg"
    drawn = figure.read_bytes()
    assert b"2407.00079" in drawn
    figure.unlink()
    assert main(["plot", str(sweep)]) == 0  # what was published is read again from a point's config
    assert figure.read_bytes() == drawn
