"""Decode under the interpreter, for every size and type it promises, against float64."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from poisoned_pool import assert_close, paged, queries

from gpu.kernels.decode import decode_reference, paged_decode
from gpu.kernels.launch import DecodeLaunch
from gpu.kernels.scoring import Scoring

GROUPS = (1, 2, 3, 4, 5, 7, 8, 16)
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
BLOCK_SIZES = (1, 8, 16, 24, 32, 64, 128, 256)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TILES = (32, 64, 128)
COUNT = 24


def cases() -> list[tuple[int, int, int, torch.dtype, int, int]]:
    """(group, head_dim, block_size, dtype, tile, splits): every value of every axis, in random combinations."""
    choice = random.Random(0)
    axes = []
    for axis in (GROUPS, HEAD_DIMS, BLOCK_SIZES, DTYPES, TILES, (1, 2, 4)):
        values = list(itertools.islice(itertools.cycle(axis), COUNT))
        choice.shuffle(values)
        axes.append(values)
    return list(zip(*axes, strict=True))


@pytest.mark.parametrize(("group", "head_dim", "block_size", "dtype", "tile", "splits"), cases())
def test_decode_is_right_for_every_size_and_type(
    group: int, head_dim: int, block_size: int, dtype: torch.dtype, tile: int, splits: int
) -> None:
    # Nothing, one token, one short of a block, a block, one more, and something over two tiles.
    lens = [0, 1, max(block_size - 1, 1), block_size, block_size + 1, 2 * tile + 3]
    sequences = paged(lens, head_dim=head_dim, block_size=block_size, dtype=dtype, shared_blocks=1)
    q = queries(len(lens), 2 * group, head_dim, dtype)
    lse = torch.full(q.shape[:2], torch.nan)
    out = paged_decode(
        q,
        sequences.k_pool,
        sequences.v_pool,
        sequences.tables,
        sequences.context_lens,
        scale=head_dim**-0.5,
        lse=lse,
        launch=DecodeLaunch(tile, num_warps=4, num_stages=2, splits=splits),
    )
    expected, expected_lse = decode_reference(
        q,
        sequences.k_pool,
        sequences.v_pool,
        sequences.tables,
        sequences.context_lens,
        Scoring(head_dim**-0.5),
        torch.float64,
    )
    assert_close(out, expected, lse, expected_lse)
    assert out[0].eq(0).all() and lse[0].eq(-torch.inf).all()
