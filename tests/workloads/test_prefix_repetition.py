"""Prompts that share prefixes: which tokens are shared, what is left to chance, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from workloads.arrivals import AllAtOnce
from workloads.errors import UserError
from workloads.generate import Synthetic
from workloads.lengths import Uniform
from workloads.prefix_repetition import PrefixRepetition
from workloads.request import HashIds

LENGTHS: dict[str, Any] = {"prompt_lengths": Uniform(3, 40), "output_lengths": Uniform(2, 9)}


def made(**changed: Any) -> PrefixRepetition:
    options: dict[str, Any] = {
        "num_prefixes": 4,
        "prefix_tokens": 40,
        "block_size": 16,
        "num_requests": 100,
        "rate": 1.0,
        "arrivals": AllAtOnce(),
        "seed": 3,
        "max_model_len": 200,
    }
    return PrefixRepetition(**{**options, **LENGTHS, **changed})


def test_whole_blocks_of_a_prefix_are_shared_and_nothing_else_is():
    # 40 tokens are two blocks of 16 and half a third one, which other prompts go on differently.
    requests = list(made())
    heads, tails = set(), []
    for request in requests:
        assert isinstance(request.prompt, HashIds)
        assert request.prompt.block_size == 16
        assert len(request.prompt.ids) == -(-request.prompt_tokens // 16)
        heads.add(request.prompt.ids[:2])
        tails += request.prompt.ids[2:]
    assert len(heads) == 4  # a hundred draws meet each of four prefixes, but for a chance of 4 * 0.75 ** 100
    ids = [id_ for head in heads for id_ in head] + tails
    assert len(set(ids)) == len(ids)


def test_lengths_and_arrivals_are_those_of_the_generator_behind_a_prefix():
    rest = list(Synthetic(100, 1.0, AllAtOnce(), seed=3, max_model_len=160, **LENGTHS))
    for ours, theirs in zip(made(), rest, strict=True):
        assert ours.prompt_tokens == theirs.prompt_tokens + 40
        assert (ours.output_tokens, ours.arrival_s) == (theirs.output_tokens, theirs.arrival_s)


def test_the_same_seed_gives_the_same_requests_and_another_one_others():
    assert list(made()) == list(made())
    assert list(made()) != list(made(seed=4))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("num_prefixes", 0, "workload.num_prefixes is 0; expected a whole number of at least 1"),
        ("prefix_tokens", 199, "leaves fewer than 2 of the 200 tokens"),
        ("block_size", 0, "workload.block_size is 0"),
    ],
)
def test_what_cannot_be_had_is_one_line(option, value, message):
    with pytest.raises(UserError, match=message):
        made(**{option: value})
