"""What a reservation costs and what retractions cost, in direction and rough size as users of SGLang report it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.sim.test_sweep import run_sweep

Simulate = Callable[..., Path]
EVERYTHING = ("scheduler.min_new_token_ratio_factor=1.0", "scheduler.schedule_conservativeness=2.0")


@pytest.fixture
def summary(simulate: Simulate) -> Callable[..., dict[str, Any]]:
    def run(*options: str) -> dict[str, Any]:
        folder = simulate("experiment=sglang_retraction", "record.steps=none", *options)
        figures: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        return figures

    return run


def test_setting_everything_aside_costs_about_half_of_the_throughput_and_retracts_nobody(
    summary: Callable[..., dict[str, Any]],
) -> None:
    # sgl-project/sglang#6860: 20,163 to 8,810 token/s, a factor of 0.44, with 1,024 tokens set aside for each request.
    # Here it depends on how much of the 1,024 requests take: between a fifth and four fifths is what is asked for.
    default = summary("workload.num_requests=300")
    reserved = summary("workload.num_requests=300", *EVERYTHING)
    assert default["completed"] == reserved["completed"] == 300
    assert reserved["preemptions"] == 0
    assert 0.35 < reserved["output_throughput"] / default["output_throughput"] < 0.75
    # Fewer run at once, and each is faster: both sides of a reservation.
    assert reserved["mean_running_saturated"] < 0.7 * default["mean_running_saturated"]
    assert reserved["mean_tpot_ms"] < default["mean_tpot_ms"]


def test_the_more_conservative_the_fewer_retractions_if_requests_take_all_that_they_may(
    summary: Callable[..., dict[str, Any]],
) -> None:
    lengths = ("workload.prompt_lengths.tokens=100", "workload.output_lengths.tokens=1500")
    workload = ("workload=synthetic", "workload.max_tokens=null", "workload.num_requests=150", *lengths)
    runs = [summary(*workload, f"scheduler.schedule_conservativeness={value}") for value in ("0.3", "1.0", "1.3")]
    runs.append(summary(*workload, *EVERYTHING))
    retracted = [run["preemptions"] for run in runs]
    assert retracted == sorted(retracted, reverse=True)
    assert retracted[0] > retracted[2] > retracted[3] == 0
    recomputed = [run["tokens_recomputed"] for run in runs]
    assert recomputed[0] > 0 == recomputed[3]
    # Whoever was retracted waits behind the queue with part of its output out: the time per token is several times that
    # of a run without retractions. Throughput does not fall: more run at once.
    assert runs[0]["mean_tpot_ms"] > 2 * runs[3]["mean_tpot_ms"]
    assert runs[0]["output_throughput"] > 0.9 * runs[3]["output_throughput"]
    # A plausibility limit of real engines: nobody is retracted over and over.
    assert retracted[0] < 150


def test_throughput_collapses_where_requests_outgrow_the_pool(tmp_path: Path) -> None:
    sweep = run_sweep(tmp_path, "experiment=outgrown", "engine=sglang", "record.steps=none")
    assert sweep.code == 0
    table = sweep.table.set_index("workload.output_lengths.tokens")
    fitting, outgrown = table.loc[3000], table.loc[60000]
    # 14 * (1,000 + 3,000) = 56,000 of 64,000 tokens: nobody is ever retracted. Of 1,000 + 60,000, one fits.
    assert fitting["preemptions"] == 0 and fitting["max_running"] == 14
    assert outgrown["preemptions"] > 14 and outgrown["mean_running"] < 2
    # sgl-project/sglang#26248 reports about 429 and then 20 to 38 token/s, 11 to 21 times less, of another model.
    assert 7 < fitting["output_throughput"] / outgrown["output_throughput"] < 21
