"""Figures: what they draw is what the tables say, and nothing covers it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.transforms import Bbox

from sim.commands.plot import main
from sim.plots.bins import Spans, bin_edges, count_events, extremes, integrate, spans
from sim.plots.hit_rate import PublishedHits, pool_size_figure
from sim.plots.latency import cumulative, latencies, latency_figure
from sim.plots.lines import block_size_figure, request_rate_figure
from sim.plots.points import select_complete
from sim.plots.pool import MOST_BINS, pool_figure
from sim.plots.run import draw_run
from sim.plots.style import POLICY_LOOKS, STATE_LOOKS, STATES, new_figure, policy_looks, save, settings
from sim.plots.sweep import draw_sweep
from sim.plots.waste import waste_figure
from sim.plots.watermark import PublishedWatermarks, watermark_figure
from workloads.errors import UserError

ORCA_AND_VLLM = ("orca_max", "orca_pow2", "orca_oracle", "vllm_v1")
SHARES = {  # each sums to 1
    "orca_max": (0.20, 0.13, 0.57, 0.00, 0.09, 0.01),
    "orca_pow2": (0.27, 0.18, 0.14, 0.00, 0.40, 0.01),
    "orca_oracle": (0.38, 0.25, 0.00, 0.00, 0.36, 0.01),
}
WHITE = "#ffffff"
PAGED = (0.90, 0.00, 0.02, 0.05, 0.00, 0.03)


@pytest.fixture(autouse=True)
def _coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels cost most of the time of these tests, and none looks at them."""
    monkeypatch.setattr("sim.plots.style.PNG_DPI", 30)


def sweep_table(
    policies: Iterable[str] = ORCA_AND_VLLM,
    block_sizes: Sequence[int] = (16,),
    rates: Sequence[float] = (2.0,),
    seeds: Sequence[int] = (0,),
) -> pd.DataFrame:
    """The product of its arguments, in the columns of a sweep; contiguous policies have no block size."""
    rows: list[dict[str, Any]] = []
    for policy in policies:
        shares = SHARES.get(policy, PAGED)
        for block_size in block_sizes:
            for rate in rates:
                for seed in seeds:
                    held = 30.0 * shares[0] + seed
                    served = min(rate, held / 15)
                    row = {
                        "point": len(rows),
                        "overrides": f"engine={policy} memory.block_size={block_size} rate={rate} seed={seed}",
                        "memory.block_size": block_size,
                        "workload.rate": rate,
                        "seed": seed,
                        "status": "complete",
                        "error": None,
                        "engine": policy,
                        "model": "opt-13b",
                        "hardware": "a100-40gb",
                        "workload": "sharegpt_like",
                        "request_rate": rate,
                        "block_size": None if policy in SHARES else block_size,
                        "pool_blocks": 15728 // block_size,
                        "prefix_queried_tokens": 16_131,
                        "prefix_hit_tokens": 0,
                        "completed": 100,
                        "request_throughput": served,
                        "output_throughput": 338 * served,
                        "mean_normalized_latency_ms": 40.0 + 4000 * (rate - served),
                        "preemptions": 10 + seed,
                        "median_ttft_ms": 500.0,
                        "mean_running": held,
                        "mean_running_saturated": held,
                    }
                    for prefix in ("share_", "saturated_share_"):
                        row |= {f"{prefix}{state}": share for state, share in zip(STATES, shares, strict=True)}
                    rows.append(row)
    return pd.DataFrame(rows)


def pool_size_table(policies: Iterable[str], sizes: Sequence[int], block_sizes: Sequence[int] = (512,)) -> pd.DataFrame:
    """Points that differ in the pool's size; of 1,000 prompt tokens, as many hit as there are hundreds of blocks."""
    tables = [sweep_table(policies, block_sizes).assign(**{"memory.num_blocks": size}) for size in sizes]
    table = pd.concat(tables, ignore_index=True)
    table.insert(1, "memory.num_blocks", table.pop("memory.num_blocks"))
    return table.assign(
        point=table.index, prefix_queried_tokens=1000, prefix_hit_tokens=table["memory.num_blocks"] // 100
    )


def published_hits(rates: dict[float, float], block_size: int = 512) -> PublishedHits:
    return PublishedHits("LRU, as published", "A paper, Table 1.", block_size, rates)


def watermark_table(
    policies: Iterable[str], watermarks: Sequence[float], seeds: Sequence[int] = (0,), rates: Sequence[float] = (2.0,)
) -> pd.DataFrame:
    """Points that differ in the watermark; a hundredth of the pool avoids ten of a hundred preemptions."""
    tables = [sweep_table(policies, (16,), rates, seeds).assign(**{"memory.watermark": at}) for at in watermarks]
    table = pd.concat(tables, ignore_index=True)
    table.insert(1, "memory.watermark", table.pop("memory.watermark"))
    return table.assign(point=table.index, preemptions=100 - 1000 * table["memory.watermark"] + table["seed"])


