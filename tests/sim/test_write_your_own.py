"""The guide to policies of one's own: its example is whole, short, and does what the guide says."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pandas as pd
import pytest

from sim.cli import main

GUIDE = Path(__file__).parents[2] / "docs/policies/write_your_own.md"


def block(language: str) -> str:
    """The only block of the guide in this language."""
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.M | re.S)
    return str(text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the guide has its reader save, and Python looking there."""
    (tmp_path / "conf/scheduler").mkdir(parents=True)
    (tmp_path / "my_policy.py").write_text(block("python"))
    (tmp_path / "conf/scheduler/one_prompt_a_step.yaml").write_text(block("yaml"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_policy", raising=False)
    return tmp_path


def run(folder: Path, name: str, *options: str) -> Path:
    """Runs the example on a small pool under pressure; returns the run folder."""
    searched = f"hydra.searchpath=[file://{folder}/conf]"
    code = main(
        [
            "sim",
            searched,
            "scheduler=one_prompt_a_step",
            "workload=sharegpt_like",
            "workload.num_requests=60",
            "workload.rate=20",
            "memory.num_blocks=400",
            "max_model_len=2048",
            "plots=false",
            f"hydra.run.dir={folder}/{name}",
            *options,
        ]
    )
    assert code == 0
    return folder / name


def test_the_example_is_complete_and_forty_lines_long() -> None:
    lines = [line for line in block("python").splitlines() if line.strip()]
    assert len(lines) <= 40


def test_the_example_serves_everyone_and_admits_one_prompt_a_step(folder: Path) -> None:
    done = run(folder, "run")
    summary = json.loads((done / "summary.json").read_text())
    assert summary["completed"] == 60
    first = pd.read_parquet(done / "requests.parquet")["first_scheduled_s"]
    assert first.nunique() == 60  # no two in one step


def test_what_it_keeps_free_spares_preemptions(folder: Path) -> None:
    preemptions = [
        json.loads((run(folder, f"{share}", f"scheduler.keep_free={share}") / "summary.json").read_text())[
            "preemptions"
        ]
        for share in (0.0, 0.2)
    ]
    assert preemptions[0] > preemptions[1]


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_the_example_leaps_as_it_steps(folder: Path, share: float) -> None:
    leaps = run(folder, "leaps", f"scheduler.keep_free={share}")
    steps = run(folder, "steps", f"scheduler.keep_free={share}", "engine.leap=false")
    for table in ("requests.parquet", "events.parquet"):
        assert (leaps / table).read_bytes() == (steps / table).read_bytes()
    counts = [json.loads((one / "summary.json").read_text()) for one in (leaps, steps)]
    assert counts[0]["steps"] == counts[1]["steps"] and counts[0]["preemptions"] > 0


def test_a_wrong_option_of_ones_own_policy_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "sim",
        f"hydra.searchpath=[file://{folder}/conf]",
        "scheduler=one_prompt_a_step",
        "scheduler.keep_free=much",
    ]
    assert main([*options, f"hydra.run.dir={folder}/wrong"]) == 2
    assert "scheduler.keep_free" in capsys.readouterr().err
