"""Workloads of several classes, and pairs of lengths from a trace: shares, what stays apart, what stays together."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.arrivals import AllAtOnce, Constant, Poisson
from workloads.errors import UserError
from workloads.joint_lengths import JointLengths
from workloads.lengths import Fixed, Uniform
from workloads.mixture import Mixture, TrafficClass

CHAT = TrafficClass(3.0, Uniform(1, 40), Uniform(1, 60))
BATCH = TrafficClass(1.0, Fixed(500), Uniform(10, 20), priority=1)


def mixed(**changed: Any) -> Mixture:
    options: dict[str, Any] = {
        "classes": {"chat": CHAT, "batch": BATCH},
        "num_requests": 2000,
        "rate": 2.0,
        "arrivals": Poisson(),
        "seed": 3,
        "max_model_len": 2048,
    }
    return Mixture(**options | changed)


def lengths(mixture: Mixture, name: str) -> list[tuple[int, int]]:
    return [(one.prompt_tokens, one.output_tokens) for one in mixture if one.traffic_class == name]


def test_each_class_has_its_share_its_lengths_and_its_priority() -> None:
    requests = list(mixed(num_requests=10_000))
    chats = [request for request in requests if request.traffic_class == "chat"]
    # Binomial: 7,500 with a standard deviation of sqrt(10,000 * 0.75 * 0.25) = 43.3.
    assert len(chats) == pytest.approx(7500, abs=4 * 43.3)
    assert {request.priority for request in chats} == {0}
    assert max(request.prompt_tokens for request in chats) <= 40
    batches = [request for request in requests if request.traffic_class == "batch"]
    assert {(request.prompt_tokens, request.priority) for request in batches} == {(500, 1)}
    assert len(chats) + len(batches) == 10_000


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 99), st.lists(st.floats(0.1, 9.0), min_size=1, max_size=4))
def test_the_same_seed_gives_the_same_requests_in_order(seed: int, weights: list[float]) -> None:
    classes = {f"c{k}": TrafficClass(weight, Uniform(1, 9), Fixed(k + 1), k) for k, weight in enumerate(weights)}
    requests = list(mixed(classes=classes, num_requests=200, seed=seed))
    assert requests == list(mixed(classes=classes, num_requests=200, seed=seed))
    assert [request.request_id for request in requests] == list(range(200))
    assert all(before.arrival_s <= after.arrival_s for before, after in pairwise(requests))
    assert all(request.traffic_class == f"c{request.output_tokens - 1}" for request in requests)


def test_what_is_drawn_apart_stays_apart() -> None:
    usual = mixed()
    assert [one.arrival_s for one in usual] == [one.arrival_s for one in mixed(classes={"chat": CHAT})]
    assert lengths(usual, "chat") == lengths(mixed(arrivals=AllAtOnce()), "chat")
    # With a third class behind them, fewer are chats, but those have the same lengths in the same order.
    more = lengths(mixed(classes={"chat": CHAT, "batch": BATCH, "code": TrafficClass(4.0, Fixed(9), Fixed(9))}), "chat")
    assert 0 < len(more) < len(lengths(usual, "chat"))
    assert more == lengths(usual, "chat")[: len(more)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mixed(classes={}), "workload.classes is empty; expected a class at least."),
        (lambda: mixed(num_requests=0), "workload.num_requests is 0; expected a whole number of at least 1."),
        (lambda: mixed(rate=-1.0), "workload.rate is -1.0; expected a finite number of requests/s above 0."),
        (lambda: mixed(seed=None), "workload.seed is null; expected a whole number of at least 0."),
        (lambda: TrafficClass(0.0, Fixed(1), Fixed(1)), "a class of workload.classes has weight=0.0; expected"),
    ],
)
def test_what_cannot_be_had_is_one_line(make: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert str(error.value).startswith(message)


PAIRS = [(10, 100), (20, 50), (30, 10), (900, 5)]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    rows = [f"{number},{prompt},{output}" for number, (prompt, output) in enumerate(PAIRS)]
    path.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *rows]))
    return str(path)


def test_pairs_of_a_trace_stay_together_and_come_as_often_as_each_other(trace: str) -> None:
    # Under a limit of 200, three of the four fit; each of them has a third of 9,000, standard deviation 44.7.
    requests = list(JointLengths(trace, 9000, 1.0, Poisson(), seed=1, max_model_len=200))
    drawn = [(request.prompt_tokens, request.output_tokens) for request in requests]
    assert set(drawn) == set(PAIRS[:3])
    for pair in PAIRS[:3]:
        assert drawn.count(pair) == pytest.approx(3000, abs=4 * math.sqrt(9000 * 2 / 9))
    assert np.corrcoef(*zip(*drawn, strict=True))[0, 1] < -0.9  # as in the trace; apart, it would be 0
    assert [request.request_id for request in requests] == list(range(9000))


def test_pairs_are_the_seeds_and_arrivals_their_own(trace: str) -> None:
    usual = list(JointLengths(trace, 300, 1.0, Poisson(), 1, 2048))
    assert usual == list(JointLengths(trace, 300, 1.0, Poisson(), 1, 2048))
    steady = list(JointLengths(trace, 300, 1.0, Constant(), 1, 2048))
    assert [one.arrival_s for one in steady] == [float(number) for number in range(1, 301)]
    assert [one[2:] for one in steady] == [one[2:] for one in usual]
    assert usual != list(JointLengths(trace, 300, 1.0, Poisson(), 2, 2048))


def test_a_trace_may_be_drawn_from_in_part(trace: str) -> None:
    requests = JointLengths(trace, 100, 1.0, Poisson(), 1, 2048, source_limit=2)
    assert {request.prompt_tokens for request in requests} == {10, 20}


def test_a_trace_of_which_nothing_fits_is_one_line(trace: str) -> None:
    with pytest.raises(UserError) as error:
        JointLengths(trace, 100, 1.0, Poisson(), 1, 30)
    assert str(error.value) == (
        f"none of the 4 requests of {trace} fits the limit of 30 tokens for prompt and output. Take another trace, or "
        "make max_model_len larger."
    )
