"""Decode under the interpreter: scoring options, fp8, contiguous sequences, splits, far blocks and what it writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from poisoned_pool import GARBAGE, Paged, assert_close, far_pool, paged, poison, queries
from torch import Tensor

from gpu.kernels.decode import contiguous_decode, decode_reference, paged_decode
from gpu.kernels.launch import DecodeLaunch
from gpu.kernels.scoring import Scoring

LENS = [0, 1, 32, 33, 100]
SCALE = 0.125
SINKS = torch.tensor([-3.0, -1.0, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0])


def launch(splits: int, tile: int = 16) -> DecodeLaunch:
    return DecodeLaunch(tile, num_warps=4, num_stages=2, splits=splits)


def check(sequences: Paged, q: Tensor, splits: int, **options: Any) -> None:
    """Compares one decode with the reference."""
    lse = torch.full(q.shape[:2], torch.nan)
    where = (sequences.k_pool, sequences.v_pool, sequences.tables, sequences.context_lens)
    out = paged_decode(q, *where, scale=SCALE, lse=lse, launch=launch(splits), **options)
    expected, expected_lse = decode_reference(q, *where, Scoring(SCALE, **options), torch.float64)
    assert_close(out, expected, lse, expected_lse)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
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
def test_scoring_options_of_models(options: dict[str, Any], splits: int) -> None:
    check(paged(LENS), queries(len(LENS), 8, 64, torch.float32), splits, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fp8_pool_is_scaled_back(dtype: torch.dtype) -> None:
    sequences = paged(LENS, dtype=torch.float8_e4m3fn)
    check(sequences, queries(len(LENS), 8, 64, dtype), 2, k_scale=0.25, v_scale=0.5)


def test_a_sink_far_above_all_scores_leaves_nothing_to_the_keys() -> None:
    # The denominator is e^200 beside keys of e^1 or so: the output is 0 in float32, the logarithm 200.
    sequences, q = paged([40]), queries(1, 2, 64, torch.float32)
    lse = torch.empty(1, 2)
    where = (sequences.k_pool, sequences.v_pool, sequences.tables, sequences.context_lens)
    for splits in (1, 3):
        out = paged_decode(q, *where, scale=SCALE, sinks=torch.full((2,), 200.0), lse=lse, launch=launch(splits))
        assert out.abs().max() < 1e-30
        torch.testing.assert_close(lse, torch.full((1, 2), 200.0))


def consecutive(lens: list[int], block_size: int, **sizes: Any) -> tuple[Paged, Tensor]:
    """Sequences at consecutive blocks with a gap of one between them, and their first blocks."""
    scattered = paged(lens, block_size=block_size, **sizes)
    room = -(-max(lens) // block_size) + 1
    shape = (len(lens) * room, *scattered.k_pool.shape[1:])
    k_pool, v_pool = (poison(shape, scattered.k_pool.dtype) for _ in range(2))
    tables = torch.arange(len(lens) * room, dtype=torch.int32).view(len(lens), room)
    for row, n in enumerate(lens):
        count = -(-n // block_size)
        source, target = scattered.tables[row, :count].long(), tables[row, :count].long()
        k_pool[target], v_pool[target] = scattered.k_pool[source], scattered.v_pool[source]
        tables[row, count:] = GARBAGE[row % 2]
    first = torch.arange(0, len(lens) * room, room, dtype=torch.int32)
    return Paged(k_pool, v_pool, tables, scattered.context_lens), first


@pytest.mark.parametrize(
    ("block_size", "head_dim", "dtype", "splits"),
    [
        (1, 64, torch.float32, 3),
        (16, 80, torch.bfloat16, 1),
        (24, 64, torch.float16, 2),
        (64, 96, torch.float32, 3),
    ],
)
def test_contiguous_and_paged_agree_bit_for_bit(
    block_size: int, head_dim: int, dtype: torch.dtype, splits: int
) -> None:
    sequences, first = consecutive(LENS, block_size, head_dim=head_dim, dtype=dtype)
    q = queries(len(LENS), 8, head_dim, dtype)
    options: dict[str, Any] = {"scale": SCALE, "window": 70, "softcap": 20.0, "sinks": SINKS, "launch": launch(splits)}
    pools, lens = (sequences.k_pool, sequences.v_pool), sequences.context_lens
    paged_lse, contiguous_lse = torch.empty(q.shape[:2]), torch.empty(q.shape[:2])
    through_table = paged_decode(q, *pools, sequences.tables, lens, lse=paged_lse, **options)
    counted_on = contiguous_decode(q, *pools, first, lens, lse=contiguous_lse, **options)
    assert torch.equal(through_table.view(torch.uint8), counted_on.view(torch.uint8))
    assert torch.equal(paged_lse, contiguous_lse)


def test_one_block_for_each_sequence_is_the_layout_without_paging() -> None:
    # Blocks of 48 slots, three tiles each: no sequence leaves its block, whatever the table says beyond.
    sequences, first = consecutive([7, 40, 48], 48)
    q = queries(3, 4, 64, torch.float32)
    pools, lens = (sequences.k_pool, sequences.v_pool), sequences.context_lens
    out = contiguous_decode(q, *pools, first, lens, scale=SCALE, launch=launch(2))
    expected, _ = decode_reference(q, *pools, sequences.tables, lens, Scoring(SCALE), torch.float64)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5)


@settings(max_examples=20, deadline=None)
@given(
    lens=st.lists(st.integers(0, 150), min_size=1, max_size=3),
    block_size=st.sampled_from([1, 2, 7, 16, 48]),
    splits=st.integers(1, 9),
    window=st.sampled_from([0, 0, 1, 13, 64]),
    seed=st.integers(0, 2**16),
)
def test_any_lengths_in_any_number_of_splits(
    lens: list[int], block_size: int, splits: int, window: int, seed: int
) -> None:
    sequences = paged(lens, num_kv_heads=1, block_size=block_size, seed=seed, shared_blocks=seed % 3)
    check(sequences, queries(len(lens), 3, 64, torch.float32, seed), splits, window=window, sinks=SINKS[:3])


def test_blocks_beyond_2_to_the_31_elements_are_found() -> None:
    k_pool, v_pool = far_pool()
    for pool, seed in ((k_pool, 0), (v_pool, 1)):
        torch.manual_seed(seed)
        pool[0, :, :4] = torch.randn(2, 4, 64)
        pool[2] = torch.randn(2, 16, 64)
    tables = torch.tensor([[2, 0]], dtype=torch.int32)  # 16 tokens 2^31 elements away, then 4 near
    sequences = Paged(k_pool, v_pool, tables, torch.tensor([20], dtype=torch.int32))
    check(sequences, queries(1, 4, 64, torch.float16), 1)
    first = torch.tensor([2], dtype=torch.int32)
    lens = torch.tensor([16], dtype=torch.int32)
    q = queries(1, 4, 64, torch.float16)
    out = contiguous_decode(q, k_pool, v_pool, first, lens, scale=SCALE, launch=launch(1))
    expected, _ = decode_reference(q, k_pool, v_pool, tables, lens, Scoring(SCALE), torch.float64)
    torch.testing.assert_close(out.double(), expected, rtol=2**-11, atol=2.5e-3)


def test_given_outputs_are_written_whatever_their_strides_and_nothing_beside_them() -> None:
    sequences, q = paged(LENS), queries(len(LENS), 8, 64, torch.float32)
    where = (sequences.k_pool, sequences.v_pool, sequences.tables, sequences.context_lens)
    expected = paged_decode(q, *where, scale=SCALE, launch=launch(3))
    wide, wide_lse = torch.full((len(LENS), 8, 80), 7.0), torch.full((8, len(LENS)), 7.0)
    out = paged_decode(q, *where, scale=SCALE, out=wide[:, :, :64], lse=wide_lse.T, launch=launch(3))
    assert out.data_ptr() == wide.data_ptr()
    assert torch.equal(wide[:, :, :64], expected)
    assert wide[:, :, 64:].eq(7).all() and wide_lse.ne(7).all()


def test_without_a_launch_the_table_and_the_number_of_splits_decide() -> None:
    sequences, q = paged([300, 17]), queries(2, 4, 64, torch.float32)
    where = (sequences.k_pool, sequences.v_pool, sequences.tables, sequences.context_lens)
    expected, _ = decode_reference(q, *where, Scoring(SCALE), torch.float64)
    for max_context in (None, 300):
        out = paged_decode(q, *where, scale=SCALE, max_context=max_context)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5)


def test_no_sequences_are_no_work() -> None:
    sequences = paged([3])
    out = paged_decode(
        queries(0, 4, 64, torch.float32),
        sequences.k_pool,
        sequences.v_pool,
        sequences.tables[:0],
        sequences.context_lens[:0],
        scale=SCALE,
    )
    assert out.shape == (0, 4, 64)


WRONG: list[tuple[str, Callable[[dict[str, Any]], None]]] = [
    ("expected the same", lambda a: a.update(q=a["q"][:, :, :32])),
    ("expected a multiple", lambda a: a.update(q=a["q"][:, :3])),
    ("differ in shape", lambda a: a.update(v_pool=a["v_pool"][:1])),
    ("must be int32", lambda a: a.update(block_tables=a["block_tables"].long())),
    ("number of sequences", lambda a: a.update(context_lens=a["context_lens"][:1])),
    ("must be contiguous", lambda a: a.update(q=a["q"].transpose(1, 2).contiguous().transpose(1, 2))),
    ("above 0", lambda a: a.update(scale=0.0)),
    ("expected 0 .off. or more", lambda a: a.update(window=-1)),
]


@pytest.mark.parametrize(("message", "spoil"), WRONG, ids=[message for message, _ in WRONG])
def test_what_does_not_fit_together_is_refused(message: str, spoil: Callable[[dict[str, Any]], None]) -> None:
    sequences = paged([3, 4])
    arguments: dict[str, Any] = {
        "q": queries(2, 4, 64, torch.float32),
        "k_pool": sequences.k_pool,
        "v_pool": sequences.v_pool,
        "block_tables": sequences.tables,
        "context_lens": sequences.context_lens,
        "scale": SCALE,
    }
    paged_decode(**arguments)
    spoil(arguments)
    with pytest.raises(ValueError, match=message):
        paged_decode(**arguments)
