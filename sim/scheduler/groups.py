"""What the sequences of one request have in common, and what each needs for itself: the arithmetic of a group."""

from __future__ import annotations

from itertools import takewhile

from sim.sequence import Group, Sequence


def common_tokens(sequences: list[Sequence], block_size: int) -> int:
    """Tokens that are stored once for all of them: those of the blocks with which every block table begins."""
    heads = zip(*(sequence.blocks for sequence in sequences), strict=False)
    shared = sum(1 for _ in takewhile(lambda blocks: len(set(blocks)) == 1, heads))
    return min(shared * block_size, *(sequence.computed for sequence in sequences))


def tokens_to_place(group: Group, block_size: int) -> int:
    """Room that a group needs to compute all it knows, in tokens of whole blocks.

    The full blocks of what it has in common are there once, the rest once for each sequence.
    """
    common = group.common // block_size
    return block_size * (common + group.width * (-(-group.known // block_size) - common))
