"""Where a tile of positions of one sequence lies in the pool, and how it is read.

One rule for all attention kernels, so that paged and contiguous attention differ in nothing but where a block id comes
from. A pool may hold more than 2^31 elements, so a block id is widened to 64 bits before it is multiplied (int32
offsets that overflow are a classic: vLLM PR 47671, SGLang 20389).

The ids of a tile are fetched one iteration ahead of the tile (`find_blocks` of the next, `slot_offsets` of this one).
Were they looked up in the same iteration, the compiler would see a load whose address is itself loaded, and would spend
its pipeline stages on the table instead of on K and V.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_blocks(
    table: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    PAGED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Physical blocks of the positions [start, start + TILE): one int32 if all lie in one block, else one a position.

    `table` points to the sequence's row of the block table if PAGED; otherwise it is the first of its consecutive
    blocks. `start` is a multiple of TILE. The table is not read at or beyond position `end`: block 0 stands for that.
    """
    position = start if BLOCK_SIZE % TILE == 0 else start + tl.arange(0, TILE)
    index = position // BLOCK_SIZE
    return tl.load(table + index, mask=position < end, other=0) if PAGED else table + index


@triton.jit
def slot_offsets(
    blocks: tl.tensor,
    start: tl.tensor,
    stride_block: tl.tensor,
    stride_slot: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Offsets in elements, int64 [TILE], of the positions [start, start + TILE) that lie in `blocks`."""
    if BLOCK_SIZE % TILE == 0:
        slot = start % BLOCK_SIZE + tl.arange(0, TILE)
    else:
        slot = (start + tl.arange(0, TILE)) % BLOCK_SIZE
    return blocks.to(tl.int64) * stride_block + slot * stride_slot


@triton.jit
def load_tile(
    pool: tl.tensor,
    offsets: tl.tensor,
    readable: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """K or V, [TILE, PADDED_DIM], of the slots at `offsets`; 0 beyond HEAD_DIM and, if MASKED, where not `readable`.

    A slot that was never written may hold NaN, and 0 × NaN is NaN: such a slot must not be read at all.
    """
    dim = tl.arange(0, PADDED_DIM)
    pointers = pool + offsets[:, None] + dim[None, :]
    if MASKED:
        tile = tl.load(pointers, mask=readable[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM < PADDED_DIM:
        tile = tl.load(pointers, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile
