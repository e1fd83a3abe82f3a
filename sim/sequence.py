"""A request in the engine: what is known of it, what is computed, and which blocks hold that."""

from __future__ import annotations

import collections.abc
from collections.abc import Hashable

from workloads.request import Request


class Clock:
    """Counts the steps of the sequences that decode in every step, so that none of them has to be touched in a step.

    Args:
        scheduled: steps in which they have computed a token or are about to.
        committed: those of them that are over.
    """

    __slots__ = ("committed", "scheduled")

    def __init__(self) -> None:
        self.scheduled = 0
        self.committed = 0


STILL = Clock()  # never ticks: the clock of everyone else


class Sequence:
    """The live state of one request.

    The *known tokens* are the prompt and what has been generated so far; *computed* of them have their KV in the pool
    or get it in the step being run. There is no separate prefill or decode: each step lets computed catch up.

    Args:
        request: what the client asked for.
        known: tokens known so far; the scheduler adds one for each token generated.
        final: known tokens at which it finishes. Its last token is never computed, so it fills `final - 1` slots.

    Attributes:
        blocks: block table, physical ids in order; only the memory policy writes it.
        keys: prefix keys of its first blocks, or None until they are asked for; only the memory policy writes them.
        clock: adds its ticks to known and computed; see `Clock`.
        order: its place in the running queue; later admissions have larger numbers.
        preemptions: how often it lost its blocks.
        hit_tokens: prefix-cache hit at its first admission; None before that.
    """

    __slots__ = (
        "_computed",
        "_known",
        "blocks",
        "clock",
        "final",
        "first_scheduled_s",
        "first_token_s",
        "hit_tokens",
        "keys",
        "last_token_s",
        "order",
        "preemptions",
        "request",
    )

    def __init__(self, request: Request, known: int, final: int) -> None:
        self.request = request
        self.final = final
        self.clock = STILL
        self._known = known
        self._computed = 0
        self.blocks: collections.abc.Sequence[int] = []
        self.keys: list[Hashable] | None = None
        self.order = 0
        self.preemptions = 0
        self.hit_tokens: int | None = None
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

    @classmethod
    def of(cls, request: Request, max_model_len: int) -> Sequence:
        """A sequence that has just arrived.

        Args:
            request: what the client asked for.
            max_model_len: most tokens, prompt and output together; a request that reaches it is cut off there. A
                prompt at the limit still yields the one token of its prefill, as in vLLM.
        """
        prompt = request.prompt_tokens
        return cls(request, prompt, max(prompt + 1, min(prompt + request.output_tokens, max_model_len)))

    @property
    def known(self) -> int:
        """Tokens known so far."""
        return self._known + self.clock.committed

    @known.setter
    def known(self, tokens: int) -> None:
        self._known = tokens - self.clock.committed

    @property
    def computed(self) -> int:
        """Tokens with KV in the pool, those of the step being run included."""
        return self._computed + self.clock.scheduled

    @computed.setter
    def computed(self, tokens: int) -> None:
        self._computed = tokens - self.clock.scheduled

    @property
    def generated(self) -> int:
        """Output tokens so far."""
        return self.known - self.request.prompt_tokens

    def keep_time(self, clock: Clock) -> None:
        """Lets `clock` count its tokens from now on; nothing else about it changes."""
        before = self.clock
        self._known += before.committed - clock.committed
        self._computed += before.scheduled - clock.scheduled
        self.clock = clock
