"""Writes the K and V of a step's tokens into the pool, each token into the slot it was given.

Which slot that is was decided by whoever allocates blocks. A block id is widened to 64 bits before it is multiplied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpu.kernels.call import KernelCall, require_device
from gpu.kernels.launch import Device, device_of, require_pool_dtype
from gpu.kernels.shapes import FLOAT_DTYPES, FP8, next_power_of_two

FP8_MAX = tl.constexpr(448.0)  # the largest float8_e4m3fn; the format has no infinity, and beyond it lies NaN


@triton.jit
def write_kernel(
    k: tl.tensor,
    v: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    slots: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    stride_k_token: tl.tensor,
    stride_k_head: tl.tensor,
    stride_v_token: tl.tensor,
    stride_v_head: tl.tensor,
    stride_block: tl.tensor,
    stride_kv_head: tl.tensor,
    stride_slot: tl.tensor,
    NUM_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """One program: one token, all heads of K and V."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    block = (slot // BLOCK_SIZE).to(tl.int64)
    head = tl.arange(0, PADDED_HEADS)[:, None]
    dim = tl.arange(0, PADDED_DIM)[None, :]
    mask = (head < NUM_HEADS) & (dim < HEAD_DIM)
    new_k = tl.load(k + token * stride_k_token + head * stride_k_head + dim, mask=mask, other=0.0)
    new_v = tl.load(v + token * stride_v_token + head * stride_v_head + dim, mask=mask, other=0.0)
    if SCALED:
        new_k = tl.clamp(new_k.to(tl.float32) / k_scale, -FP8_MAX, FP8_MAX)
        new_v = tl.clamp(new_v.to(tl.float32) / v_scale, -FP8_MAX, FP8_MAX)
    target = block * stride_block + head * stride_kv_head + (slot % BLOCK_SIZE) * stride_slot + dim
    tl.store(k_pool + target, new_k.to(k_pool.dtype.element_ty), mask=mask)
    tl.store(v_pool + target, new_v.to(v_pool.dtype.element_ty), mask=mask)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Writes the K and V of tokens into their slots.

    Args:
        k, v: [tokens, num_kv_heads, head_dim]; float32, float16 or bfloat16.
        k_pool, v_pool: [num_blocks, num_kv_heads, block_size, head_dim], of the same strides, of the type of k and v
            or float8_e4m3fn.
        slots: [tokens] int64, block × block_size + offset in the block; -1 leaves the token out. No slot twice.
        k_scale, v_scale: what is stored in an fp8 pool is the number divided by this, cut at ±448. 1 for others.

    Raises:
        ValueError: shapes, types or strides that do not fit together.
        UserError: CPU tensors while Triton is not interpreting, or a pool whose type the GPU lacks.
    """
    require_device("write_kv", k, v, k_pool, v_pool, slots)
    write_call(k, v, k_pool, v_pool, slots, k_scale, v_scale, device_of(k)).launch()


def write_call(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    k_scale: float,
    v_scale: float,
    device: Device,
) -> KernelCall:
    """The launch of one write; arguments as in `write_kv`."""
    _, num_heads, block_size, head_dim = k_pool.shape
    num_tokens = slots.shape[0]
    if k.shape != (num_tokens, num_heads, head_dim) or v.shape != k.shape:
        raise ValueError(f"k is {tuple(k.shape)} and v {tuple(v.shape)}; expected {(num_tokens, num_heads, head_dim)}")
    if k_pool.shape != v_pool.shape or k_pool.stride() != v_pool.stride() or k_pool.dtype != v_pool.dtype:
        raise ValueError("the pools of K and V differ in shape, strides or type")
    if k.dtype not in FLOAT_DTYPES or k_pool.dtype not in (k.dtype, FP8) or slots.dtype != torch.int64:
        raise ValueError(f"k of {k.dtype}, a pool of {k_pool.dtype} and slots of {slots.dtype} do not go together")
    if k.stride(2) != 1 or v.stride(2) != 1 or k_pool.stride(3) != 1:
        raise ValueError("the last dimension of k, v and pool must be contiguous")
    if k_pool.dtype != FP8 and (k_scale, v_scale) != (1.0, 1.0):
        raise ValueError(f"k_scale is {k_scale} and v_scale {v_scale} on a pool of {k_pool.dtype}; expected 1")
    require_pool_dtype(k_pool.dtype, device)
    padded_heads, padded_dim = next_power_of_two(num_heads), next_power_of_two(head_dim)
    vectors = padded_heads * padded_dim * k.element_size() // 16
    return KernelCall(
        write_kernel,
        grid=(num_tokens,),
        arguments={
            "k": k,
            "v": v,
            "k_pool": k_pool,
            "v_pool": v_pool,
            "slots": slots,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "stride_k_token": k.stride(0),
            "stride_k_head": k.stride(1),
            "stride_v_token": v.stride(0),
            "stride_v_head": v.stride(1),
            "stride_block": k_pool.stride(0),
            "stride_kv_head": k_pool.stride(1),
            "stride_slot": k_pool.stride(2),
        },
        constants={
            "NUM_HEADS": num_heads,
            "PADDED_HEADS": padded_heads,
            "HEAD_DIM": head_dim,
            "PADDED_DIM": padded_dim,
            "BLOCK_SIZE": block_size,
            "SCALED": k_pool.dtype == FP8,
        },
        num_warps=max(
            1, min(8, next_power_of_two(vectors // 32 or 1))
        ),  # one 16-byte load a thread, if it comes out so
        num_stages=1,
    )


def write_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """`write_kv` in plain torch."""
    kept = slots >= 0
    blocks, offsets = slots[kept] // k_pool.shape[2], slots[kept] % k_pool.shape[2]
    for new, pool, scale in ((k, k_pool, k_scale), (v, v_pool, v_scale)):
        if pool.dtype == FP8:
            new = (new.float() / scale).clamp(-FP8_MAX.value, FP8_MAX.value)
        pool[blocks, :, offsets] = new[kept].to(pool.dtype)
