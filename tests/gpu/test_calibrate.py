"""`kvtwin calibrate` and the loop of `kvtwin validate`: grid, file, refusals and decisions. No times."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

torch = pytest.importorskip("torch", reason="the engine needs PyTorch")
pytest.importorskip("transformers", reason="the engine runs Hugging Face models")

from gpu.calibrate import FEWEST, CalibrationOptions, _settled  # noqa: E402
from gpu.calibration_file import MeasuredPoint, PointFile  # noqa: E402
from gpu.calibration_grid import GridPoint, choose  # noqa: E402
from gpu.commands.calibrate import main as calibrate  # noqa: E402
from gpu.decisions import Decisions  # noqa: E402
from gpu.models import PagedModel  # noqa: E402
from sim.cli import main  # noqa: E402
from sim.commands.validate import main as validate  # noqa: E402
from sim.plan import StepPlan, StepWork  # noqa: E402
from sim.sequence import Sequence  # noqa: E402
from sim.timing.step_model import read_fit  # noqa: E402
from workloads.errors import UserError  # noqa: E402
from workloads.request import Request  # noqa: E402

# One layer, so that a step takes a few milliseconds.
SMALL = [
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.head_dim=16",
    "model.intermediate_size=48",
    "model.vocab_size=64",
    "max_model_len=256",
    "plots=false",
]
# 12 requests of up to 60 + 30 tokens, which store 89 at their ends, in 6 blocks of 16: 72 blocks where there are 29.
WORKLOAD = [
    "memory.num_blocks=30",
    "workload=synthetic",
    "workload.num_requests=12",
    "workload.rate=5",
    *(
        word
        for kind, low, high in (("prompt", 10, 60), ("output", 5, 30))
        for word in (
            f"workload/{kind}_lengths=uniform",
            f"workload.{kind}_lengths.low={low}",
            f"workload.{kind}_lengths.high={high}",
        )
    ),
]
FEW = ["calibrate.points=24", "calibrate.rounds=1", "calibrate.repeats=3", "calibrate.tolerance=1000"]
ARGUMENTS = ["gpu.device=cpu", *SMALL, *WORKLOAD, *FEW]


@pytest.fixture(scope="session")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a complete calibration, to be left as it is."""
    folder = tmp_path_factory.mktemp("calibration")
    assert calibrate([*ARGUMENTS, f"hydra.run.dir={folder}"]) == 0
    return folder


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "points.jsonl").read_text().splitlines()]


def keys(folder: Path) -> list[tuple[Any, ...]]:
    return [(line["round"], line["load"], line["step"]) for line in lines(folder)[1:]]


def copied(folder: Path, to: Path, keep: int | None = None) -> Path:
    """A calibration whose points beyond the first `keep` are missing."""
    rows = (folder / "points.jsonl").read_text().splitlines(keepends=True)
    to.mkdir()
    (to / "points.jsonl").write_text("".join(rows[: None if keep is None else keep + 1]))
    return to


# ------------------------------------------------------------------------------------------------------------- the grid


def decode(step: int, sequences: int, context: int, load: str = "at once") -> GridPoint:
    return GridPoint(load, step, StepWork(sequences, sequences, 0, 0, 0, sequences, context))


