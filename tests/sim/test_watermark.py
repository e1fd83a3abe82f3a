"""vLLM's own study of its watermark (pull request 44594): a real engine's count of preemptions is our witness."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from sim.cli import main

# One run each: preemptions, from the engine's own counter.
PUBLISHED = {0: 1065, 0.02: 400, 0.05: 187, 0.1: 168, 0.15: 168}
LEAN = ["experiment=watermark", "plots=false", "record.steps=none", "record.requests=none"]


def sweep_of(folder: Path, *overrides: str) -> pd.DataFrame:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sim.plots.sweep.draw_sweep", lambda *_: [])
        assert main(["sim", "-m", *LEAN, f"hydra.sweep.dir={folder}", *overrides]) == 0
    return pd.read_parquet(folder / "sweep.parquet")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """The experiment with two of its five seeds, and steps of a fixed time: see the last test."""
    return sweep_of(tmp_path_factory.mktemp("study"), "seed=0,1", "timing=constant")


@pytest.mark.slow
def test_the_study_has_the_pool_and_the_requests_of_the_real_runs(study: pd.DataFrame) -> None:
    # 16 GiB at 2 * 28 layers * 4 heads * 128 * 2 bytes = 57,344 a token: 18,724 blocks of 16, the log's 299,584 tokens.
    # Block 0 is never handed out.
    assert set(study["pool_slots"]) == {299_584 - 16}
    assert set(study["completed"]) == {450}
    # Published output of 11,582 token/s at 2.306 requests/s: 5022.5 tokens a request.
    first = study[study["seed"] == 0]
    assert (first["total_output_tokens"] / 450).round(1).unique().tolist() == [5022.5]


@pytest.mark.slow
def test_preemptions_are_within_ten_percent_of_the_published_runs_but_for_one(study: pd.DataFrame) -> None:
    ours = study.groupby("memory.watermark")["preemptions"].mean()
    for watermark in (0, 0.02, 0.1, 0.15):
        assert ours[watermark] == pytest.approx(PUBLISHED[watermark], rel=0.1), watermark
    # At 0.05 ours is a fifth too high, and the 187 of that one run near the low end of what draws of the lengths give
    # (40 of them: 180 to 248, 17 about a mean of 214). Less than the 400 and more than the 168 beside it, at least.
    assert PUBLISHED[0.1] < ours[0.05] == pytest.approx(PUBLISHED[0.05], rel=0.3)


@pytest.mark.slow
def test_preemptions_do_not_depend_on_how_long_steps_take(study: pd.DataFrame, tmp_path: Path) -> None:
    # All requests are ready at once and others are sent when one finishes, so time decides nothing; and what is
    # compared with the real engine are decisions alone.
    (priced,) = sweep_of(tmp_path, "seed=0", "memory.watermark=0.05", "timing=roofline")["preemptions"]
    assert [priced] == study.query("seed == 0 and `memory.watermark` == 0.05")["preemptions"].tolist()


def test_our_mean_is_printed_beside_the_published_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["workload.num_requests=4", "workload.random_output_len=20", "memory.watermark=0,0.05", "seed=0,1"]
    table = sweep_of(tmp_path, *few)
    assert (table["preemptions"] == 0).all()
    _, _, beside = capsys.readouterr().out.partition("ours, mean over 2 seeds / vLLM, one run each")
    assert "0 (0 to 0) / 1,065" in beside
    assert "0 (0 to 0) / 187" in beside
    assert "11.80" not in beside  # a watermark that was not run


def test_nothing_is_printed_beside_it_if_more_than_watermark_and_seed_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["workload.num_requests=4", "workload.random_output_len=20", "memory.watermark=0,0.05", "seed=0"]
    sweep_of(tmp_path, *few, "workload.concurrency=2,4")
    assert "ours, mean over" not in capsys.readouterr().out
