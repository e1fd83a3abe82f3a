"""A workload in slow or fast motion: `workload.time_scale=X`."""

from collections.abc import Iterator
from math import inf

from workloads.errors import UserError
from workloads.request import Request, Workload


class ScaledTime:
    """The requests of `workload`, each arriving `factor` times as late: 0.5 doubles the rate, 2 halves it.

    Clients think as much longer or shorter.

    Raises:
        UserError: `factor` is not a finite number above 0.
    """

    def __init__(self, workload: Workload, factor: float) -> None:
        if not 0 < factor < inf:
            raise UserError(f"workload.time_scale is {factor}; expected a finite number above 0.")
        self.workload = workload
        self.factor = factor

    @property
    def num_requests(self) -> int | None:
        """As many as the workload has."""
        return self.workload.num_requests

    def __iter__(self) -> Iterator[Request]:
        factor = self.factor
        for request in self.workload:
            yield request._replace(arrival_s=request.arrival_s * factor, think_s=request.think_s * factor)
