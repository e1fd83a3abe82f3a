"""The time of a step from a small physical model fitted to measured steps (`step_model.py`)."""

from __future__ import annotations

from pathlib import Path

from sim.plan import StepWork, WorkTimer
from sim.timing.step_model import PARTS, read_fit


class Fitted(WorkTimer):
    """Prices steps by fitted coefficients; copies of shared blocks are free.

    Args:
        path: the JSON file of the fit.

    Raises:
        UserError: no such file, or none of a fit.
    """

    def __init__(self, path: str) -> None:
        fit = read_fit(Path(path).expanduser())
        self._constant = fit.coefficients["step"]
        self._parts = [
            (part, name, fit.coefficients[part], fit.largest.get(part, float("inf")))
            for part, (name, _) in PARTS.items()
            if name is not None
        ]
        self._beyond: dict[str, tuple[int, float]] = {}  # part -> the largest sum asked for, and the largest measured

    def seconds(self, work: StepWork) -> float:
        """Duration of one step in seconds."""
        seconds = self._constant
        for part, name, coefficient, largest in self._parts:
            amount: int = getattr(work, name)
            seconds += coefficient * amount
            if amount > largest and coefficient and amount > self._beyond.get(part, (0, 0.0))[0]:
                self._beyond[part] = amount, largest
        return seconds

    @property
    def notices(self) -> list[str]:
        """What had to be extrapolated so far, a sentence each."""
        return [
            f"{PARTS[part][0]} of a step: {asked:,} were asked for, the fit has seen {largest:,.0f}; continued linearly"
            for part, (asked, largest) in sorted(self._beyond.items())
        ]
