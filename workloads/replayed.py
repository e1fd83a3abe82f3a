"""Arrivals as in a trace of any format, for other requests than its own: `workload/arrivals=replayed`."""

from itertools import islice, pairwise

from workloads.arrivals import Replayed
from workloads.readers.trace import Trace


def replayed(path: str, format: str = "auto", time_unit: str | None = None, limit: int | None = None) -> Replayed:
    """The gaps of the trace at `path`, which are all read at once.

    Args:
        path: the file.
        format: its name; "auto" recognises it.
        time_unit: of formats that do not state it.
        limit: reads only so many requests; None: all.

    Raises:
        UserError: it cannot be read, or all of its requests come at once.
    """
    requests = Trace(path, format, time_unit=time_unit)
    times = [request.arrival_s for request in islice(requests, limit)]
    return Replayed([later - earlier for earlier, later in pairwise(times)])
