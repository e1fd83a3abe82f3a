"""Arrivals for requests that have none: lengths from a file, times from a process at a rate."""

from collections.abc import Iterator

import numpy as np

from workloads.arrivals import AllAtOnce, ArrivalProcess
from workloads.errors import UserError
from workloads.generate import check_rate
from workloads.request import Request, Workload


class Timed:
    """The requests of `workload` in their order, arriving as those of a synthetic workload with the same seed would.

    A turn that follows another in closed loop has no arrival of its own, but that of the latest request which follows
    nobody: of its own conversation, where the turns of one stand together.

    Args:
        workload: its own times are not looked at.
        arrivals: how arrivals follow one another.
        rate: mean arrivals in requests/s; above 0. None if all arrive at once.
        seed: of the arrivals; at least 0.

    Raises:
        UserError: no rate where one is needed, or an argument out of its range.
    """

    def __init__(self, workload: Workload, arrivals: ArrivalProcess, rate: float | None, seed: int) -> None:
        if rate is None and not isinstance(arrivals, AllAtOnce):
            raise UserError("workload.rate is null; give the mean number of arrivals per second.")
        if rate is not None:
            check_rate(rate)
        if seed < 0:
            raise UserError(f"workload.seed is {seed}; expected a whole number of at least 0.")
        self.workload = workload
        self._arrivals = arrivals
        self._rate = 1.0 if rate is None else rate
        self._seed = seed

    @property
    def num_requests(self) -> int | None:
        """As the workload knows it."""
        return self.workload.num_requests

    def __iter__(self) -> Iterator[Request]:
        times = self._times()  # which do not end
        arrival_s = 0.0
        for request in self.workload:
            if request.after is None:
                arrival_s = next(times)
            yield request._replace(arrival_s=arrival_s)

    def _times(self) -> Iterator[float]:
        generator = np.random.default_rng(np.random.SeedSequence(self._seed).spawn(1)[0])
        return self._arrivals.times(generator, self._rate)
