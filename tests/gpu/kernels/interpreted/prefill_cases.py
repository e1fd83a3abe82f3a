"""Prefill under the interpreter, against float64 and against decode."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from poisoned_pool import Paged, assert_close, far_pool, paged, queries
from torch import Tensor

from gpu.kernels.decode import paged_decode
from gpu.kernels.launch import DecodeLaunch, PrefillLaunch
from gpu.kernels.prefill import paged_prefill, prefill_reference
from gpu.kernels.scoring import Scoring

SCALE = 0.125
SINKS = torch.tensor([-3.0, -1.0, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0])
GROUPS = (1, 2, 3, 4, 5, 7, 8, 16)
HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (1, 8, 16, 24, 64, 128, 256)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
COUNT = 18


def launch(rows: int = 32, tile: int = 32) -> PrefillLaunch:
    return PrefillLaunch(rows, tile, num_warps=4, num_stages=2)


def cumulative(query_lens: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32)


def check(
    sequences: Paged, query_lens: list[int], q: Tensor, chosen: PrefillLaunch, scale: float = SCALE, **options: Any
) -> None:
    """Compares one prefill with the reference."""
    lse = torch.full(q.shape[:2], torch.nan)
    where = (
        sequences.k_pool,
        sequences.v_pool,
        sequences.tables,
        cumulative(query_lens),
        sequences.context_lens,
    )
    out = paged_prefill(q, *where, max_query_len=max(query_lens), scale=scale, lse=lse, launch=chosen, **options)
    expected, expected_lse = prefill_reference(q, *where, Scoring(scale, **options), torch.float64)
    assert_close(out, expected, lse, expected_lse)


def cases() -> list[tuple[int, int, int, torch.dtype, int, int]]:
    """(group, head_dim, block_size, dtype, rows, tile): every value of every axis, in random combinations."""
    choice = random.Random(0)
    axes = []
    for axis in (GROUPS, HEAD_DIMS, BLOCK_SIZES, DTYPES, (32, 64, 128), (32, 64, 128)):
        values = list(itertools.islice(itertools.cycle(axis), COUNT))
        choice.shuffle(values)
        axes.append(values)
    return list(zip(*axes, strict=True))


@pytest.mark.parametrize(("group", "head_dim", "block_size", "dtype", "rows", "tile"), cases())
def test_prefill_is_right_for_every_size_and_type(
    group: int, head_dim: int, block_size: int, dtype: torch.dtype, rows: int, tile: int
) -> None:
    # A whole prompt, a chunk behind a prefix, one that decodes, one with nothing to do, and an empty one.
    query_lens, prefixes = [41, 20, 1, 0, 0], [0, 37, 70, 30, 0]
    lens = [n + prefix for n, prefix in zip(query_lens, prefixes, strict=True)]
    sequences = paged(lens, head_dim=head_dim, block_size=block_size, dtype=dtype, shared_blocks=1)
    q = queries(sum(query_lens), 2 * group, head_dim, dtype)
    check(sequences, query_lens, q, launch(rows, tile), scale=head_dim**-0.5)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 16},
        {"window": 37},
        {"window": 1000},
        {"softcap": 2.0},
        {"softcap": 50.0},
        {"sinks": SINKS},
        {"sinks": SINKS.half(), "window": 20},
        {"softcap": 30.0, "window": 50, "sinks": SINKS},
        {"k_scale": 0.5, "v_scale": 3.0},
    ],
)
def test_scoring_options_of_models(options: dict[str, Any]) -> None:
    # Chunks of 50 and 9 behind 80 and 64: with 8 queries to a tile and 32 keys, every loop has work and none has.
    query_lens = [50, 9, 1]
    check(paged([130, 73, 100]), query_lens, queries(60, 8, 64, torch.float32), launch(), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fp8_pool_is_scaled_back(dtype: torch.dtype) -> None:
    sequences = paged([45, 20], dtype=torch.float8_e4m3fn)
    check(sequences, [30, 20], queries(50, 8, 64, dtype), launch(), k_scale=0.25, v_scale=0.5)


def test_more_query_heads_to_a_kv_head_than_rows_get_the_rows_they_need() -> None:
    # Multi-query attention with 20 heads on one, and 16 rows asked for: 32 rows, one query each.
    sequences = paged([18, 5], num_kv_heads=1)
    check(sequences, [9, 5], queries(14, 20, 64, torch.float32), launch(rows=16))


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 90)), min_size=1, max_size=3),
    group=st.sampled_from([1, 3, 4]),
    block_size=st.sampled_from([1, 2, 7, 16, 48]),
    rows=st.sampled_from([16, 32, 64]),
    tile=st.sampled_from([16, 32, 64]),
    window=st.sampled_from([0, 0, 1, 13, 64]),
    seed=st.integers(0, 2**16),
)
def test_any_mix_of_chunks_and_prefixes(
    sizes: list[tuple[int, int]], group: int, block_size: int, rows: int, tile: int, window: int, seed: int
) -> None:
    query_lens = [n for n, _ in sizes]
    lens = [n + prefix for n, prefix in sizes]
    sequences = paged(lens, num_kv_heads=1, block_size=block_size, seed=seed, shared_blocks=seed % 3)
    q = queries(sum(query_lens), group, 64, torch.float32, seed)
    check(sequences, query_lens, q, launch(rows, tile), window=window, sinks=SINKS[:group])


def test_one_query_each_is_a_decode() -> None:
    sequences, q = paged([1, 33, 100]), queries(3, 8, 64, torch.float32)
    options: dict[str, Any] = {"scale": SCALE, "window": 40, "softcap": 20.0, "sinks": SINKS}
    pools, lens = (sequences.k_pool, sequences.v_pool), sequences.context_lens
    lse, decode_lse = torch.empty(3, 8), torch.empty(3, 8)
    out = paged_prefill(
        q, *pools, sequences.tables, cumulative([1, 1, 1]), lens, max_query_len=1, lse=lse, launch=launch(), **options
    )
    decoded = paged_decode(q, *pools, sequences.tables, lens, lse=decode_lse, launch=DecodeLaunch(32, 4, 2), **options)
    torch.testing.assert_close(out, decoded, rtol=0, atol=2e-5)
    torch.testing.assert_close(lse, decode_lse, rtol=0, atol=2e-5)


def test_tokens_beyond_the_last_sequence_are_not_touched() -> None:
    # A batch padded to 32 tokens, as a captured graph has it, of which 21 are real; the padded ones hold NaN.
    sequences = paged([30, 6])
    q = queries(32, 4, 64, torch.float32)
    q[21:] = torch.nan
    out, lse = torch.full((32, 4, 64), 7.0), torch.full((32, 4), 7.0)
    pools, lens = (sequences.k_pool, sequences.v_pool), sequences.context_lens
    bounds = cumulative([15, 6])
    paged_prefill(
        q, *pools, sequences.tables, bounds, lens, max_query_len=32, scale=SCALE, out=out, lse=lse, launch=launch()
    )
    expected, _ = prefill_reference(q, *pools, sequences.tables, bounds, lens, Scoring(SCALE), torch.float64)
    torch.testing.assert_close(out[:21].double(), expected[:21], rtol=0, atol=2e-5)
    assert out[21:].eq(7).all() and lse[21:].eq(7).all()


def test_blocks_beyond_2_to_the_31_elements_are_found() -> None:
    k_pool, v_pool = far_pool()
    for pool, seed in ((k_pool, 0), (v_pool, 1)):
        torch.manual_seed(seed)
        pool[0, :, :4] = torch.randn(2, 4, 64)
        pool[2] = torch.randn(2, 16, 64)
    tables = torch.tensor([[2, 0]], dtype=torch.int32)  # 16 tokens 2^31 elements away, then 4 near
    sequences = Paged(k_pool, v_pool, tables, torch.tensor([20], dtype=torch.int32))
    check(sequences, [20], queries(20, 4, 64, torch.float16), launch())


def test_without_a_launch_the_table_decides() -> None:
    sequences = paged([30, 6])
    pools, lens = (sequences.k_pool, sequences.v_pool), sequences.context_lens
    q, bounds = queries(21, 4, 64, torch.float32), cumulative([15, 6])
    out = paged_prefill(q, *pools, sequences.tables, bounds, lens, max_query_len=15, scale=SCALE)
    expected, _ = prefill_reference(q, *pools, sequences.tables, bounds, lens, Scoring(SCALE), torch.float64)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5)


def test_no_queries_are_no_work() -> None:
    sequences = paged([3])
    pools, lens = (sequences.k_pool, sequences.v_pool), sequences.context_lens
    q = queries(0, 4, 64, torch.float32)
    out = paged_prefill(q, *pools, sequences.tables, cumulative([0]), lens, max_query_len=0, scale=SCALE)
    assert out.shape == (0, 4, 64)
