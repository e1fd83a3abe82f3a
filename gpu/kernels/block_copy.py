"""Copies blocks within a pool: the copying of copy-on-write, for all layers, K and V in one launch.

Contents are moved as bit patterns, so nothing is rounded and NaNs keep their payload.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpu.kernels.call import KernelCall, require_device

CHUNK_BYTES = 8192  # of one program: four 16-byte loads for each of its 128 threads
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def copy_kernel(
    source: tl.tensor,
    target: tl.tensor,
    source_blocks: tl.tensor,
    target_blocks: tl.tensor,
    stride_pair: tl.tensor,
    stride_source_plane: tl.tensor,
    stride_source_block: tl.tensor,
    stride_target_plane: tl.tensor,
    stride_target_block: tl.tensor,
    BLOCK_ELEMENTS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """One program: one chunk of one block of one plane. Grid: blocks × chunks, planes."""
    chunks: tl.constexpr = (BLOCK_ELEMENTS + CHUNK - 1) // CHUNK
    pair = (tl.program_id(0) // chunks).to(tl.int64)
    plane = tl.program_id(1).to(tl.int64)
    element = tl.program_id(0) % chunks * CHUNK + tl.arange(0, CHUNK)
    mask = element < BLOCK_ELEMENTS
    source += plane * stride_source_plane + tl.load(source_blocks + pair * stride_pair) * stride_source_block
    target += plane * stride_target_plane + tl.load(target_blocks + pair * stride_pair) * stride_target_block
    tl.store(target + element, tl.load(source + element, mask=mask), mask=mask)


def copy_blocks(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copies blocks within a pool, in all its planes.

    Args:
        pool: [planes, num_blocks, ...], a plane being K or V of one layer; each block contiguous, and planes and blocks
            with any strides.
        pairs: [n, 2] int64, source and target block of each copy. No block is the target of two copies, or a target
            and also a source: copies run side by side in no order.

    Raises:
        ValueError: a block that is not contiguous, or pairs of another shape or type.
        UserError: CPU tensors while Triton is not interpreting.
    """
    require_device("copy_blocks", pool, pairs)
    if pairs.dim() != 2 or pairs.shape[1] != 2:
        raise ValueError(f"pairs is {tuple(pairs.shape)}; expected [n, 2]")
    copy_call(pool, pool, pairs[:, 0], pairs[:, 1]).launch()


def copy_call(
    source: torch.Tensor, target: torch.Tensor, source_blocks: torch.Tensor, target_blocks: torch.Tensor
) -> KernelCall:
    """The launch that copies block `source_blocks[i]` of `source` to `target_blocks[i]` of `target`, in all planes.

    Both are [planes, blocks, ...] with equal blocks of one type; the ids are int64 vectors of one length and stride.
    """
    if source.shape[0] != target.shape[0] or source.shape[2:] != target.shape[2:] or source.dtype != target.dtype:
        raise ValueError(f"blocks {tuple(source.shape)} of {source.dtype} to {tuple(target.shape)} of {target.dtype}")
    if not source[:1, :1].is_contiguous() or not target[:1, :1].is_contiguous():
        raise ValueError("each block must be contiguous")
    if not source_blocks.dtype == target_blocks.dtype == torch.int64 or source_blocks.shape != target_blocks.shape:
        raise ValueError("block ids must be int64 and as many of sources as of targets")
    if source_blocks.stride() != target_blocks.stride():
        raise ValueError("the ids of sources and targets must have the same stride")
    num_planes, block_elements = source.shape[0], source[0, 0].numel()
    chunk = CHUNK_BYTES // source.element_size()
    return KernelCall(
        copy_kernel,
        grid=(source_blocks.shape[0] * -(-block_elements // chunk), num_planes),
        arguments={
            "source": source.view(_BITS[source.element_size()]),
            "target": target.view(_BITS[target.element_size()]),
            "source_blocks": source_blocks,
            "target_blocks": target_blocks,
            "stride_pair": source_blocks.stride(0),
            "stride_source_plane": source.stride(0),
            "stride_source_block": source.stride(1),
            "stride_target_plane": target.stride(0),
            "stride_target_block": target.stride(1),
        },
        constants={"BLOCK_ELEMENTS": block_elements, "CHUNK": chunk},
        num_warps=4,
        num_stages=1,
    )


def copy_reference(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """`copy_blocks` in plain torch."""
    pool[:, pairs[:, 1]] = pool[:, pairs[:, 0]]
