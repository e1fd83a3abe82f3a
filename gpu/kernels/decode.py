"""Attention of one query per sequence on a paged or contiguous KV pool: the decode step.

Bound by memory: all that counts is that K and V are read once, in long runs, with many loads in flight. Hence:
query heads that share a KV head are rows of one tile (at least 16, what a matrix instruction takes); sequences are
split over programs until the GPU is full (Flash-Decoding, Dao et al. 2023), and a second kernel merges the parts.
The number of splits comes from sizes the host knows, so a launch can be captured in a CUDA graph and replayed
for other lengths.

Paged and contiguous attention are the same kernel. Only where a block id comes from differs: looked up, or counted on
from the first. So their difference is the cost of the lookup and of scattered blocks, and of nothing else.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpu.kernels.addressing import find_blocks, load_tile, slot_offsets
from gpu.kernels.call import KernelCall, require_device
from gpu.kernels.launch import DecodeLaunch, Device, decode_launch, device_of, num_splits, require_pool_dtype
from gpu.kernels.reference import attend, gather_sequence
from gpu.kernels.scoring import Scoring
from gpu.kernels.shapes import attention_shape, dot_dtype, next_power_of_two
from gpu.kernels.softmax import LN_2, add_keys, begin_softmax, cap_scores

MIN_ROWS = 16  # of the query tile: the least a matrix instruction takes
MERGE_CHUNK = 16  # splits that the merging kernel reads at once


@triton.jit
def decode_kernel(
    q: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    tables: tl.tensor,
    context_lens: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    scale: tl.tensor,
    v_scale: tl.tensor,
    stride_q_seq: tl.tensor,
    stride_q_head: tl.tensor,
    stride_block: tl.tensor,
    stride_kv_head: tl.tensor,
    stride_slot: tl.tensor,
    stride_table: tl.tensor,
    stride_out_seq: tl.tensor,
    stride_out_head: tl.tensor,
    stride_out_split: tl.tensor,
    stride_lse_seq: tl.tensor,
    stride_lse_head: tl.tensor,
    stride_lse_split: tl.tensor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """One program: the query heads of one KV head, one split of one sequence. Grid: KV heads, splits, sequences."""
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)

    context_len = tl.load(context_lens + seq)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(context_len - WINDOW, 0) // TILE * TILE
    tiles = tl.cdiv(context_len - begin, TILE)
    share = tl.cdiv(tiles, SPLITS) * TILE
    begin = begin + split * share
    end = tl.minimum(begin + share, context_len)

    row = tl.arange(0, ROWS)
    head = kv_head * GROUP + row
    real = row < GROUP
    out_lse = lse
    if lse is not None:
        out_lse = lse + seq * stride_lse_seq + head * stride_lse_head + split * stride_lse_split
    if SPLITS > 1:  # noqa: SIM102 - this one is decided when compiling
        if begin >= end:  # the merging kernel skips what has no weight
            tl.store(out_lse, tl.full([ROWS], -float("inf"), tl.float32), mask=real)
            return

    dim = tl.arange(0, PADDED_DIM)
    in_head = real[:, None] & (dim < HEAD_DIM)[None, :]
    queries = tl.load(
        q + seq * stride_q_seq + head[:, None] * stride_q_head + dim[None, :],
        mask=in_head,
        other=0.0,
    ).to(DOT)
    k_pool += kv_head * stride_kv_head
    v_pool += kv_head * stride_kv_head
    table = tables + seq * stride_table if PAGED else tl.load(tables + seq * stride_table)

    top, total = begin_softmax(sinks, head, row < tl.where(split == 0, GROUP, 0), ROWS)
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    blocks = find_blocks(table, begin, end, PAGED, BLOCK_SIZE, TILE)
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        visible = position < end
        if WINDOW > 0:
            visible = visible & (position >= context_len - WINDOW)
        offsets = slot_offsets(blocks, start, stride_block, stride_slot, BLOCK_SIZE, TILE)
        blocks = find_blocks(table, start + TILE, end, PAGED, BLOCK_SIZE, TILE)
        k = load_tile(k_pool, offsets, visible, HEAD_DIM, PADDED_DIM, True).to(DOT)
        scores, unit = cap_scores(tl.dot(queries, tl.trans(k), input_precision="ieee"), scale, SOFTCAP)
        scores = tl.where(visible[None, :], scores, -float("inf"))
        weights, shrink, top, total = add_keys(scores, unit, top, total)
        v = load_tile(v_pool, offsets, visible, HEAD_DIM, PADDED_DIM, True).to(DOT)
        acc = tl.dot(weights.to(DOT), v, acc * shrink[:, None], input_precision="ieee")

    # Nothing was seen: 0, and -inf as the logarithm of no keys. A sink alone is no key.
    empty = begin >= end
    total = tl.where(empty, 1.0, total)
    acc = acc * (v_scale / total)[:, None]
    tl.store(
        out + seq * stride_out_seq + head[:, None] * stride_out_head + split * stride_out_split + dim[None, :],
        acc.to(out.dtype.element_ty),
        mask=in_head,
    )
    if lse is not None:
        tl.store(out_lse, tl.where(empty, -float("inf"), (top + tl.log2(total)) * LN_2), mask=real)


@triton.jit
def merge_kernel(
    parts: tl.tensor,
    part_lses: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    num_heads: tl.tensor,
    stride_out_seq: tl.tensor,
    stride_out_head: tl.tensor,
    stride_lse_seq: tl.tensor,
    stride_lse_head: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """One program: one query head of one sequence. `parts` is [seq, head, split, dim], `part_lses` lacks dim."""
    head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    first = (seq * num_heads + head) * SPLITS

    every = tl.arange(0, PADDED_SPLITS)
    logs = tl.load(part_lses + first + every, mask=every < SPLITS, other=-float("inf"))
    top = tl.max(logs, 0)
    empty = top == -float("inf")
    top = tl.where(empty, 0.0, top)
    total = tl.sum(tl.exp(logs - top), 0)

    dim = tl.arange(0, PADDED_DIM)
    acc = tl.zeros([PADDED_DIM], tl.float32)
    for start in range(0, SPLITS, CHUNK):
        split = start + tl.arange(0, CHUNK)
        weights = tl.exp(tl.load(part_lses + first + split, mask=split < SPLITS, other=-float("inf")) - top)
        part = tl.load(
            parts + (first + split)[:, None] * HEAD_DIM + dim[None, :],
            mask=(weights > 0)[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
        acc += tl.sum(part * weights[:, None], 0)
    total = tl.where(empty, 1.0, total)
    acc = acc / total  # 0 / 1 if no split saw a key
    tl.store(
        out + seq * stride_out_seq + head * stride_out_head + dim,
        acc.to(out.dtype.element_ty),
        mask=dim < HEAD_DIM,
    )
    if lse is not None:
        log = tl.where(empty, -float("inf"), top + tl.log(total))
        tl.store(lse + seq * stride_lse_seq + head * stride_lse_head, log)


def paged_decode(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    max_context: int | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    launch: DecodeLaunch | None = None,
) -> torch.Tensor:
    """Attention of the last token of each sequence to all of it, through block tables.

    Args:
        q: [batch, query heads, head_dim]; float32, float16 or bfloat16.
        k_pool, v_pool: [num_blocks, num_kv_heads, block_size, head_dim], of the same strides; also float8_e4m3fn.
        block_tables: [batch, max_blocks] int32. Entries beyond a sequence's context are not read.
        context_lens: [batch] int32, tokens of each sequence with the query's own. 0: output 0, `lse` -inf.
        scale: what products of queries and keys are multiplied with; above 0.
        window, softcap, sinks, k_scale, v_scale: see `Scoring`.
        max_context: no sequence is longer, in tokens; decides the number of splits. None: what the tables can hold.
        out: [batch, query heads, head_dim], written if given.
        lse: [batch, query heads] float32, written if given: natural logarithm of the softmax's denominator.
        launch: instead of the table's choice (`launch.py`).

    Returns:
        `out`, or a new tensor like `q`.

    Raises:
        ValueError: shapes, types or strides that do not fit together.
        UserError: CPU tensors while Triton is not interpreting, or a pool whose type the GPU lacks.
    """
    require_device("paged_decode", q, k_pool, v_pool, block_tables, context_lens, sinks, out, lse)
    scoring = Scoring(scale, window, softcap, sinks, k_scale, v_scale)
    if max_context is None:
        max_context = block_tables.shape[1] * k_pool.shape[2]
    return _decode(q, k_pool, v_pool, block_tables, context_lens, scoring, max_context, out, lse, launch)


def contiguous_decode(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    first_blocks: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    max_context: int | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    launch: DecodeLaunch | None = None,
) -> torch.Tensor:
    """Attention of the last token of each sequence to all of it, where the sequence's blocks are consecutive.

    The same kernel as `paged_decode` with the same loads; only the block table is not read. A pool whose `block_size`
    is the longest context is the layout of an engine without paging, [regions, heads, tokens, dim].

    Args:
        first_blocks: [batch] int32; position p of a sequence is in block `first + p // block_size`.
        max_context: no sequence is longer, in tokens; decides the number of splits. None: what the pool can hold.

    For all others, and for what is returned and raised, see `paged_decode`.
    """
    require_device("contiguous_decode", q, k_pool, v_pool, first_blocks, context_lens, sinks, out, lse)
    scoring = Scoring(scale, window, softcap, sinks, k_scale, v_scale)
    if max_context is None:
        max_context = k_pool.shape[0] * k_pool.shape[2]
    return _decode(q, k_pool, v_pool, first_blocks, context_lens, scoring, max_context, out, lse, launch)


def _decode(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    tables: torch.Tensor,
    context_lens: torch.Tensor,
    scoring: Scoring,
    max_context: int,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    launch: DecodeLaunch | None,
) -> torch.Tensor:
    """Whether paged or contiguous, the shape of `tables` says."""
    out = torch.empty_like(q) if out is None else out
    device = device_of(q)
    for call in decode_calls(q, k_pool, v_pool, tables, context_lens, scoring, max_context, out, lse, launch, device):
        call.launch()
    return out


def decode_calls(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    tables: torch.Tensor,
    context_lens: torch.Tensor,
    scoring: Scoring,
    max_context: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    launch: DecodeLaunch | None,
    device: Device,
) -> list[KernelCall]:
    """The launches of one decode: the attention, and the merging if sequences are split.

    `tables` is [batch, max_blocks] for paged and [batch] for contiguous sequences; the rest as in `paged_decode`.
    """
    shape = attention_shape(q, k_pool, v_pool)
    require_pool_dtype(k_pool.dtype, device)
    batch, num_heads, head_dim = q.shape
    if tables.shape[0] != batch or context_lens.shape != (batch,) or out.shape != q.shape or out.stride(-1) != 1:
        raise ValueError("q, tables, context_lens and out differ in the number of sequences, or out in its shape")
    if tables.dtype != torch.int32 or context_lens.dtype != torch.int32 or tables.stride(-1) != 1:
        raise ValueError("tables and context_lens must be int32, and a table's row contiguous")
    if launch is None:
        launch = decode_launch(device, shape)
    longest = min(max_context, scoring.window) if scoring.window else max_context
    splits = launch.splits or num_splits(batch, shape.num_kv_heads, longest, launch.tile, device.num_sms)

    part, part_lse = out[:, :, None], None if lse is None else lse[:, :, None]
    if splits > 1:
        part = q.new_empty((batch, num_heads, splits, head_dim), dtype=torch.float32)
        part_lse = q.new_empty((batch, num_heads, splits), dtype=torch.float32)
    attention = KernelCall(
        decode_kernel,
        grid=(shape.num_kv_heads, splits, batch),
        arguments={
            "q": q,
            "k_pool": k_pool,
            "v_pool": v_pool,
            "tables": tables,
            "context_lens": context_lens,
            "sinks": scoring.sinks,
            "out": part,
            "lse": part_lse,
            "scale": scoring.scale * scoring.k_scale,
            "v_scale": scoring.v_scale,
            "stride_q_seq": q.stride(0),
            "stride_q_head": q.stride(1),
            "stride_block": k_pool.stride(0),
            "stride_kv_head": k_pool.stride(1),
            "stride_slot": k_pool.stride(2),
            "stride_table": tables.stride(0),
            "stride_out_seq": part.stride(0),
            "stride_out_head": part.stride(1),
            "stride_out_split": part.stride(2),
            "stride_lse_seq": 0 if part_lse is None else part_lse.stride(0),
            "stride_lse_head": 0 if part_lse is None else part_lse.stride(1),
            "stride_lse_split": 0 if part_lse is None else part_lse.stride(2),
        },
        constants={
            "GROUP": shape.group,
            "ROWS": max(MIN_ROWS, next_power_of_two(shape.group)),
            "HEAD_DIM": head_dim,
            "PADDED_DIM": shape.padded_dim,
            "BLOCK_SIZE": shape.block_size,
            "PAGED": tables.dim() == 2,
            "WINDOW": scoring.window,
            "SOFTCAP": scoring.softcap,
            "TILE": launch.tile,
            "SPLITS": splits,
            "DOT": dot_dtype(q.dtype),
        },
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    if splits == 1:
        return [attention]
    merging = KernelCall(
        merge_kernel,
        grid=(num_heads, batch),
        arguments={
            "parts": part,
            "part_lses": part_lse,
            "out": out,
            "lse": lse,
            "num_heads": num_heads,
            "stride_out_seq": out.stride(0),
            "stride_out_head": out.stride(1),
            "stride_lse_seq": 0 if lse is None else lse.stride(0),
            "stride_lse_head": 0 if lse is None else lse.stride(1),
        },
        constants={
            "HEAD_DIM": head_dim,
            "PADDED_DIM": shape.padded_dim,
            "SPLITS": splits,
            "PADDED_SPLITS": next_power_of_two(splits),
            "CHUNK": MERGE_CHUNK,
        },
        num_warps=4,
        num_stages=1,
    )
    return [attention, merging]


def decode_reference(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scoring: Scoring,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`paged_decode` in plain torch, one sequence at a time: (out, lse), both in `dtype`, which it computes in."""
    parts = []
    for query, blocks, num_tokens in zip(q, block_tables, context_lens.tolist(), strict=True):
        k = gather_sequence(k_pool, blocks, num_tokens)
        v = gather_sequence(v_pool, blocks, num_tokens)
        parts.append(attend(query[None], k, v, scoring, dtype))
    if not parts:
        return q.new_empty(q.shape, dtype=dtype), q.new_empty(q.shape[:2], dtype=dtype)
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
