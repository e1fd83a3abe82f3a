"""The study of admission by the first chunk alone: vLLM v1's thrashing, and its cure."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from tests.sim.test_sweep import run_sweep

FEW = ["experiment=first_chunk", "workload.num_requests=8", "plots=false"]


def rows(folder: Path, *options: str) -> tuple[pd.Series, pd.Series]:
    """The point that asks for the first chunk only, and the one that asks for the whole prompt."""
    sweep = run_sweep(folder, *FEW, *options)
    assert sweep.code == 0
    table = sweep.table.set_index("scheduler.scheduler_reserve_full_isl")
    return table.loc[False], table.loc[True]


@pytest.mark.slow
def test_asking_for_the_first_chunk_only_collapses_decoding_and_asking_for_all_cures_it(tmp_path: Path) -> None:
    first_chunk, whole_prompt = rows(tmp_path)
    # vllm issue 18115 reports about 100 and 1.5 token/s, a factor of 67, of another model on another GPU: an order of
    # magnitude is what can be compared.
    assert whole_prompt["output_throughput"] > 10 * first_chunk["output_throughput"]
    assert whole_prompt["preemptions"] == 0  # no two prompts fit together, so nobody can be in the way
    assert first_chunk["preemptions"] > 10 * first_chunk["completed"]
    assert first_chunk["completed"] == whole_prompt["completed"] == 8  # slow, but no livelock


@pytest.mark.slow
def test_with_prefix_caching_the_victims_find_their_blocks_again(tmp_path: Path) -> None:
    first_chunk, whole_prompt = rows(tmp_path, "memory.prefix_caching=true")
    assert first_chunk["preemptions"] > 0
    assert first_chunk["resume_hit_tokens"] > 0
    assert first_chunk["output_throughput"] > 0.9 * whole_prompt["output_throughput"]
