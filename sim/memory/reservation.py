"""Tokens that a policy sets aside for a request at its admission.

The first three are the Orca variants of Kwon et al., SOSP 2023, §6.1; the others say whose
they are.
"""

from __future__ import annotations

from typing import Protocol

from sim.sequence import Sequence


class Reservation(Protocol):
    """Tokens, prompt and output together, to set aside for a request."""

    def tokens(self, sequence: Sequence, max_model_len: int) -> int:
        """At least what the sequence will store, at most the model limit (one more for a prompt at the limit)."""


class MaxReservation:
    """The model limit, whatever the request: Orca (Max)."""

    def tokens(self, sequence: Sequence, max_model_len: int) -> int:
        return max(max_model_len, sequence.final)


class Pow2Reservation:
    """The prompt and the output rounded up to a power of two, so at most twice the true output: Orca (Pow2).

    The paper's example: an output of 25 reserves 32.
    """

    def tokens(self, sequence: Sequence, max_model_len: int) -> int:
        prompt = sequence.request.prompt_tokens
        output = sequence.final - prompt
        return max(min(prompt + (1 << (output - 1).bit_length()), max_model_len), sequence.final)


class OracleReservation:
    """The prompt and exactly the output that will occur, its last token too, never stored though: Orca (Oracle)."""

    def tokens(self, sequence: Sequence, max_model_len: int) -> int:
        return sequence.final


class SlotReservation:
    """An equal share of the pool for each slot of llama.cpp's server, whatever the request (--ctx-size / --parallel).

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens in a block.
        max_num_seqs: slots.
    """

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int) -> None:
        self._tokens = num_blocks // max(1, max_num_seqs) * block_size

    def tokens(self, sequence: Sequence, max_model_len: int) -> int:
        return self._tokens


class LimitReservation:
    """The prompt and the output that the client allows, but for its last token, which is never stored: TGI."""

    def tokens(self, sequence: Sequence, max_model_len: int) -> int:
        return sequence.limit(max_model_len) - 1
