"""Sharing and preemption from the command: each choice can be made, and a run says what came of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from sim.cli import main

Simulate = Callable[..., Path]

# 600 slots for requests of 64 + 64 tokens that come faster than they are served.
TIGHT = [
    "model=opt-13b",
    "hardware=a100-40gb",
    "memory.num_blocks=41",
    "memory.prefix_caching=false",
    "workload=synthetic",
    "workload.rate=20",
    "workload.num_requests=30",
    "workload.prompt_lengths.tokens=64",
    "workload.output_lengths.tokens=64",
]


def summary_of(folder: Path) -> dict[str, float]:
    summary: dict[str, float] = json.loads((folder / "summary.json").read_text())
    return summary


@pytest.mark.parametrize(
    "victim", ["latest", "lowest_priority", "fewest_output_tokens", "most_blocks", "longest_remaining"]
)
@pytest.mark.parametrize("recovery", ["recompute", "swap", "auto"])
def test_every_victim_with_every_recovery_serves_everybody(simulate: Simulate, victim: str, recovery: str) -> None:
    folder = simulate(
        *TIGHT, "workload/sampling=parallel", f"scheduler/victim={victim}", f"scheduler/recovery={recovery}"
    )
    summary = summary_of(folder)
    assert (summary["completed"], summary["total_output_tokens"]) == (30, 30 * 2 * 64)
    assert summary["preemptions"] > 0
    # auto computes a request again only if it is preempted before it has forked.
    assert (summary["swap_outs"] > 0) == (recovery != "recompute")
    assert (summary["swap_outs"], summary["swapped_out_bytes"]) == (summary["swap_ins"], summary["swapped_in_bytes"])
    events = pd.read_parquet(folder / "events.parquet")
    counts = events["event"].value_counts()
    assert counts["preemption"] == summary["preemptions"]
    assert counts.get("swap_out", 0) == counts.get("swap_in", 0) == summary["swap_outs"]
    assert events.loc[events["event"] == "copy", "blocks"].sum() == summary["blocks_copied"]


def test_a_host_without_room_makes_swap_the_same_as_recompute(simulate: Simulate) -> None:
    swap = simulate(*TIGHT, "scheduler/recovery=swap", "memory.swap_space=0")
    recompute = simulate(*TIGHT, "scheduler/recovery=recompute")
    assert summary_of(swap)["preemptions"] > 0
    assert (swap / "requests.parquet").read_bytes() == (recompute / "requests.parquet").read_bytes()


def test_a_slower_link_makes_the_same_swaps_take_longer_and_a_free_one_none_at_all(simulate: Simulate) -> None:
    link = simulate(*TIGHT, "scheduler/recovery=swap")
    slow = simulate(*TIGHT, "scheduler/recovery=swap", "hardware.host_bandwidth=3.2e9")
    free = simulate(*TIGHT, "scheduler/recovery=swap", "link=free")
    seconds = [summary_of(folder)["swap_s"] for folder in (free, link, slow)]
    assert seconds[0] == 0 < seconds[1] < seconds[2]
    # 16 * 819,200 bytes at 0.8 * 32e9 bytes/s and 80 pieces of 2 µs: 0.512 + 0.16 = 0.672 ms a block, out and in.
    moved = summary_of(link)["swapped_out_bytes"] / (16 * 819_200)
    assert seconds[1] == pytest.approx(2 * moved * 0.672e-3)


def test_beams_are_the_same_in_every_run_and_others_with_another_seed(simulate: Simulate, tmp_path: Path) -> None:
    beams = [*TIGHT, "workload/sampling=beam", "workload.sampling.width=3", "workload.num_requests=6"]
    first, other = simulate(*beams), simulate(*beams, "workload.sampling.seed=5")
    assert main(["sim", "plots=false", f"hydra.run.dir={tmp_path}", *beams]) == 0
    assert (tmp_path / "steps.parquet").read_bytes() == (first / "steps.parquet").read_bytes()
    assert (tmp_path / "steps.parquet").read_bytes() != (other / "steps.parquet").read_bytes()


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["engine=orca_max", "workload/sampling=parallel"],
            "request 0 asks for 2 outputs of one prompt, which this memory cannot share; choose memory=paged or "
            "leave workload.sampling out.",
        ),
        (["workload/sampling=beem"], "there is no workload/sampling named beem; did you mean beam?"),
        (["scheduler/victim=oldest"], "there is no scheduler/victim named oldest; did you mean latest?"),
        (["memory.swap_space=-1"], "memory.swap_space is -1.0; expected a number of GiB, 0 or more."),
        (
            ["workload/sampling=beam", "workload.sampling.concentration=0"],
            "workload.sampling.concentration is 0.0; expected a finite number above 0.",
        ),
        (
            ["workload/sampling=parallel", "workload.sampling.n=two"],
            "workload.sampling.n is 'two'; expected a whole number.",
        ),
    ],
)
def test_what_cannot_be_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, overrides: list[str], line: str
) -> None:
    assert main(["sim", "plots=false", f"hydra.run.dir={tmp_path}", "workload.num_requests=3", *overrides]) == 2
    assert capsys.readouterr().err.strip() == f"kvtwin: {line}"
