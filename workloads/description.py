"""What a workload asks for, in one pass over it: counts, rates, burstiness, lengths, prefix reuse and concurrency.

Memory grows with distinct lengths, with distinct prompt blocks and with requests in flight, not with requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workloads.columns import Columns, columns_of
from workloads.request import Workload
from workloads.statistics.arrivals import WINDOWS_S, Dispersion, Gaps, RateOverTime
from workloads.statistics.concurrency import Concurrency
from workloads.statistics.lengths import Correlation, LengthCounts
from workloads.statistics.prefix_reuse import PrefixReuse


class Description:
    """The statistics of the requests added so far.

    Args:
        block_size: tokens of a block, for prompts that are known token by token.
        seconds_per_output_token: how long a request is taken to stay for each token of its output.

    Attributes:
        num_requests: how many there are.
        first_s, last_s: first and last arrival, in seconds.
        gaps, rate, dispersions: how they arrive.
        lengths: of prompt, output (each output) and total (prompt and all outputs).
    """

    def __init__(self, block_size: int, seconds_per_output_token: float) -> None:
        self.num_requests = 0
        self.first_s = self.last_s = 0.0
        self.gaps, self.rate = Gaps(), RateOverTime()
        self.dispersions = [Dispersion(window_s) for window_s in WINDOWS_S]
        self.lengths = {"prompt": LengthCounts(), "output": LengthCounts(), "total": LengthCounts()}
        self._generated = 0
        self._correlation = Correlation()
        self._reuse = PrefixReuse(block_size)
        self._concurrency = Concurrency(seconds_per_output_token)

    def add(self, columns: Columns) -> None:
        """Takes in further requests."""
        if not self.num_requests:
            self.first_s = float(columns.arrival_s[0])
        self.last_s = float(columns.arrival_s[-1])
        self.num_requests += len(columns)
        self.gaps.add(columns.arrival_s)
        self.rate.add(columns.arrival_s)
        for dispersion in self.dispersions:
            dispersion.add(columns.arrival_s)
        generated = columns.output_tokens * columns.num_outputs
        total = columns.prompt_tokens + generated
        self._generated += int(generated.sum())
        for name, tokens in (("prompt", columns.prompt_tokens), ("output", columns.output_tokens), ("total", total)):
            self.lengths[name].add(tokens)
        self._correlation.add(columns.prompt_tokens, columns.output_tokens)
        self._concurrency.add(columns.arrival_s, columns.output_tokens, total)
        if columns.prompts is not None:
            self._reuse.add(columns.prompts, columns.prompt_tokens.tolist())

    def summary(self) -> dict[str, Any]:
        """Everything by name, ready for JSON. Rates count from the first arrival to the last; None if that is no time.

        `request_rate` is that of the gaps: one request fewer than there are, over the time between first and last.
        """
        span_s = self.last_s - self.first_s

        def per_second(count: int) -> float | None:
            return count / span_s if span_s else None

        prompt_tokens = self.lengths["prompt"].total
        counts = self.rate.counts()
        return {
            "requests": self.num_requests,
            "total_input_tokens": prompt_tokens,
            "total_output_tokens": self._generated,
            "first_arrival_s": self.first_s,
            "last_arrival_s": self.last_s,
            "span_s": span_s,
            "request_rate": per_second(self.num_requests - 1),
            "input_token_rate": per_second(prompt_tokens),
            "output_token_rate": per_second(self._generated),
            "gaps": self.gaps.summary(),
            "dispersion": [dispersion.summary() for dispersion in self.dispersions],
            "rate_over_time": {"bin_s": self.rate.bin_s, "requests": counts.tolist()},
            "lengths": {name: counts.summary() for name, counts in self.lengths.items()},
            "prompt_output_correlation": self._correlation.value,
            "prefix_reuse": self._reuse.summary(),
            "concurrency": self._concurrency.summary(span_s),
        }


def describe(
    workload: Workload,
    block_size: int,
    seconds_per_output_token: float,
    progress: Callable[[int, float], None] = lambda requests, now: None,
) -> Description:
    """Describes all of `workload`.

    Args:
        workload: is iterated over once.
        block_size: as in `Description`.
        seconds_per_output_token: as in `Description`.
        progress: told the number of requests so far, and the time of the latest.

    Raises:
        UserError: as iterating over the workload does.
    """
    description = Description(block_size, seconds_per_output_token)
    for columns in columns_of(workload):
        description.add(columns)
        progress(description.num_requests, description.last_s)
    return description
