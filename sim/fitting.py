"""Fits the step model to measurements: to the steps of a replay, or to a run of which only request times are known.

**Steps.** A replay writes each step's sums beside its duration (`measured.parquet`): one row each.

**Request times.** A recorded run says when requests had their first and last token, not what its steps were. But the
scheduler's rules do, given how long steps take: so the run is simulated; the time from a request's arrival to its first
token and from there to its last are each written as the sum of the steps between, and of the time in which nothing ran;
and the coefficients of these sums are fitted. With them the run is simulated again, until they no longer move.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Sequence as Listing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from sim.plan import StepPlan, StepTimer, StepWork, WorkTimer
from sim.point import MEASURED
from sim.served import Served
from sim.timing.nonnegative import Floats, nonnegative_least_squares
from sim.timing.step_model import PARTS, StepFit
from workloads.errors import UserError

REWEIGHTINGS = 5  # after three, coefficients move by less than their noise
FEWEST = 20  # rows: more than parts, so that the quality of the fit means something
MOST_ROUNDS = 25
SETTLED = 1e-4  # change of the fitted times from one round's coefficients to the next one's, relative


def fit_steps(folder: Path) -> StepFit:
    """The fit to a replay's steps; those that moved blocks are left out, their time is not the model's.

    Raises:
        UserError: no table of measured steps, or too few in it.
    """
    path = folder / MEASURED
    names = [name for name, _ in PARTS.values() if name is not None]
    try:
        table = pq.read_table(path, columns=[*names, "num_tokens", "swapped_out", "swapped_in", "copied", "duration_s"])
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise UserError(f"{path} is no table of measured steps ({reason}); give the folder of a replay.") from None
    steps = table.to_pandas()
    moved = steps["swapped_out"] + steps["swapped_in"] + steps["copied"]
    steps = steps[(moved == 0) & (steps["num_tokens"] > 0)]
    if len(steps) < FEWEST:
        raise UserError(f"{path} has {len(steps)} usable steps; at least {FEWEST} are needed. Replay more requests.")
    rows = np.column_stack([np.ones(len(steps)), *(steps[name].to_numpy(np.float64) for name in names)])
    durations = steps["duration_s"].to_numpy(np.float64)
    coefficients = nonnegative_least_squares(rows, durations)
    device, versions = _device(folder)
    return StepFit(
        dict(zip(PARTS, coefficients.tolist(), strict=True)),
        dict(zip(PARTS, rows.max(axis=0).tolist(), strict=True)),
        _quality(rows @ coefficients, durations),
        device,
        versions,
        str(path),
    )


def fit_points(works: Listing[StepWork], seconds: Listing[float], **about: Any) -> StepFit:
    """The fit to steps that were chosen and measured one by one (`kvtwin calibrate`).

    Shares of a step's time are fitted, not seconds: a short step counts as much as a long one. They are shares of the
    fitted time (quasi-likelihood, McCullagh and Nelder, *Generalized Linear Models*, 1989, ch. 9), because shares of
    the measured one would give most weight to the rows that noise has made short.

    Args:
        works: what each step computed.
        seconds: how long it took.
        about: what the fit should say of itself: `device`, `versions`, `source` and `model` of `StepFit`.

    Raises:
        UserError: too few steps.
    """
    if len(works) < FEWEST:
        raise UserError(f"{len(works)} steps were measured; at least {FEWEST} are needed. Take a larger workload.")
    rows, durations = np.array([_sums(work) for work in works]), np.array(seconds)
    scale = durations
    for _ in range(REWEIGHTINGS):
        coefficients = nonnegative_least_squares(rows / scale[:, None], durations / scale)
        scale = np.maximum(rows @ coefficients, durations / 10)  # never 0
    return StepFit(
        dict(zip(PARTS, coefficients.tolist(), strict=True)),
        dict(zip(PARTS, rows.max(axis=0).tolist(), strict=True)),
        _quality(rows @ coefficients, durations),
        **about,
    )


Rehearse = Callable[[StepTimer], tuple[Served, Floats]]
"""Simulates a run step by step with a timer: what it served, and when each step ended, in seconds, shape (m,)."""


class WatchedTimer:
    """A timer that keeps the sums of every step that it prices; the run must not leap.

    Args:
        timer: says how long steps take.
    """

    def __init__(self, timer: StepTimer) -> None:
        self._timer = timer
        self.durations_s: list[float] = []
        self.sums: list[list[float]] = []

    def durations(self, plan: StepPlan) -> list[float]:
        """Seconds of the plan's only step."""
        (duration,) = self._timer.durations(plan)
        self.durations_s.append(duration)
        self.sums.append(_sums(plan.work))
        return [duration]


