"""SGLang's `schedule_policy` (0.5): in which order the waiting requests are tried. Whoever was retracted waits last.

The order is made anew whenever a prefill is to be formed. That the longest cached prefix goes first is the order of
Zheng et al., arXiv 2312.07104, §3.2, which in a depth-first walk of the tree has the best hit rate there is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sim.memory.interface import KVMemory
from sim.memory.radix import content_of
from sim.memory.radix_tree import RadixTree
from sim.scheduler.victims import FewestOutputTokens
from sim.sequence import Sequence

LONG_QUEUE = 128  # waiting requests from which on SGLang does not sort by prefix any more
IN_BATCH_TOKENS = 32  # IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD, and its DEPRIORITIZE


class ArrivalOrder(deque[Sequence]):
    """`fcfs`: first come, first served, whoever was retracted counting as just come."""

    arrive = return_preempted = deque.append
    pop = deque.popleft

    def __init__(self) -> None:
        super().__init__()

    def head(self) -> Sequence:
        return self[0]

    def victim(self, running: dict[Sequence, None]) -> Sequence:
        return FewestOutputTokens().victim(running)

    def arrange(self, memory: KVMemory, max_model_len: int) -> None:
        """Puts those in front that are to be tried first.

        Args:
            memory: says what is cached.
            max_model_len: bounds what a request may generate.
        """

    def _sort(self, rank: Callable[[Sequence], int]) -> None:
        """By rank, the smallest first; those of one rank stay as they stand."""
        ordered = sorted(self, key=rank)
        self.clear()
        self.extend(ordered)


class LongestPrefix(ArrivalOrder):
    """`lpm`: most cached tokens first.

    Of requests that begin alike with what is not cached yet, only one goes now, and the others last: they will find
    it. A queue of more than 128 stays as it stands.
    """

    def arrange(self, memory: KVMemory, max_model_len: int) -> None:
        if len(self) > LONG_QUEUE:
            return
        size, begun, rank = memory.block_size, RadixTree(), {}
        for sequence in self:
            hit = len(memory.lookup(sequence)) * size
            rank[sequence] = -hit
            if hit <= IN_BATCH_TOKENS and memory.caches_prefixes:
                content, pages = content_of(sequence, size), sequence.known // size
                path = begun.match(content, pages)
                if sum(same for _, same in path) * size >= IN_BATCH_TOKENS:
                    rank[sequence] = 1
                else:
                    begun.insert(content, pages, range(pages), begun.root, 0)
        self._sort(rank.__getitem__)


class LongestOutput(ArrivalOrder):
    """`lof`: whoever may generate most goes first."""

    def arrange(self, memory: KVMemory, max_model_len: int) -> None:
        self._sort(lambda one: one.request.prompt_tokens - one.limit(max_model_len))
