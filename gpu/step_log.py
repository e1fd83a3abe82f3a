"""What each step of a replay was made of and how long its parts took: `measured.parquet`, a row a step.

It holds the sums that a timer prices (`sim.plan.StepWork`) beside the times, so that a timer can be fitted to it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path

import pyarrow as pa

from sim.plan import StepWork
from sim.point import MEASURED
from sim.tables import Table

_SUMS = [field.name for field in fields(StepWork)]
_sums_of = attrgetter(*_SUMS)
SCHEMA = pa.schema(
    [
        ("step", pa.int64()),  # those with anything to do, from 0
        *((name, pa.int64()) for name in _SUMS),
        ("swapped_out", pa.int64()),  # blocks, as are the next two
        ("swapped_in", pa.int64()),
        ("copied", pa.int64()),
        ("duration_s", pa.float64()),  # the sum of the next five
        ("between_s", pa.float64()),  # host work since the last step: scheduling, recording, arrivals
        ("move_s", pa.float64()),  # swaps and copies, as the host sees them
        ("prepare_s", pa.float64()),  # tensors of the batch
        ("model_s", pa.float64()),  # from the first launch until the tokens are on the host
        ("note_s", pa.float64()),  # writing the tokens down
        ("device_s", pa.float64()),  # from first move to last logits by its clock; null on a CPU, or after a capture
    ]
)


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step; times in seconds, see `SCHEMA`."""

    work: StepWork
    duration: float
    between: float
    move: float
    prepare: float
    model: float
    note: float
    device: float | None


class StepLog:
    """Writes the table and sums up.

    Args:
        folder: of the run.

    Attributes:
        steps: how many so far.
        seconds: of all steps.
        outside_model: seconds of them spent outside the model: before, in preparing and noting, not in moving blocks.
    """

    def __init__(self, folder: Path) -> None:
        self.steps = 0
        self.seconds = 0.0
        self.outside_model = 0.0
        self._table = Table(folder / MEASURED, SCHEMA)

    def add(self, step: MeasuredStep, swapped_out: int, swapped_in: int, copied: int) -> None:
        """One step more."""
        times = (step.duration, step.between, step.move, step.prepare, step.model, step.note, step.device)
        self._table.add((self.steps, *_sums_of(step.work), swapped_out, swapped_in, copied, *times))
        self.steps += 1
        self.seconds += step.duration
        self.outside_model += step.between + step.prepare + step.note

    def close(self) -> None:
        """Completes the table."""
        self._table.close()

    def discard(self) -> None:
        """Leaves no half-written table behind; harmless after `close`."""
        self._table.discard()
