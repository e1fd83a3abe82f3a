"""What a client asks for: the unit every workload yields and every scheduler serves."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from workloads.sampling import Sampling


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt known token by token.

    Args:
        ids: the prompt's token ids, in order.
    """

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HashIds:
    """A prompt known by one id for each `block_size` tokens; the last id may stand for a partial block.

    Args:
        ids: equal ids at equal positions mean equal content of the prompt up to and including that block
            (the ids are chained, as in the Mooncake and Bailian traces).
        block_size: tokens behind each id.
    """

    ids: tuple[int, ...]
    block_size: int


@runtime_checkable
class Promise(Protocol):
    """How well a request is to be served."""

    def met(self, ttft_s: float, tpot_s: float | None, e2el_s: float) -> bool:
        """Whether a request that took so many seconds was: to its first token, for each further one (None: it has
        none), and to its last.
        """


class Request(NamedTuple):
    """One request.

    Args:
        request_id: position in the workload, from 0.
        arrival_s: seconds since the workload's time zero; never decreasing from one request to the next.
        prompt_tokens: tokens of the prompt; at least 1.
        output_tokens: tokens that will be generated, for each output; at least 1. The simulator knows this, a
            scheduler may not use it unless its rule is an oracle's.
        priority: smaller goes first under a priority policy.
        prompt: what the prompt says, for prefix caching; None if only its length is known, and then it shares
            nothing with any other.
        sampling: how several outputs of the prompt come about; None if it has one.
        max_tokens: tokens that the client allows each output to have, at least `output_tokens`; None if it asks for
            just as many as will be generated, as a benchmark does. This a scheduler may use.
        after: request_id of the turn before it in its conversation, which comes earlier in the workload. It is sent
            when that one has finished and `think_s` have passed, but not before `arrival_s`; if that one gets no
            answer, never. None: at `arrival_s`.
        think_s: seconds between the end of that turn and this one's being sent; at least 0.
        traffic_class: name of the class of requests that it is one of, if there are several.
        promised: what it must meet to count for goodput; None: what the run promises to all.
    """

    request_id: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    prompt: TokenIds | HashIds | None = None
    sampling: Sampling | None = None
    max_tokens: int | None = None
    after: int | None = None
    think_s: float = 0.0
    traffic_class: str | None = None
    promised: Promise | None = None

    @property
    def num_outputs(self) -> int:
        """Outputs of this prompt."""
        return 1 if self.sampling is None else self.sampling.num_outputs


class Workload(Protocol):
    """A stream of requests in order of arrival; iterating twice gives the same requests twice."""

    def __iter__(self) -> Iterator[Request]: ...

    @property
    def num_requests(self) -> int | None:
        """How many requests will come, or None if that is not known without reading them all."""
