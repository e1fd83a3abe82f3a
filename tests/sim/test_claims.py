"""Claims: what is looked up, how near it has to be, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from sim.claims import Claim, examine, write_findings
from workloads.errors import UserError

TABLE = pd.DataFrame(
    {
        "engine": ["a", "b", "b"],
        "workload.n": [2, 2, 4],
        "status": ["complete", "complete", "failed"],
        "used": [0.5, 0.25, 0.0],
        "idle": [0.125, 0.25, 0.0],
        "nothing": [0.0, 1.0, 0.0],
    }
)


def claim(**changes: Any) -> dict[str, Any]:
    return {"figure": "used", "at": {"engine": "a"}, "published": 0.5, "within": 0.0} | changes


@pytest.mark.parametrize(
    ("given", "ours", "verdict"),
    [
        (claim(), 0.5, "holds"),
        (claim(published=0.4), 0.5, "does not hold"),
        (claim(published=0.4, within=0.1), 0.5, "holds"),
        (claim(published=[0.5, 0.9]), 0.5, "holds"),
        (claim(published=[0.6, 0.9], within=0.05), 0.5, "does not hold"),
        (claim(figure=["used", "idle"], published=0.625), 0.625, "holds"),
        (claim(over={"engine": "b"}, published=2.0), 2.0, "holds"),
        (claim(at={"engine": "a", "workload.n": 2}), 0.5, "holds"),
        (claim(at={"engine": "c"}), None, "not in this sweep"),
        (claim(at={"workload.m": 2}), None, "not in this sweep"),
        (claim(at={"workload.n": 4}), None, "not in this sweep"),  # a failed point has no figures
        (claim(figure="unheard_of"), None, "not in this sweep"),
        (claim(at={"engine": "b"}, over={"engine": "a"}, figure="nothing"), None, "not in this sweep"),  # over 0
    ],
)
def test_a_verdict_is_arithmetic(given: dict[str, Any], ours: float | None, verdict: str) -> None:
    (finding,) = examine({"it does": given}, TABLE)
    assert finding.ours == ours
    assert finding.verdict == verdict


def test_values_are_spelled_in_their_unit() -> None:
    (share,) = examine({"share": claim(unit="%", published=[0.4, 0.6])}, TABLE)
    (ratio,) = examine({"ratio": claim(unit="x", over={"engine": "b"}, published=2)}, TABLE)
    assert share.cells == ("share", "40.0 % to 60.0 %", "50.0 %", "holds")
    assert ratio.cells == ("ratio", "2.00x", "2.00x", "holds")


def test_a_point_that_is_not_the_only_one_is_refused() -> None:
    with pytest.raises(UserError, match=r"claims\.it does: 2 points have \{'workload\.n': 2\}; say more of which\."):
        examine({"it does": claim(at={"workload.n": 2})}, TABLE)


@pytest.mark.parametrize(
    "given",
    [{"figure": "used"}, claim(kind="x"), claim(published="much"), claim(published=[1, 2, 3]), claim(within=-1)],
)
def test_what_is_no_claim_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^claims\.it does"):
        Claim.of("it does", given)


def test_findings_are_written_with_their_verdicts(tmp_path: Path) -> None:
    write_findings(examine({"one": claim(), "none": claim(at={"engine": "c"})}, TABLE), tmp_path)
    rows = pd.read_csv(tmp_path / "claims.csv")
    assert rows["verdict"].tolist() == ["holds", "not in this sweep"]
    assert rows["published_low"].tolist() == [0.5, 0.5]
    assert rows["ours"].isna().tolist() == [False, True]
