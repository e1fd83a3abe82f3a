"""The kernels on a GPU, against float64: what the interpreter can't show, real instructions, pipelines and 16-bit sums.

Pools are poisoned with NaN wherever no token is, and table entries that must not be followed are garbage.
"""

from __future__ import annotations

import itertools
import random

import pytest

torch = pytest.importorskip("torch", reason="the kernels need PyTorch")
pytest.importorskip("triton", reason="the kernels need Triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from gpu.kernels.block_copy import copy_blocks, copy_reference  # noqa: E402
from gpu.kernels.cache_write import write_kv, write_reference  # noqa: E402
from gpu.kernels.decode import contiguous_decode, decode_reference, paged_decode  # noqa: E402
from gpu.kernels.prefill import paged_prefill, prefill_reference  # noqa: E402
from gpu.kernels.scoring import Scoring  # noqa: E402
from gpu.kernels.swap import gather_blocks, scatter_blocks  # noqa: E402
from tests.gpu.kernels.interpreted.poisoned_pool import Paged, paged, queries  # noqa: E402

DEVICE = "cuda"
FP8 = torch.float8_e4m3fn
HAS_FP8 = torch.version.hip is not None or torch.cuda.get_device_capability() >= (8, 9)
needs_fp8 = pytest.mark.skipif(not HAS_FP8, reason="fp8 needs compute capability 8.9")
COUNT = 24  # combinations, in which every value of every axis occurs


def combinations(*axes: tuple[object, ...]) -> list[tuple[object, ...]]:
    choice = random.Random(0)
    columns = []
    for axis in axes:
        values = list(itertools.islice(itertools.cycle(axis), COUNT))
        choice.shuffle(values)
        columns.append(values)
    return list(zip(*columns, strict=True))


SHAPES = combinations(
    (1, 2, 3, 4, 5, 7, 8, 16),  # group
    (64, 80, 96, 128, 192, 256),  # head size
    (1, 8, 16, 24, 32, 64, 128, 256),  # block size
    (torch.float32, torch.float16, torch.bfloat16),
)
OPTIONS = {"plain": {}, "window": {"window": 37}, "softcap": {"softcap": 20.0}, "both": {"window": 100, "softcap": 5.0}}


def on_device(sequences: Paged) -> Paged:
    return Paged(*(getattr(sequences, name).to(DEVICE) for name in Paged.__dataclass_fields__))


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Weights are rounded to the type before they multiply values of up to 5, outputs once more.

    2^-11 × 5 = 2.5e-3 in float16, 2^-8 × 5 = 2e-2 in bfloat16; in float32 sums of a few hundred products, 2^-24 each.
    """
    rtol, atol = {torch.float32: (0.0, 2e-5), torch.float16: (2**-10, 2.5e-3), torch.bfloat16: (2**-7, 2e-2)}[out.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize(("group", "head_dim", "block_size", "dtype"), SHAPES)
def test_decode_is_right_for_every_size_and_type(
    group: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    lens = [0, 1, max(block_size - 1, 1), block_size, block_size + 1, 131, 2500]
    sequences = on_device(paged(lens, head_dim=head_dim, block_size=block_size, dtype=dtype, shared_blocks=1))
    q = queries(len(lens), 2 * group, head_dim, dtype).to(DEVICE)
    arguments = (q, sequences.k_pool, sequences.v_pool, sequences.tables, sequences.context_lens)
    lse = torch.full(q.shape[:2], torch.nan, device=DEVICE)
    out = paged_decode(*arguments, scale=head_dim**-0.5, lse=lse, max_context=2500)
    expected, expected_lse = decode_reference(*arguments, Scoring(head_dim**-0.5), torch.float64)
    assert_close(out, expected)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-4)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_decode_follows_every_option(options: dict[str, float], dtype: torch.dtype) -> None:
    lens = [1, 36, 37, 38, 700]
    sequences = on_device(paged(lens, head_dim=128, dtype=dtype))
    q = queries(len(lens), 8, 128, dtype).to(DEVICE)
    sinks = torch.linspace(-1.0, 2.0, 8, device=DEVICE)
    arguments = (q, sequences.k_pool, sequences.v_pool, sequences.tables, sequences.context_lens)
    out = paged_decode(*arguments, scale=0.1, sinks=sinks, **options)
    assert_close(out, decode_reference(*arguments, Scoring(0.1, sinks=sinks, **options), torch.float64)[0])


@pytest.mark.parametrize(("group", "head_dim", "block_size", "dtype"), SHAPES)
def test_prefill_is_right_for_every_size_and_type(
    group: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    # Whole prompts, chunks after a prefix, one token, none.
    new, lens = [300, 64, 1, 0, 129], [300, 500, 77, 5, 260]
    sequences = on_device(paged(lens, head_dim=head_dim, block_size=block_size, dtype=dtype))
    q = queries(sum(new), 2 * group, head_dim, dtype).to(DEVICE)
    bounds = torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32, device=DEVICE)
    arguments = (q, sequences.k_pool, sequences.v_pool, sequences.tables, bounds, sequences.context_lens)
    out = paged_prefill(*arguments, max_query_len=300, scale=head_dim**-0.5)
    assert_close(out, prefill_reference(*arguments, Scoring(head_dim**-0.5), torch.float64)[0])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_prefill_follows_every_option(options: dict[str, float]) -> None:
    new, lens = [300, 64, 1], [300, 500, 77]
    sequences = on_device(paged(lens, head_dim=128, dtype=torch.bfloat16))
    q = queries(sum(new), 8, 128, torch.bfloat16).to(DEVICE)
    sinks = torch.linspace(-1.0, 2.0, 8, device=DEVICE)
    bounds = torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32, device=DEVICE)
    arguments = (q, sequences.k_pool, sequences.v_pool, sequences.tables, bounds, sequences.context_lens)
    out = paged_prefill(*arguments, max_query_len=300, scale=0.1, sinks=sinks, **options)
    assert_close(out, prefill_reference(*arguments, Scoring(0.1, sinks=sinks, **options), torch.float64)[0])


@needs_fp8
def test_fp8_pools_are_written_and_read_as_their_scales_say() -> None:
    pools = torch.zeros((2, 40, 2, 16, 128), device=DEVICE).to(FP8)
    expected = pools.clone()
    new = torch.randn((2, 500, 2, 128), dtype=torch.bfloat16, device=DEVICE)
    slots = torch.randperm(640, device=DEVICE)[:500]
    write_kv(new[0], new[1], pools[0], pools[1], slots, k_scale=0.5, v_scale=0.25)
    write_reference(new[0], new[1], expected[0], expected[1], slots, 0.5, 0.25)
    # Rounding may fall either way half-way between two numbers of the format, 2^-3 apart at most.
    torch.testing.assert_close(pools.float(), expected.float(), rtol=0.13, atol=2**-9)
    tables = torch.arange(40, dtype=torch.int32, device=DEVICE).view(4, 10)
    lens = torch.tensor([160, 159, 1, 17], dtype=torch.int32, device=DEVICE)
    q = torch.randn((4, 8, 128), dtype=torch.bfloat16, device=DEVICE)
    arguments = (q, pools[0], pools[1], tables, lens)
    out = paged_decode(*arguments, scale=0.1, k_scale=0.5, v_scale=0.25)
    assert_close(out, decode_reference(*arguments, Scoring(0.1, k_scale=0.5, v_scale=0.25), torch.float64)[0])


def test_contiguous_and_paged_decode_agree_to_the_bit_on_consecutive_blocks() -> None:
    pools = torch.randn((2, 64, 2, 16, 128), dtype=torch.bfloat16, device=DEVICE)
    tables = torch.arange(64, dtype=torch.int32, device=DEVICE).view(4, 16)
    lens = torch.tensor([256, 255, 1, 130], dtype=torch.int32, device=DEVICE)
    q = torch.randn((4, 8, 128), dtype=torch.bfloat16, device=DEVICE)
    paged_out = paged_decode(q, pools[0], pools[1], tables, lens, scale=0.1, max_context=256)
    first = tables[:, 0].contiguous()
    assert torch.equal(paged_out, contiguous_decode(q, pools[0], pools[1], first, lens, scale=0.1, max_context=256))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_written_into_their_slots_and_nowhere_else(dtype: torch.dtype) -> None:
    pools = torch.full((2, 40, 2, 16, 80), torch.nan, dtype=dtype, device=DEVICE)
    expected = pools.clone()
    new = torch.randn((2, 300, 2, 80), dtype=dtype, device=DEVICE)
    slots = torch.randperm(640, device=DEVICE)[:300]
    slots[::7] = -1
    write_kv(new[0], new[1], pools[0], pools[1], slots)
    write_reference(new[0], new[1], expected[0], expected[1], slots)
    torch.testing.assert_close(pools, expected, rtol=0, atol=0, equal_nan=True)


def test_blocks_are_copied_in_the_pool_and_come_back_from_the_host_as_they_were() -> None:
    pool = torch.randn((4, 50, 2, 16, 128), dtype=torch.bfloat16, device=DEVICE)
    expected = pool.clone()
    pairs = torch.randperm(50, device=DEVICE).view(25, 2)
    copy_blocks(pool, pairs)
    copy_reference(expected, pairs)
    assert torch.equal(pool, expected)
    host = torch.zeros((30, 4, 2, 16, 128), dtype=torch.bfloat16, pin_memory=True)
    out, rows = torch.randperm(50, device=DEVICE)[:20], torch.randperm(30, device=DEVICE)[:20]
    gather_blocks(pool, out, host, rows)
    torch.cuda.synchronize()
    assert torch.equal(host[rows.cpu()], expected[:, out].transpose(0, 1).cpu())
    pool[:, out] = torch.nan
    scatter_blocks(pool, out, host, rows)
    assert torch.equal(pool, expected)


def test_blocks_beyond_two_to_the_31_elements_are_found() -> None:
    # 2^31 elements are 4 GiB in bfloat16; blocks of 16 × 2 × 128 elements begin there with block 2^19.
    pool = torch.zeros((2**19 + 8, 2, 16, 128), dtype=torch.bfloat16, device=DEVICE)
    pool[-8:] = torch.randn((8, 2, 16, 128), dtype=torch.bfloat16, device=DEVICE)
    tables = torch.tensor([[2**19 + 7, 2**19], [2**19 + 3, 2**19 + 4]], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([32, 20], dtype=torch.int32, device=DEVICE)
    q = torch.randn((2, 8, 128), dtype=torch.bfloat16, device=DEVICE)
    arguments = (q, pool, pool, tables, lens)
    out = paged_decode(*arguments, scale=0.1)
    assert_close(out, decode_reference(*arguments, Scoring(0.1), torch.float64)[0])
    bounds = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    out = paged_prefill(q, pool, pool, tables, bounds, lens, max_query_len=1, scale=0.1)
    assert_close(out, decode_reference(*arguments, Scoring(0.1), torch.float64)[0])


def test_a_captured_decode_serves_other_lengths() -> None:
    pools = torch.randn((2, 256, 2, 16, 128), dtype=torch.bfloat16, device=DEVICE)
    tables = torch.randperm(256, device=DEVICE).to(torch.int32).view(4, 64)
    lens = torch.full((4,), 1024, dtype=torch.int32, device=DEVICE)
    q = torch.randn((4, 8, 128), dtype=torch.bfloat16, device=DEVICE)
    out = torch.empty_like(q)

    def decode() -> None:
        paged_decode(q, pools[0], pools[1], tables, lens, scale=0.1, max_context=1024, out=out)

    decode()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    lens.copy_(torch.tensor([1, 500, 0, 1023], dtype=torch.int32))
    graph.replay()
    expected, _ = decode_reference(q, pools[0], pools[1], tables, lens, Scoring(0.1), torch.float64)
    assert_close(out, expected)
