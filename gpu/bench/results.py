"""What is made of the times: bandwidths, rates and shares, as `bench.json` has them.

A share is of what the same run measured: of a large copy on the device, of a large bfloat16 matrix product, and of the
same kernel on the contiguous layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gpu.bench.cases import ATTENTION, OURS, Case, Problem

Status = Literal["complete", "interrupted", "failed"]


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one launch, in seconds.

    Args:
        median: of the repeats.
        min: of the repeats.
        repeats: how often it was measured.
    """

    median: float
    min: float
    repeats: int


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device does at its best, measured in the same run.

    Args:
        copy_bandwidth: bytes read and written per second by a large copy.
        matmul_rate: operations per second of a large bfloat16 matrix product.
    """

    copy_bandwidth: float
    matmul_rate: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one case.

    Args:
        case: what was to be measured.
        launch: the launch configuration by name, where the kernel is ours and has one.
        timing: None if it was refused.
        refused: why it could not be measured, or None.
    """

    case: Case
    launch: Mapping[str, int] | None
    timing: Timing | None
    refused: str | None = None


@dataclass
class Record:
    """All that a run has found so far.

    Args:
        rates: None until they are measured.
        outcomes: in the order in which they were measured.
        candidates: launches tried for tuning, as outcomes of their own.
        left_out: cases for which no time was left.
        status: how the run ended.
    """

    rates: Rates | None
    outcomes: list[Outcome]
    candidates: list[Outcome]
    left_out: int
    status: Status


def entries(record: Record) -> list[dict[str, Any]]:
    """The cases as `bench.json` has them; figures that do not apply are None."""
    contiguous = {
        outcome.case.problem: outcome.timing
        for outcome in record.outcomes
        if outcome.case.layout == "contiguous" and outcome.case.by == OURS
    }
    return [_entry(outcome, record.rates, contiguous) for outcome in record.outcomes]


def content(record: Record, device: Mapping[str, Any], versions: Mapping[str, str]) -> dict[str, Any]:
    """`bench.json`."""
    return {
        "status": record.status,
        "device": dict(device),
        "versions": dict(versions),
        "copy_bandwidth": record.rates.copy_bandwidth if record.rates else None,
        "matmul_rate": record.rates.matmul_rate if record.rates else None,
        "left_out": record.left_out,
        "cases": entries(record),
        "candidates": [_entry(outcome, record.rates, {}) for outcome in record.candidates],
    }


def _entry(outcome: Outcome, rates: Rates | None, contiguous: Mapping[Problem, Timing | None]) -> dict[str, Any]:
    case, problem, timing = outcome.case, outcome.case.problem, outcome.timing
    entry: dict[str, Any] = {
        **asdict(problem),
        "dtype": problem.dtype,
        "pool_dtype": problem.pool_dtype,
        "layout": case.layout,
        "by": case.by,
        "launch": None if outcome.launch is None else dict(outcome.launch),
        "bytes_moved": problem.bytes_moved,
        "flops": problem.flops,
        "seconds_median": None,
        "seconds_min": None,
        "repeats": 0,
        "bandwidth": None,
        "share_of_copy": None,
        "flop_rate": None,
        "share_of_matmul": None,
        "share_of_contiguous": None,
        "refused": outcome.refused,
    }
    if timing is None:
        return entry
    bandwidth, rate = problem.bytes_moved / timing.median, problem.flops / timing.median
    entry |= {"seconds_median": timing.median, "seconds_min": timing.min, "repeats": timing.repeats}
    entry["bandwidth"] = bandwidth
    if rates is not None:
        entry["share_of_copy"] = bandwidth / rates.copy_bandwidth
    if problem.kernel in ATTENTION:
        entry["flop_rate"] = rate
        if rates is not None:
            entry["share_of_matmul"] = rate / rates.matmul_rate
    beside = contiguous.get(problem.contiguous)
    if beside is not None and case.layout == "paged" and case.by == OURS:
        entry["share_of_contiguous"] = beside.median / timing.median
    return entry
