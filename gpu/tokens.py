"""Which token ids a request's prompt has, given what its workload tells of it.

Ids that a workload names are kept; ids it does not name are made up by a counter-based generator: each token is a hash
of a seed, of what it belongs to (a request, or a hash id) and of its place there. So equal hash ids give equal tokens
wherever they occur, and nothing has to be remembered.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from workloads.errors import UserError
from workloads.request import HashIds, Request, TokenIds

_WORD = (1 << 64) - 1
_REQUEST, _HASH_ID = 1, 2  # two streams, so that request 7 and hash id 7 have nothing in common


class PromptTokens:
    """Makes prompts for a vocabulary.

    Args:
        vocab_size: ids run from 0 to `vocab_size - 1`.
        seed: the run's seed; another one gives other prompts wherever the workload names no ids.

    Attributes:
        num_folded: prompts so far with ids beyond the vocabulary, which were taken modulo its size.
    """

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.num_folded = 0
        self._seed = seed

    @property
    def notice(self) -> str | None:
        """What a user should know of the prompts made so far, one line; None if there is nothing to say."""
        if self.num_folded == 0:
            return None
        return (
            f"{self.num_folded} prompts had token ids beyond the model's vocabulary of {self.vocab_size}; these were "
            f"taken modulo its size. Lengths and shared prefixes are as in the workload, the text is not."
        )

    def of(self, request: Request) -> NDArray[np.int64]:
        """The prompt's ids, [request.prompt_tokens].

        Raises:
            UserError: a negative id, or fewer ids than the prompt has tokens.
        """
        match request.prompt:
            case TokenIds(ids):
                return self._given(request, ids)
            case HashIds(ids, block_size):
                self._check_length(request, len(ids) * block_size)
                keys = np.array([self._key(_HASH_ID, hash_id) for hash_id in ids], np.uint64)
                return self._draw(keys, block_size)[: request.prompt_tokens]
            case _:
                key = np.array([self._key(_REQUEST, request.request_id)], np.uint64)
                return self._draw(key, request.prompt_tokens)

    def _given(self, request: Request, ids: tuple[int, ...]) -> NDArray[np.int64]:
        self._check_length(request, len(ids))
        try:
            tokens = np.array(ids[: request.prompt_tokens], np.int64)
        except OverflowError:
            tokens = np.array([-1], np.int64)
        if tokens.min() < 0:
            raise UserError(
                f"request {request.request_id}: its prompt has a token id that is negative or beyond 64 bits; "
                f"correct the workload."
            )
        if tokens.max() >= self.vocab_size:
            self.num_folded += 1
            tokens %= self.vocab_size
        return tokens

    def _check_length(self, request: Request, num_tokens: int) -> None:
        if num_tokens < request.prompt_tokens:
            raise UserError(
                f"request {request.request_id}: its prompt has {request.prompt_tokens} tokens, but ids for only "
                f"{num_tokens}; correct the workload."
            )

    def _key(self, stream: int, number: int) -> int:
        return _mixed_int(_mixed_int(_mixed_int(self._seed) + stream) + number)

    def _draw(self, keys: NDArray[np.uint64], num_tokens: int) -> NDArray[np.int64]:
        """`num_tokens` ids for each key, one key after the other."""
        places = np.arange(num_tokens, dtype=np.uint64)
        return (_mixed(keys[:, None] + places) % np.uint64(self.vocab_size)).astype(np.int64).ravel()


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function (Steele, Lea and Flood, OOPSLA 2014): a bijection of 64-bit words."""
    words = (words + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _mixed_int(word: int) -> int:
    return int(_mixed(np.array([word & _WORD], np.uint64))[0])