def published_watermarks(figures: dict[float, dict[str, float]]) -> PublishedWatermarks:
    return PublishedWatermarks("as published", "A pull request.", figures)


def steps_table(num_steps: int = 50, gap_s: float = 0.0) -> pd.DataFrame:
    """Steps of 1 s with `gap_s` after each, in a pool of 100 slots; every tenth step preempts one."""
    index = np.arange(num_steps)
    used = 20 + index % 50
    return pd.DataFrame(
        {
            "start_s": index * (1.0 + gap_s),
            "duration_s": 1.0,
            "running": 2 + index % 3,
            "waiting": index % 2,
            "used": used,
            "reserved": 5,
            "internal": 3,
            "cached": 2,
            "external": 1,
            "idle": 100 - used - 11,
            "preempted": (index % 10 == 9).astype(int),
        }
    )


def requests_table() -> pd.DataFrame:
    """Three finished requests and a rejected one."""
    return pd.DataFrame(
        {
            "arrival_s": [0.0, 1.0, 2.0, 3.0],
            "status": ["finished", "finished", "finished", "rejected"],
            "first_token_s": [0.5, 3.0, 2.25, np.nan],
            "finish_s": [2.5, 3.0, 6.25, np.nan],
            "generated_tokens": [5, 1, 9, 0],
        }
    )


def run_folder(folder: Path, steps: pd.DataFrame | None = None) -> Path:
    (steps_table() if steps is None else steps).to_parquet(folder / "steps.parquet")
    requests_table().to_parquet(folder / "requests.parquet")
    (folder / "summary.json").write_text(json.dumps({"status": "complete", "engine": "vllm_v1"}))
    return folder


def bars_by_height(ax: Axes) -> dict[float, list[Rectangle]]:
    bars: dict[float, list[Rectangle]] = {}
    for patch in ax.patches:
        assert isinstance(patch, Rectangle)
        bars.setdefault(round(patch.get_y() + patch.get_height() / 2, 6), []).append(patch)
    return bars


def outlined_widths(ax: Axes) -> list[float]:
    return [
        bar.get_width() for bars in bars_by_height(ax).values() for bar in bars if to_hex(bar.get_facecolor()) == WHITE
    ]


def text_of(figure: Figure) -> str:
    """Everything written in the margins."""
    return f"{figure.get_suptitle()}\n{figure.get_supxlabel()}"


def inked_boxes(figure: Figure) -> list[tuple[str, Bbox]]:
    """Boxes of the axes with their labels, the legends, the title and the footnote, in pixels, after layout."""
    figure.draw_without_rendering()
    legends = [*figure.legends, *filter(None, (ax.get_legend() for ax in figure.axes))]
    for legend in legends:
        legend.set_in_layout(False)  # else the box of its axes would contain it
    boxes = [("axes", ax.get_tightbbox()) for ax in figure.axes]
    boxes += [("legend", legend.get_window_extent()) for legend in legends]
    boxes += [("text", text.get_window_extent()) for text in figure.texts if text.get_text()]
    return [(kind, box) for kind, box in boxes if box is not None]


# What is drawn


@pytest.mark.parametrize("prefix_panel", [0, 1])
def test_every_stacked_bar_sums_to_one(prefix_panel: int) -> None:
    ax = waste_figure(select_complete(sweep_table(block_sizes=(8, 16)))).axes[prefix_panel]
    bars = bars_by_height(ax)
    assert len(bars) == 5  # three contiguous policies, whose block sizes are one, and two block sizes of vLLM
    for segments in bars.values():
        assert len(segments) == len(STATES)
        assert sum(segment.get_width() for segment in segments) == pytest.approx(1, abs=1e-12)
        ends = [0.0, *(segment.get_x() + segment.get_width() for segment in segments)]
        assert [segment.get_x() for segment in segments] == pytest.approx(ends[:-1])


def test_pooled_bars_are_means_that_still_sum_to_one_and_show_the_range_of_used() -> None:
    table = sweep_table(["vllm_v1"], seeds=(0, 1, 2))
    table["share_used"] = [0.80, 0.90, 0.91]  # mean 0.87
    table["share_idle"] = [0.13, 0.03, 0.02]  # the rest of each is 0.02 internal and 0.05 cached
    figure = waste_figure(select_complete(table))
    (segments,) = bars_by_height(figure.axes[0]).values()
    assert segments[0].get_width() == pytest.approx(0.87)
    assert sum(segment.get_width() for segment in segments) == pytest.approx(1)
    (spread,) = figure.axes[0].lines
    assert np.asarray(spread.get_xdata()).tolist() == [0.80, 0.91]
    assert "means over points that differ in seed" in text_of(figure)


