"""Kernels that move KV, under the interpreter: bit for bit as plain torch moves it, and nothing else touched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from poisoned_pool import BITS, far_pool, poison
from torch import Tensor

from gpu.kernels.block_copy import copy_blocks, copy_reference
from gpu.kernels.cache_write import write_kv, write_reference
from gpu.kernels.swap import gather_blocks, gather_reference, scatter_blocks, scatter_reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(BITS[tensor.element_size()])


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Any bit pattern, NaNs with payloads among them."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty((), dtype=dtype).element_size()
    shape = (*shape[:-1], shape[-1] * size)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(dtype)


# ---------------------------------------------------------------------------------------------------------------- write


def check_write(k: Tensor, v: Tensor, pool_dtype: torch.dtype, block_size: int, k_scale: float, v_scale: float) -> None:
    """Writes 9 tokens, two of them skipped, through the kernel and through torch, and compares whole pools."""
    heads, dim = k.shape[1:]
    num_blocks = 5 + -(-9 // block_size)
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(0))[:9]
    slots[3] = slots[8] = -1
    pool, expected = (poison((2, 2, num_blocks, heads, block_size, dim), pool_dtype) for _ in range(2))
    write_kv(k, v, pool[1, 0], pool[1, 1], slots, k_scale=k_scale, v_scale=v_scale)
    write_reference(k, v, expected[1, 0], expected[1, 1], slots, k_scale, v_scale)
    assert torch.equal(bits(pool), bits(expected))
    untouched = bits(pool).eq(bits(poison((1,), pool_dtype))).all(-1).sum()
    assert untouched == pool.shape[:-1].numel() - 7 * 2 * heads


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize(("heads", "dim", "block_size"), [(1, 64, 1), (2, 80, 16), (5, 128, 24), (8, 96, 8)])
def test_each_token_goes_into_its_slot_and_minus_one_nowhere(
    dtype: torch.dtype, heads: int, dim: int, block_size: int
) -> None:
    # A fused projection leaves q, k and v side by side, so that k and v have strides of their own.
    fused = torch.randn((9, 3, heads, dim), generator=torch.Generator().manual_seed(0)).to(dtype)
    check_write(fused[:, 1], fused[:, 2], dtype, block_size, 1.0, 1.0)


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize(("k_scale", "v_scale"), [(1.0, 1.0), (0.5, 4.0)])
def test_fp8_is_scaled_and_cut_at_its_largest_number(dtype: torch.dtype, k_scale: float, v_scale: float) -> None:
    # Numbers of the format times the scale, which is a power of two, so that none has to be rounded: the interpreter
    # rounds 127.9 to 64. Every 7th is beyond 448 either way, where the format has only NaN.
    stored = (torch.randn((9, 2, 64), generator=torch.Generator().manual_seed(0)) * 100).to(torch.float8_e4m3fn).float()
    stored.view(-1)[::7] = 1000.0
    stored.view(-1)[::14] = -1000.0
    k, v = (stored * k_scale).to(dtype), (stored.flip(0) * v_scale).to(dtype)
    check_write(k, v, torch.float8_e4m3fn, 16, k_scale, v_scale)


def test_writing_beyond_2_to_the_31_elements_finds_its_block() -> None:
    k_pool, v_pool = far_pool()
    k, v = torch.randn(1, 2, 64).half(), torch.randn(1, 2, 64).half()
    write_kv(k, v, k_pool, v_pool, torch.tensor([2 * 16 + 5]))
    assert torch.equal(k_pool[2, :, 5], k[0]) and torch.equal(v_pool[2, :, 5], v[0])
    assert k_pool[0].isnan().all() and v_pool[0].isnan().all()


def test_a_pool_of_another_type_is_refused() -> None:
    k, pool = torch.zeros(1, 2, 64), torch.zeros(3, 2, 16, 64)
    slots = torch.zeros(1, dtype=torch.int64)
    write_kv(k, k, pool, pool.clone(), slots)
    with pytest.raises(ValueError, match="do not go together"):
        write_kv(k, k, pool.half(), pool.half(), slots)
    with pytest.raises(ValueError, match="do not go together"):
        write_kv(k, k, pool, pool.clone(), slots.int())
    with pytest.raises(ValueError, match="expected 1"):
        write_kv(k, k, pool, pool.clone(), slots, k_scale=2.0)


# ----------------------------------------------------------------------------------------------------------------- copy


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [(2, 16, 64), (3, 24, 80), (1, 1, 64), (2, 64, 128)])
def test_copies_carry_every_plane_bit_for_bit(dtype: torch.dtype, block: tuple[int, ...]) -> None:
    pool = random_bits((4, 9, *block), dtype)
    expected = pool.clone()
    pairs = torch.tensor([[3, 0], [3, 8], [5, 2]])
    copy_reference(expected, pairs)
    copy_blocks(pool, pairs)
    assert torch.equal(bits(pool), bits(expected))


def test_copies_of_a_pool_of_layers_leave_other_layers_alone() -> None:
    # Planes of a slice of a larger pool: their stride is not their size.
    whole = random_bits((3, 4, 6, 2, 16, 64), torch.float16)
    before = whole.clone()
    copy_blocks(whole[1, :, 1:], torch.tensor([[0, 4]]))
    assert torch.equal(bits(whole[1, :, 5]), bits(before[1, :, 1]))
    whole[1, :, 5] = before[1, :, 5]
    assert torch.equal(bits(whole), bits(before))


def test_copying_beyond_2_to_the_31_elements_finds_its_block() -> None:
    near, _ = far_pool()
    near[0] = torch.randn(2, 16, 64).half()
    copy_blocks(near[None], torch.tensor([[0, 2]]))
    assert torch.equal(near[2], near[0])


def test_copying_nothing_is_no_work() -> None:
    copy_blocks(torch.zeros(2, 3, 2, 16, 64), torch.empty((0, 2), dtype=torch.int64))


def test_pairs_of_another_shape_or_blocks_in_pieces_are_refused() -> None:
    pool = torch.zeros(2, 3, 2, 16, 64)
    with pytest.raises(ValueError, match=r"expected \[n, 2\]"):
        copy_blocks(pool, torch.zeros((2, 3), dtype=torch.int64))
    with pytest.raises(ValueError, match="int64"):
        copy_blocks(pool, torch.zeros((2, 2), dtype=torch.int32))
    with pytest.raises(ValueError, match="contiguous"):
        copy_blocks(pool.transpose(2, 3), torch.zeros((2, 2), dtype=torch.int64))


# ----------------------------------------------------------------------------------------------------------------- swap


@settings(max_examples=15, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), planes=st.integers(1, 5))
def test_swapping_out_and_in_is_the_references_and_brings_every_block_back(
    data: st.DataObject, dtype: torch.dtype, planes: int
) -> None:
    block = (2, data.draw(st.sampled_from([1, 16, 24])), 64)
    count = data.draw(st.integers(0, 4))
    blocks = torch.tensor(data.draw(st.permutations(range(7)))[:count], dtype=torch.int64)
    rows = torch.tensor(data.draw(st.permutations(range(5)))[:count], dtype=torch.int64)
    back = torch.tensor(data.draw(st.permutations(range(7)))[:count], dtype=torch.int64)
    pool, host = random_bits((planes, 7, *block), dtype), random_bits((5, planes, *block), dtype, seed=1)
    expected_pool, expected_host = pool.clone(), host.clone()

    gather_blocks(pool, blocks, host, rows)
    gather_reference(expected_pool, blocks, expected_host, rows)
    assert torch.equal(bits(host), bits(expected_host))

    original = pool[:, blocks.tolist()].clone() if count else pool[:, :0]
    scatter_blocks(pool, back, host, rows)
    scatter_reference(expected_pool, back, expected_host, rows)
    assert torch.equal(bits(pool), bits(expected_pool))
    assert torch.equal(bits(pool[:, back.tolist()] if count else pool[:, :0]), bits(original))


def test_without_rows_blocks_go_to_the_first_rows_in_order() -> None:
    pool, host = random_bits((3, 6, 2, 16, 64), torch.bfloat16), random_bits((4, 3, 2, 16, 64), torch.bfloat16, 1)
    last = host[2:].clone()
    gather_blocks(pool, torch.tensor([4, 1]), host)
    assert torch.equal(bits(host[:2]), bits(torch.stack([pool[:, 4], pool[:, 1]])))
    assert torch.equal(bits(host[2:]), bits(last))
