"""Published claims beside what a sweep finds: each is about one figure at one point, its verdict is arithmetic.

An experiment has its claims; what they say, where they stand and how far ours may lie from them is written there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sim.files import whole
from workloads.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

TABLE = "claims.csv"

Unit = Literal["%", "x", ""]
Verdict = Literal["holds", "does not hold", "not in this sweep"]


@dataclass(frozen=True, slots=True)
class Claim:
    """What somebody has published of a figure, as a number or as a range.

    Args:
        claim: in a few words, with its source.
        figure: columns of the sweep's table, summed.
        at: the point: values of columns that only one complete point has.
        published: lowest and highest value, the same twice if there is but one.
        within: how far outside of these ours may be, in their unit; 0 or more.
        over: another point, whose figure ours is divided by; None: it is not.
        unit: of what is shown: `%` of a share, `x` of a ratio; empty of anything else.
    """

    claim: str
    figure: tuple[str, ...]
    at: Mapping[str, Any]
    published: tuple[float, float]
    within: float
    over: Mapping[str, Any] | None = None
    unit: Unit = ""

    @classmethod
    def of(cls, claim: str, given: Any) -> Claim:
        """The claim in these words, with what an experiment says of it, checked.

        Raises:
            UserError: it lacks something, has something else, or its numbers are none.
        """
        name = f"claims.{claim}"
        needed = {"figure", "at", "published", "within"}
        known = {field.name for field in fields(cls)} - {"claim"}
        if not isinstance(given, Mapping) or not needed <= set(given) <= known:
            raise UserError(
                f"{name} is {given!r}; expected {', '.join(sorted(needed))}, and at most over and unit too."
            )
        figure, published = given["figure"], given["published"]
        published = published if isinstance(published, Sequence) else (published, published)
        numbers = [*published, given["within"]]
        if not all(isinstance(x, int | float) for x in numbers) or len(published) != 2 or given["within"] < 0:
            raise UserError(f"{name}: expected published as a number or as two, and within as one of at least 0.")
        return cls(
            claim=claim,
            figure=(figure,) if isinstance(figure, str) else tuple(figure),
            at=given["at"],
            published=(min(published), max(published)),
            within=given["within"],
            over=given.get("over"),
            unit=given.get("unit", ""),
        )

    def verdict(self, ours: float | None) -> Verdict:
        """Whether `ours` is as near as it has to be; None stands for a point that there is not."""
        if ours is None:
            return "not in this sweep"
        low, high = self.published
        rounding = 1e-9 * max(abs(low), abs(high))
        return "holds" if low - self.within - rounding <= ours <= high + self.within + rounding else "does not hold"

    def spelled(self, value: float) -> str:
        """A value of its figure, with its unit."""
        if self.unit == "%":
            return f"{100 * value:.1f} %"
        digits = 2 if abs(value) < 1000 else 0
        return f"{value:,.{digits}f}{self.unit}"


@dataclass(frozen=True, slots=True)
class Finding:
    """A claim and what the sweep has to say of it; `ours` is None if it has no such point."""

    claim: Claim
    ours: float | None

    @property
    def verdict(self) -> Verdict:
        """Of the claim, by arithmetic."""
        return self.claim.verdict(self.ours)

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Claim, published, ours and verdict, spelled out."""
        claim = self.claim
        low, high = claim.published
        published = claim.spelled(low) if low == high else f"{claim.spelled(low)} to {claim.spelled(high)}"
        ours = "-" if self.ours is None else claim.spelled(self.ours)
        return claim.claim, published, ours, self.verdict


def examine(claims: Mapping[str, Any], table: pd.DataFrame) -> list[Finding]:
    """Looks up every claim in a sweep's table, of which only complete points count.

    Args:
        claims: as an experiment has them, by their words.
        table: one row a point.

    Raises:
        UserError: a claim that is none, or one that more than one point answers to.
    """
    done = table[table["status"] == "complete"]
    found = []
    for words, given in claims.items():
        claim = Claim.of(words, given)
        ours = _value(done, claim, claim.at)
        if claim.over is not None and ours is not None:
            base = _value(done, claim, claim.over)
            ours = ours / base if base else None
        found.append(Finding(claim, ours))
    return found


def write_findings(findings: Sequence[Finding], folder: Path) -> None:
    """Writes `claims.csv`: a row a claim, with numbers in the unit of the sweep's table."""
    import pandas as pd

    rows = [
        {
            "claim": finding.claim.claim,
            "published_low": finding.claim.published[0],
            "published_high": finding.claim.published[1],
            "within": finding.claim.within,
            "ours": finding.ours,
            "verdict": finding.verdict,
        }
        for finding in findings
    ]
    with whole(folder / TABLE) as temporary:
        pd.DataFrame(rows).to_csv(temporary, index=False)


def _value(done: pd.DataFrame, claim: Claim, at: Mapping[str, Any]) -> float | None:
    """The figure at a point; None if there is no such point, or it has no such figure."""
    rows = done
    for column, value in at.items():
        if column not in rows:
            return None
        rows = rows[rows[column].astype(str) == str(value)]
    if len(rows) > 1:
        raise UserError(f"claims.{claim.claim}: {len(rows)} points have {dict(at)}; say more of which.")
    if rows.empty or not set(claim.figure) <= set(rows.columns):
        return None
    value = sum(float(rows.iloc[0][column]) for column in claim.figure)
    return None if math.isnan(value) else value