def test_panel_while_requests_wait_is_there_only_if_some_request_waited() -> None:
    table = sweep_table()
    saturated = [f"saturated_share_{state}" for state in STATES]
    table.loc[0, saturated] = np.nan
    panel = waste_figure(select_complete(table)).axes[1]
    assert [text.get_text() for text in panel.texts if "wait" in text.get_text()] == ["no request ever waited"]
    table[saturated] = None
    shares, running = waste_figure(select_complete(table)).axes
    assert [ax.get_title(loc="left") for ax in (shares, running)] == ["over the whole run"] * 2


def test_published_shares_are_outlined_beside_ours() -> None:
    published = {"orca_max": {"used": 0.204, "reserved": 0.133, "internal": 0.573, "others": 0.089, "running": 7.0}}
    ax, _, running = waste_figure(select_complete(sweep_table()), published).axes
    assert outlined_widths(ax) == pytest.approx([0.204, 0.133, 0.573, 0.089])
    assert outlined_widths(running) == [7.0]
    assert len(bars_by_height(ax)) == len(ORCA_AND_VLLM) + 1


@pytest.mark.parametrize(
    "shares", [{"used": 20.4}, {"used": -0.1}, {"cached": 0.1}, {"used": 0.9, "others": 0.2}, {"used": "most"}]
)
def test_published_shares_that_are_no_shares_are_refused(shares: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^published\.orca_max: "):
        waste_figure(select_complete(sweep_table()), {"orca_max": shares})


def test_line_is_the_median_and_the_band_its_extremes() -> None:
    table = sweep_table(["vllm_v1"], block_sizes=(8, 16), seeds=(0, 1, 2))
    table["request_throughput"] = [1.0, 9.0, 2.0, 3.0, 3.0, 3.0]  # block size 8: median 2 of 1 to 9; 16: no spread
    figure = block_size_figure(select_complete(table))
    (line,) = figure.axes[0].lines
    assert np.asarray(line.get_xdata()).tolist() == [8, 16]
    assert np.asarray(line.get_ydata()).tolist() == [2, 3]
    band = figure.axes[0].collections[0].get_paths()[0].get_extents()
    assert (band.y0, band.y1) == (1, 9)
    assert "band: lowest to highest, over points that differ in seed" in text_of(figure)


def test_policy_without_blocks_is_level_across_the_block_sizes() -> None:
    figure = block_size_figure(select_complete(sweep_table(["orca_max", "vllm_v1"], block_sizes=(8, 16, 32))))
    orca = figure.axes[2].lines[0]
    assert np.asarray(orca.get_xdata()).tolist() == [8, 16, 32]
    assert np.asarray(orca.get_ydata()).tolist() == [6, 6, 6]  # 30 times its share of used, 0.20
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["8", "16", "32"]


def test_other_swept_keys_of_few_values_split_the_figure_instead_of_being_mixed() -> None:
    figure = block_size_figure(select_complete(sweep_table(block_sizes=(8, 16), rates=(1.0, 2.0))))
    names = [ax.get_title(loc="left") for ax in figure.axes]
    assert [name for name in names if name] == ["1 req/s", "2 req/s"]
    rows = np.array(figure.axes).reshape(2, -1)
    assert all(len(ax.lines) == len(ORCA_AND_VLLM) for ax in rows.ravel())  # contiguous policies are in both rows


def test_policy_without_a_swept_key_is_in_every_part_but_null_is_a_value_of_it() -> None:
    table = sweep_table(["orca_max", "vllm_v1"], rates=(1.0, 2.0), seeds=(0, 1))
    table.insert(1, "memory.watermark", [None, None, None, None, None, 0.01, None, 0.01])  # vLLM: null and 0.01
    figure = request_rate_figure(select_complete(table.assign(seed=0)))
    names = [ax.get_title(loc="left") for ax in figure.axes]
    assert [name for name in names if name] == ["memory.watermark=0.01", "memory.watermark=null"]
    assert len(figure.axes[1].lines) == len(figure.axes[4].lines) == 3  # two policies and the offered load


def test_swept_key_of_many_values_is_pooled_and_named() -> None:
    figure = block_size_figure(select_complete(sweep_table(["vllm_v1"], (8, 16), rates=tuple(np.arange(1.0, 9.0)))))
    assert len(figure.axes) == 4  # one row of panels
    assert "differ in request_rate" in text_of(figure)


def test_latency_axis_is_logarithmic_only_beyond_a_decade_and_says_so() -> None:
    narrow = sweep_table(rates=(1.0, 2.0))
    narrow["mean_normalized_latency_ms"] = np.linspace(40, 390, len(narrow))
    ax = request_rate_figure(select_complete(narrow)).axes[0]
    assert (ax.get_yscale(), ax.get_ylim()[0]) == ("linear", 0)
    wide = narrow.assign(mean_normalized_latency_ms=np.linspace(40, 410, len(narrow)))
    ax = request_rate_figure(select_complete(wide)).axes[0]
    assert ax.get_yscale() == "log"
    assert "log scale" in ax.get_ylabel()


def test_hit_rate_is_hits_of_queried_tokens_from_none_to_all_against_the_pool_size() -> None:
    # 100, 10,000 and 30,000 blocks: 1, 100 and 300 of 1,000 tokens.
    table = pool_size_table(["vllm_v1"], [30_000, 100, 10_000])
    ax = pool_size_figure(select_complete(table)).axes[0]
    (line,) = ax.lines
    assert np.asarray(line.get_xdata()).tolist() == [100, 10_000, 30_000]
    assert np.asarray(line.get_ydata()).tolist() == [0.001, 0.1, 0.3]
    assert (ax.get_xscale(), ax.get_ylim()) == ("log", (0, 1))
    assert {tick.get_text() for tick in ax.get_xticklabels()} == {"100", "10k", "30k"}
    assert ax.get_xlabel() == "pool size (blocks of 512 tokens, log scale)"


def test_published_hit_rates_are_open_markers_and_an_unbounded_pool_stands_right_of_all() -> None:
    table = pool_size_table(["vllm_v1"], [100, 10_000])
    figure = pool_size_figure(select_complete(table), {"vllm_v1": published_hits({500: 0.3, np.inf: 0.5})})
    ours, theirs = figure.axes[0].lines
    assert theirs.get_markerfacecolor() == "white" != ours.get_markerfacecolor()
    assert theirs.get_linestyle() == "None"
    places = np.asarray(theirs.get_xdata()).tolist()
    assert (places[0], np.asarray(theirs.get_ydata()).tolist()) == (500, [0.3, 0.5])
    assert 2 * 10_000 <= places[1] < np.inf
    assert {tick.get_text() for tick in figure.axes[0].get_xticklabels()} == {"100", "500", "10k", "∞"}
    assert "A paper, Table 1." in text_of(figure)


def test_pool_sizes_too_near_to_be_named_leave_room_and_the_largest_is_always_named() -> None:
    # From 1,000 to 2,000 blocks in steps of 50. The rightmost of each 1/14 of the axis is named: ln(2,000 / 1,900) is
    # 0.0513, above ln 2 / 14 = 0.0495, and ln(2,000 / 1,950) is 0.025, below.
    ax = pool_size_figure(select_complete(pool_size_table(["vllm_v1"], range(1000, 2001, 50)))).axes[0]
    names = [tick.get_text() for tick in ax.get_xticklabels()]
    assert len(names) <= 15
    assert "2k" in names and "1.9k" in names and "1950" not in names


def test_published_hit_rates_stand_only_beside_blocks_of_their_size_and_policies_that_were_run() -> None:
    points = select_complete(pool_size_table(["vllm_v1"], [100, 10_000], block_sizes=(16, 512)))
    small, large = pool_size_figure(points, {"vllm_v1": published_hits({500: 0.3})}).axes
    assert [len(ax.lines) for ax in (small, large)] == [1, 2]  # the first row is that of blocks of 16
    for others in ({"vllm_v1": published_hits({500: 0.3}, block_size=64)}, {"sglang": published_hits({500: 0.3})}):
        figure = pool_size_figure(points, others)
        assert [len(ax.lines) for ax in figure.axes] == [1, 1]
        assert "A paper" not in text_of(figure)


@pytest.mark.parametrize(
    "figures",
    [
        0.5,
        {"rates": {1000: 0.3}},
        {"label": "", "source": "", "block_size": 512, "rates": [0.3]},
        {"label": "", "source": "", "block_size": 512, "rates": {1000: 30}},
        {"label": "", "source": "", "block_size": 512, "rates": {0: 0.3}},
        {"label": "", "source": "", "block_size": 512, "rates": {"1k": 0.3}},
    ],
)
def test_published_hit_rates_that_are_none_are_refused(figures: Any) -> None:
    with pytest.raises(UserError, match=r"^published\.vllm_v1\.prefix_hits.*\.$"):
        PublishedHits.of("vllm_v1", figures)


def test_hit_rate_is_drawn_if_the_pool_size_was_swept_and_something_hit(tmp_path: Path) -> None:
    swept = pool_size_table(["vllm_v1"], [100, 10_000])
    published = {"vllm_v1": {"prefix_hits": {"label": "", "source": "", "block_size": 512, "rates": {500: 0.3}}}}
    stems = [path.stem for path in draw_sweep(swept, tmp_path, published)]
    assert stems == ["waste_shares"] * 2 + ["prefix_hit_rate"] * 2
    for table in (swept.assign(prefix_hit_tokens=0), pool_size_table(["vllm_v1", "sglang"], [100])):
        assert "prefix_hit_rate" not in [path.stem for path in draw_sweep(table, tmp_path)]


def test_points_that_are_not_complete_are_left_out_and_counted() -> None:
    table = sweep_table(block_sizes=(8, 16, 32))
    lost = table.index[table["engine"] == "vllm_v1"][:2]
    table.loc[lost, "status"] = ["failed", "interrupted"]
    table.loc[lost, "share_used"] = np.nan
    figure = waste_figure(select_complete(table))
    assert "Left out of 12 points: 1 failed and 1 interrupted." in text_of(figure)
    assert len(bars_by_height(figure.axes[0])) == 4


def test_no_complete_point_draws_nothing(tmp_path: Path) -> None:
    failed = sweep_table().assign(status="failed")
    assert draw_sweep(failed, tmp_path) == []
    assert draw_sweep(failed[["point", "overrides", "status", "error", "engine"]], tmp_path) == []  # none ever started
    assert list(tmp_path.iterdir()) == []


def test_pool_figure_stacks_the_states_to_the_pool() -> None:
    steps = steps_table(20)
    plans = spans(steps["start_s"].to_numpy(), steps["duration_s"].to_numpy())
    ax = pool_figure(steps, plans, "").axes[0]
    tops = [patch.get_data() for patch in ax.patches]  # type: ignore[attr-defined]
    assert len(tops) == len(STATES)
    assert tops[0].values == pytest.approx(steps["used"].to_numpy())  # few steps: drawn one by one, not binned
    assert tops[-1].values == pytest.approx(np.full(20, 100.0))
    for below, above in pairwise(tops):
        assert above.baseline == pytest.approx(below.values)


def test_pool_figure_of_a_long_run_has_a_bounded_number_of_bins_and_every_preemption() -> None:
    steps = steps_table(50_000, gap_s=0.5)
    plans = spans(steps["start_s"].to_numpy(), steps["duration_s"].to_numpy())
    figure = pool_figure(steps, plans, "")
    edges = figure.axes[0].patches[0].get_data().edges  # type: ignore[attr-defined]
    assert len(edges) == MOST_BINS + 1
    top = figure.axes[0].patches[-1].get_data()  # type: ignore[attr-defined]
    covered = 50_000 / plans.end[-1]  # of each 1.5 s, 1 s is a step; the last has no gap after it
    assert np.average(top.values, weights=np.diff(edges)) == pytest.approx(100 * covered)
    assert "no step runs" in [text.get_text() for text in figure.axes[0].get_legend().get_texts()]  # type: ignore[union-attr]
    assert "5,000 preemptions in all" in text_of(figure)


# Watermarks


def test_preemptions_are_drawn_against_the_watermark_with_every_seed_as_a_dot() -> None:
    table = watermark_table(["vllm_v1"], [0.05, 0.0], seeds=(0, 1, 2))
    figure = watermark_figure(select_complete(table))
    line, dots = figure.axes[0].lines
    assert np.asarray(line.get_xdata()).tolist() == [0.0, 0.05]
    assert np.asarray(line.get_ydata()).tolist() == [101, 51]  # the median of three seeds
    assert sorted(np.asarray(dots.get_ydata()).tolist()) == [50, 51, 52, 100, 101, 102]
    assert {tick.get_text() for tick in figure.axes[0].get_xticklabels()} == {"0", "0.05"}


def test_published_results_at_a_watermark_are_open_markers_that_the_axis_has_room_for() -> None:
    table = watermark_table(["vllm_v1"], [0.0, 0.05], seeds=(0, 1))
    published = published_watermarks({0.0: {"preemptions": 5000, "median_ttft_ms": 400.0}, 0.02: {"preemptions": 7}})
    figure = watermark_figure(select_complete(table), {"vllm_v1": published})
    preemptions, throughput, ttft = figure.axes
    theirs = preemptions.lines[-1]
    assert (theirs.get_markerfacecolor(), theirs.get_linestyle()) == ("white", "None")
    assert np.asarray(theirs.get_xdata()).tolist() == [0.0, 0.02]
    assert np.asarray(theirs.get_ydata()).tolist() == [5000, 7]
    assert preemptions.get_ylim()[0] == 0 and preemptions.get_ylim()[1] > 5000
    assert np.asarray(throughput.lines[-1].get_ydata()).tolist() == []  # none was published
    assert np.asarray(ttft.lines[-1].get_ydata()).tolist() == [400.0]
    assert "A pull request." in text_of(figure)


def test_published_results_at_a_watermark_stand_beside_nothing_but_their_own_setting() -> None:
    published = {"vllm_v1": published_watermarks({0.0: {"preemptions": 5}})}
    for table in (
        watermark_table(["vllm_v1"], [0.0, 0.05], rates=(1.0, 2.0)),  # which of the two rates was theirs?
        watermark_table(["sglang"], [0.0, 0.05]),
    ):
        assert "A pull request." not in text_of(watermark_figure(select_complete(table), published))


@pytest.mark.parametrize(
    "figures",
    [
        0.5,
        {"figures": {0.0: {"preemptions": 1}}},
        {"label": "", "source": "", "figures": [1]},
        {"label": "", "source": "", "figures": {1.5: {"preemptions": 1}}},
        {"label": "", "source": "", "figures": {0.0: 1065}},
        {"label": "", "source": "", "figures": {0.0: {"preemptions": "many"}}},
    ],
)
def test_published_watermarks_that_are_none_are_refused(figures: Any) -> None:
    with pytest.raises(UserError, match=r"^published\.vllm_v1\.watermarks.*\.$"):
        PublishedWatermarks.of("vllm_v1", figures)


def test_watermarks_are_drawn_if_they_were_swept(tmp_path: Path) -> None:
    published = {"vllm_v1": {"watermarks": {"label": "", "source": "", "figures": {0: {"preemptions": 3}}}}}
    stems = [path.stem for path in draw_sweep(watermark_table(["vllm_v1"], [0, 0.05]), tmp_path, published)]
    assert stems == ["waste_shares"] * 2 + ["watermark"] * 2
    assert "watermark" not in [path.stem for path in draw_sweep(watermark_table(["vllm_v1"], [0]), tmp_path)]


# Legends and looks


@pytest.mark.parametrize("policies", [("vllm_v1",), ORCA_AND_VLLM, tuple(POLICY_LOOKS), (*POLICY_LOOKS, "mine")])
def test_legend_names_every_policy_once(policies: tuple[str, ...]) -> None:
    points = select_complete(sweep_table(policies, block_sizes=(8, 16), rates=(1.0, 2.0)))
    for draw, others in ((block_size_figure, []), (request_rate_figure, ["served = offered"])):
        (legend,) = draw(points).legends
        assert Counter(text.get_text() for text in legend.get_texts()) == Counter([*policies, *others])


def figures(policies: Sequence[str]) -> list[Figure]:
    points = select_complete(sweep_table(policies, block_sizes=(8, 16), rates=(1.0, 2.0), seeds=(0, 1)))
    published = {policies[-1]: {"used": 0.5, "others": 0.5}}
    pools = select_complete(pool_size_table(policies, [1000, 10_000, 30_000, 50_000, 100_000], block_sizes=(16, 512)))
    hits = {policies[-1]: published_hits({1000: 0.3, 10_000: 0.4, np.inf: 0.5})}
    marked = select_complete(watermark_table(policies, [0.0, 0.05, 0.1], seeds=(0, 1)))
    theirs = {policies[-1]: published_watermarks({0.02: {"preemptions": 120.0, "output_throughput": 90.0}})}
    steps = steps_table(gap_s=1.0)
    plans = spans(steps["start_s"].to_numpy(), steps["duration_s"].to_numpy())
    return [
        waste_figure(points, published),
        block_size_figure(points),
        request_rate_figure(points),
        pool_size_figure(pools, hits),
        watermark_figure(marked, theirs),
        pool_figure(steps, plans, "vllm_v1 · opt-13b · a100-40gb · sharegpt_like"),
        latency_figure(requests_table(), "vllm_v1"),
    ]


@pytest.mark.parametrize("policies", [("vllm_v1",), ORCA_AND_VLLM, tuple(POLICY_LOOKS)])
def test_nothing_overlaps_and_nothing_leaves_the_figure(policies: tuple[str, ...]) -> None:
    with settings():
        for figure in figures(policies):
            boxes = inked_boxes(figure)
            whole = figure.bbox
            for place, (kind, box) in enumerate(boxes):
                assert box.x0 >= whole.x0 - 1 and box.x1 <= whole.x1 + 1, (figure.get_suptitle(), kind)
                assert box.y0 >= whole.y0 - 1 and box.y1 <= whole.y1 + 1, (figure.get_suptitle(), kind)
                for other_kind, other in boxes[place + 1 :]:
                    common = Bbox.intersection(box, other)
                    apart = common is None or min(common.width, common.height) < 1
                    assert apart, (figure.get_suptitle(), kind, other_kind)


def test_titles_ask_a_question_and_axes_have_labels() -> None:
    for figure in figures(ORCA_AND_VLLM):
        assert "?" in figure.get_suptitle()
        assert any(ax.get_xlabel() for ax in figure.axes)
        assert figure.axes[-1].get_xlabel()


def test_named_policies_differ_in_colour_and_marker_and_states_share_no_colour_with_them() -> None:
    assert len({(look.colour, look.marker) for look in POLICY_LOOKS.values()}) == len(POLICY_LOOKS)
    four = [POLICY_LOOKS[name] for name in ORCA_AND_VLLM]
    assert all(len({getattr(look, trait) for look in four}) == 4 for trait in ("colour", "marker", "line"))
    assert not {look.colour for look in POLICY_LOOKS.values()} & {look.colour for look in STATE_LOOKS.values()}


@given(st.lists(st.text(min_size=1, max_size=8), max_size=30))
def test_unknown_policies_get_looks_of_their_own(names: list[str]) -> None:
    looks = policy_looks([*names, *POLICY_LOOKS])
    assert len({(look.colour, look.marker) for look in looks.values()}) == len(looks)
    assert looks == policy_looks(reversed([*names, *POLICY_LOOKS]))  # the order of the points does not matter


def test_unknown_policy_looks_the_same_alone_and_in_company() -> None:
    assert policy_looks(["mine"])["mine"] == policy_looks(["vllm_v1", "mine", "orca_max"])["mine"]


# Bins


def test_two_bins_by_hand() -> None:
    # 4 from 0 to 2 s, nothing to 3 s, 8 from 3 to 4 s. The bins [0, 2] and [2, 4]: 4 * 2 and 8 * 1.
    plans = spans(np.array([0.0, 3.0]), np.array([2.0, 1.0]))
    edges = np.array([0.0, 2.0, 4.0])
    assert list(integrate(plans, np.array([4.0, 8.0]), edges)) == [8, 8]
    assert [list(values) for values in extremes(plans, np.array([4.0, 8.0]), edges)] == [[4, 8], [4, 8]]
    assert list(count_events(plans, np.array([1, 5]), edges)) == [1, 5]
    assert plans.idle_s == 1


@st.composite
def plans_and_values(draw: st.DrawFn) -> tuple[Spans, np.ndarray]:
    numbers = st.tuples(st.floats(1e-3, 1e3), st.one_of(st.just(0.0), st.floats(1e-3, 1e3)), st.integers(0, 10**6))
    rows = np.array(draw(st.lists(numbers, min_size=1, max_size=60)))
    duration, gap = rows[:, 0], rows[:, 1]
    start = np.concatenate([[0.0], np.cumsum(duration + gap)[:-1]])
    return spans(start, duration), rows[:, 2]


@given(plans_and_values(), st.integers(1, 40))
def test_bins_conserve_the_integral_over_time_and_the_events(drawn: tuple[Spans, np.ndarray], most: int) -> None:
    plans, values = drawn
    edges = bin_edges(plans, most)
    assert len(edges) - 1 <= most
    assert (np.diff(edges) > 0).all()
    whole = float(np.sum(values * (plans.end - plans.start)))
    assert integrate(plans, values, edges).sum() == pytest.approx(whole, rel=1e-9)
    assert count_events(plans, values.astype(np.int64), edges).sum() == int(values.sum())


@given(plans_and_values(), st.integers(1, 40))
def test_extremes_of_a_bin_are_those_of_the_plans_that_overlap_it(drawn: tuple[Spans, np.ndarray], most: int) -> None:
    plans, values = drawn
    edges = bin_edges(plans, most)
    low, high = extremes(plans, values, edges)
    for place, (left, right) in enumerate(pairwise(edges)):
        inside = values[(plans.start < right) & (plans.end > left)]
        assert low[place] == (inside.min() if len(inside) else 0)
        assert high[place] == (inside.max() if len(inside) else 0)


def test_start_and_duration_that_miss_the_next_start_by_rounding_leave_no_gap() -> None:
    start = np.cumsum(np.full(1000, 0.1))
    plans = spans(start, np.full(1000, 0.1))
    assert len(bin_edges(plans, 10_000)) == 1001
    assert plans.idle_s == pytest.approx(0, abs=1e-12)


# Latencies


def test_latencies_by_hand() -> None:
    # TTFT: 0.5 - 0, 3 - 1, 2.25 - 2. TPOT: 2 s over 4 tokens, none for a single token, 4 s over 8. E2E: 2.5, 2, 4.25.
    ttft, tpot, e2e = latencies(requests_table()[:3]).values()
    assert list(ttft) == [0.5, 2.0, 0.25]
    assert list(tpot) == [0.5, 0.5]
    assert list(e2e) == [2.5, 2.0, 4.25]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200), st.integers(2, 50))
