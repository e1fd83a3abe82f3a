"""The requests of `vllm bench serve --dataset-name random`: from the same seed, the same lengths in the same order.

So a run of that tool can be simulated request by request from nothing but its command line. Its prompts are unrelated
text, so they share nothing. All are ready at time 0 (`--request-rate inf`, its default); how many are in flight is
`workload.concurrency`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from workloads.errors import UserError
from workloads.request import Request


class VllmBenchRandom:
    """Lengths uniform over the whole numbers within a share of their means, as the random data set of vLLM draws them.

    First all prompts, then all outputs, from one NumPy generator. A tokenizer that puts a token of its own before each
    text (Llama's does, Qwen's does not) would take that off the mean of the prompts first; here none does.

    Args:
        num_requests: `--num-prompts`; at least 1.
        random_input_len: mean tokens of a prompt.
        random_output_len: mean tokens of an output.
        random_range_ratio: how far a length may be from its mean, as a share of it; at least 0 and below 1.
        seed: `--seed`; at least 0. None is refused: it marks a knob that a run still has to fill in.

    Raises:
        UserError: an argument is out of its range.
    """

    def __init__(
        self,
        num_requests: int,
        random_input_len: int,
        random_output_len: int,
        random_range_ratio: float,
        seed: int | None,
    ) -> None:
        lengths = {"random_input_len": random_input_len, "random_output_len": random_output_len}
        for name, value in ({"num_requests": num_requests} | lengths).items():
            if value < 1:
                raise UserError(f"workload.{name} is {value}; expected a whole number of at least 1.")
        if not 0 <= random_range_ratio < 1:
            raise UserError(f"workload.random_range_ratio is {random_range_ratio}; expected at least 0 and below 1.")
        if math.floor(random_input_len * (1 - random_range_ratio)) < 1:
            raise UserError(
                f"workload.random_input_len is {random_input_len}, so with workload.random_range_ratio="
                f"{random_range_ratio} a prompt may have no token; take a longer one or a smaller ratio."
            )
        if seed is None or seed < 0:
            shown = "null" if seed is None else seed
            raise UserError(f"workload.seed is {shown}; expected a whole number of at least 0.")
        self._num_requests = num_requests
        self._means = (random_input_len, random_output_len)
        self._range_ratio = random_range_ratio
        self._seed = seed

    @property
    def num_requests(self) -> int:
        """As many as were asked for."""
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        generator = np.random.default_rng(self._seed)
        prompts, outputs = (self._lengths(generator, mean) for mean in self._means)
        for request_id, (prompt_tokens, output_tokens) in enumerate(zip(prompts, outputs, strict=True)):
            yield Request(request_id, 0.0, prompt_tokens, output_tokens)

    def _lengths(self, generator: np.random.Generator, mean: int) -> list[int]:
        low = max(1, math.floor(mean * (1 - self._range_ratio)))
        high = math.ceil(mean * (1 + self._range_ratio))
        lengths: list[int] = generator.integers(low, high + 1, self._num_requests).tolist()
        return lengths
