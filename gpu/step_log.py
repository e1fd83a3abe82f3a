"""What each step of a replay was made of and how long its parts took: `measured.parquet`, a row a step.

It holds the sums that a timer prices (`sim.plan.StepWork`) beside the times, so that a timer can be fitted to it.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from pathlib import Path

import pyarrow as pa

from sim.plan import StepWork
from sim.tables import Table

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        *((field.name, pa.int64()) for field in fields(StepWork)),
        ("swapped_out", pa.int64()),  # blocks, as are the next two
        ("swapped_in", pa.int64()),
        ("copied", pa.int64()),
        ("duration_s", pa.float64()),  # the sum of the next five
        ("between_s", pa.float64()),  # host work since the last step: scheduling, recording, arrivals
        ("move_s", pa.float64()),  # swaps and copies, as the host sees them
        ("prepare_s", pa.float64()),  # tensors of the batch
        ("model_s", pa.float64()),  # from the first launch until the tokens are on the host
        ("note_s", pa.float64()),  # writing the tokens down
        ("device_s", pa.float64()),  # from the first move to the last logits by the device's clock; null on a CPU
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
        self._table = Table(folder / "measured.parquet", SCHEMA)

    def add(self, step: MeasuredStep, swapped_out: int, swapped_in: int, copied: int) -> None:
        """One step more."""
        times = (step.duration, step.between, step.move, step.prepare, step.model, step.note, step.device)
        self._table.add((self.steps, *astuple(step.work), swapped_out, swapped_in, copied, *times))
        self.steps += 1
        self.seconds += step.duration
        self.outside_model += step.between + step.prepare + step.note

    def close(self) -> None:
        """Completes the table."""
        self._table.close()

    def discard(self) -> None:
        """Leaves no half-written table behind; harmless after `close`."""
        self._table.discard()
