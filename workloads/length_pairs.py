"""Prompt and output lengths together, given that prompt + output fit the model's limit.

Prompt and output are independent until the limit comes in. `vllm bench` leaves out pairs that exceed it; drawing until
a pair fits has the same law, and that law is worked out here instead of drawn for: the probability of each prompt
length times the share of outputs that fit behind it. So no draw is ever repeated, each request takes exactly one random
number for its prompt and one for its output, and the means of what is generated are known.

Leaving long pairs out lowers the means. Where a `Lognormal` or `Gamma` asks for a mean, its location is found for which
the mean *after* that is the one asked for. If prompt and output both ask, each location depends on the other.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from workloads.errors import UserError
from workloads.lengths import Gamma, LengthDistribution, Lognormal, Probabilities

_RELATIVE_ERROR = 1e-8  # of the means; far below what any sample can show
_MAX_ROUNDS = 100  # means that need more leave out all but a few pairs
_LEAST_ACCEPTED = 0.01  # share of pairs that must fit


class LengthPairs:
    """The law of (prompt, output) given prompt + output <= limit.

    Args:
        prompt: shares of the prompt lengths before the limit has a say, from 0 tokens to the limit.
        output: the same of the outputs.
    """

    def __init__(self, prompt: Probabilities, output: Probabilities) -> None:
        self._limit = len(prompt) - 1
        fitting_prompts = prompt * _room(output)
        self._prompt_sums = np.cumsum(fitting_prompts)
        self._output_sums = np.cumsum(output)
        self.share_accepted = float(self._prompt_sums[-1])
        """Share of independent pairs that fit."""
        self.mean_prompt = _mean(fitting_prompts)
        """Tokens, of the pairs that fit."""
        self.mean_output = _mean(output * _room(prompt))
        """Tokens, of the pairs that fit."""

    def at(
        self, prompt_quantiles: NDArray[np.float64], output_quantiles: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens of prompts and of outputs; quantiles that are uniform on [0, 1) and independent give the law's pairs.

        A prompt depends on its own quantile only, an output on both.
        """
        prompts = _lengths_at(self._prompt_sums, prompt_quantiles * self._prompt_sums[-1], self._prompt_sums[-1])
        fitting = self._output_sums[self._limit - prompts]
        return prompts, _lengths_at(self._output_sums, output_quantiles * fitting, fitting)


def _lengths_at(
    sums: NDArray[np.float64], levels: NDArray[np.float64], end: NDArray[np.float64] | np.float64
) -> NDArray[np.int64]:
    """The first length at which `sums` exceeds each level; levels that rounding has put on `end` count as below it."""
    return np.searchsorted(sums, np.minimum(levels, np.nextafter(end, 0.0)), side="right").astype(np.int64)


def pairs_within(limit: int, prompt: LengthDistribution, output: LengthDistribution) -> LengthPairs:
    """The law of prompts and outputs that fit `limit` tokens together; with the means that are asked for.

    Raises:
        UserError: hardly any pair fits, or the means cannot be reached under the limit.
    """
    sides = _Side(prompt, limit), _Side(output, limit)
    if not (sides[0].shares * _room(sides[1].shares)).any():
        raise UserError(
            f"no prompt ({prompt}) with an output ({output}) fits the limit of {limit} tokens for both together. "
            "Make the lengths shorter or max_model_len larger."
        )
    try:
        _find_locations(*sides)
    except _OutOfReach:
        raise UserError(
            f"the mean lengths asked for (prompt: {prompt}; output: {output}) cannot be reached under the limit of "
            f"{limit} tokens for both together. Lower a mean, or make max_model_len larger."
        ) from None
    pairs = LengthPairs(sides[0].shares, sides[1].shares)
    if pairs.share_accepted < _LEAST_ACCEPTED:
        raise UserError(
            f"under {_LEAST_ACCEPTED:.0%} of prompts ({prompt}) with outputs ({output}) would fit the limit of {limit} "
            "tokens for both together; what is left has little to do with either. "
            "Make the lengths shorter or max_model_len larger."
        )
    return pairs


class _OutOfReach(Exception):
    """No location gives the mean."""


class _Side:
    """Prompts or outputs while the locations are being found.

    Starts at the lowest location, where every length is 1.
    """

    def __init__(self, lengths: LengthDistribution, limit: int) -> None:
        self._lengths = lengths
        self._limit = limit
        if isinstance(lengths, (Lognormal, Gamma)):
            self._location = lengths.lowest_location
            self.shares = lengths.probabilities(limit, self._location)
        else:
            self.shares = lengths.probabilities(limit)

    def reach_mean(self, room: Probabilities) -> bool:
        """Moves the location up to where the mean is the one asked for, if `room` is what the others leave (`_room`).

        True if there was anything to do. Raises _OutOfReach.
        """
        lengths = self._lengths
        if not isinstance(lengths, (Lognormal, Gamma)):
            return False

        def excess(location: float) -> float:
            return math.log(_mean(lengths.probabilities(self._limit, location) * room) / lengths.mean)

        longest = int(np.flatnonzero(room)[-1])  # that finds any room
        location = _zero_of_rising(excess, self._location, lengths.highest_location(longest))
        if location == self._location:
            return False
        self._location = location
        self.shares = lengths.probabilities(self._limit, location)
        return True


def _find_locations(prompt: _Side, output: _Side) -> None:
    """Gives both sides the means they ask for. Raises _OutOfReach.

    The longer the outputs, the less room for long prompts, and so the higher the location that gives the prompts their
    mean; and the other way round. Started from below, both therefore only rise, and stop at the lowest pair of
    locations that gives both means, if there is any.
    """
    for _ in range(_MAX_ROUNDS):
        moved = prompt.reach_mean(_room(output.shares))
        moved |= output.reach_mean(_room(prompt.shares))
        if not moved:
            return
    raise _OutOfReach


def _zero_of_rising(function: Callable[[float], float], low: float, highest: float) -> float:
    """Where a continuous function that rises with its argument is 0; `low` itself if it is not below 0 there.

    False position in the Illinois variant (Dowell and Jarratt, BIT 11, 1971). Raises _OutOfReach if the function is
    still below 0 at `highest`.
    """
    at_low = function(low)
    if at_low >= -_RELATIVE_ERROR:
        return low
    high, at_high, step = low, at_low, -at_low
    while at_high < 0:
        if high >= highest:
            raise _OutOfReach
        low, at_low = high, at_high
        high = min(high + step, highest)
        at_high, step = function(high), 2 * step
    replaced = 0
    while True:
        middle = low + (high - low) * at_low / (at_low - at_high)
        at_middle = function(middle)
        if abs(at_middle) < _RELATIVE_ERROR or not low < middle < high:
            return middle
        # An end that stays twice running counts half, which draws the next point to its side.
        if at_middle < 0:
            low, at_low = middle, at_middle
            at_high *= 0.5 if replaced == -1 else 1.0
            replaced = -1
        else:
            high, at_high = middle, at_middle
            at_low *= 0.5 if replaced == 1 else 1.0
            replaced = 1


def _room(others: Probabilities) -> Probabilities:
    """For each length from 0 to the limit, the share of the others that fit behind it."""
    return np.cumsum(others)[::-1]


def _mean(weights: Probabilities) -> float:
    """Mean length in tokens if lengths from 0 up have these weights."""
    # Not a matrix product: its rounding would depend on the number of threads, and so on the machine.
    return float((np.arange(len(weights)) * weights).sum() / weights.sum())
