"""The measured points of a calibration: JSON lines that grow as points are measured, so that nothing is measured twice.

The first line says what was measured and how; a calibration of anything else is not mixed with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sim.files import cannot_write, write_text
from sim.plan import StepWork
from workloads.errors import UserError

POINTS = "points.jsonl"
FORMAT = "kvtwin calibration 1"


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """One point in one round. Times in seconds; but for `between_s`, medians of the repeats.

    Args:
        round: from 0.
        load: under which its step occurs (`calibration_grid.py`), as does the next.
        step: its number.
        repeats: how often it was measured.
        spread: of the repeats, the interquartile range over the median.
        duration_s: host work since the step before, and the median of all else.
        between_s: the former, measured once.
        move_s: parts of the step, as in `gpu.step_log.SCHEMA`; so are the next four.
        prepare_s: tensors of the batch.
        model_s: from the first launch until the tokens are on the host.
        note_s: writing the tokens down.
        device_s: by the device's own clock; None on a CPU.
        work: the sums of the step.
    """

    round: int
    load: str
    step: int
    repeats: int
    spread: float
    duration_s: float
    between_s: float
    move_s: float
    prepare_s: float
    model_s: float
    note_s: float
    device_s: float | None
    work: StepWork

    @property
    def key(self) -> tuple[int, str, int]:
        """What tells it from all others."""
        return self.round, self.load, self.step


class PointFile:
    """The file, and what is in it.

    Args:
        path: of the file; if there is none, or nothing in it, it is begun.
        identity: what is measured and how, as JSON has it.

    Attributes:
        path: as above.
        points: by key, in the order in which they were measured.

    Raises:
        UserError: the file is of something else, or none of a calibration.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path = path
        header = json.dumps({"format": FORMAT, **identity})
        lines = _complete_lines(path)
        if lines:
            _require_same(path, json.loads(header), _parsed(path, lines[0]))
        read = [_point(path, _parsed(path, line)) for line in lines[1:]]
        self.points = {point.key: point for point in read}
        write_text(path, "\n".join([header, *lines[1:]]) + "\n")  # a line that was cut short is gone

    def add(self, point: MeasuredPoint) -> None:
        """Writes a point behind the others."""
        try:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(asdict(point)) + "\n")
        except OSError as error:
            raise cannot_write(self.path, error) from None
        self.points[point.key] = point


def _complete_lines(path: Path) -> list[str]:
    """The last line counts only with its end: whoever wrote it may have been killed."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise _no_calibration(path, str(error)) from None
    return text.split("\n")[:-1]


def _parsed(path: Path, line: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise _no_calibration(path, str(error)) from None
    if not isinstance(content, dict):
        raise _no_calibration(path, "a line is no JSON object")
    return content


def _point(path: Path, content: dict[str, Any]) -> MeasuredPoint:
    try:
        return MeasuredPoint(**{**content, "work": StepWork(**content["work"])})
    except (KeyError, TypeError) as error:
        raise _no_calibration(path, str(error)) from None


def _require_same(path: Path, wanted: dict[str, Any], found: dict[str, Any]) -> None:
    if found.get("format") != FORMAT:
        raise _no_calibration(path, f"its format is not {FORMAT!r}")
    ours, theirs = (dict(_flat(content)) for content in (wanted, found))
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise UserError(
                f"{path} was measured with {name}={theirs.get(name)}, this is {name}={ours.get(name)}; choose another "
                "folder with hydra.run.dir=, or the same device and options."
            )


def _flat(node: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _no_calibration(path: Path, reason: str) -> UserError:
    return UserError(f"{path} holds no points of a calibration ({reason}); remove it or choose another folder.")
