"""What clients allow their requests to generate: `workload.max_tokens=N`, whatever the workload."""

from collections.abc import Iterator

from workloads.errors import UserError
from workloads.request import Request, Workload


class AskedLimit:
    """The requests of `workload`, each with the limit `max_tokens`, or its true output where that is more.

    Nothing is cut off by it: whoever generates more than `max_tokens` had asked for that many. Policies that set
    memory aside for what a request may generate, not for what it will, reserve by it.

    Raises:
        UserError: `max_tokens` is below 1.
    """

    def __init__(self, workload: Workload, max_tokens: int) -> None:
        if max_tokens < 1:
            raise UserError(
                f"workload.max_tokens is {max_tokens}; expected a whole number of at least 1, or null if each request "
                "asks for what it generates."
            )
        self.workload = workload
        self.max_tokens = max_tokens

    @property
    def num_requests(self) -> int | None:
        """As many as the workload has."""
        return self.workload.num_requests

    def __iter__(self) -> Iterator[Request]:
        limit = self.max_tokens
        for request in self.workload:
            yield request._replace(max_tokens=max(limit, request.output_tokens))
