"""`workload.time_scale`: the same requests, sooner or later."""

from collections.abc import Iterator
from itertools import count
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.errors import UserError
from workloads.request import HashIds, Request
from workloads.time_scale import ScaledTime


class Listed:
    """A workload of given requests."""

    def __init__(self, requests: list[Request], num_requests: int | None = None) -> None:
        self.requests = requests
        self.num_requests = num_requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)


REQUESTS = [
    Request(0, 0.0, 5, 3),
    Request(1, 1.5, 7, 2, priority=4),
    Request(2, 1.5, 2, 9, prompt=HashIds((3,), 16)),
    Request(3, 40.0, 1, 1),
]


@pytest.mark.parametrize(
    ("factor", "arrivals"), [(0.5, [0, 0.75, 0.75, 20]), (2, [0, 3, 3, 80]), (1, [0, 1.5, 1.5, 40])]
)
def test_arrivals_are_multiplied_and_nothing_else_changes(factor: float, arrivals: list[float]) -> None:
    workload = ScaledTime(Listed(REQUESTS), factor)
    for _ in range(2):  # iterating twice gives the same twice
        scaled = list(workload)
        assert [request.arrival_s for request in scaled] == arrivals
        assert [request._replace(arrival_s=0.0) for request in scaled] == [
            request._replace(arrival_s=0.0) for request in REQUESTS
        ]


@given(st.lists(st.floats(0, 1e9), max_size=20), st.floats(1e-9, 1e9))
def test_requests_stay_in_order_of_arrival(arrivals: list[float], factor: float) -> None:
    requests = [Request(i, arrival, 1, 1) for i, arrival in enumerate(sorted(arrivals))]
    scaled = [request.arrival_s for request in ScaledTime(Listed(requests), factor)]
    assert scaled == sorted(scaled)


class Endless:
    """A request a second, for ever."""

    num_requests = None

    def __iter__(self) -> Iterator[Request]:
        return (Request(number, float(number), 1, 1) for number in count())


def test_requests_are_streamed() -> None:
    stream = iter(ScaledTime(Endless(), 3.0))
    assert [next(stream).arrival_s for _ in range(3)] == [0.0, 3.0, 6.0]


@pytest.mark.parametrize("num_requests", [4, None])
def test_number_of_requests_is_the_workloads(num_requests: int | None) -> None:
    assert ScaledTime(Listed(REQUESTS, num_requests), 2.0).num_requests == num_requests


@pytest.mark.parametrize("factor", [0, -1.0, inf, nan])
def test_a_factor_that_is_no_finite_number_above_0_is_refused(factor: float) -> None:
    with pytest.raises(UserError) as error:
        ScaledTime(Listed(REQUESTS), factor)
    assert str(error.value) == f"workload.time_scale is {factor}; expected a finite number above 0."
