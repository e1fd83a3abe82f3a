"""`workload.max_tokens`: what clients allow, which is not what is generated."""

import pytest

from sim.sequence import Sequence
from tests.workloads.test_time_scale import REQUESTS, Listed
from workloads.asked_limit import AskedLimit
from workloads.errors import UserError
from workloads.request import Request


def test_each_request_asks_for_the_limit_or_for_its_own_output_if_that_is_more_and_nothing_else_changes() -> None:
    workload = AskedLimit(Listed(REQUESTS, 4), 3)
    for _ in range(2):  # iterating twice gives the same twice
        limited = list(workload)
        assert [request.max_tokens for request in limited] == [3, 3, 9, 3]  # outputs of 3, 2, 9 and 1
        assert [request._replace(max_tokens=None) for request in limited] == REQUESTS
    assert workload.num_requests == 4


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_a_limit_that_allows_nothing_is_refused(max_tokens: int) -> None:
    with pytest.raises(UserError, match=f"^workload.max_tokens is {max_tokens}; expected a whole number of at least 1"):
        AskedLimit(Listed(REQUESTS), max_tokens)


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len", "limit"),
    [
        (None, 100, 15),  # asks for what it generates: 10 + 5
        (40, 100, 50),  # 10 + 40
        (40, 30, 30),  # the model's limit is nearer
        (40, 12, 12),  # which also cuts off what it generates
        (5, 100, 15),
    ],
)
def test_a_sequence_may_have_what_its_client_and_the_model_allow(
    max_tokens: int | None, max_model_len: int, limit: int
) -> None:
    sequence = Sequence.of(Request(0, 0.0, 10, 5, max_tokens=max_tokens), max_model_len)
    assert sequence.limit(max_model_len) == limit
