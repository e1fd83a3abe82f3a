"""What an infinite prefix cache would save: blocks of prompts that an earlier request already had.

The most that any pool can reuse: nothing is evicted, and a block is there as soon as its request has arrived. Blocks
count from the front up to the first that is new, as a prefix cache finds them. Of a trace with hash ids, a partial
last block counts like the others; an engine would reuse full blocks only, and compute at least the last token again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import takewhile

from workloads.request import HashIds, TokenIds

ID_BYTES = 32  # of a Python integer


class PrefixReuse:
    """Counts blocks and tokens that were there before. Holds every distinct block id: some 100 bytes a block.

    Args:
        block_size: tokens of a block, of prompts that are known token by token; hash ids bring their own.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._seen: dict[int, set[int]] = {}
        self._num_known = self._blocks = self._hit_blocks = self._tokens = self._hit_tokens = 0

    def add(self, prompts: Sequence[TokenIds | HashIds | None], prompt_tokens: Sequence[int]) -> None:
        """Takes in further prompts; those of which nothing is known are passed over."""
        for prompt, num_tokens in zip(prompts, prompt_tokens, strict=True):
            if prompt is None:
                continue
            size = prompt.block_size if isinstance(prompt, HashIds) else self._block_size
            ids = prompt.ids if isinstance(prompt, HashIds) else tuple(_chained(prompt.ids[:num_tokens], size))
            seen = self._seen.setdefault(size, set())
            hits = sum(1 for _ in takewhile(seen.__contains__, ids))
            seen.update(ids[hits:])
            self._num_known += 1
            self._blocks += len(ids)
            self._hit_blocks += hits
            self._tokens += num_tokens
            self._hit_tokens += min(hits * size, num_tokens)

    def summary(self) -> dict[str, float] | None:
        """Counts, and the shares of blocks and of prompt tokens that were there already; None if no prompt is known."""
        if not self._num_known:
            return None
        distinct = sum(map(len, self._seen.values()))
        return {
            "requests_known": self._num_known,
            "blocks": self._blocks,
            "hit_blocks": self._hit_blocks,
            "hit_block_share": self._hit_blocks / self._blocks if self._blocks else 0.0,
            "prompt_tokens": self._tokens,
            "hit_tokens": self._hit_tokens,
            "hit_token_share": self._hit_tokens / self._tokens,
            "distinct_blocks": distinct,
            "counting_bytes": sum(map(sys.getsizeof, self._seen.values())) + distinct * ID_BYTES,
        }


def _chained(tokens: Sequence[int], block_size: int) -> Iterator[int]:
    """An id for each full block, which stands for everything up to its end."""
    before = b""
    for end in range(block_size, len(tokens) + 1, block_size):
        block = ",".join(map(str, tokens[end - block_size : end]))
        before = blake2b(before + block.encode(), digest_size=16).digest()
        yield int.from_bytes(before)
