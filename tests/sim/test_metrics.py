"""Latencies, percentiles and time averages against figures computed by hand, by numpy, and again from the tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

PERCENTILES = (50, 90, 95, 99)
NAMES = ("used", "reserved", "internal", "cached", "external", "idle")
SECONDS = ["timing=constant", "timing.step_seconds=1"]
# A busy pool: OPT-13B with room for 2,000 tokens (819,200 bytes each), limit 256, all requests at once.
PRESSURE = [
    "workload=alpaca_like",
    "workload/arrivals=all_at_once",
    "workload.num_requests=120",
    "model=opt-13b",
    "hardware=a100-40gb",
    "kv_cache_memory_bytes=1638400000",
    "max_model_len=256",
    "timing=constant",
]


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return summary


@pytest.fixture(scope="module")
def preempted(simulate: Callable[..., Path], trace: Callable[..., list[str]]) -> Path:
    """Two requests of 7 + 6 tokens at time 0, four blocks of 4 to hand out, steps of 1 s.

    A request finishes when it has 13 tokens and 12 of them stored, in three blocks. Step by step, tokens stored after
    it and (in brackets) output tokens so far:

        t = 0..1   A 7 (1)   B 7 (1)    two blocks each: the pool is full
        t = 1..2   A 8 (2)   B 8 (2)
        t = 2..3   A 9 (3)   B out      A needs a third block: B loses its two with 8 tokens
        t = 3..6   A 10, 11, 12 (6)     B needs three blocks for its 9 known tokens and finds one; A is done at 6
        t = 6..7   B 9 (3)              computed again, the 9th for the first time
        t = 7..10  B 10, 11, 12 (6)     done at 10
    """
    pool = ["memory.block_size=4", "memory.num_blocks=5", "memory.prefix_caching=false"]
    return simulate(*trace([(0, 7, 6), (0, 7, 6)]), *pool, *SECONDS)


def test_latencies_of_one_request_are_those_counted_by_hand(
    simulate: Callable[..., Path], trace: Callable[..., list[str]]
) -> None:
    # 3 + 4 tokens alone, 1 s a step: the prompt's step ends at 1 s with the first token, the others come at 2, 3, 4 s.
    summary = summary_of(simulate(*trace([(0, 3, 4)]), *SECONDS))
    for what in ("mean", "median", "p50", "p90", "p95", "p99"):
        assert summary[f"{what}_ttft_ms"] == 1000
        assert summary[f"{what}_tpot_ms"] == 1000
        assert summary[f"{what}_itl_ms"] == 1000
        assert summary[f"{what}_e2el_ms"] == 4000
    assert [summary[f"std_{name}_ms"] for name in ("ttft", "tpot", "itl", "e2el")] == [0, 0, 0, 0]
    assert summary["mean_normalized_latency_ms"] == 1000  # 4 s for 4 tokens
    assert (summary["duration"], summary["steps"]) == (4, 4)
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (3, 4)
    assert (summary["request_throughput"], summary["output_throughput"]) == (0.25, 1)
    assert summary["total_token_throughput"] == 1.75


def test_one_output_token_has_no_tpot_and_no_itl(
    simulate: Callable[..., Path], trace: Callable[..., list[str]]
) -> None:
    summary = summary_of(simulate(*trace([(0, 3, 1)]), *SECONDS))
    assert summary["mean_ttft_ms"] == summary["mean_e2el_ms"] == 1000
    for name in ("tpot", "itl"):
        assert {summary[f"{what}_{name}_ms"] for what in ("mean", "median", "std", "p50", "p99")} == {None}


def test_latencies_through_a_preemption_are_those_counted_by_hand(preempted: Path) -> None:
    summary = summary_of(preempted)
    assert summary["mean_ttft_ms"] == summary["p99_ttft_ms"] == 1000  # both at 1 s; B's is not moved by its return
    # A: 5 intervals of 1 s. B: tokens at 1, 2, 7, 8, 9, 10 s, so 1, 5, 1, 1, 1. Ten in all, nine of 1 and one of 5:
    # mean 1.4; variance (9 * 0.4² + 3.6²) / 10 = 1.44. Percentiles lie at 0.p * 9 in order, so p90 is a tenth, p95
    # 0.55 and p99 0.91 of the way from the ninth to the tenth.
    assert summary["mean_itl_ms"] == pytest.approx(1400)
    assert summary["std_itl_ms"] == pytest.approx(1200)
    assert summary["median_itl_ms"] == summary["p50_itl_ms"] == 1000
    assert summary["p90_itl_ms"] == pytest.approx(1400)
    assert summary["p95_itl_ms"] == pytest.approx(3200)
    assert summary["p99_itl_ms"] == pytest.approx(4640)
    # TPOT: A (6 - 1) / 5 = 1, B (10 - 1) / 5 = 1.8. E2E: 6 and 10. Population standard deviations are half of that.
    assert (summary["mean_tpot_ms"], summary["std_tpot_ms"]) == pytest.approx((1400, 400))
    assert (summary["mean_e2el_ms"], summary["std_e2el_ms"]) == pytest.approx((8000, 2000))
    assert (summary["p90_e2el_ms"], summary["p99_e2el_ms"]) == pytest.approx((9600, 9960))
    assert summary["mean_normalized_latency_ms"] == pytest.approx((6 / 6 + 10 / 6) / 2 * 1000)


def test_throughput_and_counts_through_a_preemption_are_those_counted_by_hand(preempted: Path) -> None:
    summary = summary_of(preempted)
    assert (summary["completed"], summary["failed"], summary["cut_off"]) == (2, 0, 0)
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (14, 12)
    assert summary["duration"] == 10
    assert summary["request_throughput"] == pytest.approx(2 / 10)
    assert summary["output_throughput"] == pytest.approx(12 / 10)
    assert summary["total_token_throughput"] == pytest.approx(26 / 10)
    assert (summary["preemptions"], summary["tokens_recomputed"]) == (1, 8)
    assert summary["steps"] == 10
    assert summary["scheduled_tokens"] == 14 + 2 + 4 + 9 + 3  # A stores 12, B 8 and once more 12


def test_time_averages_through_a_preemption_are_those_counted_by_hand(preempted: Path) -> None:
    summary = summary_of(preempted)
    # Two run for 2 s, one for 8 s; one waits for 4 s, and then one runs.
    assert summary["mean_running"] == pytest.approx(1.2)
    assert summary["mean_waiting"] == pytest.approx(0.4)
    assert (summary["max_running"], summary["saturated_s"], summary["mean_running_saturated"]) == (2, 4, 1)
    # Slots of 16 used in each second: 14, 16, then 9 to 12 twice. Reserved: 16 held less that in the first two
    # seconds, then 12 held less that. Every block is filled in the end, so nothing is internal; four are idle for 8 s.
    used, reserved = 14 + 16 + 2 * (9 + 10 + 11 + 12), 2 + 0 + 2 * (3 + 2 + 1 + 0)
    shares = {"used": used, "reserved": reserved, "internal": 0, "cached": 0, "external": 0, "idle": 8 * 4}
    assert sum(shares.values()) == 10 * 16
    assert summary["pool_slots"] == 16
    for name, slot_seconds in shares.items():
        assert summary[f"share_{name}"] == pytest.approx(slot_seconds / 160), name
    # While B waits, A holds three blocks: 9 to 12 slots used.
    assert summary["saturated_share_used"] == pytest.approx((9 + 10 + 11 + 12) / 64)
    assert summary["saturated_share_idle"] == pytest.approx(16 / 64)


def test_the_keys_are_those_of_vllm_bench_serve(preempted: Path) -> None:
    keys = {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens"}
    keys |= {"request_throughput", "output_throughput", "total_token_throughput"}
    for name in ("ttft", "tpot", "itl", "e2el"):
        keys |= {f"{what}_{name}_ms" for what in ("mean", "median", "std", *(f"p{p}" for p in PERCENTILES))}
    assert keys - summary_of(preempted).keys() == set()


def test_latencies_of_the_summary_can_be_had_from_the_requests(simulate: Callable[..., Path]) -> None:
    folder = simulate("workload=sharegpt_like", "workload.num_requests=80", "workload.rate=8", "memory.num_blocks=600")
    summary, requests = summary_of(folder), pd.read_parquet(folder / "requests.parquet")
    assert summary["preemptions"] > 0  # or this would be the easy case
    ttft = requests["first_token_s"] - requests["arrival_s"]
    e2el = requests["finish_s"] - requests["arrival_s"]
    several = requests["generated_tokens"] > 1
    tpot = ((requests["finish_s"] - requests["first_token_s"]) / (requests["generated_tokens"] - 1))[several]
    for name, values in (("ttft", ttft), ("e2el", e2el), ("tpot", tpot)):
        assert summary[f"mean_{name}_ms"] == pytest.approx(1000 * values.mean())
        assert summary[f"std_{name}_ms"] == pytest.approx(1000 * values.std(ddof=0))
        for p in PERCENTILES:
            assert summary[f"p{p}_{name}_ms"] == pytest.approx(1000 * values.quantile(p / 100))
    # The intervals of a request add up to the time from its first to its last token.
    intervals = (requests["generated_tokens"] - 1).sum()
    whole = (requests["finish_s"] - requests["first_token_s"]).sum()
    assert summary["mean_itl_ms"] == pytest.approx(1000 * whole / intervals)
    assert summary["mean_normalized_latency_ms"] == pytest.approx(1000 * (e2el / requests["generated_tokens"]).mean())
    span = requests["finish_s"].max() - requests["arrival_s"].min()
    assert summary["duration"] == pytest.approx(span)
    assert summary["output_throughput"] == pytest.approx(requests["generated_tokens"].sum() / span)


ORCAS = ["orca_max", "orca_pow2", "orca_oracle"]


@pytest.fixture(scope="module", params=[*ORCAS, "vllm_v1"])
def pressed(request: pytest.FixtureRequest, simulate: Callable[..., Path]) -> Path:
    """A run of each engine in which requests wait for memory most of the time."""
    folder = simulate(f"engine={request.param}", *PRESSURE)
    summary = summary_of(folder)
    assert summary["completed"] == 120
    assert summary["saturated_s"] > 0.5 * summary["duration"]
    return folder


def test_every_slot_has_exactly_one_name_in_every_step(pressed: Path) -> None:
    summary, steps = summary_of(pressed), pd.read_parquet(pressed / "steps.parquet")
    assert (steps[list(NAMES)].sum(axis=1) == summary["pool_slots"]).all()
    assert (steps[list(NAMES)] >= 0).all(axis=None)
    assert sum(summary[f"share_{name}"] for name in NAMES) == pytest.approx(1, rel=1e-12)
    assert sum(summary[f"saturated_share_{name}"] for name in NAMES) == pytest.approx(1, rel=1e-12)


def test_averages_of_the_summary_are_those_of_the_steps_weighted_by_time(
    pressed: Path, simulate: Callable[..., Path]
) -> None:
    summary = summary_of(pressed)
    # The same run with a row for every single step.
    steps = pd.read_parquet(simulate(f"engine={summary['engine']}", *PRESSURE, "engine.leap=false") / "steps.parquet")
    assert set(steps["repeat"]) == {1}
    for prefix, part in (("", steps), ("saturated_", steps[steps["waiting"] > 0])):
        seconds = part["duration_s"]
        for name in NAMES:
            mean = (part[name] * seconds).sum() / (seconds.sum() * summary["pool_slots"])
            assert summary[f"{prefix}share_{name}"] == pytest.approx(mean, rel=1e-9, abs=1e-12), (prefix, name)
    seconds = steps["duration_s"]
    assert summary["duration"] == pytest.approx(seconds.sum())
    assert summary["mean_running"] == pytest.approx((steps["running"] * seconds).sum() / seconds.sum())
    assert summary["mean_waiting"] == pytest.approx((steps["waiting"] * seconds).sum() / seconds.sum())


def test_a_row_that_stands_for_several_steps_uses_a_slot_more_a_sequence_in_each(pressed: Path) -> None:
    summary, rows = summary_of(pressed), pd.read_parquet(pressed / "steps.parquet")
    assert rows["repeat"].max() > 1
    assert rows["repeat"].sum() == summary["steps"]
    # Steps are equally long here, so a row that begins with u slots and has k steps of n sequences uses
    # u + n * (k - 1) / 2 on average.
    used = rows["used"] + rows["num_sequences"] * (rows["repeat"] - 1) / 2
    mean = (used * rows["duration_s"]).sum() / (rows["duration_s"].sum() * summary["pool_slots"])
    assert summary["share_used"] == pytest.approx(mean, rel=1e-9)


@pytest.mark.parametrize("pressed", ORCAS, indirect=True)
def test_waste_of_a_reservation_can_be_had_from_the_requests(pressed: Path) -> None:
    # A region stands from admission to the end. Of its slots those of all tokens but the last are used or reserved, the
    # rest of what was set aside is internal. (Rounding of the buddy is external by default.)
    summary, requests = summary_of(pressed), pd.read_parquet(pressed / "requests.parquet")
    prompt, output = requests["prompt_tokens"], requests["output_tokens"]
    set_aside = {
        "orca_max": pd.Series(256, requests.index),
        "orca_pow2": np.minimum(prompt + 2 ** np.ceil(np.log2(output)).astype(int), 256),
        "orca_oracle": prompt + output,
    }[summary["engine"]]
    fills = prompt + output - 1
    slot_seconds = (requests["finish_s"] - requests["first_scheduled_s"]) / (
        summary["pool_slots"] * summary["duration"]
    )
    kept = summary["share_used"] + summary["share_reserved"]
    assert kept == pytest.approx((fills * slot_seconds).sum(), rel=1e-9)
    assert summary["share_internal"] == pytest.approx(((set_aside - fills) * slot_seconds).sum(), rel=1e-9)
    assert summary["preemptions"] == 0  # what was set aside is enough


@pytest.mark.parametrize("pressed", ["vllm_v1"], indirect=True)
def test_paging_wastes_less_than_a_block_of_a_request_and_pays_with_preemptions(pressed: Path) -> None:
    summary = summary_of(pressed)
    assert summary["share_external"] == 0  # any free block serves any request
    assert 0 < summary["share_internal"] < summary["mean_running"] * 16 / summary["pool_slots"]
    assert summary["preemptions"] > 0


def test_time_without_work_counts_in_the_averages_once_a_request_has_come(
    simulate: Callable[..., Path],
) -> None:
    # 1 + 2 tokens every 4 s, 1 s a step, blocks of 1 in a pool of 8: two steps of work with 1 and 2 slots used, then
    # 2 s of nothing. Three requests come at 4, 8, 12 s, and the last is done at 14 s: 10 s, 6 of them busy. The 4 s
    # before the first are no part of the run.
    lengths = ["workload.prompt_lengths.tokens=1", "workload.output_lengths.tokens=2"]
    arrivals = ["workload=synthetic", "workload/arrivals=constant", "workload.rate=0.25", "workload.num_requests=3"]
    pool = ["memory.block_size=1", "memory.num_blocks=9", "memory.prefix_caching=false"]
    summary = summary_of(simulate(*arrivals, *lengths, *pool, *SECONDS))
    assert summary["duration"] == 10
    assert summary["mean_running"] == pytest.approx(6 / 10)
    assert summary["share_used"] == pytest.approx(3 * (1 + 2) / (10 * 8))
    assert summary["share_idle"] == pytest.approx(1 - 3 * (1 + 2) / (10 * 8))
    assert (summary["saturated_s"], summary["mean_running_saturated"], summary["saturated_share_used"]) == (
        0,
        None,
        None,
    )
