"""The tensors of a problem: sequences of normally distributed K and V, and the same in the scattered blocks of a pool.

Lengths are all alike, so that a layout without paging needs no padding and peers without block tables can take part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from gpu.bench.cases import Problem


@dataclass(frozen=True, slots=True)
class Pool:
    """K and V of one layer in blocks, and where each sequence's are.

    Args:
        keys, values: [blocks, num_kv_heads, block_size, head_dim]; slots beyond a sequence's end are 0.
        tables: [batch, blocks of a sequence] int32.
    """

    keys: Tensor
    values: Tensor
    tables: Tensor


class Sequences:
    """The sequences of a problem, each K and V in one piece.

    Args:
        problem: its kernel, sizes and types.
        device: where the tensors are.
        seed: of their contents.

    Attributes:
        problem: in its contiguous form.
        queries: [queries, query heads, head_dim].
        keys, values: [batch, num_kv_heads, context, head_dim], in the pool's type.
        context_lens: [batch] int32.
        cu_query_lens: [batch + 1] int32: where each sequence's queries begin.
    """

    def __init__(self, problem: Problem, device: torch.device, seed: int = 0) -> None:
        self.problem = problem.contiguous
        self._generator = torch.Generator(device).manual_seed(seed)
        self._device = device
        dtype = getattr(torch, problem.dtype)
        heads = problem.num_kv_heads * problem.group
        self.queries = self._random((problem.num_queries, heads, problem.head_dim), dtype)
        shape = (problem.batch, problem.num_kv_heads, problem.context, problem.head_dim)
        pool_dtype = getattr(torch, problem.pool_dtype)
        self.keys = self._random(shape, dtype).to(pool_dtype)
        self.values = self._random(shape, dtype).to(pool_dtype)
        queries = problem.num_queries // problem.batch
        self.context_lens = torch.full((problem.batch,), problem.context, dtype=torch.int32, device=device)
        self.cu_query_lens = torch.arange(problem.batch + 1, dtype=torch.int32, device=device) * queries

    def pool(self, block_size: int) -> Pool:
        """The same K and V in blocks that lie in no order."""
        blocks = -(-self.problem.context // block_size)
        count = self.problem.batch * blocks
        order = torch.randperm(count, generator=self._generator, device=self._device)
        keys, values = (self._scattered(kv, block_size, blocks, order) for kv in (self.keys, self.values))
        return Pool(keys, values, order.to(torch.int32).view(self.problem.batch, blocks))

    @cached_property
    def in_order(self) -> Pool:
        """The same K and V where they are: each sequence is one block."""
        rows = torch.arange(self.problem.batch, dtype=torch.int32, device=self._device)
        return Pool(self.keys, self.values, rows[:, None])

    def _random(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device).normal_(generator=self._generator)

    def _scattered(self, kv: Tensor, block_size: int, blocks: int, order: Tensor) -> Tensor:
        batch, heads, context, _ = kv.shape
        bits = kv.view(torch.uint8)  # not every device indexes 8-bit floats
        padded = torch.nn.functional.pad(bits, (0, 0, 0, blocks * block_size - context))
        by_block = padded.view(batch, heads, blocks, block_size, bits.shape[-1]).transpose(1, 2).flatten(0, 1)
        scattered = torch.empty_like(by_block, memory_format=torch.contiguous_format)
        scattered[order] = by_block
        return scattered.view(kv.dtype)


def like(sequences: Sequences, problem: Problem) -> bool:
    """Whether these are the sequences of a problem, whatever its block size."""
    return sequences.problem == replace(problem, block_size=sequences.problem.block_size)