class Coefficients(WorkTimer):
    """The step model with coefficients that are still being fitted; shape (parts,)."""

    def __init__(self, coefficients: Floats) -> None:
        self._coefficients = coefficients.tolist()

    def seconds(self, work: StepWork) -> float:
        """Duration of one step in seconds."""
        return sum(map(float.__mul__, self._coefficients, _sums(work)))


def fit_requests(measured: Served, first: StepTimer, rehearse: Rehearse, device: str = "") -> StepFit:
    """The fit to the times at which requests had their first and last tokens.

    Args:
        measured: the run, in order of arrival.
        first: times of the first round; any that are not far off.
        rehearse: simulates the run with a timer, without leaps.
        device: what was measured.

    Raises:
        UserError: too few requests.
    """
    if 2 * len(measured.names) < FEWEST:
        raise UserError(f"{measured.source} has {len(measured.names)} requests; at least {FEWEST // 2} are needed.")
    timer, coefficients = first, np.zeros(len(PARTS))
    for _ in range(MOST_ROUNDS):
        watched = WatchedTimer(timer)
        served, ends = rehearse(watched)
        sums = np.array(watched.sums)
        rows, idle = _rows(served, ends, sums, np.array(watched.durations_s))
        # Both runs have the arrivals of the simulated one: a recorded engine notes them only between its steps.
        to_first, to_last = measured.first_token_s - served.arrival_s, measured.last_token_s - measured.first_token_s
        times = np.concatenate([to_first, to_last])
        before, coefficients = coefficients, nonnegative_least_squares(rows, times - idle)
        if (
            before.any()
        ):  # queues answer to a change with more than their share: half of it avoids swinging back and forth
            coefficients = (before + coefficients) / 2
        if np.abs(rows @ (coefficients - before)).sum() <= SETTLED * times.sum():
            break
        timer = Coefficients(coefficients)
    return StepFit(
        dict(zip(PARTS, coefficients.tolist(), strict=True)),
        dict(zip(PARTS, sums.max(axis=0).tolist(), strict=True)),
        _quality(rows @ coefficients + idle, times),
        device,
        {},
        measured.source,
    )


def _rows(served: Served, ends: Floats, sums: Floats, durations: Floats) -> tuple[Floats, Floats]:
    """For each request up to its first token, and then from there to its last: sums over the steps, and idle time.

    Of a step in which a request arrives counts what was left of it.

    Args:
        served: the simulated run.
        ends: shape (m,), when each step ended.
        sums: shape (m, parts), what the model multiplies, of each step.
        durations: shape (m,), seconds of each step.
    """
    starts = ends - durations
    times = np.column_stack([starts, ends]).ravel()
    idle = np.cumsum(starts - np.concatenate([[0.0], ends[:-1]]))
    after = np.column_stack([sums.cumsum(axis=0), idle])
    before = np.column_stack([after[:, :-1] - sums, idle])
    totals = np.stack([before, after], axis=1).reshape(len(times), -1)

    def until(moments: Floats) -> Floats:
        return np.column_stack([np.interp(moments, times, column) for column in totals.T])

    arrived, first, last = map(until, (served.arrival_s, served.first_token_s, served.last_token_s))
    rows = np.concatenate([first - arrived, last - first])
    return rows[:, :-1], rows[:, -1]


def _sums(work: StepWork) -> list[float]:
    return [1.0 if name is None else float(getattr(work, name)) for name, _ in PARTS.values()]


def _quality(fitted: Floats, measured: Floats) -> dict[str, float]:
    spread = float(((measured - measured.mean()) ** 2).sum())
    missed = fitted - measured
    return {
        "rows": len(measured),
        "r2": 1 - float((missed**2).sum()) / spread if spread else 0.0,
        "mean_error_pct": 100 * float(missed.mean() / measured.mean()),
        "mean_abs_error_pct": 100 * float(np.abs(missed).mean() / measured.mean()),
    }


def _device(folder: Path) -> tuple[str, dict[str, str]]:
    """What the replay's summary says of device and versions; nothing if it has none."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "", {}
    return str(summary.get("hardware", "")), dict(summary.get("versions", {}))
