"""The fitted timer: known coefficients come back, no cost is negative, and a fit says where it does not hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.commands.fit import main as fit
from sim.fitting import fit_points, fit_steps
from sim.hardware import Deployment, Hardware
from sim.kv_layout import ModelSpec
from sim.plan import StepWork
from sim.timing.fitted import Fitted, names_device
from sim.timing.nonnegative import nonnegative_least_squares
from sim.timing.step_model import FORMAT, PARTS, StepFit, read_fit, shape_of, write_fit
from workloads.errors import UserError

COEFFICIENTS = {
    "step": 2e-3,
    "prefill_token": 1e-5,
    "prefill_pair": 1e-9,
    "sequence": 2e-5,
    "decode_context_token": 1e-8,
    "decode_block": 0.0,
}
SUMS = ("prefill_tokens", "prefill_pairs", "num_sequences", "decode_context", "decode_blocks")


def write_steps(folder: Path, steps: int, noise: float = 0.0) -> None:
    """`measured.parquet` of a replay whose steps take what `COEFFICIENTS` say."""
    rng = np.random.default_rng(7)
    table = {
        name: rng.integers(0, most, steps) for name, most in zip(SUMS, (2000, 2_000_000, 60, 60_000, 4000), strict=True)
    }
    rows = np.column_stack([np.ones(steps), *(table[name] for name in SUMS)])
    duration = rows @ np.array(list(COEFFICIENTS.values())) * (1 + noise * rng.standard_normal(steps))
    moved = dict.fromkeys(("swapped_out", "swapped_in", "copied"), np.zeros(steps, np.int64))
    columns = table | moved | {"num_tokens": table["prefill_tokens"] + 1, "duration_s": duration}
    pq.write_table(pa.table(columns), folder / "measured.parquet")


def saved(folder: Path, largest: dict[str, float] | None = None) -> Path:
    write_fit(folder / "fit.json", StepFit(COEFFICIENTS, largest or {}, {}))
    return folder / "fit.json"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 10), min_size=3, max_size=3), st.integers(0, 2**32 - 1))
def test_coefficients_that_are_not_negative_come_back(coefficients, seed):
    rows = np.random.default_rng(seed).uniform(0, 1, (12, 3)) * [1, 1e6, 1e-3]
    expected = np.array(coefficients) / [1, 1e6, 1e-3]
    fitted = nonnegative_least_squares(rows, rows @ expected)
    assert np.allclose(rows @ fitted, rows @ expected, atol=1e-8)
    assert (fitted >= 0).all()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_the_fit_cannot_be_improved_by_any_coefficient_that_may_move(columns, seed):
    # Kuhn and Tucker: the gradient is 0 where a coefficient is above 0, and points below 0 where it is 0.
    rng = np.random.default_rng(seed)
    rows, values = rng.normal(size=(9, columns)), rng.normal(size=9)
    fitted = nonnegative_least_squares(rows, values)
    gradient = rows.T @ (values - rows @ fitted)
    assert (fitted >= 0).all()
    assert np.allclose(gradient[fitted > 0], 0, atol=1e-7)
    assert (gradient[fitted == 0] <= 1e-7).all()


def test_a_cost_that_would_be_negative_is_none():
    # Best without bounds: 2 and -1. With them the second is 0, and the first the mean of the values.
    fitted = nonnegative_least_squares(np.array([[1.0, 0.0], [1.0, 1.5]]), np.array([2.0, 0.5]))
    assert fitted.tolist() == pytest.approx([1.25, 0.0])
    assert nonnegative_least_squares(np.array([[0.0], [0.0]]), np.array([1.0, 2.0])).tolist() == [0.0]


def test_steps_that_follow_the_model_give_its_coefficients(tmp_path):
    write_steps(tmp_path, 200)
    (tmp_path / "summary.json").write_text(json.dumps({"hardware": "a GPU", "versions": {"torch": "2"}}))
    result = fit_steps(tmp_path)
    assert result.coefficients == pytest.approx(COEFFICIENTS, rel=1e-6, abs=1e-12)
    assert result.quality["r2"] == pytest.approx(1)
    assert (result.device, result.versions) == ("a GPU", {"torch": "2"})
    assert result.largest["step"] == 1
    assert 0 < result.largest["sequence"] < 60


def test_noise_is_seen_in_the_quality_and_leaves_the_coefficients_near(tmp_path):
    write_steps(tmp_path, 2000, noise=0.05)
    result = fit_steps(tmp_path)
    assert result.coefficients["step"] == pytest.approx(2e-3, rel=0.2)
    assert 0.9 < result.quality["r2"] < 0.9999
    # The mean size of a normal error of 5 % is 0.05 * sqrt(2 / pi) = 4 %.
    assert result.quality["mean_abs_error_pct"] == pytest.approx(4, abs=0.5)


def test_steps_that_moved_blocks_are_left_out_and_too_few_are_refused(tmp_path):
    write_steps(tmp_path, 25)
    table = pq.read_table(tmp_path / "measured.parquet").to_pandas()
    table.loc[:5, "swapped_in"] = 1
    pq.write_table(pa.Table.from_pandas(table), tmp_path / "measured.parquet")
    with pytest.raises(UserError, match=r"has 19 usable steps; at least 20 are needed"):
        fit_steps(tmp_path)
    (tmp_path / "measured.parquet").write_text("no table")
    with pytest.raises(UserError, match=r"no table of measured steps"):
        fit_steps(tmp_path)


def test_a_step_costs_the_sum_of_its_parts_and_beyond_the_fit_says_so(tmp_path):
    largest = dict.fromkeys(PARTS, 1e9) | {"decode_context_token": 1000.0}
    timer = Fitted(str(saved(tmp_path, largest)))
    work = StepWork(num_sequences=3, num_tokens=12, prefill_tokens=10, prefill_pairs=55, decode_context=900)
    # 2 ms + 10 * 10 µs + 55 * 1 ns + 3 * 20 µs + 900 * 10 ns
    assert timer.seconds(work) == pytest.approx(2e-3 + 1e-4 + 55e-9 + 6e-5 + 9e-6)
    assert timer.notices == []
    timer.seconds(StepWork(decode_context=1500))
    timer.seconds(StepWork(decode_context=1200))
    assert timer.notices == [
        "decode_context of a step: 1,500 were asked for, the fit has seen 1,000; continued linearly"
    ]


def chosen_steps(count: int) -> list[StepWork]:
    """Steps of decodes, of a prefill and of both in turn, none a multiple of another."""
    rng = np.random.default_rng(11)
    steps = []
    for number, (decodes, context, tokens) in enumerate(rng.integers(2, 60, (count, 3)).tolist()):
        decodes, tokens = decodes * (number % 3 != 1), 8 * tokens * (number % 3 != 0)
        sums = (tokens, tokens * (tokens + 1) // 2, tokens)
        blocks = decodes * (1 + context // 2)
        steps.append(StepWork(decodes + (tokens > 0), decodes + tokens, *sums, decodes, decodes * 9 * context, blocks))
    return steps


def test_measured_points_that_follow_the_model_give_its_coefficients(tmp_path):
    works = chosen_steps(60)
    truth = Fitted(str(saved(tmp_path)))
    result = fit_points(works, [truth.seconds(work) for work in works], device="a GPU", model={"num_layers": 2})
    assert result.coefficients == pytest.approx(COEFFICIENTS, rel=1e-5, abs=1e-11)
    assert (result.device, result.model) == ("a GPU", {"num_layers": 2})
    assert result.largest["sequence"] == max(work.num_sequences for work in works)
    with pytest.raises(UserError, match=r"19 steps were measured; at least 20 are needed"):
        fit_points(works[:19], [1.0] * 19)


def test_noise_that_grows_with_a_step_does_not_pull_the_points_fit_to_one_side(tmp_path):
    # Shares of the measured times instead would come out 1 / (1 + 0.1 ** 2) = 1 % short. Here the mean of 3,000 errors
    # of 10 % is off by 0.18 % (one standard deviation), so 0.6 % is beyond three of them.
    works = chosen_steps(3000)
    truth = Fitted(str(saved(tmp_path)))
    noise = 1 + 0.1 * np.random.default_rng(2).standard_normal(len(works))
    exact = np.array([truth.seconds(work) for work in works])
    result = fit_points(works, (exact * noise).tolist())
    write_fit(tmp_path / "noisy.json", result)
    fitted = Fitted(str(tmp_path / "noisy.json"))
    assert np.mean([fitted.seconds(work) for work in works] / exact) == pytest.approx(1, abs=0.006)


@pytest.mark.parametrize(
    ("name", "device", "means"),
    [
        ("a100-80gb", "NVIDIA A100-SXM4-80GB", True),
        ("a100-40gb", "NVIDIA A100-SXM4-80GB", False),
        ("h200-141gb", "NVIDIA H200", True),
        ("rtx-4090", "NVIDIA GeForce RTX 4090", True),
        ("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", True),
        ("l4", "NVIDIA L40S", False),
        ("l40s", "NVIDIA L40S", True),
        ("AMD EPYC", "AMD EPYC", True),
        ("a100-80gb", "AMD EPYC", False),
        ("80gb", "NVIDIA H200", False),
    ],
)
def test_a_hardwares_name_means_the_devices_whose_words_it_has(name, device, means):
    assert names_device(name, device) is means


def test_a_file_that_says_what_was_measured_is_for_nothing_else(tmp_path):
    model = ModelSpec("small", 2, 64, 4, 2, 16, 128, 256, 512)
    gpu = Hardware("h200-141gb", 1, 1.0, 1.0, 1.0)
    write_fit(tmp_path / "fit.json", StepFit(COEFFICIENTS, {}, {}, "NVIDIA H200", model=shape_of(model)))
    path = str(tmp_path / "fit.json")
    Fitted(path, model, gpu, Deployment())
    Fitted(path, replace(model, name="the same under another name"), gpu, Deployment())
    with pytest.raises(UserError, match=r"measured with small \(num_layers 2\), but this run's small has num_layers 3"):
        Fitted(path, replace(model, num_layers=3), gpu, Deployment())
    with pytest.raises(UserError, match=r"measured on NVIDIA H200, but this run's hardware is l4; measure this one"):
        Fitted(path, model, replace(gpu, name="l4"), Deployment())
    with pytest.raises(UserError, match=r"measured on one device, but this run has 2; set tensor_parallel=1"):
        Fitted(path, model, gpu, Deployment(tensor_parallel=2))
    # What kvtwin fit finds says nothing of a model, and is for whoever asks.
    Fitted(str(saved(tmp_path)), replace(model, num_layers=3), replace(gpu, name="l4"), Deployment(tensor_parallel=2))


def test_a_fit_survives_its_file(tmp_path):
    original = StepFit(COEFFICIENTS, {"step": 1.0}, {"r2": 0.5}, "GPU", {"torch": "2.0"}, "somewhere")
    write_fit(tmp_path / "fit.json", original)
    assert read_fit(tmp_path / "fit.json") == original
    content = json.loads((tmp_path / "fit.json").read_text())
    assert (content["format"], content["units"]["decode_block"]) == (FORMAT, "s/block")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("{", "not readable as JSON"),
        ("{}", "is no fit"),
        (json.dumps({"format": FORMAT}), "coefficients.step is None; expected a number, 0 or more"),
        (
            json.dumps({"format": FORMAT, "coefficients": COEFFICIENTS | {"sequence": -1}}),
            "coefficients.sequence is -1",
        ),
        (json.dumps({"format": FORMAT, "coefficients": dict.fromkeys(PARTS, 0)}), "all coefficients are 0"),
    ],
)
def test_a_file_that_is_no_fit_is_one_line(tmp_path, content, message):
    path = tmp_path / "fit.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=r"make one with kvtwin calibrate or kvtwin fit\.$") as error:
        Fitted(str(path))
    assert message in str(error.value)


def test_request_times_alone_give_back_a_model_that_made_them(tmp_path, recorded, capsys):
    # 60 requests at 20 a second, recorded from a simulation with `COEFFICIENTS`: what is fitted to their first and
    # last tokens
    # alone predicts every kind of step within 2 %. (Sums that grow together, such as tokens and pairs, may share a
    # cost.)
    run = recorded(tmp_path / "run", saved(tmp_path), num_requests=60, rate=20)
    assert fit([f"measured={run}", f"hydra.run.dir={tmp_path / 'out'}"]) == 0
    assert "use it with timing=fitted" in capsys.readouterr().out
    timer, truth = Fitted(str(tmp_path / "out" / "fit.json")), Fitted(str(saved(tmp_path)))
    for work in (
        StepWork(20, 20, 0, 0, 0, 20, 6000, 400),
        StepWork(1, 300, 300, 45_150, 300),
        StepWork(11, 310, 300, 45_150, 300, 10, 3000, 200),
    ):
        assert timer.seconds(work) == pytest.approx(truth.seconds(work), rel=0.02)


def test_only_replays_and_recorded_runs_can_be_fitted(tmp_path):
    with pytest.raises(UserError, match=r"neither a replay \(measured.parquet\) nor a recorded run"):
        fit([f"measured={tmp_path}", f"hydra.run.dir={tmp_path / 'out'}"])
