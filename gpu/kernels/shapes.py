"""What queries and a pool must look like to be attended with, checked once for all attention kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from gpu.kernels.call import INTERPRETING

MAX_HEAD_DIM = 256
FP8 = torch.float8_e4m3fn
FLOAT_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes a kernel is compiled for.

    Args:
        num_kv_heads: KV heads.
        group: query heads that share one KV head.
        head_dim: size of a head, of K and V alike.
        block_size: slots of a block.
        pool_bytes: bytes of one element of the pool.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    pool_bytes: int

    @property
    def padded_dim(self) -> int:
        """`head_dim` up to a power of two of at least 16, which matrix instructions need."""
        return max(16, next_power_of_two(self.head_dim))


def next_power_of_two(n: int) -> int:
    """The least power of two that is at least `n`, for n of at least 1."""
    return 1 << (n - 1).bit_length()


def attention_shape(q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor) -> AttentionShape:
    """The shape of [.., query heads, head_dim] queries on a pool [num_blocks, num_kv_heads, block_size, head_dim].

    Raises:
        ValueError: sizes that do not fit together, or a type or stride that no kernel takes.
    """
    if q.dim() != 3 or k_pool.dim() != 4:
        raise ValueError(f"q has {q.dim()} dimensions and the pool {k_pool.dim()}; expected 3 and 4")
    if k_pool.shape != v_pool.shape or k_pool.stride() != v_pool.stride() or k_pool.dtype != v_pool.dtype:
        raise ValueError("the pools of K and V differ in shape, strides or type")
    _, num_kv_heads, block_size, head_dim = k_pool.shape
    _, num_heads, query_dim = q.shape
    if query_dim != head_dim or not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"heads of {query_dim} on a pool of {head_dim}; expected the same, at most {MAX_HEAD_DIM}")
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads on {num_kv_heads} KV heads; expected a multiple")
    if q.dtype not in FLOAT_DTYPES or k_pool.dtype not in (*FLOAT_DTYPES, FP8):
        raise ValueError(f"queries of {q.dtype} on a pool of {k_pool.dtype}")
    if q.stride(-1) != 1 or k_pool.stride(-1) != 1:
        raise ValueError("the last dimension of queries and pool must be contiguous")
    return AttentionShape(num_kv_heads, num_heads // num_kv_heads, head_dim, block_size, k_pool.element_size())


def dot_dtype(dtype: torch.dtype) -> Any:
    """The type in which matrices are multiplied: that of the queries, whatever the pool holds.

    The interpreter multiplies the bit patterns of bfloat16, not the numbers, so there it is float32; on a GPU that
    would forgo the matrix instructions.
    """
    if INTERPRETING and dtype == torch.bfloat16:
        return tl.float32
    return FLOAT_DTYPES[dtype]
