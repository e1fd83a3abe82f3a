"""Moves whole blocks, bit for bit: within the device pool, and between it and the host pool.

By our kernels on a GPU, by plain torch elsewhere. Both take planes, a plane being the keys or the values of one layer:
the device pool as [planes, num_blocks, ...] and the host pool as [num_host_blocks, planes, ...].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

Pairs = Sequence[tuple[int, int]]


class BlockTransfer(Protocol):
    """Moves blocks in all planes. `pairs` are never empty; no block is a destination twice."""

    def copy(self, planes: Tensor, pairs: Pairs) -> None:
        """Copies device blocks: (source, destination); no block is both."""

    def swap_out(self, planes: Tensor, host: Tensor, pairs: Pairs) -> None:
        """Copies to the host: (device block, host block)."""

    def swap_in(self, host: Tensor, planes: Tensor, pairs: Pairs) -> None:
        """Copies to the device: (host block, device block)."""


class TorchTransfer:
    """By indexing. Blocks are taken as bytes: not every operation knows 8-bit floats, and none needs to."""

    def copy(self, planes: Tensor, pairs: Pairs) -> None:
        source, destination = _ids(planes, pairs)
        data = planes.view(torch.uint8)
        data[:, destination] = data[:, source]

    def swap_out(self, planes: Tensor, host: Tensor, pairs: Pairs) -> None:
        block, host_block = _ids(planes, pairs)
        host.view(torch.uint8)[host_block] = planes.view(torch.uint8)[:, block].transpose(0, 1)

    def swap_in(self, host: Tensor, planes: Tensor, pairs: Pairs) -> None:
        host_block, block = _ids(planes, pairs)
        planes.view(torch.uint8)[:, block] = host.view(torch.uint8)[host_block].transpose(0, 1)


class TritonTransfer:
    """By our kernels, queued on the current stream. Needs a GPU and a pinned host pool, or Triton's interpreter."""

    def copy(self, planes: Tensor, pairs: Pairs) -> None:
        from gpu.kernels.block_copy import copy_blocks  # Triton exists on Linux only; the torch way needs none

        copy_blocks(planes, torch.stack(_ids(planes, pairs), dim=1))

    def swap_out(self, planes: Tensor, host: Tensor, pairs: Pairs) -> None:
        from gpu.kernels.swap import gather_blocks

        block, host_block = _ids(planes, pairs)
        gather_blocks(planes, block, host, host_block)

    def swap_in(self, host: Tensor, planes: Tensor, pairs: Pairs) -> None:
        from gpu.kernels.swap import scatter_blocks

        host_block, block = _ids(planes, pairs)
        scatter_blocks(planes, block, host, host_block)


def _ids(planes: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """First and second ids of the pairs, int64, on the device; two rows of one tensor, sent without waiting."""
    ids = torch.tensor(pairs, dtype=torch.int64).T.contiguous()
    if planes.device.type == "cuda":
        ids = ids.pin_memory().to(planes.device, non_blocking=True)
    return ids[0], ids[1]
