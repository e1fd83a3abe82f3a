"""`workload.limit`: the first requests, and no reading beyond them."""

from collections.abc import Iterator

import pytest

from workloads.errors import UserError
from workloads.limit import FirstRequests
from workloads.request import Request


class Countdown:
    """A workload that fails when read beyond its requests."""

    def __init__(self, available: int, num_requests: int | None = None) -> None:
        self._available = available
        self.num_requests = num_requests

    def __iter__(self) -> Iterator[Request]:
        for number in range(self._available):
            yield Request(number, float(number), 1, 1)
        raise AssertionError("read too far")


def test_takes_the_first_and_reads_no_further() -> None:
    workload = FirstRequests(Countdown(3), limit=3)
    assert [request.request_id for request in workload] == [0, 1, 2]
    assert [request.request_id for request in workload] == [0, 1, 2]


@pytest.mark.parametrize(("available", "expected"), [(10, 3), (2, 2), (None, None)])
def test_number_of_requests_is_the_smaller_one_if_both_are_known(available: int | None, expected: int | None) -> None:
    assert FirstRequests(Countdown(3, available), limit=3).num_requests == expected


@pytest.mark.parametrize("limit", [0, -5])
def test_a_limit_below_one_is_refused(limit: int) -> None:
    with pytest.raises(UserError) as error:
        FirstRequests(Countdown(3), limit)
    assert str(error.value) == (
        f"workload.limit is {limit}; expected a whole number of at least 1, or null for all requests."
    )
