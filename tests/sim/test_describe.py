"""`kvtwin describe`: what it prints, writes and draws, run in process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sim.commands.describe import main
from workloads.errors import UserError

HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Five rows, one of which failed."""
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "10,A,100,10,0,L\n11,A,200,20,0,L\n12,A,1,0,0,L\n13,A,300,30,0,L\n14,A,400,40,0,L\n")
    return path


def described(folder: Path, *argv: str) -> dict[str, Any]:
    assert main([*argv, f"hydra.run.dir={folder}"]) == 0
    summary: dict[str, Any] = json.loads((folder / "description.json").read_text())
    return summary


def test_a_bare_file_is_described(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    summary = described(folder, str(trace), "workload.on_bad_row=drop", "seconds_per_output_token=0.1")
    assert summary["trace_format"] == "burstgpt"
    assert (summary["rows_read"], summary["rows_kept"]) == (5, 4)
    assert summary["rows_dropped"] == {"no response: the request failed": 1}
    # 10, 11, 13, 14 s: three gaps in 4 s; 1,000 and 100 tokens in 4 s.
    assert (summary["requests"], summary["span_s"], summary["request_rate"]) == (4, 4.0, 0.75)
    assert (summary["input_token_rate"], summary["output_token_rate"]) == (250.0, 25.0)
    # Stays of 1, 2, 3 and 4 s: 10 s over 4 s. The first has gone when the second comes at 11 s, the second when the
    # third comes at 13 s; the third is there when the fourth comes: 330 + 440 tokens.
    assert summary["concurrency"] == {"seconds_per_output_token": 0.1, "mean": 2.5, "peak": 2, "peak_tokens": 770}
    assert summary["prompt_output_correlation"] == pytest.approx(1.0)
    assert sorted(file.name for file in folder.iterdir()) == ["description.json", "description.png", "description.svg"]
    printed = capsys.readouterr().out
    for words in (
        r"trace taken for .* burstgpt",
        r"rows dropped: no response: the request failed .* 1 ",
        r"request rate .* 0\.75 requests/s",
        r"prompt .* 250\.0 .* 100 .* 200 .* 400 .* 400 .* 400 .* 1,000",
    ):
        assert re.search(words, printed), words


def test_the_same_workload_is_described_alike_and_by_every_way_to_name_it(trace: Path, tmp_path: Path) -> None:
    options = ("workload.on_bad_row=drop", "plots=false")
    first = described(tmp_path / "a", str(trace), *options)
    second = described(tmp_path / "b", "workload=trace", f"workload.path={trace}", *options)
    assert first == second
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["description.json"]
    assert described(tmp_path / "c", str(trace), *options, "workload.limit=2")["requests"] == 2


def test_a_generated_workload_is_that_of_the_run(tmp_path: Path) -> None:
    # Fixed lengths, 1,024 and 128 tokens; constant gaps of half a second: CV 0, and each window of a second holds two.
    options = ("workload=synthetic", "workload/arrivals=constant", "workload.rate=2", "workload.num_requests=101")
    summary = described(tmp_path / "out", *options)
    assert summary["workload"] == "synthetic"
    assert (summary["span_s"], summary["request_rate"]) == (50.0, 2.0)
    assert summary["gaps"] == {"mean_s": 0.5, "cv": 0.0, "max_s": 0.5, "zero_share": 0.0}
    assert summary["dispersion"][0] == {"window_s": 1.0, "windows": 50, "mean": 2.0, "index": 0.0}
    assert summary["prompt_output_correlation"] is None
    assert (tmp_path / "out" / "description.png").exists()


@pytest.mark.parametrize("rows", ["10,A,100,10,0,L\n", "10,A,1,1,2,L\n10,A,100,10,0,L\n"])
def test_a_workload_of_one_request_or_of_one_moment_is_drawn_too(rows: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(HEADER + rows)
    summary = described(tmp_path / "out", str(trace))
    assert (summary["span_s"], summary["request_rate"]) == (0.0, None)
    assert (tmp_path / "out" / "description.png").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "workload.path is not set; give it as workload.path=VALUE"),
        (["nowhere.csv"], "nowhere.csv: no such file"),
        (["one", "two"], "one file at a time, not one and two"),
        (["-m", "one"], "one workload at a time"),
        (["workload=azur"], "there is no workload named azur; did you mean azure"),
        (["workload=synthetic", "seconds_per_output_token=0"], "seconds_per_output_token is 0.0; expected a finite"),
        (["workload=synthetic", "block_size=0"], "block_size is 0; expected a whole number of at least 1"),
    ],
)
def test_mistake_is_one_line(argv: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as error:
        main([*argv, f"hydra.run.dir={tmp_path / 'out'}"])
    assert "\n" not in str(error.value)


def test_a_failed_row_ends_it_unless_it_is_to_be_dropped(trace: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"line 4: Response tokens is 0: no response.*workload\.on_bad_row=drop"):
        main([str(trace), f"hydra.run.dir={tmp_path / 'out'}"])
    assert not (tmp_path / "out" / "description.json").exists()
