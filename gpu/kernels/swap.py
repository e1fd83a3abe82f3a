"""Moves blocks between the pool on the GPU and a pool in host memory: swapping out and in.

A block of the host pool is one run of memory with all planes of one block, [num_host_blocks, planes, block...], so that
a request's KV could be written to disk or sent elsewhere block by block.

The kernel reads and writes the host pool itself, which a GPU can where the memory is pinned. The alternative, a staging
buffer on the GPU and a copy by the copy engine, was not chosen: a pool is swapped when GPU memory has run out, which is
no time to ask for a staging buffer; and host blocks lie scattered, so it would take a copy call each. The price is that
a swap occupies SMs while it waits for the bus. On CPU tensors, where there is no bus, the torch reference moves them.
"""

from __future__ import annotations

import torch

from gpu.kernels.block_copy import copy_call
from gpu.kernels.call import INTERPRETING
from workloads.errors import UserError


def gather_blocks(
    pool: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor, rows: torch.Tensor | None = None
) -> None:
    """Copies blocks of the pool, all planes, into rows of a host pool (swap out).

    Returns when the copy is queued on the current stream; the host may read the rows after that stream has been waited
    for, and the blocks may be overwritten by later work of the same stream.

    Args:
        pool: [planes, num_blocks, ...], each block contiguous.
        blocks: [n] int64 on the pool's device.
        out: [num_rows, planes, ...], on the pool's device or in pinned host memory; each plane of a row contiguous.
        rows: [n] int64 on the pool's device, each row once; None is 0 to n - 1.

    Raises:
        ValueError: shapes or types that do not fit together.
        UserError: host memory that is not pinned.
    """
    rows = _rows(blocks, rows)
    if _on_cpu(pool, out):
        gather_reference(pool, blocks, out, rows)
    else:
        copy_call(pool, out.transpose(0, 1), blocks, rows).launch()


def scatter_blocks(
    pool: torch.Tensor, blocks: torch.Tensor, source: torch.Tensor, rows: torch.Tensor | None = None
) -> None:
    """Copies rows of a host pool into blocks of the pool, all planes (swap in).

    Returns when the copy is queued; the rows may be overwritten by the host after the stream has been waited for.

    Args:
        pool: [planes, num_blocks, ...], each block contiguous.
        blocks: [n] int64 on the pool's device, each block once.
        source: [num_rows, planes, ...], on the pool's device or in pinned host memory; each plane of a row contiguous.
        rows: [n] int64 on the pool's device; None is 0 to n - 1.

    Raises:
        ValueError: shapes or types that do not fit together.
        UserError: host memory that is not pinned.
    """
    rows = _rows(blocks, rows)
    if _on_cpu(pool, source):
        scatter_reference(pool, blocks, source, rows)
    else:
        copy_call(source.transpose(0, 1), pool, rows, blocks).launch()


def gather_reference(pool: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor, rows: torch.Tensor) -> None:
    """`gather_blocks` in plain torch."""
    out[rows] = pool[:, blocks].transpose(0, 1)


def scatter_reference(pool: torch.Tensor, blocks: torch.Tensor, source: torch.Tensor, rows: torch.Tensor) -> None:
    """`scatter_blocks` in plain torch."""
    pool[:, blocks] = source[rows].transpose(0, 1)


def _rows(blocks: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return torch.arange(blocks.shape[0], device=blocks.device) if rows is None else rows


def _on_cpu(pool: torch.Tensor, host: torch.Tensor) -> bool:
    """Whether torch is to move the blocks.

    Raises:
        UserError: the pool is on a GPU, which cannot reach the host's memory.
    """
    if pool.device.type == "cpu":
        return not INTERPRETING
    if host.device.type == "cpu" and not host.is_pinned():
        raise UserError("swap: the host pool is not in pinned memory, which a GPU cannot reach; allocate it pinned.")
    return False
