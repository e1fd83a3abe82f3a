"""A share of a workload's requests, drawn from a seed: `workload.sample=X`."""

from array import array
from collections.abc import Iterator

import numpy as np

from workloads.errors import UserError
from workloads.request import Request, Workload

_DROPPED = -1


class Sampled:
    """Each request of `workload` with the same chance, at its own time; a turn goes with the one that it follows.

    They are numbered anew. Poisson arrivals stay Poisson, at `share` of the rate, and bursts are thinned out. Requests
    that share a prefix without following one another are drawn apart, which leaves fewer to share it.

    Args:
        workload: what is sampled from.
        share: above 0 and at most 1. A larger share of the same workload and seed has all requests of a smaller one.
        seed: of the draws; at least 0.

    Raises:
        UserError: `share` is out of range.
    """

    def __init__(self, workload: Workload, share: float, seed: int) -> None:
        if not 0 < share <= 1:
            raise UserError(f"workload.sample is {share}; expected a share above 0 and at most 1, or null for all.")
        self.workload = workload
        self.share = share
        self._seed = seed

    @property
    def num_requests(self) -> int | None:
        """None: only drawing would tell."""
        return None

    def __iter__(self) -> Iterator[Request]:
        generator = np.random.default_rng(self._seed)
        new_ids = array("q")  # of the workload's requests, by their position
        num_kept = 0
        for request in self.workload:
            drawn = generator.random() < self.share
            after = None if request.after is None else new_ids[request.after]
            if after == _DROPPED or (after is None and not drawn):
                new_ids.append(_DROPPED)
                continue
            new_ids.append(num_kept)
            yield request._replace(request_id=num_kept, after=after)
            num_kept += 1
