"""Synthetic workloads: arrivals at a rate, and lengths from distributions, all from one seed.

Arrivals, prompts and outputs each have a random generator of their own, so that changing one leaves the others as they
were: a sweep over rates serves the same prompts. Requests are made in chunks of a fixed size, so memory does not grow
with their number, and a longer run begins with the requests of a shorter one.
"""

import math
from collections.abc import Iterator
from itertools import count, islice, takewhile

import numpy as np

from workloads.arrivals import AllAtOnce, ArrivalProcess
from workloads.errors import UserError
from workloads.length_pairs import pairs_within
from workloads.lengths import LengthDistribution
from workloads.request import HashIds, Request

CHUNK = 4096
"""Requests made at a time; a different number would give different workloads."""


class Synthetic:
    """A generated workload; prompt + output of each request are at most `max_model_len`.

    The first request arrives one gap after time 0.

    Args:
        num_requests: how many requests come; at least 1. None if `duration_s` is given.
        rate: mean arrivals in requests/s; above 0. Without effect if all arrive at once.
        arrivals: how arrivals follow one another.
        prompt_lengths: distribution of the prompts' tokens.
        output_lengths: distribution of the outputs' tokens.
        seed: of all random numbers; at least 0. None is refused: it marks a knob that a run still has to fill in.
        max_model_len: tokens of prompt and output together that the model takes; at least 2. None is refused too.
        duration_s: seconds within which requests arrive, above 0; as many as come. None if `num_requests` is given.
        shared_prefix_tokens: tokens that every prompt begins with, the same in all, before those of `prompt_lengths`;
            at least 0. With 0, nothing is said of what prompts contain.

    Raises:
        UserError: an argument is out of its range, or the lengths cannot be had under the limit.
    """

    def __init__(
        self,
        num_requests: int | None,
        rate: float,
        arrivals: ArrivalProcess,
        prompt_lengths: LengthDistribution,
        output_lengths: LengthDistribution,
        seed: int | None,
        max_model_len: int | None,
        duration_s: float | None = None,
        shared_prefix_tokens: int = 0,
    ) -> None:
        check_rate(rate)
        _check_extent(arrivals, num_requests, duration_s)
        self._seed = check_seed(seed)
        self._arrivals = arrivals
        self._rate = rate
        longest = check_limit(max_model_len)
        if not 0 <= shared_prefix_tokens <= longest - 2:
            raise UserError(
                f"workload.shared_prefix_tokens is {shared_prefix_tokens}; expected 0 to {longest - 2}, "
                "which leaves room for one token of prompt and one of output."
            )
        self._prefix, self._longest = shared_prefix_tokens, longest
        self._pairs = pairs_within(longest - shared_prefix_tokens, prompt_lengths, output_lengths)
        self._num_requests = num_requests
        self._duration_s = duration_s

    @property
    def num_requests(self) -> int | None:
        """None if the workload ends by time: then only making the requests would tell."""
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        requests = self._endless()
        if self._duration_s is None:
            return islice(requests, self._num_requests)
        duration_s = self._duration_s
        return takewhile(lambda request: request.arrival_s < duration_s, requests)

    def _endless(self) -> Iterator[Request]:
        arrivals, prompts, outputs = (
            np.random.default_rng(seed) for seed in np.random.SeedSequence(self._seed).spawn(3)
        )
        arrivals_s = self._arrivals.times(arrivals, self._rate)
        for first in count(0, CHUNK):
            prompt_tokens, output_tokens = self._pairs.at(prompts.random(CHUNK), outputs.random(CHUNK))
            chunk = range(first, first + CHUNK)
            lengths = (prompt_tokens + self._prefix).tolist(), output_tokens.tolist()
            requests = map(Request, chunk, arrivals_s, *lengths)
            yield from map(self._with_prefix, requests) if self._prefix else requests

    def _with_prefix(self, request: Request) -> Request:
        """The request with ids for the tokens of its prompt: those of the prefix, then some that nobody else has."""
        own = self._prefix + request.request_id * self._longest
        ids = (*range(self._prefix), *range(own, own + request.prompt_tokens - self._prefix))
        return request._replace(prompt=HashIds(ids, block_size=1))


def check_rate(rate: float) -> None:
    """Raises UserError unless `rate` can be a mean number of requests/s."""
    if not (rate > 0 and math.isfinite(rate)):
        raise UserError(
            f"workload.rate is {rate}; expected a finite number of requests/s above 0. "
            "Use workload/arrivals=all_at_once to have no gaps at all."
        )


def check_seed(seed: int | None) -> int:
    """The seed, once a run has filled it in. Raises UserError."""
    if seed is None or seed < 0:
        raise UserError(f"workload.seed is {_shown(seed)}; expected a whole number of at least 0.")
    return seed


def check_limit(max_model_len: int | None) -> int:
    """The model's limit, once a run has filled it in. Raises UserError."""
    if max_model_len is None or max_model_len < 2:
        raise UserError(
            f"workload.max_model_len is {_shown(max_model_len)}; "
            "expected at least 2 tokens, one of prompt and one of output."
        )
    return max_model_len


def _check_extent(arrivals: ArrivalProcess, num_requests: int | None, duration_s: float | None) -> None:
    """Raises UserError unless exactly one of the two says where the workload ends."""
    if (num_requests is None) == (duration_s is None):
        raise UserError(
            f"workload.num_requests is {_shown(num_requests)} and workload.duration_s is {_shown(duration_s)}; "
            "expected one of them, and the other null."
        )
    if num_requests is not None and num_requests < 1:
        raise UserError(f"workload.num_requests is {num_requests}; expected a whole number of at least 1.")
    if duration_s is None:
        return
    if not (duration_s > 0 and math.isfinite(duration_s)):
        raise UserError(f"workload.duration_s is {duration_s}; expected a finite number of seconds above 0.")
    if isinstance(arrivals, AllAtOnce):
        raise UserError("workload.duration_s cannot end arrivals that all come at once. Use workload.num_requests.")


def _shown(value: float | None) -> str:
    return "null" if value is None else str(value)
