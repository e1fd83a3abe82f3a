"""A file of every trace format through `kvtwin sim`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sim.cli import main
from tests.workloads.trace_samples import BURSTGPT_1, SAMPLES

Simulate = Callable[..., Path]
QUICK = ["timing=constant", "timing.step_seconds=0.01", "memory.num_blocks=300", "max_model_len=2048"]


@pytest.mark.parametrize("name", SAMPLES)
def test_a_trace_of_each_format_is_served_and_its_fate_reported(name: str, simulate: Simulate, tmp_path: Path) -> None:
    sample = SAMPLES[name]
    path = tmp_path / "log.dat"
    path.write_text(sample.content)
    folder = simulate(*QUICK, "workload=trace", f"workload.path={path}", *sample.overrides)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["trace_format"] == name
    assert summary["completed"] == summary["rows_read"] == summary["rows_kept"] == len(sample.requests)
    assert (summary["rows_dropped"], summary["rows_first_dropped"]) == ({}, {})
    assert summary["total_input_tokens"] == sum(one.prompt_tokens for one in sample.requests)
    assert summary["total_output_tokens"] == sum(one.output_tokens for one in sample.requests)


def test_dropped_rows_are_in_the_summary_and_on_the_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.dat"
    path.write_text(BURSTGPT_1 + "50,GPT-4,9,0,9,API log\n60,GPT-4,9,0,9,API log\n")
    folder = tmp_path / "run"
    run = ["sim", "plots=false", f"hydra.run.dir={folder}", *QUICK, "workload=trace", f"workload.path={path}"]
    assert main(run) == 2
    assert "line 4: Response tokens is 0: no response: the request failed" in capsys.readouterr().err
    assert main([*run, "workload.on_bad_row=drop"]) == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["rows_read"], summary["rows_kept"]) == (4, 2)
    assert summary["rows_dropped"] == {"no response: the request failed": 2}
    assert summary["rows_first_dropped"] == {"no response: the request failed": "line 4"}
    shown = " ".join(capsys.readouterr().out.split())
    assert "trace taken for │ burstgpt" in shown
    assert "trace rows read │ 4" in shown
    assert "rows dropped: no response: the request failed (first: line 4) │ 2" in shown
