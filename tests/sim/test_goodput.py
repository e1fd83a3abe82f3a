"""Goodput: what counts as served well, and how a run counts it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from sim.cli import main
from sim.goodput import ServiceLevel
from workloads.errors import UserError

LEVEL = ServiceLevel(ttft=200, tpot=50, e2el=1000)


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "e2el_s", "met"),
    [
        (0.2, 0.05, 1.0, True),  # at each limit
        (0.201, 0.05, 1.0, False),
        (0.2, 0.051, 1.0, False),
        (0.2, 0.05, 1.001, False),
        (0.2, None, 0.2, True),  # a single token has no time per further token
    ],
)
def test_a_request_counts_if_it_is_within_every_limit(
    ttft_s: float, tpot_s: float | None, e2el_s: float, met: bool
) -> None:
    assert LEVEL.met(ttft_s, tpot_s, e2el_s) is met


def test_without_a_limit_nothing_is_promised_and_everything_is_met() -> None:
    assert not ServiceLevel().promises
    assert ServiceLevel().met(1e9, 1e9, 1e9)


@pytest.mark.parametrize("name", ["ttft", "tpot", "e2el"])
def test_a_limit_that_nothing_can_meet_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=rf"^goodput\.{name} is 0; expected milliseconds, above 0"):
        ServiceLevel(**{name: 0})


RUN = [
    "sim",
    "plots=false",
    "workload=synthetic",
    "workload.num_requests=40",
    "workload.rate=20",
    "workload.prompt_lengths.tokens=100",
    "workload.output_lengths.tokens=50",
    "scheduler.max_num_seqs=4",
]


def test_a_run_counts_the_requests_within_the_limits_and_says_nothing_without_any(tmp_path: Path) -> None:
    assert main([*RUN, f"hydra.run.dir={tmp_path}/without"]) == 0
    assert json.loads((tmp_path / "without/summary.json").read_text())["request_goodput"] is None
    rows = pd.read_parquet(tmp_path / "without/requests.parquet")
    ttft = 1e3 * (rows["first_token_s"] - rows["arrival_s"])
    limit = float(ttft.median())
    assert main([*RUN, f"hydra.run.dir={tmp_path}/with", f"goodput.ttft={limit}"]) == 0
    summary = json.loads((tmp_path / "with/summary.json").read_text())
    good = int((ttft <= limit).sum())
    assert 0 < good < len(rows)  # neither all nor none, or the count would prove nothing
    assert summary["request_goodput"] == pytest.approx(good / summary["duration"])
    assert summary["request_throughput"] == pytest.approx(len(rows) / summary["duration"])


def test_each_class_is_measured_by_its_own_promise(simulate: Callable[..., Path]) -> None:
    # Nobody gets a first token within a microsecond, and everybody is done within a day. So all requests that count as
    # good are of the batch class, whatever the run promises to others.
    options = ["workload=mixture", "workload.num_requests=60", "goodput.ttft=0.001"]
    promised = ["workload.classes.chat.promised=null", "workload.classes.batch.promised.e2el=86400000"]
    folder = simulate(*options, *promised)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    rows = pd.read_parquet(folder / "requests.parquet")
    counts = rows["traffic_class"].value_counts().to_dict()
    assert {name: one["completed"] for name, one in summary["classes"].items()} == counts
    assert sum(counts.values()) == 60
    chat, batch = summary["classes"]["chat"], summary["classes"]["batch"]
    assert (chat["request_goodput"], batch["request_goodput"]) == (0, batch["request_throughput"])
    assert summary["request_goodput"] == batch["request_goodput"] > 0