def prefill(step: int, tokens: int, load: str = "at once") -> GridPoint:
    return GridPoint(load, step, StepWork(1, tokens, tokens, tokens * (tokens + 1) // 2, tokens))


def test_the_grid_has_the_extremes_of_every_kind_of_step():
    rng = np.random.default_rng(5)
    candidates = [decode(i, int(n), int(n) * int(c)) for i, (n, c) in enumerate(rng.integers(1, 200, (300, 2)))]
    candidates += [prefill(300 + i, 2 + i) for i in range(100)]
    chosen = choose(candidates, 20)
    assert len(chosen) == 20
    sizes = {point.work.num_sequences for point in chosen if not point.work.prefill_tokens}
    every = {point.work.num_sequences for point in candidates if not point.work.prefill_tokens}
    assert {min(every), max(every)} <= sizes
    tokens = {point.work.prefill_tokens for point in chosen if point.work.prefill_tokens}
    assert {2, 101} <= tokens
    assert len(tokens) == 10  # half of the points for each kind


def test_a_kind_with_few_steps_leaves_its_share_to_the_others():
    # Two prefills need two of the ten; each step that another one equals is there once.
    candidates = [prefill(0, 5), prefill(1, 9), prefill(2, 9), *(decode(3 + i, 1 + i, 10) for i in range(30))]
    chosen = choose(candidates, 10)
    assert [point.step for point in chosen][:2] == [0, 1]
    assert len(chosen) == 10


def test_steps_are_numbered_load_by_load():
    chosen = choose([decode(7, 1, 5, "at once"), decode(2, 2, 6, "at once"), decode(9, 3, 7, "alone")], 8)
    assert [(point.load, point.step) for point in chosen] == [("alone", 9), ("at once", 2), ("at once", 7)]


def test_repetition_ends_with_a_median_that_stands_or_at_the_limit():
    options = CalibrationOptions(requests=1, points=8, rounds=1, tolerance=0.01, repeats=5)
    assert not _settled([1.0] * (FEWEST - 1), options)
    assert _settled([1.0] * FEWEST, options)
    assert not _settled([1.0, 1.5, 2.0, 1.2], options)
    assert _settled([1.0, 1.5, 2.0, 1.2, 1.7], options)


def test_options_out_of_range_are_one_line():
    with pytest.raises(UserError, match=r"calibrate.points is 0; expected at least 8"):
        CalibrationOptions(requests=1, points=0, rounds=1, tolerance=0.01, repeats=3)
    with pytest.raises(UserError, match=r"calibrate.tolerance is 0"):
        CalibrationOptions(requests=1, points=8, rounds=1, tolerance=0, repeats=3)


# ------------------------------------------------------------------------------------------------------- what comes out


def test_points_and_timing_file_are_complete(calibration: Path) -> None:
    header, *points = lines(calibration)
    assert header["model"]["num_layers"] == 1
    assert header["clock"] == "cpu"
    assert len(points) == len(set(keys(calibration))) == 24
    assert {point["load"] for point in points} == {"alone", "at once"}
    for point in points:
        assert point["repeats"] == FEWEST
        assert point["model_s"] > 0
        assert point["duration_s"] > point["between_s"] >= 0
        assert point["device_s"] is None
    works = [StepWork(**point["work"]) for point in points]
    assert any(work.prefill_tokens and work.decode_sequences for work in works)
    assert max(work.decode_sequences for work in works) > 1
    fit = read_fit(calibration / "timing.json")
    assert (fit.device, fit.model, fit.quality["rows"]) == (header["hardware"], header["model"], 24)
    assert fit.largest["prefill_token"] == max(work.prefill_tokens for work in works)
    assert {file.name for file in calibration.iterdir()} == {"points.jsonl", "timing.json"}


def test_only_the_chosen_steps_are_computed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, calibration: Path) -> None:
    """Each of them as often as it is repeated, and the step before it once; what is in the file not at all."""
    folder = copied(calibration, tmp_path / "half", keep=20)
    forward, computed = PagedModel.forward, []

    def counted(self: PagedModel, batch: Any, pool: Any, observer: Any = None) -> Any:
        if observer is None:  # or else it is the model's check
            computed.append(batch.num_decodes)
        return forward(self, batch, pool, observer)

    monkeypatch.setattr(PagedModel, "forward", counted)
    assert calibrate([*ARGUMENTS, f"hydra.run.dir={folder}"]) == 0
    assert 4 * FEWEST <= len(computed) <= 4 * (FEWEST + 1)
    assert lines(folder)[:21] == lines(calibration)[:21]


def test_the_same_seed_gives_the_same_grid(calibration: Path, tmp_path: Path) -> None:
    assert calibrate([*ARGUMENTS, f"hydra.run.dir={tmp_path}"]) == 0
    assert keys(tmp_path) == keys(calibration)
    works = [[line["work"] for line in lines(folder)[1:]] for folder in (tmp_path, calibration)]
    assert works[0] == works[1]


def test_a_killed_calibration_goes_on_where_it_was(calibration: Path, tmp_path: Path) -> None:
    code = "import sys; from gpu.commands.calibrate import main; sys.exit(main(sys.argv[1:]))"
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    arguments = [*ARGUMENTS, f"hydra.run.dir={tmp_path}"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.DEVNULL
    )
    file = tmp_path / "points.jsonl"
    until = time.monotonic() + 300
    try:
        while not file.exists() or file.read_text().count("\n") < 4:
            assert process.poll() is None, "it ended too soon"
            assert time.monotonic() < until, "waited in vain"
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    with file.open("a") as stream:
        stream.write('{"round": 0, "load": "al')  # as if it had been in the midst of a line, too
    before = file.read_text().split("\n")[:-1]
    assert calibrate(arguments) == 0
    assert file.read_text().split("\n")[: len(before)] == before
    assert keys(tmp_path) == keys(calibration)


@pytest.mark.parametrize(
    "changed",
    [
        ["workload/sampling=parallel", "scheduler/recovery=swap", "memory.swap_space=0.01"],
        ["workload/sampling=beam"],
        ["engine=orca_pow2", "memory.num_blocks=400"],
    ],
    ids=["several outputs and swaps", "beams", "contiguous"],
)
def test_whatever_a_replay_does_can_be_calibrated(changed: list[str], tmp_path: Path) -> None:
    assert calibrate([*ARGUMENTS, *changed, "workload.num_requests=6", f"hydra.run.dir={tmp_path}"]) == 0
    assert len(keys(tmp_path)) == 24
    assert all(point["work"]["copied_slots"] == 0 for point in lines(tmp_path)[1:])  # what moves blocks is not taken


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing may be computed."""

    def refused(self: PagedModel, batch: Any, pool: Any, observer: Any = None) -> Any:
        if observer is None:
            raise AssertionError("something was measured")
        return forward(self, batch, pool, observer)

    forward = PagedModel.forward
    monkeypatch.setattr(PagedModel, "forward", refused)
    yield


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("model.intermediate_size=64", "measured with model.intermediate_size=48, this is model.intermediate_size=64"),
        ("scheduler.max_num_seqs=7", "measured with scheduler.max_num_seqs="),
        ("seed=1", "measured with seed=0, this is seed=1"),
    ],
)
def test_points_of_another_model_or_setting_are_refused(
    changed: str, message: str, calibration: Path, tmp_path: Path
) -> None:
    folder = copied(calibration, tmp_path / "other")
    before = (folder / "points.jsonl").read_bytes()
    with pytest.raises(UserError, match=message) as error:
        calibrate([*ARGUMENTS, changed, f"hydra.run.dir={folder}"])
    assert "\n" not in str(error.value)
    assert (folder / "points.jsonl").read_bytes() == before


def test_points_of_another_device_are_refused(tmp_path: Path) -> None:
    PointFile(tmp_path / "points.jsonl", {"hardware": "NVIDIA H200", "versions": {"torch": "2"}})
    with pytest.raises(UserError, match=r"measured with hardware=NVIDIA H200, this is hardware=AMD EPYC; choose"):
        PointFile(tmp_path / "points.jsonl", {"hardware": "AMD EPYC", "versions": {"torch": "2"}})
    with pytest.raises(UserError, match=r"measured with versions.torch=2, this is versions.torch=3"):
        PointFile(tmp_path / "points.jsonl", {"hardware": "NVIDIA H200", "versions": {"torch": "3"}})


@pytest.mark.parametrize("content", ["no JSON\n", '{"format": "another"}\n', '["a list"]\n', None])
def test_a_file_that_is_none_of_a_calibration_is_left_alone(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    if content is None:
        PointFile(path, {})
        path.write_text(path.read_text() + '{"round": 0}\n')
    else:
        path.write_text(content)
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"holds no points of a calibration \(.*\); remove it or choose another"):
        PointFile(path, {})
    assert path.read_bytes() == before


def test_points_survive_their_file(tmp_path: Path) -> None:
    point = MeasuredPoint(1, "alone", 4, 3, 0.5, 1.0, 0.25, 0.0, 0.125, 0.5, 0.125, None, StepWork(2, 2))
    PointFile(tmp_path / "points.jsonl", {"seed": 3}).add(point)
    assert PointFile(tmp_path / "points.jsonl", {"seed": 3}).points == {(1, "alone", 4): point}


def test_the_timing_file_is_for_this_model_and_device_only(calibration: Path, tmp_path: Path) -> None:
    def sim(*changed: str) -> int:
        timing = ["timing=fitted", f"timing.path={calibration / 'timing.json'}"]
        options = ["model=tiny-llama", "hardware=cpu", *SMALL, *WORKLOAD, *timing]
        return main(["sim", *options, *changed, f"hydra.run.dir={tmp_path}"])

    assert sim() == 0
    assert json.loads((tmp_path / "summary.json").read_text())["completed"] == 12
    assert sim("model.hidden_size=64") == 2
    assert sim("hardware=h200-141gb") == 2
    assert sim("tensor_parallel=2", "model.num_kv_heads=2") == 2


# ------------------------------------------------------------------------------------------------------------- the loop

LOOP = [
    "experiment=cpu_loop",
    "loop.repetitions=2",
    *FEW,
    *SMALL,
    "memory.num_blocks=40",  # 12 requests that store up to 111 tokens, in 7 blocks each, 2 of them shared
    "scheduler.max_num_batched_tokens=64",
    "workload.num_requests=12",
    "workload.num_prefixes=3",
    "workload.prefix_tokens=32",
    "workload.prompt_lengths.high=50",
    "workload.output_lengths.high=30",
]


def test_the_loop_predicts_every_step_and_block_of_what_it_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert validate([*LOOP, f"hydra.run.dir={tmp_path}"]) == 0
    found = json.loads((tmp_path / "validation.json").read_text())
    assert found["decisions"] == {"predicted": True, "with_measured_times": True}
    assert found["requests"] == 12
    assert found["requests_of_one_only"] == 0
    assert found["metrics"].keys() == {"ttft", "tpot", "itl", "e2e"}
    assert found["throughput"]["output_throughput"]["measured"] > 0
    runs = [tmp_path / name for name in ("predicted", "measured_1", "measured_2")]
    for run in runs:
        summary = json.loads((run / "summary.json").read_text())
        assert (summary["status"], summary["completed"]) == ("complete", 12)
        assert summary["preemptions"] > 0
        assert summary["prefix_hit_tokens"] > 0
    assert len({repetition["digest"] for repetition in found["repetitions"]}) == 1
    assert [repetition["folder"] for repetition in found["repetitions"]] == [str(run) for run in runs[1:]]
    for entry in found["spread"].values():
        assert entry["measured"]["min"] <= entry["measured"]["median"] <= entry["measured"]["max"]
    # All that is not a time is the same in the tables of all runs.
    steps, events = ([pd.read_parquet(run / f"{name}.parquet") for run in runs] for name in ("steps", "events"))
    for table, times in ((steps, ["start_s", "duration_s"]), (events, ["time_s"])):
        first, *others = (frame.drop(columns=times) for frame in table)
        assert all(first.equals(other) for other in others)
    printed = capsys.readouterr().out
    assert "decisions as predicted: equal in every step and block" in printed
    assert "2 replays" in printed


def test_a_loop_calibrates_with_another_seed_than_it_predicts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"loop.calibration_seed is the run's seed, 3; choose another"):
        validate([*LOOP, "seed=3", "loop.calibration_seed=3", f"hydra.run.dir={tmp_path}"])
    with pytest.raises(UserError, match=r"loop.repetitions is 0"):
        validate([*LOOP, "loop.repetitions=0", f"hydra.run.dir={tmp_path}"])


def test_where_requests_come_one_by_one_decisions_are_those_of_the_measured_times(tmp_path: Path) -> None:
    # Whether they are also the predicted ones is the machine's mood.
    slowly = ["workload/arrivals=poisson", "workload.rate=100", "loop.repetitions=1"]
    assert validate([*LOOP, *slowly, f"hydra.run.dir={tmp_path}"]) == 0
    found = json.loads((tmp_path / "validation.json").read_text())
    assert found["decisions"]["with_measured_times"]


def plan_of(*tables: list[int]) -> StepPlan:
    plan = StepPlan()
    for number, table in enumerate(tables):
        sequence = Sequence.of(Request(number, 0.0, 20, 5), 100)
        sequence.blocks, sequence.computed = table, 20
        plan.batch.append((sequence, 20))
    return plan


def test_one_other_block_is_another_decision_and_its_step_is_named() -> None:
    ours, theirs = Decisions(), Decisions()
    for table in ([1, 2], [3, 4]):
        ours.add(plan_of([5, 6], table))
        theirs.add(plan_of([5, 6], copy(table)))
    assert ours.first_difference(theirs) is None
    assert ours.digest == theirs.digest
    ours.add(plan_of([5, 6], [7, 8]))
    assert ours.first_difference(theirs) == theirs.first_difference(ours) == 2
    theirs.add(plan_of([5, 6], [8, 7]))
    assert ours.first_difference(theirs) == 2
    assert ours.digest != theirs.digest
