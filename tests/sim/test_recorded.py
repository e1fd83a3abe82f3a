"""`timing=recorded`: a run's own step times give that run again, one by one and in leaps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sim.cli import main
from sim.plan import StepPlan, StepWork
from sim.timing.recorded import Recorded
from workloads.errors import UserError

Simulate = Callable[..., Path]
COLUMNS = ["step", "repeat", "duration_s", "num_tokens", "num_sequences"]
STEP_BY_STEP = "engine.leap=false"
WORKLOAD = ["workload=alpaca_like", "workload.num_requests=30", "workload.rate=100", "max_model_len=512"]
RUNS = {
    "recompute": ["memory.num_blocks=50"],
    "several outputs": ["memory.num_blocks=80", "workload/sampling=parallel", "workload.sampling.n=3"],
    "beams": ["memory.num_blocks=80", "workload/sampling=beam"],
    "swap": ["memory.num_blocks=50", "scheduler/recovery=swap", "link=free"],
    "contiguous": ["engine=orca_pow2", "memory.num_blocks=2000"],
    "gaps": ["memory.num_blocks=50", "workload.rate=1"],
}


def written(tmp_path: Path, rows: list[tuple[int, int, float, int, int]]) -> str:
    """A run folder with these steps."""
    columns = {name: [row[place] for row in rows] for place, name in enumerate(COLUMNS)}
    pq.write_table(pa.table(columns), tmp_path / "steps.parquet")
    return str(tmp_path)


def plan(num_sequences: int, num_tokens: int, further_steps: int = 0) -> StepPlan:
    made = StepPlan()
    made.work = StepWork(num_sequences, num_tokens)
    made.needs = [0] * further_steps
    return made


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_is_had_again_from_its_own_step_times(kind: str, simulate: Simulate) -> None:
    overrides = [*WORKLOAD, *RUNS[kind]]
    original = simulate(*overrides, STEP_BY_STEP)
    again = simulate(*overrides, STEP_BY_STEP, "timing=recorded", f"timing.run={original}")
    for table in ("steps", "requests", "events"):
        assert (again / f"{table}.parquet").read_bytes() == (original / f"{table}.parquet").read_bytes()
    in_leaps = simulate(*overrides, "timing=recorded", f"timing.run={original}")
    for table in ("requests", "events"):
        assert (in_leaps / f"{table}.parquet").read_bytes() == (original / f"{table}.parquet").read_bytes()
    events = pd.read_parquet(original / "events.parquet")["event"]
    if kind in ("recompute", "swap"):
        assert "preemption" in set(events)
    if kind == "swap":
        assert "swap_in" in set(events)
    leaps = pd.read_parquet(in_leaps / "steps.parquet")["repeat"]
    assert leaps.sum() == len(pd.read_parquet(original / "steps.parquet"))
    assert kind == "beams" or leaps.max() > 1


@given(start=st.floats(0, 1e6), duration=st.floats(1e-9, 1e4))
def test_a_steps_end_is_had_again_from_its_start_and_recorded_duration(start: float, duration: float) -> None:
    """What lets a table of rounded differences give the very same times: the engine adds, the recorder subtracts."""
    end = start + duration
    assume(end > start)
    assert start + (end - start) == end


def test_durations_are_given_in_order_and_a_leap_takes_as_many_as_it_was_cut_to(tmp_path: Path) -> None:
    timer = Recorded(written(tmp_path, [(i, 1, i + 0.5, 2, 2) for i in range(5)]))
    assert timer.durations(plan(2, 2)) == [0.5]
    leap = plan(2, 2, further_steps=2)
    assert timer.durations(leap) == [1.5, 2.5, 3.5]
    leap.cut(2)
    assert timer.durations(plan(2, 2)) == [3.5]
    # One that looks beyond the end is cut before it gets there.
    assert timer.durations(plan(2, 2, further_steps=2))[:1] == [4.5]


def test_rows_in_which_nothing_was_computed_are_passed_over(tmp_path: Path) -> None:
    # A plan that only preempts has no duration to ask for, and yet is a row.
    timer = Recorded(written(tmp_path, [(0, 1, 0.5, 2, 2), (1, 1, 0.0, 0, 0), (2, 1, 0.7, 1, 1), (3, 1, 0.8, 1, 1)]))
    assert [timer.durations(plan(n, n)) for n in (2, 1)] == [[0.5], [0.7]]
    with pytest.raises(UserError, match="step 3 computed 1 tokens"):
        timer.durations(plan(4, 4))


@pytest.mark.parametrize(
    ("plans", "reason"),
    [
        ([plan(2, 2), plan(2, 3)], r"step 1 computed 2 tokens of 2 sequences, but now 3 of 2"),
        ([plan(2, 2), plan(1, 2)], r"step 1 computed 2 tokens of 2 sequences, but now 2 of 1"),
        ([plan(2, 2, further_steps=2), plan(2, 2)], r"step 2 computed 5 tokens of 2 sequences, but now 2 of 2"),
        ([plan(2, 2), plan(2, 2), plan(2, 5), plan(1, 1)], r"ends after 3 steps, but this run has more"),
    ],
)
def test_a_run_that_does_something_else_ends_with_one_line(tmp_path: Path, plans: list[StepPlan], reason: str) -> None:
    timer = Recorded(written(tmp_path, [(0, 1, 0.5, 2, 2), (1, 1, 0.6, 2, 2), (2, 1, 0.7, 5, 2)]))
    with pytest.raises(UserError, match=rf"steps\.parquet.* {reason}; use the workload and") as error:
        for each in plans:
            timer.durations(each)
    assert "\n" not in str(error.value)


def test_another_workload_is_one_line_on_the_terminal(
    simulate: Simulate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = simulate(*WORKLOAD, *RUNS["recompute"], STEP_BY_STEP)
    recorded = ["timing=recorded", f"timing.run={original}", f"hydra.run.dir={tmp_path / 'run'}"]
    assert main(["sim", *WORKLOAD, "memory.num_blocks=200", "seed=1", *recorded]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "use the workload and the policies of that run" in error


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([(0, 1, 0.5, 2, 2), (1, 3, 0.5, 2, 2)], "does not hold every step in a row of its own"),
        ([(0, 1, 0.5, 2, 2), (2, 1, 0.5, 2, 2)], "does not hold every step in a row of its own"),
        ([], "holds no step"),
    ],
    ids=["leaps", "samples", "none"],
)
def test_a_table_without_every_step_is_refused(
    tmp_path: Path, rows: list[tuple[int, int, float, int, int]], reason: str
) -> None:
    with pytest.raises(UserError, match=reason) as error:
        Recorded(written(tmp_path, rows))
    assert str(error.value).endswith("record the run with record.steps=all and engine.leap=false.")


def test_what_is_no_table_of_steps_is_refused(tmp_path: Path) -> None:
    def refused() -> str:
        with pytest.raises(UserError) as error:
            Recorded(str(tmp_path))
        return str(error.value)

    expected = f"{tmp_path}/steps.parquet is not a table of steps; timing.run takes the folder of a run."
    assert refused() == expected  # no such file
    (tmp_path / "steps.parquet").write_text("no Parquet")
    assert refused() == expected
    pq.write_table(pa.table({"step": [0], "repeat": [1]}), tmp_path / "steps.parquet")
    assert refused() == expected


def test_the_folder_must_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "timing=recorded", f"hydra.run.dir={tmp_path}"]) == 2
    assert capsys.readouterr().err == "kvtwin: timing.run is not set; give it as timing.run=VALUE.\n"
