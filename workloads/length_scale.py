"""A workload with longer or shorter requests: `workload.length_scale=X`."""

from collections.abc import Iterator
from math import inf

from workloads.errors import UserError
from workloads.request import Request, Workload


class ScaledLengths:
    """The requests of `workload`, prompts and outputs `factor` times as long, rounded, and at least 1 token.

    Client limits grow with the outputs. What would exceed the model's limit by it is the scheduler's business.

    Raises:
        UserError: `factor` is not a finite number above 0; or, when iterating, what a prompt says is known token by
            token, so that it has no other length.
    """

    def __init__(self, workload: Workload, factor: float) -> None:
        if not 0 < factor < inf:
            raise UserError(f"workload.length_scale is {factor}; expected a finite number above 0.")
        self.workload = workload
        self.factor = factor

    @property
    def num_requests(self) -> int | None:
        """As many as the workload has."""
        return self.workload.num_requests

    def __iter__(self) -> Iterator[Request]:
        for request in self.workload:
            if request.prompt is not None:
                raise UserError(
                    f"workload.length_scale is {self.factor}, but request {request.request_id} says what its prompt "
                    "is, which has one length only. Leave it out, or take a workload that tells lengths alone."
                )
            allowed = request.max_tokens
            yield request._replace(
                prompt_tokens=self._scaled(request.prompt_tokens),
                output_tokens=self._scaled(request.output_tokens),
                max_tokens=None if allowed is None else self._scaled(allowed),
            )

    def _scaled(self, tokens: int) -> int:
        return max(1, int(tokens * self.factor + 0.5))
