"""A request in the engine: what is known of it, what is computed, and which blocks hold that."""

from __future__ import annotations

import collections.abc
from collections.abc import Hashable
from dataclasses import dataclass, field

from workloads.request import Request


@dataclass(slots=True, eq=False)
class Sequence:
    """The live state of one request.

    The *known tokens* are the prompt and what has been generated so far; *computed* of them have their KV in the pool
    or get it in the step being run. There is no separate prefill or decode: each step lets computed catch up.

    Args:
        request: what the client asked for.
        known: tokens known so far; the scheduler adds one for each token generated.
        final: known tokens at which it finishes. Its last token is never computed, so it fills `final - 1` slots.
        computed: tokens with KV in the pool; the scheduler sets it.
        blocks: block table, physical ids in order; only the memory policy writes it.
        keys: prefix keys of its first blocks, as many as were asked for so far; only the memory policy writes them.
        preemptions: how often it lost its blocks.
        hit_tokens: prefix-cache hit at its first admission; None before that.
    """

    request: Request
    known: int
    final: int
    computed: int = 0
    blocks: collections.abc.Sequence[int] = field(default_factory=list)
    keys: list[Hashable] = field(default_factory=list)
    preemptions: int = 0
    hit_tokens: int | None = None
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

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
    def generated(self) -> int:
        """Output tokens so far."""
        return self.known - self.request.prompt_tokens
