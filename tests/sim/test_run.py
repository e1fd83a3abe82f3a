"""A run leaves a whole folder behind however it ends, and the same one each time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from omegaconf import OmegaConf

from sim.cli import main
from sim.plan import StepWork
from sim.timing.constant import Constant

Simulate = Callable[..., Path]
Trace = Callable[..., list[str]]

SECONDS = ["timing=constant", "timing.step_seconds=1"]
TABLES = {"requests.parquet", "steps.parquet", "events.parquet"}
FILES = TABLES | {"config.yaml", "summary.json"}
FIGURES = {f"{name}.{kind}" for name in ("pool", "latency") for kind in ("png", "svg")}
SMALL = [
    "workload.num_requests=30",
    "workload.rate=20",
    "memory.num_blocks=300",
    "max_model_len=2048",
]  # enough to preempt
NAMES = ["used", "reserved", "internal", "cached", "external", "idle"]
REAL = Path(__file__).parents[3] / "shared" / "traces"


class Interrupted(Constant):
    """A timer during whose second step someone presses Ctrl-C."""

    def __init__(self) -> None:
        super().__init__(step_seconds=1)
        self._steps = 0

    def seconds(self, work: StepWork) -> float:
        self._steps += 1
        if self._steps == 2:
            raise KeyboardInterrupt
        return super().seconds(work)


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def status(folder: Path) -> str:
    value: str = json.loads((folder / "summary.json").read_text())["status"]
    return value


def test_a_run_leaves_all_its_files_and_says_that_it_is_complete(simulate: Simulate) -> None:
    folder = simulate(*SMALL)
    assert names(folder) == FILES
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("complete", None)
    facts = ("llama-3.1-8b", "a100-80gb", "vllm_v1", "sharegpt_like")
    assert tuple(summary[key] for key in ("model", "hardware", "engine", "workload")) == facts
    assert (summary["request_rate"], summary["pool_blocks"], summary["block_size"]) == (20, 299, 16)  # one is kept back
    assert summary["preemptions"] > 0
    requests = pd.read_parquet(folder / "requests.parquet")
    assert sorted(requests["request_id"]) == list(range(30))
    assert set(requests["status"]) == {"finished"}
    assert summary["total_input_tokens"] == requests["prompt_tokens"].sum()
    assert summary["total_output_tokens"] == requests["generated_tokens"].sum() == requests["output_tokens"].sum()


def test_the_summary_goes_to_the_terminal_too(trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # 3 + 4 and 5 + 2 tokens at once: done after 4 steps of 1 s; 6 tokens in 4 s.
    assert main(["sim", "plots=false", f"hydra.run.dir={tmp_path}", *trace([(0, 3, 4), (0, 5, 2)]), *SECONDS]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""  # no progress bar where nobody watches
    cells = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in printed.out.splitlines() if "│" in line}
    assert (cells["requests finished"], cells["prompt tokens"], cells["output tokens"]) == ("2", "8", "6")
    assert (cells["duration"], cells["output throughput"]) == ("4.0 s", "1.5 token/s")
    assert str(tmp_path) in printed.out


def test_the_config_is_resolved_and_says_all_that_the_run_needs(simulate: Simulate) -> None:
    folder = simulate(*SMALL, "seed=5")
    text = (folder / "config.yaml").read_text()
    assert "${" not in text
    assert "???" not in text
    config = OmegaConf.create(text)
    assert (config.seed, config.workload.num_requests, config.memory.num_blocks) == (5, 30, 300)
    # Every leaf as an override of another run gives that run again.
    leaves = [f"{key}={value}" for key, value in leaves_of(config.workload, "workload") if value is not None]
    again = simulate(*leaves, "seed=5", *SMALL[2:])
    assert {name: contents(again)[name] for name in TABLES} == {name: contents(folder)[name] for name in TABLES}


def leaves_of(node: object, prefix: str) -> list[tuple[str, object]]:
    if OmegaConf.is_dict(node):
        return [leaf for key in node for leaf in leaves_of(node[key], f"{prefix}.{key}")]  # type: ignore[attr-defined, index]
    return [(prefix, node)]


def test_the_same_seed_gives_the_same_bytes_in_every_file(tmp_path: Path) -> None:
    overrides = ["sim", *SMALL, "seed=3", "plots=false"]
    once, again, elsewhere = (tmp_path / name for name in ("once", "again", "elsewhere"))
    assert main([*overrides, f"hydra.run.dir={once}"]) == 0
    assert main([*overrides, f"hydra.run.dir={again}"]) == 0
    code = "import sys; from sim.cli import main; sys.exit(main())"
    subprocess.run([sys.executable, "-c", code, *overrides, f"hydra.run.dir={elsewhere}"], check=True)
    first = contents(once)
    assert first.keys() == FILES
    for other in (again, elsewhere):
        assert [name for name, content in contents(other).items() if content != first[name]] == []


def test_figures_are_drawn_into_the_run_folder_unless_declined(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sim.plots.style.PNG_DPI", 30)  # pixels cost time, and nobody looks at these
    assert main(["sim", f"hydra.run.dir={tmp_path}", *trace([(0, 3, 4), (0, 5, 2)]), *SECONDS]) == 0
    assert names(tmp_path) == FILES | FIGURES


def test_another_seed_gives_other_arrivals(simulate: Simulate) -> None:
    one, other = (pd.read_parquet(simulate(*SMALL, f"seed={seed}") / "requests.parquet") for seed in (1, 2))
    assert not set(one["arrival_s"]) & set(other["arrival_s"])
    assert one["prompt_tokens"].tolist() != other["prompt_tokens"].tolist()


def test_the_seed_changes_nothing_about_the_run_of_a_trace(simulate: Simulate, trace: Trace) -> None:
    overrides = trace([(0, 100, 40), (0.1, 300, 20), (0.2, 30, 70)])
    one, other = (contents(simulate(*overrides, f"seed={seed}")) for seed in (1, 2))
    assert [name for name in one if one[name] != other[name]] == ["config.yaml"]


def test_an_interrupted_run_keeps_what_it_has_and_says_so(
    trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Both prompts are computed in the first step, for one token each. The third request is still to come.
    overrides = trace([(0, 3, 50), (0, 4, 50), (30, 3, 3)])
    timer = "timing={_target_:test_run.Interrupted}"
    assert main(["sim", f"hydra.run.dir={tmp_path}", *overrides, "~timing", f"+{timer}"]) == 130
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "kvtwin: interrupted\n")
    assert names(tmp_path) == FILES
    assert status(tmp_path) == "interrupted"
    requests = pd.read_parquet(tmp_path / "requests.parquet").sort_values("request_id")
    assert requests["status"].tolist() == ["unfinished", "unfinished"]
    assert requests["generated_tokens"].tolist() == [1, 1]
    assert requests["first_token_s"].tolist() == [1, 1]
    assert requests["finish_s"].isna().all()
    assert len(pd.read_parquet(tmp_path / "steps.parquet")) == 1


def test_a_run_that_fails_half_way_keeps_what_it_has_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The third row is faulty. When it is read the first request is done and the second has yet to arrive.
    path = tmp_path / "trace.csv"
    times = [f"2023-11-16 18:00:0{second}.0000000" for second in (0, 3, 6)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{time},3,2\n" for time in times[:2]))
    with path.open("a") as file:
        file.write(f"{times[2]},3,none\n")
    run = tmp_path / "run"
    arguments = ["sim", f"hydra.run.dir={run}", "workload=azure", f"workload.path={path}", *SECONDS]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert names(run) == FILES
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert error == f"kvtwin: {summary['error']}\n"
    assert "line 4" in error
    assert len(pd.read_parquet(run / "requests.parquet")) == summary["completed"] <= 2


def test_a_run_without_progress_says_who_waits_and_keeps_them_in_its_table(
    trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 16 slots. The second request wants 20 of them, and blocks the third.
    pool = ["memory.block_size=4", "memory.num_blocks=5", "scheduler.reject_oversize=false"]
    overrides = [*trace([(0, 3, 2), (1, 20, 1), (2, 3, 2)]), *pool, *SECONDS]
    assert main(["sim", f"hydra.run.dir={tmp_path}", *overrides]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "request 1 waits at the head of 2" in printed.err
    assert names(tmp_path) == FILES
    assert status(tmp_path) == "failed"
    requests = pd.read_parquet(tmp_path / "requests.parquet").set_index("request_id")
    assert requests["status"].to_dict() == {0: "finished", 1: "unfinished", 2: "unfinished"}


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["sim", "workload.num_requests=1", f"hydra.run.dir={tmp_path / 'file' / 'run'}"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"kvtwin: cannot write {tmp_path / 'file'}")
    assert printed.err.endswith("choose another folder with hydra.run.dir=.\n")
    assert printed.err.count("\n") == 1


def test_a_limit_takes_exactly_the_first_requests(simulate: Simulate, trace: Trace) -> None:
    rows = [(k, 10 + k, 1 + k % 3) for k in range(10)]
    for limit, expected in ((4, 4), (10, 10), (99, 10)):
        folder = simulate(*trace(rows), f"workload.limit={limit}")
        requests = pd.read_parquet(folder / "requests.parquet").sort_values("request_id")
        got = requests[["arrival_s", "prompt_tokens", "output_tokens"]]
        assert [tuple(row) for row in got.to_numpy()] == rows[:expected]


def test_a_limit_leaves_generated_requests_as_they_are(simulate: Simulate) -> None:
    columns = ["request_id", "arrival_s", "prompt_tokens", "output_tokens"]
    whole, part = (
        pd.read_parquet(simulate(*SMALL, *limit) / "requests.parquet").sort_values("request_id")[columns]
        for limit in ([], ["workload.limit=7"])
    )
    assert len(part) == 7
    assert part.to_numpy().tolist() == whole.head(7).to_numpy().tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "finished", "prompt_tokens", "output_tokens"),
    # Rows and sums of the published files: conv 19,366, code 8,819 rows with means 2047.8 and 27.9.
    [("conv", 19_366, 22_361_870, 4_088_665), ("code", 8_819, 18_059_974, 245_896)],
)
def test_an_hour_of_a_production_trace_runs_to_its_end(
    simulate: Simulate, name: str, finished: int, prompt_tokens: int, output_tokens: int
) -> None:
    path = REAL / f"azure_2023_{name}.csv"
    if not path.is_file():
        pytest.skip(f"real traces are not here: ../shared/traces/{path.name} is absent")
    machine = ["model=llama-3.1-8b", "hardware=a100-80gb", "engine=vllm_v1"]
    folder = simulate("workload=azure", f"workload.path={path}", *machine)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["completed"], summary["failed"]) == ("complete", finished, 0)
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (prompt_tokens, output_tokens)
    steps = pd.read_parquet(folder / "steps.parquet", columns=NAMES)
    assert len(steps) > 1000
    assert (steps.sum(axis=1) == summary["pool_slots"]).all()
    assert (steps >= 0).all(axis=None)
