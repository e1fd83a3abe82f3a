"""Conversations in closed loop: each turn is sent when the one before it was answered and its client has thought.

A turn's prompt is all that was said before, prompts and outputs, and something new; so a cache may find what it kept of
either. When a conversation begins is the arrival process's business; everything behind it depends on how fast it is
served. A conversation whose next turn would not fit the model's limit is over, as it is for its client.

Starts, new tokens, outputs, numbers of turns and think times have a random generator each, so that changing one leaves
the others as they were.
"""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from workloads.arrivals import ArrivalProcess
from workloads.errors import UserError
from workloads.generate import check_limit, check_rate, check_seed
from workloads.length_pairs import pairs_within
from workloads.lengths import LengthDistribution
from workloads.request import Request, TokenIds
from workloads.turn_taking import ThinkTime, TurnCount

_SHARED = 1 << 20  # tokens that a system prompt may have: its ids come first


class Conversations:
    """A generated workload of conversations; prompt + output of each turn are at most `max_model_len`.

    Args:
        num_conversations: how many begin; at least 1.
        rate: conversations that begin per second, in the mean; above 0. Without effect if all begin at once.
        arrivals: how their beginnings follow one another.
        turns: how many turns each has, unless the model's limit ends it before.
        think: seconds between an answer and the next turn.
        prompt_lengths: tokens that each turn adds to what was said before.
        output_lengths: tokens of each answer.
        seed: of all random numbers; at least 0. None is refused: it marks a knob that a run still has to fill in.
        max_model_len: tokens of prompt and output together that the model takes. None is refused too.
        system_tokens: tokens that every conversation begins with, the same in all; at least 0.

    Raises:
        UserError: an argument is out of its range, or the lengths cannot be had under the limit.
    """

    def __init__(
        self,
        num_conversations: int,
        rate: float,
        arrivals: ArrivalProcess,
        turns: TurnCount,
        think: ThinkTime,
        prompt_lengths: LengthDistribution,
        output_lengths: LengthDistribution,
        seed: int | None,
        max_model_len: int | None,
        system_tokens: int = 0,
    ) -> None:
        if num_conversations < 1:
            raise UserError(
                f"workload.num_conversations is {num_conversations}; expected a whole number of at least 1."
            )
        check_rate(rate)
        self._seed = check_seed(seed)
        self._max_model_len = check_limit(max_model_len)
        if not 0 <= system_tokens <= min(self._max_model_len - 2, _SHARED):
            raise UserError(
                f"workload.system_tokens is {system_tokens}; expected 0 to {min(self._max_model_len - 2, _SHARED)}, "
                "which leaves room for one token of prompt and one of output."
            )
        self._num_conversations = num_conversations
        self._rate = rate
        self._arrivals = arrivals
        self._turns = turns
        self._think = think
        self._system = system_tokens
        # The first turn fits; of the later ones, those that do.
        self._pairs = pairs_within(self._max_model_len - system_tokens, prompt_lengths, output_lengths)

    @property
    def num_requests(self) -> int | None:
        """None: how many turns fit the model's limit is known when they are made."""
        return None

    def __iter__(self) -> Iterator[Request]:
        arrivals, prompts, outputs, turns, thoughts = (
            np.random.default_rng(seed) for seed in np.random.SeedSequence(self._seed).spawn(5)
        )
        next_id = 0
        starts = islice(self._arrivals.times(arrivals, self._rate), self._num_conversations)
        for conversation, start_s in enumerate(starts):
            num_turns = self._turns.draw(turns)
            think_s = [0.0] + [self._think.draw(thoughts) for _ in range(num_turns - 1)]
            new, answers = self._pairs.at(prompts.random(num_turns), outputs.random(num_turns))
            first_id = next_id
            said = self._system
            for turn in range(num_turns):
                prompt, output = said + int(new[turn]), int(answers[turn])
                said = prompt + output
                if said > self._max_model_len:
                    break
                yield Request(
                    next_id,
                    start_s,
                    prompt,
                    output,
                    prompt=TokenIds(self._ids(conversation, said)),
                    after=next_id - 1 if next_id > first_id else None,
                    think_s=think_s[turn],
                )
                next_id += 1

    def _ids(self, conversation: int, num_tokens: int) -> tuple[int, ...]:
        """Of the first tokens of a conversation: those of the system prompt, then some that no other has."""
        own = _SHARED + conversation * self._max_model_len
        return (*range(self._system), *range(own, own + num_tokens - self._system))
