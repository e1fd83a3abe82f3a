"""Predicted against measured: the same requests, side by side, and the error of every figure.

Requests are aligned by name. A prediction of a recorded run knows them by their order of arrival, which is then their
name. **Latencies of both sides begin when the measured engine took the request in**, so that a prediction that is a
second late is a second wrong, and none gains by another idea of when a request arrived.

An error is predicted over measured, less 1, in percent; null where either is missing or the measured figure is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.served import Floats, Series, Served
from workloads.errors import UserError

PERCENTILES = (50, 90, 95, 99)
STATISTICS = ("mean", *(f"p{p}" for p in PERCENTILES))
LATENCIES = ("ttft", "tpot", "itl", "e2e")
Figure = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Aligned:
    """The requests that both runs served, in the order of the measured one.

    Args:
        predicted: latencies in seconds, by name; shape (n,) each, TPOT only of requests with more than one token.
        measured: the same.
        missing: how many requests only one of the runs served.
    """

    predicted: dict[str, Floats]
    measured: dict[str, Floats]
    arrival_s: Floats
    missing: int


def align(predicted: Served, measured: Served) -> Aligned:
    """Brings the two together.

    Raises:
        UserError: they have no request in common, or one of them has another length in each.
    """
    if not set(predicted.names) & set(measured.names) and len(predicted.names) <= len(measured.names):
        places = {str(place): place for place in range(len(measured.names))}  # predicted by order of arrival
    else:
        places = {name: place for place, name in enumerate(measured.names)}
    pairs = [(row, places[name]) for row, name in enumerate(predicted.names) if name in places]
    if not pairs:
        raise UserError(
            f"{predicted.source} and {measured.source} have no request in common; compare runs of one workload."
        )
    pairs.sort(key=lambda pair: pair[1])
    rows, columns = (np.array(side) for side in zip(*pairs, strict=True))
    for name, ours, theirs in (
        ("input", predicted.input_tokens[rows], measured.input_tokens[columns]),
        ("output", predicted.output_tokens[rows], measured.output_tokens[columns]),
    ):
        if (ours != theirs).any():
            at = int((ours != theirs).argmax())
            raise UserError(
                f"request {measured.names[columns[at]]} has {ours[at]} {name} tokens in {predicted.source} and "
                f"{theirs[at]} in {measured.source}; compare runs of one workload."
            )
    arrival, tokens = measured.arrival_s[columns], measured.output_tokens[columns]
    return Aligned(
        _latencies(predicted, rows, arrival, tokens),
        _latencies(measured, columns, arrival, tokens),
        arrival,
        len(predicted.names) + len(measured.names) - 2 * len(pairs),
    )


def compare(predicted: Served, measured: Served) -> dict[str, Any]:
    """Everything that `validation.json` says.

    Raises:
        UserError: as `align`.
    """
    aligned = align(predicted, measured)
    metrics: dict[str, dict[str, Figure]] = {}
    for name in LATENCIES:
        if name == "itl":
            ours, theirs = _itl(predicted), _itl(measured)
        else:
            ours, theirs = _statistics(aligned.predicted[name]), _statistics(aligned.measured[name])
        metrics[name] = {which: figure(ours.get(which), theirs.get(which)) for which in STATISTICS}
    return {
        "predicted": predicted.source,
        "measured": measured.source,
        "requests": len(aligned.arrival_s),
        "requests_of_one_only": aligned.missing,
        "metrics": metrics,
        "throughput": {
            name: figure(ours, theirs)
            for name, ours, theirs in zip(
                ("duration", "request_throughput", "output_throughput", "total_token_throughput"),
                _throughput(predicted),
                _throughput(measured),
                strict=True,
            )
        },
        "preemptions": figure(predicted.preemptions, measured.preemptions),
        "series": _series(predicted.series, measured.series),
    }


def figure(predicted: float | None, measured: float | None) -> Figure:
    """`{predicted, measured, error_pct}`."""
    error = None if predicted is None or not measured else 100 * (predicted / measured - 1)
    return {"predicted": predicted, "measured": measured, "error_pct": error}


def sampled(series: Series, times: Floats) -> dict[str, Floats | None]:
    """The state at each of `times`: that of the last record at or before it, nothing running outside of the records."""
    at = np.searchsorted(series.time_s, times, side="right") - 1
    return {
        name: None if values is None else np.where(at >= 0, values[np.maximum(at, 0)], 0.0)
        for name, values in (("running", series.running), ("waiting", series.waiting), ("kv_use", series.kv_use))
    }


def _latencies(served: Served, rows: Any, arrival: Floats, tokens: Any) -> dict[str, Floats]:
    first, last = served.first_token_s[rows], served.last_token_s[rows]
    several = tokens > 1
    return {
        "ttft": first - arrival,
        "tpot": (last - first)[several] / (tokens[several] - 1),
        "e2e": last - arrival,
    }


def _statistics(values: Floats) -> dict[str, float]:
    if not len(values):
        return {}
    return {"mean": float(values.mean()), **{f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}}


def _itl(served: Served) -> dict[str, float]:
    return served.itl_figures if served.itl_s is None else _statistics(served.itl_s)


def _throughput(served: Served) -> tuple[float, float, float, float]:
    """Seconds from the first arrival to the last token; requests, output tokens and all tokens a second."""
    duration = float(served.last_token_s.max() - served.arrival_s.min())
    output, every = int(served.output_tokens.sum()), int((served.input_tokens + served.output_tokens).sum())
    return duration, len(served.names) / duration, output / duration, every / duration


def _series(predicted: Series | None, measured: Series | None) -> dict[str, Any] | None:
    """Means over the measured ticks, and the mean absolute difference at a tick over the measured mean, in percent."""
    if predicted is None or measured is None:
        return None
    ours, theirs = sampled(predicted, measured.time_s), sampled(measured, measured.time_s)
    compared: dict[str, Any] = {}
    for name, expected in theirs.items():
        got = ours[name]
        if got is None or expected is None:
            compared[name] = None
            continue
        mean = float(expected.mean())
        difference = float(np.abs(got - expected).mean())
        compared[name] = figure(float(got.mean()), mean) | {
            "mean_abs_error_pct": 100 * difference / mean if mean else None
        }
    return compared
