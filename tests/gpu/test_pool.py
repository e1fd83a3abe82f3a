"""The KV pool: its bytes are the simulator's, and blocks survive copying and swapping bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the engine needs PyTorch")

from gpu.pool import KVPool  # noqa: E402
from sim.hardware import Deployment  # noqa: E402
from sim.kv_layout import LatentAttention, ModelSpec, kv_bytes_per_token  # noqa: E402
from workloads.errors import UserError  # noqa: E402

SPEC = ModelSpec("tiny", 3, 64, 6, 2, 24, 96, 128, 256, dtype="float32")


def contents(pool: KVPool) -> torch.Tensor:
    """A copy of the device pool's bytes, [layers, 2, blocks, ...]."""
    return pool.blocks.view(torch.uint8).clone()


def filled(dtype: str, num_blocks: int = 9, num_host_blocks: int = 5, block_size: int = 3) -> KVPool:
    """A pool in which every byte is random; among them are NaNs of every kind."""
    fp8 = dtype.startswith("fp8")
    spec = replace(SPEC, dtype="float16" if fp8 else dtype)
    pool = KVPool(spec, num_blocks, block_size, dtype if fp8 else "auto", num_host_blocks)
    generator = torch.Generator().manual_seed(0)
    for blocks in (pool.blocks, pool.host_blocks):
        data = blocks.view(torch.uint8)
        data.copy_(torch.randint(0, 256, data.shape, generator=generator, dtype=torch.uint8))
    return pool


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "fp8", "fp8_e4m3"])
@pytest.mark.parametrize("block_size", [1, 16, 7])
def test_bytes_are_those_of_the_layout(dtype: str, block_size: int) -> None:
    pool = filled(dtype, num_blocks=11, num_host_blocks=4, block_size=block_size)
    spec, kv_dtype = (replace(SPEC, dtype="float16"), dtype) if dtype.startswith("fp8") else (SPEC, "auto")
    spec = spec if kv_dtype != "auto" else replace(spec, dtype=dtype)
    block = kv_bytes_per_token(spec, Deployment(kv_cache_dtype=kv_dtype)) * block_size
    assert pool.num_bytes == pool.blocks.untyped_storage().nbytes() == 11 * block
    assert pool.num_host_bytes == pool.host_blocks.untyped_storage().nbytes() == 4 * block


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_allocator_holds_the_bytes_of_the_layout_and_no_more() -> None:
    before = torch.cuda.memory_allocated()
    pool = KVPool(replace(SPEC, dtype="bfloat16"), 1000, 16, device="cuda")
    # 2 x 2 heads x 24 x 2 bytes x 3 layers is 576 bytes a token; the allocator rounds up to 512.
    assert pool.num_bytes == 576 * 16 * 1000
    assert torch.cuda.memory_allocated() - before == -(-pool.num_bytes // 512) * 512


def test_layers_are_views_that_do_not_overlap() -> None:
    pool = KVPool(SPEC, 4, 5)
    for index in range(pool.num_layers):
        layer = pool.layer(index)
        assert layer.keys.shape == layer.values.shape == (4, 2, 5, 24)
        assert layer.keys.stride() == (2 * 5 * 24, 5 * 24, 24, 1)
        layer.keys.fill_(2 * index)
        layer.values.fill_(2 * index + 1)
    assert [set(plane.flatten().tolist()) for plane in pool.blocks.flatten(0, 1)] == [{i} for i in range(6)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_copy_changes_the_destinations_only(dtype: str) -> None:
    pool = filled(dtype)
    before = contents(pool)
    pool.copy([(0, 4), (0, 7), (8, 2)])
    expected = before.clone()
    expected[:, :, 4] = expected[:, :, 7] = before[:, :, 0]
    expected[:, :, 2] = before[:, :, 8]
    assert torch.equal(contents(pool), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_swap_moves_blocks_and_nothing_else(dtype: str) -> None:
    pool = filled(dtype)
    before, host_before = contents(pool), pool.host_blocks.view(torch.uint8).clone()
    pool.swap_out([(6, 0), (1, 4)])
    host = pool.host_blocks.view(torch.uint8)
    assert torch.equal(contents(pool), before)
    assert torch.equal(host[0], before[:, :, 6])
    assert torch.equal(host[4], before[:, :, 1])
    assert torch.equal(host[1:4], host_before[1:4])
    host_after = host.clone()
    pool.swap_in([(4, 3), (0, 0)])
    expected = before.clone()
    expected[:, :, 3], expected[:, :, 0] = before[:, :, 1], before[:, :, 6]
    assert torch.equal(contents(pool), expected)
    assert torch.equal(pool.host_blocks.view(torch.uint8), host_after)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_rounds=st.integers(1, 4))
def test_blocks_that_went_out_and_came_back_elsewhere_are_the_same(seed: int, num_rounds: int) -> None:
    rng = np.random.default_rng(seed)
    pool = filled("float16", num_blocks=8, num_host_blocks=8)
    where = np.arange(8)  # of each original block
    original = contents(pool)
    for _ in range(num_rounds):
        host, back = rng.permutation(8), rng.permutation(8)
        pool.swap_out([(int(block), int(host[i])) for i, block in enumerate(where)])
        pool.blocks.view(torch.uint8).fill_(0xFF)
        pool.swap_in([(int(host[i]), int(back[i])) for i in range(8)])
        where = back
    assert torch.equal(contents(pool)[:, :, torch.from_numpy(where)], original)


def test_moving_nothing_is_nothing() -> None:
    pool = filled("float32", num_host_blocks=0)
    before = contents(pool)
    pool.copy([])
    pool.swap_out([])
    pool.swap_in([])
    assert torch.equal(contents(pool), before)


def test_scales_belong_to_layers() -> None:
    pool = KVPool(SPEC, 2, 4, "fp8", scales=[(0.5, 2.0), (1.0, 1.0), (4.0, 0.25)])
    assert [(pool.layer(i).k_scale, pool.layer(i).v_scale) for i in range(3)] == [(0.5, 2.0), (1.0, 1.0), (4.0, 0.25)]


@pytest.mark.parametrize("option", ["num_blocks", "num_host_blocks"])
def test_pool_beyond_the_machine_is_refused_with_what_was_asked_and_what_is_free(option: str) -> None:
    # A block of one token is 2 x 2 heads x 24 x 4 bytes x 3 layers = 1,152 bytes; 2^40 of them are 1,152 TiB.
    sizes = {"num_blocks": 1, "num_host_blocks": 0, option: 2**40}
    with pytest.raises(UserError, match=rf"memory\.{option}.* 1,179,648\.0 GiB .* GiB are free") as refused:
        KVPool(SPEC, block_size=1, **sizes)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("spec", "options", "reason"),
    [
        (SPEC, {"num_blocks": 0}, r"memory\.num_blocks is 0"),
        (SPEC, {"block_size": 0}, r"memory\.block_size is 0"),
        (SPEC, {"num_host_blocks": -1}, r"memory\.num_host_blocks is -1"),
        (SPEC, {"kv_cache_dtype": "float16"}, "kv_cache_dtype is float16.*float32"),
        (SPEC, {"kv_cache_dtype": "int8"}, "kv_cache_dtype is int8"),
        (replace(SPEC, dtype="int8"), {}, "no KV pool of int8"),
        (replace(SPEC, latent_attention=LatentAttention(16, 8, 8, 8)), {}, "latent"),
    ],
)
def test_pool_that_cannot_be_is_refused(spec: ModelSpec, options: dict[str, object], reason: str) -> None:
    with pytest.raises(UserError, match=reason) as refused:
        KVPool(spec, **({"num_blocks": 2, "block_size": 4} | options))
    assert "\n" not in str(refused.value)
