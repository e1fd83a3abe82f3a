"""Tokens of texts: counted by a tokenizer, or estimated from the number of characters. Which of them, the user says."""

from __future__ import annotations

import hashlib
import math
from typing import Any, Protocol

from workloads.errors import UserError
from workloads.request import HashIds, TokenIds

_BLOCK_SIZE = 16  # tokens behind each id of an estimated text; a divisor of most engines' block sizes


class Conversation(Protocol):
    """The text of a conversation as it grows."""

    def append(self, text: str) -> int:
        """Adds a text to the end; returns how many tokens it has by itself."""

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""

    def content(self) -> TokenIds | HashIds:
        """What the text so far says: equal for two texts as far as they begin alike."""


class TextTokens(Protocol):
    """How texts become tokens."""

    def begin(self) -> Conversation:
        """A conversation without any text yet."""


def text_tokens(tokenizer: str | None, tokens_per_character: float | None) -> TextTokens:
    """By the tokenizer of that name, or the estimate.

    Raises:
        UserError: neither or both are given, the estimate is out of range, or the tokenizer cannot be had.
    """
    if (tokenizer is None) == (tokens_per_character is None):
        said = "neither" if tokenizer is None else "both"
        raise UserError(
            f"the trace holds texts, and {said} of workload.tokenizer= (name or folder) and "
            "workload.tokens_per_character= (an estimate) is given; expected one of them."
        )
    if tokenizer is not None:
        return Tokenized(tokenizer)
    assert tokens_per_character is not None
    return Estimated(tokens_per_character)


class Estimated:
    """So many tokens a character, rounded up for a text and once for a conversation.

    Args:
        tokens_per_character: above 0 and at most 4, which is a token for each byte.

    Raises:
        UserError: it is out of that range.
    """

    def __init__(self, tokens_per_character: float) -> None:
        if not 0 < tokens_per_character <= 4:
            raise UserError(
                f"workload.tokens_per_character is {tokens_per_character}; expected a number above 0 and at most 4. "
                "English has about 0.25."
            )
        self._rate = tokens_per_character

    def begin(self) -> Conversation:
        return _EstimatedConversation(self._rate)


class _EstimatedConversation:
    def __init__(self, tokens_per_character: float) -> None:
        self._rate = tokens_per_character
        self._text = ""
        self._full: list[int] = []  # ids of the blocks that will not change any more
        self._hash = hashlib.blake2b(digest_size=7)  # of the characters behind them
        self._hashed = 0

    @property
    def num_tokens(self) -> int:
        return math.ceil(len(self._text) * self._rate)

    def append(self, text: str) -> int:
        self._text += text
        return math.ceil(len(text) * self._rate)

    def content(self) -> HashIds:
        while (end := math.ceil((len(self._full) + 1) * _BLOCK_SIZE / self._rate)) <= len(self._text):
            self._hash.update(_bytes(self._text[self._hashed : end]))
            self._hashed = end
            self._full.append(int.from_bytes(self._hash.digest(), "big"))
        if len(self._full) * _BLOCK_SIZE >= self.num_tokens:
            return HashIds(tuple(self._full), _BLOCK_SIZE)
        last = self._hash.copy()
        last.update(_bytes(self._text[self._hashed :]))
        return HashIds((*self._full, int.from_bytes(last.digest(), "big")), _BLOCK_SIZE)


class Tokenized:
    """Counted by a tokenizer of the Hugging Face kind, which must be on this machine. No chat template is applied.

    Args:
        name: of a model in the local cache, or a folder.

    Raises:
        UserError: transformers is not installed, or has no such tokenizer.
    """

    def __init__(self, name: str) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise UserError("workload.tokenizer needs transformers; install kvtwin[gpu].") from None
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name, local_files_only=True)
        except Exception as error:  # it raises whatever its parts do
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"workload.tokenizer={name} cannot be loaded ({reason[:120]}); give a folder, or a name that has been "
                "downloaded before."
            ) from None

    def begin(self) -> Conversation:
        return _TokenizedConversation(self._tokenizer)


class _TokenizedConversation:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def append(self, text: str) -> int:
        ids: list[int] = self._tokenizer(text, verbose=False).input_ids
        self._ids += ids
        return len(ids)

    def content(self) -> TokenIds:
        return TokenIds(tuple(self._ids))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # JSON can hold half a character
