"""Step times as they were in an earlier run: its decisions can then be had again, or looked at under other rules of
recording.

The run must be the same up to its times: same workload, memory and scheduler. A step that differs ends it.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from sim.plan import StepPlan
from workloads.errors import UserError

_COLUMNS = ("step", "repeat", "duration_s", "num_tokens", "num_sequences")


class Recorded:
    """The durations of a run folder's steps, one after another.

    Those of a replay include its swaps, so take `link=free`.

    Args:
        run: the folder; its run kept every step as a row of its own (`record.steps=all engine.leap=false`, as replays
            do).

    Raises:
        UserError: no such table, or one that does not hold every step. Asking for a step's duration raises it if the
            step computes something else than the recorded one.
    """

    def __init__(self, run: str) -> None:
        self._path = Path(run) / "steps.parquet"
        try:
            rows = pq.read_table(self._path, columns=list(_COLUMNS)).to_pydict()
            steps, repeats, durations, tokens, sequences = (rows[column] for column in _COLUMNS)
        except (OSError, ValueError, KeyError):
            raise UserError(f"{self._path} is not a table of steps; timing.run takes the folder of a run.") from None
        remedy = "record the run with record.steps=all and engine.leap=false."
        if not steps:
            raise UserError(f"{self._path} holds no step; {remedy}")
        if any(repeat != 1 for repeat in repeats) or steps != list(range(len(steps))):
            raise UserError(f"{self._path} does not hold every step in a row of its own; {remedy}")
        self._steps = [step for step in steps if tokens[step]]  # nobody asks how long it takes to compute nothing
        self._durations: list[float] = [durations[step] for step in self._steps]
        self._work = [(sequences[step], tokens[step]) for step in self._steps]
        self._next = 0
        self._last: StepPlan | None = None

    def durations(self, plan: StepPlan) -> list[float]:
        """Those of the next steps. How many of them a leap really takes is only known when the next plan comes."""
        if self._last is not None:
            executed = range(self._next, self._next + self._last.repeat)
            self._check(self._last, executed)
            self._next = executed.stop
        self._last = plan
        self._check(plan, range(self._next, self._next + 1))
        durations = self._durations[self._next : self._next + plan.repeat]
        return durations + durations[-1:] * (plan.repeat - len(durations))  # a leap that looks beyond will be cut

    def _check(self, plan: StepPlan, steps: range) -> None:
        if steps.stop > len(self._durations):
            raise UserError(
                f"{self._path} ends after {len(self._durations)} steps, but this run has more; use the workload and "
                "the policies of that run."
            )
        now = plan.work.num_sequences, plan.work.num_tokens
        for step in steps:
            if (then := self._work[step]) != now:
                raise UserError(
                    f"{self._path}: step {self._steps[step]} computed {then[1]} tokens of {then[0]} sequences, but now "
                    f"{now[1]} of {now[0]}; use the workload and the policies of that run."
                )
