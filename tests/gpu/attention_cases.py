"""One step of random sequences on a poisoned pool, for whichever backend computes it."""

from __future__ import annotations

import numpy as np
import torch
from dense_attention import dense_attention
from torch import Tensor

from gpu.attention import AttentionBackend, ScoreRule
from gpu.batch import BatchBuilder, BlockTables, DecodeShape, SequenceWork
from gpu.pool import KVPool
from sim.kv_layout import ModelSpec

NUM_HEADS, NUM_KV_HEADS = 6, 2
# (tokens computed, context): whole prompts, chunks, decodes, some of one token only, in no order.
MIXED = [(5, 5), (1, 30), (7, 19), (1, 1), (1, 8), (2, 33)]
DECODES = [(1, 30), (1, 1), (1, 17)]


def rules() -> dict[str, ScoreRule]:
    sinks = torch.linspace(-1.0, 2.0, NUM_HEADS)
    return {
        "plain": ScoreRule(0.3),
        "window": ScoreRule(0.3, window=6),
        "softcap": ScoreRule(0.9, softcap=1.5),
        "sinks": ScoreRule(0.3, sinks=sinks),
        "all": ScoreRule(0.5, window=9, softcap=3.0, sinks=sinks),
    }


def step_and_reference(
    backend: AttentionBackend,
    rule: ScoreRule,
    works: list[tuple[int, int]],
    block_size: int,
    kv_cache_dtype: str = "auto",
    pad_to: DecodeShape | None = None,
    head_dim: int = 16,
) -> tuple[Tensor, Tensor]:
    """What the backend computes for a step, padding left out, and what it should: [tokens, heads, head_dim].

    Earlier tokens of each sequence are written by the backend too, in a step of their own. Of an 8-bit pool the
    reference takes what is stored there, times the scale: rounding is none of its business.
    """
    generator = torch.Generator().manual_seed(3)
    spec = ModelSpec("tiny", 2, 96, NUM_HEADS, NUM_KV_HEADS, head_dim, 96, 128, 256, dtype="float32")
    num_blocks = [-(-context // block_size) for _, context in works]
    scales = [(1.0, 1.0), (0.5, 2.0)] if kv_cache_dtype.startswith("fp8") else None
    pool = KVPool(spec, sum(num_blocks) + 4, block_size, kv_cache_dtype, scales=scales)
    pool.blocks.view(torch.uint8).fill_(0x7F if scales else 0xFF)  # NaN
    layer = pool.layer(1)
    ids = np.random.default_rng(4).permutation(pool.num_blocks)
    blocks = [part.tolist() for part in np.split(ids[: sum(num_blocks)], np.cumsum(num_blocks)[:-1])]
    tables = BlockTables(len(works) + 2, max(num_blocks))
    builder = BatchBuilder(tables, block_size, 256, "cpu")
    rows = [tables.take() for _ in works]

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    queries = [random(context, NUM_HEADS, head_dim) for _, context in works]
    keys = [random(context, NUM_KV_HEADS, head_dim) for _, context in works]
    values = [random(context, NUM_KV_HEADS, head_dim) for _, context in works]

    def attend(spans: list[tuple[int, int, int]], pad_to: DecodeShape | None) -> tuple[Tensor, list[int]]:
        """Attends to positions [start, end) of sequences; (sequence, start, end). Returns rows in batch order."""
        batch = builder.build(
            [SequenceWork(rows[i], np.zeros(end - start, np.int64), end, blocks[i]) for i, start, end in spans], pad_to
        )
        order = sorted(range(len(spans)), key=lambda j: spans[j][2] - spans[j][1] > 1)
        padding = batch.token_ids.numel() - int(batch.query_lens.sum())

        def packed(tensors: list[Tensor]) -> Tensor:
            parts = [tensors[i][start:end] for i, start, end in (spans[j] for j in order)]
            return torch.cat([*parts, torch.full((padding, *tensors[0].shape[1:]), torch.nan)])

        out = backend.attend(packed(queries), packed(keys), packed(values), layer, batch, rule)
        return out[: len(out) - padding], [spans[j][0] for j in order]

    earlier = [(i, 0, context - new) for i, (new, context) in enumerate(works) if context > new]
    if earlier:
        attend(earlier, None)
    out, order = attend([(i, context - new, context) for i, (new, context) in enumerate(works)], pad_to)
    if scales:
        keys = [_held(layer.keys, table, len(key)) * layer.k_scale for table, key in zip(blocks, keys, strict=True)]
        values = [_held(layer.values, table, len(key)) * layer.v_scale for table, key in zip(blocks, keys, strict=True)]
    expected = [dense_attention(queries[i][-works[i][0] :], keys[i], values[i], rule) for i in order]
    return out, torch.cat(expected)


def _held(cache: Tensor, table: list[int], num_tokens: int) -> Tensor:
    """What a pool holds of a sequence, [tokens, num_kv_heads, head_dim]."""
    return cache.float()[table].transpose(1, 2).flatten(0, 1)[:num_tokens]
