"""A request in the engine: what is known of it, what is computed, and which blocks hold that."""

from __future__ import annotations

import collections.abc
from collections.abc import Hashable

from sim.beams import BeamModel
from workloads.request import Request
from workloads.sampling import BeamSearch


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
    """The live state of one request, or of one output of a request that asks for several.

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
        group: the sequences of its request, itself included, if that asks for several outputs.
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
        "group",
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
        self.group: Group | None = None
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
        sequence = cls(request, prompt, max(prompt + 1, min(prompt + request.output_tokens, max_model_len)))
        if request.num_outputs > 1:
            sequence.group = Group(sequence)
        return sequence

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

    def limit(self, max_model_len: int) -> int:
        """Known tokens that it may have at its end by the client's limit and the model's: what a scheduler can know.

        At least `final`.
        """
        request = self.request
        if request.max_tokens is None:
            return self.final
        return max(self.final, min(request.prompt_tokens + request.max_tokens, max_model_len))

    @property
    def generated(self) -> int:
        """Output tokens so far, of this one output."""
        return self.known - self.request.prompt_tokens

    @property
    def generated_in_all(self) -> int:
        """Output tokens of its request so far, over all outputs."""
        group = self.group
        return self.generated if group is None else group.width * (group.known - self.request.prompt_tokens)

    @property
    def together(self) -> list[Sequence]:
        """The sequences of its request that hold blocks or would if they ran: this one, or its group's."""
        return [self] if self.group is None else self.group.live

    def keep_time(self, clock: Clock) -> None:
        """Lets `clock` count its tokens from now on; nothing else about it changes."""
        before = self.clock
        self._known += before.committed - clock.committed
        self._computed += before.scheduled - clock.scheduled
        self.clock = clock


class Group:
    """The sequences of a request that asks for several outputs. They come, run and go together (Kwon et al., §4.5).

    The first sequence computes what all of them begin with, the *common* tokens: the prompt, or after a preemption by
    recompute whatever they still shared. Then the group forks: the others share its blocks, and each writes the rest
    into blocks of its own. All gain a token in the same step: one that has caught up waits for the others.

    Args:
        first: the sequence that has just arrived.

    Attributes:
        width: how many there are once the group has forked.
        sequences: the first, and once it has forked for the first time all others; the same objects to the end.
        forked: whether all of them hold blocks now, not just the first.
        common: tokens that the first computes for all before the group forks.
        beams: says which sequences are replaced in each step; None if they are independent of one another.
    """

    __slots__ = ("_known", "beams", "common", "forked", "sequences", "width")

    def __init__(self, first: Sequence) -> None:
        request = first.request
        self.sequences = [first]
        self.width = request.num_outputs
        self.beams = (
            BeamModel(request.sampling, request.request_id) if isinstance(request.sampling, BeamSearch) else None
        )
        self.forked = False
        self.common = self._known = request.prompt_tokens

    @property
    def first(self) -> Sequence:
        """Stands for the request in queues, plans and tables."""
        return self.sequences[0]

    @property
    def live(self) -> list[Sequence]:
        """Those that hold blocks, or would if they ran."""
        return self.sequences if self.forked else self.sequences[:1]

    @property
    def known(self) -> int:
        """Tokens known of each sequence, whatever the first has still to compute for all."""
        return self.first.known if self.forked else self._known

    @property
    def caught_up(self) -> bool:
        """Whether every live sequence has computed what it is to compute before the group forks or gains a token."""
        return all(sequence.computed == sequence.known for sequence in self.live)

    def fork(self) -> list[Sequence]:
        """All sequences are live from now on, with the tokens that the group knows.

        Returns:
            All but the first; they hold nothing yet.
        """
        first, known = self.first, self.known
        if len(self.sequences) == 1:
            self.sequences += (Sequence(first.request, known, first.final) for _ in range(self.width - 1))
        self.forked = True
        for place, sequence in enumerate(self.sequences):
            sequence.group = self
            sequence.known = known
            sequence.order = first.order + place
        return self.sequences[1:]

    def start_over(self, common: int) -> None:
        """Only the first is live from now on, and has the `common` tokens to compute for all; nobody holds blocks."""
        self._known = self.known
        self.forked = False
        self.common = self.first.known = common
