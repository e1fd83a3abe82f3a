"""Which tokens a prompt has."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu.tokens import PromptTokens
from workloads.errors import UserError
from workloads.request import HashIds, Request, TokenIds


def request(number: int, length: int, prompt: TokenIds | HashIds | None = None) -> Request:
    return Request(number, 0.0, length, 1, prompt=prompt)


def test_given_ids_are_kept() -> None:
    tokens = PromptTokens(100)
    assert tokens.of(request(0, 3, TokenIds((99, 0, 42)))).tolist() == [99, 0, 42]
    assert tokens.of(request(1, 2, TokenIds((7, 8, 9)))).tolist() == [7, 8]  # ids of the output may follow
    assert tokens.notice is None


def test_ids_beyond_the_vocabulary_are_folded_and_that_is_said() -> None:
    tokens = PromptTokens(100)
    assert tokens.of(request(0, 3, TokenIds((100, 99, 250)))).tolist() == [0, 99, 50]
    tokens.of(request(1, 1, TokenIds((5,))))
    assert tokens.num_folded == 1
    assert tokens.notice is not None
    assert "1 prompts" in tokens.notice
    assert "vocabulary of 100" in tokens.notice
    assert "\n" not in tokens.notice


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (TokenIds((3, -1)), "negative or beyond 64 bits"),
        (TokenIds((3, 2**63)), "negative or beyond 64 bits"),
        (TokenIds((3,)), "has 2 tokens, but ids for only 1"),
        (HashIds((3,), 1), "has 2 tokens, but ids for only 1"),
    ],
)
def test_impossible_prompts_are_refused(prompt: TokenIds | HashIds, reason: str) -> None:
    with pytest.raises(UserError, match=f"request 5: .*{reason}"):
        PromptTokens(100).of(request(5, 2, prompt))


@given(
    ids=st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=4),
    block_size=st.integers(1, 9),
    cut=st.integers(0, 8),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_hash_id_stands_for_the_same_tokens_wherever_it_occurs(
    ids: list[int], block_size: int, cut: int, seed: int
) -> None:
    length = max(1, len(ids) * block_size - cut)
    prompt = PromptTokens(1000, seed).of(request(3, length, HashIds(tuple(ids), block_size)))
    assert prompt.shape == (length,)
    alone = [PromptTokens(1000, seed).of(request(9, block_size, HashIds((number,), block_size))) for number in ids]
    assert prompt.tolist() == np.concatenate(alone)[:length].tolist()


def test_blocks_of_other_hash_ids_differ() -> None:
    # 200 blocks of 16 tokens out of a vocabulary of 1000: that two are equal by chance has odds of about 1e-44.
    blocks = PromptTokens(1000).of(request(0, 3200, HashIds(tuple(range(-100, 100)), 16))).reshape(200, 16)
    assert len(np.unique(blocks, axis=0)) == 200


def test_prompts_of_a_length_depend_on_request_and_seed_alone() -> None:
    first = PromptTokens(1000, seed=1)
    first.of(request(8, 100))
    prompt = first.of(request(7, 50))
    assert prompt.tolist() == PromptTokens(1000, seed=1).of(request(7, 50)).tolist()
    others = [
        PromptTokens(1000, seed=2).of(request(7, 50)),
        first.of(request(8, 50)),
        first.of(request(7, 50, HashIds((7,), 50))),
    ]
    # Two of 50 unrelated tokens out of 1000 are equal with a chance of 0.05 each, so 6 and more with odds below 1e-11.
    assert all((prompt == other).sum() < 6 for other in others)


def test_tokens_are_spread_evenly_over_the_vocabulary() -> None:
    # 100,000 tokens over 10 ids: 10,000 each, with a standard deviation of sqrt(100,000 x 0.1 x 0.9) = 95.
    counts = np.bincount(PromptTokens(10).of(request(0, 100_000)), minlength=10)
    assert len(counts) == 10
    assert np.abs(counts - 10_000).max() < 5 * 95