def test_thinned_distribution_keeps_true_corners(numbers: list[float], most: int) -> None:
    values = np.array(numbers)
    times, shares = cumulative(values, most)
    assert len(times) <= most
    assert (times[0], times[-1], shares[-1]) == (values.min(), values.max(), 1)
    for time, share in zip(times, shares, strict=True):
        # `share` of the values lie at or below the corner: exactly, or with ties at least that many
        assert np.mean(values < time) < share <= np.mean(values <= time) + 1e-12


# Files


def test_sweep_writes_both_formats_of_what_was_swept(tmp_path: Path) -> None:
    paths = draw_sweep(sweep_table(), tmp_path)
    assert [path.name for path in paths] == ["waste_shares.png", "waste_shares.svg"]
    paths = draw_sweep(sweep_table(["vllm_v1"], block_sizes=(8, 16), rates=(1.0, 2.0)), tmp_path)
    stems = ("waste_shares", "block_size", "request_rate")
    assert [path.name for path in paths] == [f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")]
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in paths[1].read_bytes()


def test_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    both = []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        both.append({path.name: path.read_bytes() for path in draw_run(run_folder(folder, steps_table(12)))})
    assert len(both[0]) == 4
    assert both[0] == both[1]


def test_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pool.png").write_text("the old one")

    def savefig(self: Figure, path: Path, **_: object) -> None:
        path.write_text("half a fig")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", savefig)
    with pytest.raises(OSError, match="disk full"):
        save(new_figure(2, 2), tmp_path, "pool")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["the old one"]


# The command


def test_plot_prints_the_paths_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run_folder(tmp_path))]) == 0
    names = ("pool.png", "pool.svg", "latency.png", "latency.svg")
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / name) for name in names]


