"""Generated conversations: what a turn repeats, what seeds fix, and the closed forms of their lengths."""

from __future__ import annotations

import math
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.arrivals import AllAtOnce, Constant, Poisson
from workloads.conversations import Conversations
from workloads.errors import UserError
from workloads.lengths import Fixed, Uniform
from workloads.request import Request, TokenIds
from workloads.turn_taking import (
    ExponentialThinkTime,
    FixedThinkTime,
    FixedTurns,
    GeometricTurns,
    LognormalThinkTime,
    UniformTurns,
)


def made(**changed: Any) -> Conversations:
    options: dict[str, Any] = {
        "num_conversations": 40,
        "rate": 2.0,
        "arrivals": Poisson(),
        "turns": UniformTurns(1, 6),
        "think": ExponentialThinkTime(5.0),
        "prompt_lengths": Uniform(1, 30),
        "output_lengths": Uniform(1, 30),
        "seed": 3,
        "max_model_len": 4096,
    }
    return Conversations(**options | changed)


def ids(request: Request) -> tuple[int, ...]:
    assert isinstance(request.prompt, TokenIds)
    return request.prompt.ids


def by_conversation(requests: list[Request]) -> list[list[Request]]:
    roots: dict[int, int] = {}
    for request in requests:
        roots[request.request_id] = request.request_id if request.after is None else roots[request.after]
    return [list(turns) for _, turns in groupby(requests, key=lambda request: roots[request.request_id])]


def test_a_conversation_of_fixed_lengths_is_known_in_advance() -> None:
    # A system prompt of 2, 3 new tokens a turn and answers of 4: prompts of 2 + 3 = 5, 5 + 4 + 3 = 12 and 19.
    fixed = {"arrivals": Constant(), "turns": FixedTurns(3), "think": FixedThinkTime(1.5)}
    lengths = {"prompt_lengths": Fixed(3), "output_lengths": Fixed(4), "system_tokens": 2}
    first, second, third, other, *_ = made(**fixed, **lengths)
    assert [(turn.prompt_tokens, turn.output_tokens) for turn in (first, second, third)] == [(5, 4), (12, 4), (19, 4)]
    assert [(turn.after, turn.think_s) for turn in (first, second, third)] == [(None, 0), (0, 1.5), (1, 1.5)]
    assert [turn.arrival_s for turn in (first, second, third, other)] == [0.5, 0.5, 0.5, 1.0]
    assert other.after is None
    assert ids(other)[:2] == ids(first)[:2]  # the system prompt is everybody's, and nothing else
    assert set(ids(other)[2:]).isdisjoint(ids(third)[2:])


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([FixedTurns(1), FixedTurns(9), UniformTurns(1, 12), GeometricTurns(4.0)]),
    st.integers(62, 400),
    st.sampled_from([0, 1, 2]),
    st.integers(0, 99),
)
def test_each_turn_repeats_what_was_said_and_fits_the_model(
    turns: Any, limit: int, system_tokens: int, seed: int
) -> None:
    options = {"turns": turns, "max_model_len": limit, "system_tokens": system_tokens, "seed": seed}
    requests = list(made(**options))
    assert requests == list(made(**options))
    assert [request.request_id for request in requests] == list(range(len(requests)))
    assert all(before.arrival_s <= after.arrival_s for before, after in pairwise(requests))
    conversations = by_conversation(requests)
    assert len(conversations) == 40
    for conversation in conversations:
        for turn in conversation:
            assert len(ids(turn)) == turn.prompt_tokens + turn.output_tokens <= limit
        for before, after in pairwise(conversation):
            assert after.after == before.request_id
            assert 1 <= after.prompt_tokens - len(ids(before)) <= 30
            assert ids(after)[: len(ids(before))] == ids(before)
    own = [set(ids(conversation[-1])[system_tokens:]) for conversation in conversations]
    assert len(set().union(*own)) == sum(map(len, own))


def test_a_conversation_ends_when_its_next_turn_would_not_fit() -> None:
    # Turns of 3 + 4 tokens under a limit of 20: two fit, 14 tokens, and the third would need 21.
    requests = list(made(turns=FixedTurns(9), prompt_lengths=Fixed(3), output_lengths=Fixed(4), max_model_len=20))
    assert [len(turns) for turns in by_conversation(requests)] == [2] * 40


def test_what_is_drawn_apart_stays_apart() -> None:
    def columns(**changed: Any) -> tuple[list[float], list[float], list[int]]:
        requests = list(made(**changed))
        starts = sorted({request.arrival_s for request in requests})
        return starts, [request.think_s for request in requests], [request.output_tokens for request in requests]

    usual = columns()
    other_arrivals, other_thoughts = columns(arrivals=AllAtOnce()), columns(think=FixedThinkTime(0.0))
    assert other_arrivals[1:] == usual[1:]
    assert (other_thoughts[0], other_thoughts[2]) == (usual[0], usual[2])
    assert columns(seed=4) != usual


# Standard deviations over means: sqrt(1 - 1/mean) of a geometric, sqrt((n² - 1) / 12) / mean of a uniform, 1 of an
# exponential, sqrt(exp(sigma²) - 1) of a lognormal.
@pytest.mark.parametrize(
    ("law", "mean", "variation"),
    [
        (FixedTurns(4), 4.0, 0.0),
        (UniformTurns(1, 9), 5.0, math.sqrt(80 / 12) / 5),
        (GeometricTurns(5.0), 5.0, math.sqrt(0.8)),
        (FixedThinkTime(2.5), 2.5, 0.0),
        (ExponentialThinkTime(10.0), 10.0, 1.0),
        (LognormalThinkTime(10.0, 0.8), 10.0, math.sqrt(math.exp(0.64) - 1)),
    ],
)
def test_turns_and_thoughts_have_their_means_and_spreads(law: Any, mean: float, variation: float) -> None:
    generator = np.random.default_rng(5)
    drawn = np.array([law.draw(generator) for _ in range(20_000)])
    assert drawn.mean() == pytest.approx(mean, rel=4 * variation / math.sqrt(20_000) + 1e-12)
    # Heavy tails: the spread itself is known to a tenth.
    assert drawn.std() / mean == pytest.approx(variation, rel=0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: made(num_conversations=0), "workload.num_conversations is 0; expected a whole number of at least 1."),
        (lambda: made(rate=0.0), "workload.rate is 0.0; expected a finite number of requests/s above 0."),
        (lambda: made(seed=None), "workload.seed is null; expected a whole number of at least 0."),
        (lambda: made(max_model_len=None), "workload.max_model_len is null; expected at least 2 tokens"),
        (lambda: made(system_tokens=4095), "workload.system_tokens is 4095; expected 0 to 4094"),
        (lambda: FixedTurns(0), "workload.turns.turns is 0; expected a whole number of at least 1."),
        (lambda: UniformTurns(3, 2), "workload.turns has low=3 and high=2; expected 1 <= low <= high."),
        (lambda: GeometricTurns(0.5), "workload.turns.mean is 0.5; expected a finite number of at least 1."),
        (lambda: FixedThinkTime(-1.0), "workload.think.seconds is -1.0; expected a finite number of at least 0."),
        (lambda: ExponentialThinkTime(0.0), "workload.think.mean is 0.0; expected a finite number of seconds above 0."),
        (lambda: LognormalThinkTime(1.0, 0.0), "workload.think.sigma is 0.0; expected above 0 and at most 10."),
    ],
)
def test_what_cannot_be_had_is_one_line(make: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert str(error.value).startswith(message)
