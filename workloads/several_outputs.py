"""A workload whose requests all ask for several outputs: `workload.sampling=…`, whatever the workload."""

from collections.abc import Iterator

from workloads.request import Request, Workload
from workloads.sampling import Sampling


class SeveralOutputs:
    """The requests of `workload`, each with the same `sampling`."""

    def __init__(self, workload: Workload, sampling: Sampling) -> None:
        self.workload = workload
        self.sampling = sampling

    @property
    def num_requests(self) -> int | None:
        """As many as the workload has."""
        return self.workload.num_requests

    def __iter__(self) -> Iterator[Request]:
        sampling = self.sampling
        for request in self.workload:
            yield request._replace(sampling=sampling)
