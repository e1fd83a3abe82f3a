"""Prompts that begin with one of a few prefixes, as the `prefix_repetition` data set of `vllm bench serve` has them.

Which prefix a request has is drawn from the seed, each as likely as the others. What follows it is like no other.
"""

from collections.abc import Iterator

import numpy as np

from workloads.arrivals import ArrivalProcess
from workloads.errors import UserError
from workloads.generate import Synthetic
from workloads.lengths import LengthDistribution
from workloads.request import HashIds, Request

_STREAM = 3  # of the seed; `Synthetic` has those from 0 to 2


class PrefixRepetition:
    """A generated workload with shared prefixes; prompt + output of each request are at most `max_model_len`.

    Args:
        num_prefixes: different prefixes; at least 1.
        prefix_tokens: of each; at least 1.
        block_size: tokens behind each hash id, at least 1; whole blocks of a prefix are shared.
        num_requests: as in `Synthetic`, and so are the next three.
        rate: mean arrivals in requests/s.
        arrivals: how arrivals follow one another.
        prompt_lengths: distribution of the tokens behind the prefix.
        output_lengths: as in `Synthetic`, and so are the next two.
        seed: of all random numbers.
        max_model_len: tokens of prompt and output together that the model takes.

    Raises:
        UserError: an argument is out of its range, or the lengths cannot be had under the limit.
    """

    def __init__(
        self,
        num_prefixes: int,
        prefix_tokens: int,
        block_size: int,
        num_requests: int,
        rate: float,
        arrivals: ArrivalProcess,
        prompt_lengths: LengthDistribution,
        output_lengths: LengthDistribution,
        seed: int | None,
        max_model_len: int | None,
    ) -> None:
        for name, value in (
            ("num_prefixes", num_prefixes),
            ("prefix_tokens", prefix_tokens),
            ("block_size", block_size),
        ):
            if value < 1:
                raise UserError(f"workload.{name} is {value}; expected a whole number of at least 1.")
        if max_model_len is not None and max_model_len - prefix_tokens < 2:
            raise UserError(
                f"workload.prefix_tokens is {prefix_tokens}, which leaves fewer than 2 of the {max_model_len} tokens "
                "of max_model_len to prompt and output; choose a shorter prefix."
            )
        left = None if max_model_len is None else max_model_len - prefix_tokens
        self._rest = Synthetic(num_requests, rate, arrivals, prompt_lengths, output_lengths, seed, left)
        self._seed = seed
        self._num_prefixes = num_prefixes
        self._prefix_tokens = prefix_tokens
        self._block_size = block_size

    @property
    def num_requests(self) -> int | None:
        """As asked for."""
        return self._rest.num_requests

    def __iter__(self) -> Iterator[Request]:
        prefixes = np.random.default_rng(np.random.SeedSequence(self._seed).spawn(_STREAM + 1)[_STREAM])
        shared = self._prefix_tokens // self._block_size
        next_id = self._num_prefixes * shared
        for request in self._rest:
            first = shared * int(prefixes.integers(self._num_prefixes))
            tokens = self._prefix_tokens + request.prompt_tokens
            own = -(-tokens // self._block_size) - shared
            ids = (*range(first, first + shared), *range(next_id, next_id + own))
            next_id += own
            yield request._replace(prompt_tokens=tokens, prompt=HashIds(ids, self._block_size))
