"""`workload.sampling`: every request asks for the same, and nothing else about the workload changes."""

from __future__ import annotations

from collections.abc import Iterator

from workloads.request import Request, Workload
from workloads.sampling import BeamSearch, ParallelSampling
from workloads.several_outputs import SeveralOutputs


class Two:
    """Two requests; how many is not said."""

    num_requests = None

    def __iter__(self) -> Iterator[Request]:
        yield from (Request(0, 0.0, 3, 2), Request(1, 1.5, 4, 1, priority=2))


def test_every_request_asks_for_the_same_and_is_otherwise_as_before() -> None:
    sampling = BeamSearch(3, 1.0, 0)
    workload: Workload = SeveralOutputs(Two(), sampling)
    assert list(workload) == [request._replace(sampling=sampling) for request in Two()]
    assert list(workload) == list(workload)
    assert workload.num_requests is None


def test_a_request_has_as_many_outputs_as_it_asks_for() -> None:
    request = Request(0, 0.0, 3, 2)
    assert request.num_outputs == 1
    assert request._replace(sampling=ParallelSampling(4)).num_outputs == 4
    assert request._replace(sampling=BeamSearch(5, 1.0, 0)).num_outputs == 5
