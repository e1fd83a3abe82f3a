"""Kwon et al., SOSP 2023, as experiments: each at a size that takes seconds, held to the tolerances that they state.

The published figures and what is allowed are those of the experiments themselves, which is checked against the paper's
figures here, so that neither can drift.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from sim.cli import main

# Fig. 2 in per cent: used, reserved, internal, external and others; and what ours may differ by, in points.
FIG_2 = {
    "Orca (Max)": ((20.4, 13.3, 57.3, 8.9), 2.0),
    "Orca (Pow2)": ((26.8, 17.9, 13.6, 41.6), 3.0),
    "Orca (Oracle)": ((38.2, 25.2, 0.0, 36.6), 2.0),
}
STATES = ("used", "reserved", "internal", "external and others")


def claims(folder: Path, experiment: str, *overrides: str) -> pd.DataFrame:
    """Runs an experiment and returns what became of its claims, by their words."""
    quiet = ("plots=false", f"hydra.sweep.dir={folder / experiment}")
    assert main(["sim", "-m", f"experiment={experiment}", *quiet, *overrides]) == 0
    return pd.read_csv(folder / experiment / "claims.csv").set_index("claim")


ORCA = "engine=orca_max,orca_pow2,orca_oracle"  # past saturation within a minute, so part of the hour will do


@pytest.fixture(scope="module")
def sharegpt(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    return claims(tmp_path_factory.mktemp("fig2"), "kwon_fig2", ORCA, "workload.num_requests=2000")


@pytest.fixture(scope="module")
def alpaca(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    return claims(tmp_path_factory.mktemp("fig13"), "kwon_fig13", ORCA, "workload.num_requests=3000")


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    # It only just keeps up, so its batch varies by some per cent from one quarter of an hour to the next: this is the
    # whole hour of ShareGPT, and 5 minutes of Alpaca.
    folder = tmp_path_factory.mktemp("vllm")
    sharegpt = claims(folder, "kwon_fig2", "engine=vllm_2023")
    alpaca = claims(folder, "kwon_fig13", "engine=vllm_2023", "workload.num_requests=9000")
    return pd.concat([found[found["ours"].notna()] for found in (sharegpt, alpaca)])


@pytest.mark.parametrize("system", FIG_2)
def test_fig_2_shares_of_orca_come_out(sharegpt: pd.DataFrame, system: str) -> None:
    shares, points = FIG_2[system]
    for state, share in zip(STATES, shares, strict=True):
        row = sharegpt.loc[f"Fig. 2, {system}: {state}"]
        assert row["published_low"] == row["published_high"] == pytest.approx(share / 100)
        assert 100 * row["ours"] == pytest.approx(share, abs=points), state
        assert row["verdict"] == "holds"


def test_fig_2_share_of_vllm_comes_out_within_a_point_and_a_half(vllm: pd.DataFrame) -> None:
    assert 100 * vllm.loc["Fig. 2, vLLM: used", "ours"] == pytest.approx(96.3, abs=1.5)


def test_orca_max_batches_seven_requests_whatever_they_are(sharegpt: pd.DataFrame, alpaca: pd.DataFrame) -> None:
    # Seven regions of 2,048 slots fit into 15,728, and 1,392 slots are left over: 8.85 %.
    assert sharegpt.loc["Fig. 13, ShareGPT: Orca (Max) batches", "ours"] == pytest.approx(7.0, abs=1e-9)
    assert alpaca.loc["Fig. 13, Alpaca: Orca (Max) batches", "ours"] == pytest.approx(7.0, abs=1e-9)
    others = sharegpt.loc["Fig. 2, Orca (Max): external and others", "ours"]
    assert others == pytest.approx(1392 / 15_728, abs=1e-9)


@pytest.mark.parametrize(("system", "batched"), [("Orca (Pow2)", 9.81), ("Orca (Oracle)", 13.62)])
def test_fig_13_batches_of_sharegpt_come_out_within_5_per_cent(
    sharegpt: pd.DataFrame, system: str, batched: float
) -> None:
    assert sharegpt.loc[f"Fig. 13, ShareGPT: {system} batches", "ours"] == pytest.approx(batched, rel=0.05)


@pytest.mark.parametrize(("system", "batched"), [("Orca (Pow2)", 43.24), ("Orca (Oracle)", 72.75)])
def test_fig_13_batches_of_alpaca_come_out_within_10_per_cent(
    alpaca: pd.DataFrame, system: str, batched: float
) -> None:
    assert alpaca.loc[f"Fig. 13, Alpaca: {system} batches", "ours"] == pytest.approx(batched, rel=0.1)


def test_fig_13_batches_of_vllm_are_those_that_its_time_was_worked_out_from(vllm: pd.DataFrame) -> None:
    assert vllm.loc["Fig. 13, ShareGPT: vLLM batches", "ours"] == pytest.approx(30.42, rel=0.05)
    assert vllm.loc["Fig. 13, Alpaca: vLLM batches", "ours"] == pytest.approx(132.44, rel=0.1)


def test_fig_15_sharing_of_parallel_samples_comes_out_within_a_point_and_a_half(tmp_path: Path) -> None:
    found = claims(tmp_path, "kwon_fig15_parallel")
    assert (100 * found["ours"]).tolist() == pytest.approx([6.09, 8.53, 9.79], abs=1.5)


def test_fig_15_beams_share_most_of_their_blocks_and_more_the_more_there_are(tmp_path: Path) -> None:
    # The survivors are a model with one parameter, which was chosen by these three figures.
    found = claims(tmp_path, "kwon_fig15_beam", "workload.num_requests=30")
    assert (100 * found["ours"]).tolist() == pytest.approx([37.56, 53.13, 55.16], abs=6)
    assert found["ours"].is_monotonic_increasing


def test_fig_16_a_shared_prefix_gains_and_a_longer_one_gains_more(tmp_path: Path) -> None:
    short, long = claims(tmp_path, "kwon_fig16", "workload.num_requests=600")["ours"]
    assert 1 < short < long
    assert short == pytest.approx(1.67, rel=1 / 3)
    assert long == pytest.approx(3.58, rel=1 / 3)


def test_why_paging_and_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = claims(tmp_path, "why_paging")
    assert (found["verdict"] == "holds").all()
    alone = found[found.index.str.startswith("one tenant")]["ours"]
    assert len(alone) == 3
    assert alone.tolist() == pytest.approx([1.0] * 3, abs=0.01)  # the case in which it gains nothing
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("claim", "published", "ours", "verdict", "holds"))
