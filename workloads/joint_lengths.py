"""Requests with lengths from a trace: prompt and output of each stay together, arrivals are generated.

Unlike with `Empirical` lengths, which draw prompts and outputs apart, long prompts keep the outputs that the trace has
with them. Each request takes one random number for its pair; arrivals have a generator of their own.
"""

from collections.abc import Iterator
from itertools import count, islice

import numpy as np

from workloads.arrivals import ArrivalProcess
from workloads.errors import UserError
from workloads.generate import check_limit, check_rate, check_seed
from workloads.readers.trace import Trace
from workloads.request import Request

_CHUNK = 4096  # requests; a different number would not give different workloads


class JointLengths:
    """A generated workload whose pairs of prompt and output are drawn, with replacement, from a trace.

    Args:
        path: the trace, of any format; its lengths are all in memory.
        num_requests: how many come; at least 1.
        rate: mean arrivals in requests/s; above 0. Without effect if all arrive at once.
        arrivals: how arrivals follow one another.
        seed: of all random numbers; at least 0. None is refused: it marks a knob that a run still has to fill in.
        max_model_len: tokens of prompt and output together that the model takes; longer pairs are not drawn. None is
            refused too.
        format: name of the trace's format; "auto" recognises it.
        time_unit: of formats that do not state it; the times are not looked at.
        source_limit: pairs of the first so many requests only; None: all.

    Raises:
        UserError: an argument is out of its range, the trace cannot be read, or no pair of it fits.
    """

    def __init__(
        self,
        path: str,
        num_requests: int,
        rate: float,
        arrivals: ArrivalProcess,
        seed: int | None,
        max_model_len: int | None,
        format: str = "auto",
        time_unit: str | None = None,
        source_limit: int | None = None,
    ) -> None:
        if num_requests < 1:
            raise UserError(f"workload.num_requests is {num_requests}; expected a whole number of at least 1.")
        if source_limit is not None and source_limit < 1:
            raise UserError(f"workload.source_limit is {source_limit}; expected a whole number of at least 1, or null.")
        check_rate(rate)
        self._seed = check_seed(seed)
        limit = check_limit(max_model_len)
        trace = islice(Trace(path, format, time_unit=time_unit), source_limit)
        pairs = [(request.prompt_tokens, request.output_tokens) for request in trace]
        fitting = [pair for pair in pairs if sum(pair) <= limit]
        if not fitting:
            raise UserError(
                f"none of the {len(pairs)} requests of {path} fits the limit of {limit} tokens for prompt and output. "
                "Take another trace, or make max_model_len larger."
            )
        self._pairs = np.array(fitting, dtype=np.int64)
        self._num_requests = num_requests
        self._rate = rate
        self._arrivals = arrivals

    @property
    def num_requests(self) -> int | None:
        """As asked for."""
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        return islice(self._endless(), self._num_requests)

    def _endless(self) -> Iterator[Request]:
        arrivals, draws = (np.random.default_rng(seed) for seed in np.random.SeedSequence(self._seed).spawn(2))
        arrivals_s = self._arrivals.times(arrivals, self._rate)
        for first in count(0, _CHUNK):
            drawn = self._pairs[(draws.random(_CHUNK) * len(self._pairs)).astype(np.int64)]
            yield from map(
                Request, range(first, first + _CHUNK), arrivals_s, drawn[:, 0].tolist(), drawn[:, 1].tolist()
            )
