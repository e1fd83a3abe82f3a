"""Sequences in a pool whose every other slot is NaN, at scattered blocks, with tables that are garbage where unused."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

GARBAGE = (-1, 2**31 - 1)  # block ids of unused table entries; to follow one is to read outside the pool
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Paged:
    """A layer's pools, and the tables of the sequences in them."""

    k_pool: Tensor
    v_pool: Tensor
    tables: Tensor
    context_lens: Tensor


def poison(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of NaNs."""
    if dtype == torch.float8_e4m3fn:
        return torch.full(shape, 0x7F, dtype=torch.uint8).view(dtype)  # the format's NaN
    return torch.full(shape, torch.nan, dtype=dtype)


def paged(
    lens: list[int],
    *,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    shared_blocks: int = 0,
) -> Paged:
    """Sequences of normally distributed K and V, the second of two layers of a pool.

    The first `shared_blocks` blocks of every sequence are those of the longest, as far as it fills them.
    """
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-n // block_size) for n in lens]
    num_blocks = sum(needed) + 3
    pool = poison((2, 2, num_blocks, num_kv_heads, block_size, head_dim), dtype)
    order = torch.randperm(num_blocks, generator=generator, dtype=torch.int32)
    tables = torch.empty((len(lens), max([*needed, 1]) + 2), dtype=torch.int32)
    for column in range(tables.shape[1]):
        tables[:, column] = GARBAGE[column % 2]
    longest = max(range(len(lens)), key=lens.__getitem__)
    for row, count in enumerate(needed):
        tables[row, :count] = order[:count]
        order = order[count:]
    for row, n in enumerate(lens):
        shared = min(shared_blocks, n // block_size)
        tables[row, :shared] = tables[longest, :shared]
    for row, n in enumerate(lens):
        position = torch.arange(n)
        blocks = tables[row, position // block_size].long()
        for plane in range(2):
            new = torch.randn((n, num_kv_heads, head_dim), generator=generator).to(dtype)
            bits = pool[1, plane].view(BITS[pool.element_size()])
            bits[blocks, :, position % block_size] = new.view(BITS[new.element_size()])
    return Paged(pool[1, 0], pool[1, 1], tables, torch.tensor(lens, dtype=torch.int32))


def queries(count: int, num_heads: int, head_dim: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Normally distributed queries, the first third of rows that hold q, k and v, as a fused projection leaves them."""
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn((count, 3, num_heads, head_dim), generator=generator)
    return fused.to(dtype)[:, 0]


def assert_close(out: Tensor, expected: Tensor, lse: Tensor, expected_lse: Tensor) -> None:
    """Compares with the float64 reference, as close as the arithmetic allows.

    float32: sums of at most a few hundred products, each rounded to 2^-24, and exponents of up to 50 (a soft cap)
    rounded likewise, which is 50 × 2^-24 = 3e-6 in a weight. float16: weights are rounded to 2^-11 before they multiply
    values of up to 5 (2.4e-3 at worst), and the output to 2^-11. bfloat16: the interpreter multiplies in float32 and
    cuts the output off instead of rounding it, up to 2^-7.
    """
    rtol, atol = {torch.float32: (0.0, 2e-5), torch.float16: (2**-11, 2.5e-3), torch.bfloat16: (2**-7, 1e-4)}[out.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=2e-5)


def far_pool(block_size: int = 16, head_dim: int = 64) -> tuple[Tensor, Tensor]:
    """Pools [3, 2, block_size, head_dim] in float16 whose block 2 begins 2^31 elements after block 0.

    The 4 GiB between are address space that is never touched.
    """
    share = 2 * block_size * head_dim
    try:
        memory = torch.empty(2**31 + 2 * share, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("needs 4 GiB of address space")
    pools = [
        memory.as_strided((3, 2, block_size, head_dim), (2**30, block_size * head_dim, head_dim, 1), plane * share)
        for plane in range(2)
    ]
    for pool in pools:
        pool[0] = torch.nan
        pool[2] = torch.nan
    return pools[0], pools[1]
