"""Hybrid memory from the command: `memory=hybrid` under an engine preset, its switch, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sim.cli import main

Simulate = Callable[..., Path]

# Requests of 400 + 200 tokens that come faster than they are served; a window of 64 in place of Gemma's 1,024, so that
# it matters.
BUSY = [
    "model=gemma-3-27b",
    "model.sliding_window.tokens=64",
    "hardware=h100-80gb",
    "workload=synthetic",
    "workload.rate=50",
    "workload.num_requests=12",
    "workload.prompt_lengths.tokens=400",
    "workload.output_lengths.tokens=200",
    "record.steps=all",
]


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def test_an_engine_serves_a_model_with_windows_over_hybrid_memory(simulate: Simulate) -> None:
    # 1e9 bytes: 1e9 / (16 * 10 * 8,192) = 762 blocks of a group, or 1e9 / (16 * 62 * 8,192) = 123 of all layers. The
    # latter hold three sequences of 38 blocks at a time. In groups, a sequence holds 38 full blocks and, while it
    # decodes, 6 * (ceil(64 / 16) + 1) = 30 others: 11 at a time.
    one_gb = "kv_cache_memory_bytes=1000000000"
    hybrid = summary_of(simulate(*BUSY, one_gb, "memory=hybrid"))
    paged = summary_of(simulate(*BUSY, one_gb))
    assert (hybrid["pool_blocks"], paged["pool_blocks"]) == (761, 122)  # without block 0
    assert hybrid["completed"] == paged["completed"] == 12
    assert hybrid["mean_running"] > 2 * paged["mean_running"]
    assert hybrid["duration"] < paged["duration"]


@pytest.mark.parametrize("caching", ["true", "false"])
def test_the_switch_makes_it_the_memory_of_one_table(simulate: Simulate, caching: str) -> None:
    options = [*BUSY, "memory.num_blocks=80", f"memory.prefix_caching={caching}"]
    switched = simulate(*options, "memory=hybrid", "memory.disable_hybrid_kv_cache_manager=true")
    paged = simulate(*options, "engine.leap=false")
    assert summary_of(switched)["preemptions"] > 0
    for table in ("requests", "events", "steps"):
        assert (switched / f"{table}.parquet").read_bytes() == (paged / f"{table}.parquet").read_bytes()


@pytest.mark.parametrize("budget", ["256", "null"])
def test_a_sliding_layer_is_given_room_for_a_step(simulate: Simulate, budget: str) -> None:
    # Without a budget any prompt is one step, and a sliding layer may have to hold all of it.
    folder = simulate(*BUSY, "memory=hybrid", "memory.num_blocks=300", f"scheduler.max_num_batched_tokens={budget}")
    assert summary_of(folder)["completed"] == 12


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["scheduler.async_scheduling=true"], "set scheduler.async_scheduling=false or choose memory=paged."),
        (["workload/sampling=parallel"], "which this memory cannot share; choose memory=paged or leave workload.sampl"),
        (["memory.prefix_cache_retention_interval=20"], "expected null, 0 or a multiple of memory.block_size=16."),
        (["memory.disable_hybrid_kv_cache_manager=maybe"], "memory.disable_hybrid_kv_cache_manager is 'maybe'; expect"),
    ],
)
def test_what_it_does_not_do_is_one_line(
    options: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", *BUSY, "memory=hybrid", "plots=false", f"hydra.run.dir={tmp_path}", *options]) == 2
    assert expected in capsys.readouterr().err
