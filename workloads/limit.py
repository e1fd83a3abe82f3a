"""The first requests of a workload: `workload.limit=N`."""

from collections.abc import Iterator
from itertools import islice

from workloads.errors import UserError
from workloads.request import Request, Workload


class FirstRequests:
    """The first `limit` requests of `workload`, or all of them if there are fewer. Reads no further than that.

    Raises:
        UserError: `limit` is below 1.
    """

    def __init__(self, workload: Workload, limit: int) -> None:
        if limit < 1:
            raise UserError(
                f"workload.limit is {limit}; expected a whole number of at least 1, or null for all requests."
            )
        self.workload = workload
        self.limit = limit

    @property
    def num_requests(self) -> int | None:
        """The smaller of the limit and the workload's own number; None if the latter is not known."""
        available = self.workload.num_requests
        return None if available is None else min(self.limit, available)

    def __iter__(self) -> Iterator[Request]:
        return islice(self.workload, self.limit)