def test_plot_redraws_a_sweep_byte_for_byte_with_what_was_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = sweep_table(["vllm_v1", "mine"], rates=(1.0, 2.0))
    table.to_parquet(tmp_path / "sweep.parquet")
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "config.yaml").write_text("seed: 0\npublished:\n  vllm_v1: {used: 0.963, running: 30.42}\n")
    paths = draw_sweep(table, tmp_path, {"vllm_v1": {"used": 0.963, "running": 30.42}})
    before = [path.read_bytes() for path in paths]
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(path) for path in paths]
    assert [path.read_bytes() for path in paths] == before


def _broken(tmp_path: Path, kind: str) -> Path:
    folder = tmp_path / "broken"
    if kind == "absent":
        return folder
    folder.mkdir()
    match kind:
        case "file":
            return run_folder(folder) / "steps.parquet"
        case "no parquet":
            run_folder(folder)
            (folder / "steps.parquet").write_text("start_s,duration_s\n0,1\n")
        case "no column":
            run_folder(folder, steps_table().drop(columns="waiting"))
        case "no requests":
            (run_folder(folder) / "requests.parquet").unlink()
        case "overlap":
            run_folder(folder, steps_table().assign(duration_s=1.5))
        case "no summary":
            (run_folder(folder) / "summary.json").write_text("{")
        case "no sweep column":
            sweep_table().drop(columns=["request_rate", "mean_running"]).to_parquet(folder / "sweep.parquet")
        case "no config":
            sweep_table().to_parquet(folder / "sweep.parquet")
            (folder / "0").mkdir()
            (folder / "0" / "config.yaml").write_text("published: {")
        case "all failed":
            sweep_table().assign(status="failed").to_parquet(folder / "sweep.parquet")
    return folder


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("absent", "broken: no such folder"),
        ("file", "steps.parquet: is a file, not a folder"),
        ("empty", "neither a sweep (no sweep.parquet) nor a run (no steps.parquet)"),
        ("no parquet", "steps.parquet: not a readable Parquet file"),
        ("no column", "steps.parquet: column waiting is missing"),
        ("no requests", "requests.parquet: no such file"),
        # steps start every 1 s and last 1.5 s
        ("overlap", "steps.parquet, row 1: starts at 1 s, before the one before it ends (1.5 s)"),
        ("no summary", "summary.json: not readable JSON"),
        ("no sweep column", "sweep.parquet: columns mean_running, request_rate are missing"),
        ("no config", "config.yaml: not readable YAML"),
        ("all failed", "nothing to draw"),
    ],
)
def test_what_is_wrong_with_a_folder_is_one_line(tmp_path: Path, kind: str, says: str) -> None:
    with pytest.raises(UserError) as raised:
        main([str(_broken(tmp_path, kind))])
    message = str(raised.value)
    assert says in message
    assert "\n" not in message
    assert message.endswith(".")


@pytest.mark.parametrize("argv", [[], ["a", "b"], ["--colour", "a"]])
def test_wrong_arguments_are_one_line_that_points_to_the_help(argv: list[str]) -> None:
    with pytest.raises(UserError, match=r"^plot: .*See kvtwin plot --help\.$"):
        main(argv)


def test_help_fits_a_screen_and_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    assert len(text.splitlines()) <= 24
    assert "  kvtwin plot results/" in text


def test_command_loads_matplotlib_only_to_draw_and_pyplot_never() -> None:
    code = (
        "import sys, sim.commands.plot; assert 'matplotlib' not in sys.modules; "
        "import sim.plots.sweep, sim.plots.run; assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
