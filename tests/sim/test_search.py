"""Searches: Hydra's Optuna sweeper on our configs, and the best point of any sweep."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from sim.sweep import best_point
from tests.sim.test_sweep import SMALL, Sweep, run_sweep

pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs the extra: pip install 'kvtwin[search]'")

TRIALS = 6
SEARCH = [
    *SMALL,
    "hydra/sweeper=optuna",
    "hydra/sweeper/sampler=tpe",
    "hydra.sweeper.sampler.seed=3",
    f"hydra.sweeper.n_trials={TRIALS}",
    "hydra.sweeper.n_jobs=1",
    "plots=false",
    "workload.rate=50",
    "scheduler.max_num_seqs=range(1,8)",
]
FOR_THROUGHPUT = [*SEARCH, "objective=request_throughput"]


def trials(folder: Path) -> list[str]:
    return pd.read_parquet(folder / "sweep.parquet")["overrides"].tolist()


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    return run_sweep(tmp_path_factory.mktemp("search"), *FOR_THROUGHPUT)


def test_a_search_runs_its_trials_and_names_the_best(search: Sweep) -> None:
    assert (search.code, search.err) == (0, "")
    table = search.table
    assert table["status"].tolist() == ["complete"] * TRIALS
    best = table.loc[table["request_throughput"].idxmax()]
    assert f"best request_throughput is {best['request_throughput']:.6g}, of point {best['point']}: " in search.out
    # What Optuna took for the value of a point is the figure in its summary.
    found = (search.folder / "optimization_results.yaml").read_text()
    assert f"best_value: {best['request_throughput']}" in found
    assert table["request_throughput"].nunique() > 1  # or there was nothing to find


def test_a_search_for_the_least_finds_the_least(tmp_path: Path) -> None:
    search = run_sweep(tmp_path, *SEARCH, "objective=mean_e2el_ms", "direction=minimize")
    least = search.table["mean_e2el_ms"].min()
    assert f"best mean_e2el_ms is {least:.6g}" in search.out
    assert f"best_value: {least}" in (tmp_path / "optimization_results.yaml").read_text()


def test_the_same_seed_makes_the_same_trials(search: Sweep, tmp_path: Path) -> None:
    assert run_sweep(tmp_path, *FOR_THROUGHPUT).code == 0
    assert trials(tmp_path) == trials(search.folder)


def test_a_search_that_goes_on_keeps_the_finished_trials_and_ends_like_one_undisturbed(
    search: Sweep, tmp_path: Path
) -> None:
    half = [word for word in FOR_THROUGHPUT if "n_trials" not in word]
    assert run_sweep(tmp_path, *half, "hydra.sweeper.n_trials=3").code == 0
    before = [(tmp_path / str(point) / "steps.parquet").stat().st_mtime_ns for point in range(3)]
    assert run_sweep(tmp_path, *FOR_THROUGHPUT, "resume=true").code == 0
    assert [(tmp_path / str(point) / "steps.parquet").stat().st_mtime_ns for point in range(3)] == before
    assert (tmp_path / "sweep.csv").read_bytes() == (search.folder / "sweep.csv").read_bytes()


def test_a_trial_that_cannot_run_does_not_end_the_search(tmp_path: Path) -> None:
    search = run_sweep(
        tmp_path,
        *FOR_THROUGHPUT,
        "hydra.sweeper.max_failure_rate=1.0",
        "memory.num_blocks=choice(1,400)",  # 1: none is left beside the reserved one
    )
    statuses = search.table["status"].tolist()
    assert len(statuses) == TRIALS and {"complete", "failed"} == set(statuses)
    assert search.code == 1  # as of every sweep with a failed point
    best = search.table.loc[search.table["request_throughput"].idxmax()]
    assert best["memory.num_blocks"] == 400 and f"of point {best['point']}: " in search.out


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (SEARCH, "a search needs objective=NAME, a figure of summary.json, and direction=maximize or minimize."),
        (
            [*SEARCH, "objective=request_troughput"],
            "objective is request_troughput, which is no figure of summary.json; did you mean request_throughput?",
        ),
        (
            [*SEARCH, "objective=request_goodput"],
            "objective=request_goodput needs a limit: give goodput.ttft=, goodput.tpot= or goodput.e2el=.",
        ),
        ([*FOR_THROUGHPUT, "direction=up"], "direction is 'up'; expected maximize or minimize."),
    ],
)
def test_what_cannot_be_searched_for_is_one_line(tmp_path: Path, overrides: list[str], line: str) -> None:
    search = run_sweep(tmp_path, *overrides)
    assert search.code == 2
    assert search.err.splitlines()[-1] == f"kvtwin: {line}"
    assert "Traceback" not in search.err


def test_any_sweep_names_its_best_point(tmp_path: Path) -> None:
    sweep = run_sweep(tmp_path, *SMALL, "plots=false", "workload.rate=1,4", "objective=request_throughput")
    best = sweep.table["request_throughput"].max()
    assert f"best request_throughput is {best:.6g}, of point 1: " in sweep.out  # the higher rate
    assert json.loads((tmp_path / "1/point.json").read_text())["point"] == 1


def test_a_failed_point_is_never_the_best() -> None:
    table = pd.DataFrame(
        {
            "point": [0, 1, 2],
            "overrides": ["a", "b", "c"],
            "status": ["failed", "complete", "complete"],
            "x": [9.0, 1.0, 2.0],
        }
    )
    assert best_point(table, "x", "maximize") == "best x is 2, of point 2: c"
    assert best_point(table, "x", "minimize") == "best x is 1, of point 1: b"
    assert best_point(table[:1], "x", "maximize") == "no point is complete, so none has a x"
