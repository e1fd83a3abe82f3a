"""Prefix hits of SGLang's tree on traces that name their prompts by hash ids, against two accounts that know no tree.

One is taken from the rows of the trace alone (`test_mooncake_hits.py`), the other is vLLM's cache of keyed blocks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from test_mooncake_hits import CONVERSATION, LIMIT, Row, accounts, simulated_hits, traces

from sim.memory.radix import RadixMemory
from sim.scheduler.schedule_policies import ArrivalOrder
from sim.scheduler.sglang import SGLang
from workloads.readers.mooncake import MooncakeTrace

Simulate = Callable[..., Path]


def tree_hits(folder: Path, rows: list[Row], hash_block: int, page_size: int, num_pages: int) -> list[int]:
    """Hit tokens of each row, one request at a time."""
    file = folder / "trace.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    engine = SGLang(RadixMemory(num_pages, page_size), LIMIT, ArrivalOrder(), 1, chunked_prefill_size=4 * page_size)
    sequences = []
    for request in MooncakeTrace(str(file), hash_block):
        sequence, reason = engine.arrive(request)
        assert reason is None
        sequences.append(sequence)
    while not engine.idle:
        engine.commit(engine.schedule())
    return [sequence.hit_tokens or 0 for sequence in sequences]


@pytest.mark.parametrize(("hash_block", "page_size"), [(16, 1), (16, 8), (16, 16), (16, 32), (64, 1), (64, 64)])
def test_a_tree_that_never_evicts_hits_what_the_trace_says_and_what_keyed_blocks_hit(
    tmp_path_factory: pytest.TempPathFactory, hash_block: int, page_size: int
) -> None:
    folder = tmp_path_factory.mktemp("trace")

    @settings(max_examples=25, deadline=None)
    @given(traces(hash_block))
    def law(rows: list[Row]) -> None:
        enough = sum(-(-(row["input_length"] + row["output_length"]) // page_size) for row in rows) + 2
        hits = tree_hits(folder, rows, hash_block, page_size, enough)
        assert hits == [account.hit for account in accounts(rows, hash_block, page_size)]
        assert hits == simulated_hits(folder, rows, hash_block, page_size, enough)
        finest = tree_hits(folder, rows, hash_block, 1, enough * page_size)
        assert all(fine >= coarse for fine, coarse in zip(finest, hits, strict=True))

    law()


def test_the_mooncake_trace_is_hit_the_same_by_tree_and_keyed_blocks_and_more_by_single_tokens(
    simulate: Simulate,
) -> None:
    # The first 300 requests have 4,269,971 prompt and 113,079 output tokens; a pool of 8 M never evicts.
    if not CONVERSATION.exists():
        pytest.skip("the Mooncake conversation trace is not beside the repository")

    def hits(engine: str, page_size: int, *options: str) -> list[int]:
        pool = [f"memory.block_size={page_size}", f"memory.num_blocks={2**23 // page_size}"]
        trace = ["workload=mooncake", f"workload.path={CONVERSATION}", "workload.limit=300", "model=llama-3.1-8b"]
        one_by_one = ["scheduler.max_num_seqs=1", "timing=constant", "record.steps=none"]
        folder = simulate(f"engine={engine}", *trace, *pool, *one_by_one, *options)
        requests = pd.read_parquet(folder / "requests.parquet").sort_values("request_id")
        assert (requests["status"] == "finished").all()
        return [int(tokens) for tokens in requests["hit_tokens"]]

    rows: list[dict[str, Any]] = [json.loads(line) for line in CONVERSATION.open(encoding="utf-8")][:300]
    for page_size in (512, 16):
        expected = [account.hit for account in accounts(rows, 512, page_size)]
        assert hits("sglang", page_size) == expected
        assert hits("vllm_v1", page_size) == expected
    finest = hits("sglang", 1)
    assert finest == [account.hit for account in accounts(rows, 512, 1)]
    assert sum(finest) >= sum(expected) > 0
