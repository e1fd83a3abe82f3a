"""Prompt and output lengths together, given that prompt + output fit the model's limit.

Prompt and output are independent until the limit comes in. `vllm bench` leaves out pairs that exceed it; drawing until a
pair fits has the same law, and that law is worked out here instead of drawn for: the probability of each prompt length
times the share of outputs that fit behind it. So no draw is ever repeated, each request takes exactly one random number for
its prompt and one for its output, and the means of what is generated are known.

Leaving long pairs out lowers the means. Where a `Lognormal` asks for a mean, its location is found for which the mean
*after* that is the one asked for. If prompt and output both ask, each location depends on the other.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workloads.errors import UserError
from workloads.lengths import LengthDistribution, Lognormal, Probabilities

_RELATIVE_ERROR = 1e-9  # of the means; far below what any sample can show
_MAX_ROUNDS = 500


@dataclass(frozen=True, slots=True)
class LengthPairs:
    """The law of (prompt, output) given prompt + output <= limit.

    Args:
        limit: tokens of prompt and output together.
        prompt: shares of the prompt lengths before the limit, from 0 to `limit` tokens.
        output: the same for the outputs.
    """

    limit: int
    prompt: Probabilities
    output: Probabilities

    @property
    def accepted(self) -> float:
        """The share of independent pairs that fit."""
        return float(self._fitting(self.prompt, self.output).sum())

    @property
    def means(self) -> tuple[float, float]:
        """Mean tokens of prompt and of output, of the pairs that fit."""
        return _mean(self._fitting(self.prompt, self.output)), _mean(self._fitting(self.output, self.prompt))

    def lengths(
        self, prompt_shares: NDArray[np.float64], output_shares: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Prompt and output tokens at the given quantiles, each in [0, 1): uniform random numbers give the law's pairs."""
        prompts = _quantiles(np.cumsum(self._fitting(self.prompt, self.output)), prompt_shares)
        output_sums = np.cumsum(self.output)
        outputs = _quantiles(output_sums, output_shares, output_sums[self.limit - prompts])
        return prompts, outputs

    @staticmethod
    def _fitting(lengths: Probabilities, others: Probabilities) -> Probabilities:
        """Share of the pairs that have each length and fit: element i of `others`' sums, reversed, is those up to limit - i."""
        return lengths * np.cumsum(others)[::-1]
