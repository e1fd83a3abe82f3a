"""Several classes of requests in one workload: each with lengths, priority and promise of its own.

Which class a request is of is drawn from the seed, each as likely as its weight says, whenever it comes: bursts are of
all classes. Arrivals, classes, and prompts and outputs of each class have a random generator each. Adding a class at
the end leaves the lengths of the others as they were.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from workloads.arrivals import ArrivalProcess
from workloads.errors import UserError
from workloads.generate import check_limit, check_rate, check_seed
from workloads.length_pairs import LengthPairs, pairs_within
from workloads.lengths import LengthDistribution
from workloads.request import Promise, Request

_CHUNK = 4096  # random numbers drawn at once


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """Requests of one kind.

    Args:
        weight: its share of the requests is this over the sum of all weights; above 0.
        prompt_lengths: tokens of its prompts.
        output_lengths: tokens of its outputs.
        priority: smaller goes first under a priority policy.
        promised: what its requests must meet to count for goodput; None: what the run promises to all.

    Raises:
        UserError: a weight that is not above 0 and finite.
    """

    weight: float
    prompt_lengths: LengthDistribution
    output_lengths: LengthDistribution
    priority: int = 0
    promised: Promise | None = None

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise UserError(f"a class of workload.classes has weight={self.weight}; expected a finite number above 0.")


class Mixture:
    """A generated workload of several classes; prompt + output of each request are at most `max_model_len`.

    Args:
        classes: by name; at least one.
        num_requests: how many come, of all classes together; at least 1.
        rate: mean arrivals of all together in requests/s; above 0. Without effect if all arrive at once.
        arrivals: how arrivals follow one another, of whatever class.
        seed: of all random numbers; at least 0. None is refused: it marks a knob that a run still has to fill in.
        max_model_len: tokens of prompt and output together that the model takes; at least 2. None is refused too.

    Raises:
        UserError: an argument is out of its range, or lengths cannot be had under the limit.
    """

    def __init__(
        self,
        classes: dict[str, TrafficClass],
        num_requests: int,
        rate: float,
        arrivals: ArrivalProcess,
        seed: int | None,
        max_model_len: int | None,
    ) -> None:
        if not classes:
            raise UserError("workload.classes is empty; expected a class at least.")
        if num_requests < 1:
            raise UserError(f"workload.num_requests is {num_requests}; expected a whole number of at least 1.")
        check_rate(rate)
        self._seed = check_seed(seed)
        limit = check_limit(max_model_len)
        self._classes = classes
        self._pairs = {
            name: pairs_within(limit, kind.prompt_lengths, kind.output_lengths) for name, kind in classes.items()
        }
        self._num_requests = num_requests
        self._rate = rate
        self._arrivals = arrivals

    @property
    def num_requests(self) -> int | None:
        """As asked for."""
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        arrivals, choices, *apart = (
            np.random.default_rng(seed) for seed in np.random.SeedSequence(self._seed).spawn(2 + 2 * len(self._classes))
        )
        names = list(self._classes)
        weights = np.cumsum([kind.weight for kind in self._classes.values()])
        lengths = {name: _lengths(self._pairs[name], *apart[2 * k : 2 * k + 2]) for k, name in enumerate(names)}
        times = islice(self._arrivals.times(arrivals, self._rate), self._num_requests)
        for request_id, arrival_s in enumerate(times):
            name = names[int(np.searchsorted(weights, choices.random() * weights[-1], side="right"))]
            kind = self._classes[name]
            prompt, output = next(lengths[name])
            yield Request(
                request_id, arrival_s, prompt, output, kind.priority, traffic_class=name, promised=kind.promised
            )


def _lengths(
    pairs: LengthPairs, prompts: np.random.Generator, outputs: np.random.Generator
) -> Iterator[tuple[int, int]]:
    """Prompts and outputs of one class, without end."""
    while True:
        drawn = pairs.at(prompts.random(_CHUNK), outputs.random(_CHUNK))
        yield from zip(*(column.tolist() for column in drawn), strict=True)
