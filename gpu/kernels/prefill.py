"""Causal attention of many queries per sequence on a paged KV pool: prefill, chunked prefill, and mixed batches.

A chunk's own K and V are in the pool before this runs, so a key is read from the pool whether it came with this chunk,
an earlier one or a shared prefix. Bound by arithmetic: the tile of queries holds the query heads that share a KV head
side by side (row r is query r // group, head r % group), so that K and V are read once per KV head; keys that every
row sees are taken in a loop without masks, and only those on the causal diagonal or at the edge of a window in one
with them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpu.kernels.addressing import find_blocks, load_tile, slot_offsets
from gpu.kernels.call import KernelCall, require_device
from gpu.kernels.launch import Device, PrefillLaunch, device_of, prefill_launch, require_pool_dtype
from gpu.kernels.reference import attend, gather_sequence
from gpu.kernels.scoring import Scoring
from gpu.kernels.shapes import attention_shape, dot_dtype, next_power_of_two
from gpu.kernels.softmax import LN_2, add_keys, begin_softmax, cap_scores


@triton.jit
def _attend_range(
    queries: tl.tensor,
    position: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    table: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    context_end: tl.tensor,
    scale: tl.tensor,
    stride_block: tl.tensor,
    stride_slot: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    DOT: tl.constexpr,
) -> tl.tensor:
    """(top, total, acc) after the keys [begin, end), both multiples of TILE; without MASKED every row sees them all.

    Slots at or beyond `context_end` are not read.
    """
    blocks = find_blocks(table, begin, context_end, True, BLOCK_SIZE, TILE)
    for start in range(begin, end, TILE):
        key = start + tl.arange(0, TILE)
        offsets = slot_offsets(blocks, start, stride_block, stride_slot, BLOCK_SIZE, TILE)
        blocks = find_blocks(table, start + TILE, context_end, True, BLOCK_SIZE, TILE)
        k = load_tile(k_pool, offsets, key < context_end, HEAD_DIM, PADDED_DIM, MASKED).to(DOT)
        scores, unit = cap_scores(tl.dot(queries, tl.trans(k), input_precision="ieee"), scale, SOFTCAP)
        if MASKED:
            visible = key[None, :] <= position[:, None]
            if WINDOW > 0:
                visible = visible & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(visible, scores, -float("inf"))
        weights, shrink, top, total = add_keys(scores, unit, top, total)
        v = load_tile(v_pool, offsets, key < context_end, HEAD_DIM, PADDED_DIM, MASKED).to(DOT)
        acc = tl.dot(weights.to(DOT), v, acc * shrink[:, None], input_precision="ieee")
    return top, total, acc


@triton.jit
def prefill_kernel(
    q: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    block_tables: tl.tensor,
    cu_query_lens: tl.tensor,
    context_lens: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    scale: tl.tensor,
    v_scale: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_block: tl.tensor,
    stride_kv_head: tl.tensor,
    stride_slot: tl.tensor,
    stride_table: tl.tensor,
    stride_out_token: tl.tensor,
    stride_out_head: tl.tensor,
    stride_lse_token: tl.tensor,
    stride_lse_head: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """One program: the query heads of one KV head, ROWS // GROUP queries. Grid: KV heads, sequences, query tiles."""
    QUERIES: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    # Later queries see more keys. The longest programs begin first, so that short ones fill the end.
    first_query = (tl.num_programs(2) - 1 - tl.program_id(2)) * QUERIES

    first_token = tl.load(cu_query_lens + seq)
    num_queries = tl.load(cu_query_lens + seq + 1) - first_token
    if first_query >= num_queries:
        return
    computed = tl.load(context_lens + seq) - num_queries  # tokens before the first query

    row = tl.arange(0, ROWS)
    query = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    real = (query < num_queries) & (row < QUERIES * GROUP)
    position = computed + query
    token = (first_token + query).to(tl.int64)
    dim = tl.arange(0, PADDED_DIM)
    in_head = real[:, None] & (dim < HEAD_DIM)[None, :]
    queries = tl.load(
        q + (token * stride_q_token + head * stride_q_head)[:, None] + dim[None, :],
        mask=in_head,
        other=0.0,
    ).to(DOT)
    k_pool += kv_head * stride_kv_head
    v_pool += kv_head * stride_kv_head
    table = block_tables + seq * stride_table

    # Keys [begin, inner_begin) are hidden from some rows by the window, [inner_end, end) by causality.
    first_position = computed + first_query
    last_position = computed + tl.minimum(first_query + QUERIES, num_queries) - 1
    context_end = last_position + 1
    inner_end = (first_position + 1) // TILE * TILE
    begin = 0
    inner_begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // TILE * TILE
        inner_begin = tl.minimum(tl.cdiv(tl.maximum(last_position - WINDOW + 1, 0), TILE) * TILE, inner_end)

    top, total = begin_softmax(sinks, head, real, ROWS)
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    if WINDOW > 0:
        top, total, acc = _attend_range(
            queries, position, k_pool, v_pool, table, begin, inner_begin, context_end, scale, stride_block, stride_slot,
            top, total, acc, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, WINDOW, SOFTCAP, TILE, True, DOT,
        )  # fmt: skip
    top, total, acc = _attend_range(
        queries, position, k_pool, v_pool, table, inner_begin, inner_end, context_end, scale, stride_block, stride_slot,
        top, total, acc, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, WINDOW, SOFTCAP, TILE, False, DOT,
    )  # fmt: skip
    top, total, acc = _attend_range(
        queries, position, k_pool, v_pool, table, inner_end, context_end, context_end, scale, stride_block, stride_slot,
        top, total, acc, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, WINDOW, SOFTCAP, TILE, True, DOT,
    )  # fmt: skip

    acc = acc * (v_scale / tl.where(real, total, 1.0))[:, None]
    tl.store(
        out + (token * stride_out_token + head * stride_out_head)[:, None] + dim[None, :],
        acc.to(out.dtype.element_ty),
        mask=in_head,
    )
    if lse is not None:
        log = (top + tl.log2(tl.where(real, total, 1.0))) * LN_2
        tl.store(lse + token * stride_lse_token + head * stride_lse_head, log, mask=real)


def paged_prefill(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    cu_query_lens: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    max_query_len: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    launch: PrefillLaunch | None = None,
) -> torch.Tensor:
    """Causal attention of the last tokens of each sequence to all of it, through block tables.

    Args:
        q: [tokens, query heads, head_dim], the sequences' queries one after the other; float32, float16 or bfloat16.
        k_pool, v_pool: [num_blocks, num_kv_heads, block_size, head_dim], of the same strides; also float8_e4m3fn.
            The keys of the queries' own tokens are already in them.
        block_tables: [batch, max_blocks] int32. Entries beyond a sequence's context are not read.
        cu_query_lens: [batch + 1] int32; sequence b has the tokens cu_query_lens[b] to cu_query_lens[b + 1] - 1 of q:
            a chunk of its prompt, or one token that it decodes, or none. Tokens beyond the last are not touched.
        context_lens: [batch] int32, tokens of each sequence with its queries' own; at least as many as its queries.
        max_query_len: no sequence has more queries; decides the grid.
        window, softcap, sinks, k_scale, v_scale: see `Scoring`.
        scale: what products of queries and keys are multiplied with; above 0.
        out: [tokens, query heads, head_dim], written if given.
        lse: [tokens, query heads] float32, written if given: natural logarithm of the softmax's denominator.
        launch: instead of the table's choice (`launch.py`).

    Returns:
        `out`, or a new tensor like `q`.

    Raises:
        ValueError: shapes, types or strides that do not fit together.
        UserError: CPU tensors while Triton is not interpreting, or a pool whose type the GPU lacks.
    """
    require_device("paged_prefill", q, k_pool, v_pool, block_tables, cu_query_lens, context_lens, sinks, out, lse)
    scoring = Scoring(scale, window, softcap, sinks, k_scale, v_scale)
    out = torch.empty_like(q) if out is None else out
    prefill_call(
        q,
        k_pool,
        v_pool,
        block_tables,
        cu_query_lens,
        context_lens,
        scoring,
        max_query_len,
        out,
        lse,
        launch,
        device_of(q),
    ).launch()
    return out


def prefill_call(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    cu_query_lens: torch.Tensor,
    context_lens: torch.Tensor,
    scoring: Scoring,
    max_query_len: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    launch: PrefillLaunch | None,
    device: Device,
) -> KernelCall:
    """The launch of one prefill; arguments as in `paged_prefill`."""
    shape = attention_shape(q, k_pool, v_pool)
    require_pool_dtype(k_pool.dtype, device)
    batch = context_lens.shape[0]
    if block_tables.shape[0] != batch or cu_query_lens.shape != (batch + 1,):
        raise ValueError("block_tables, cu_query_lens and context_lens differ in the number of sequences")
    if out.shape != q.shape or out.stride(-1) != 1:
        raise ValueError("out must have the shape of q and a contiguous last dimension")
    if (
        not block_tables.dtype == cu_query_lens.dtype == context_lens.dtype == torch.int32
        or block_tables.stride(1) != 1
    ):
        raise ValueError("block_tables, cu_query_lens and context_lens must be int32, and a table's row contiguous")
    if launch is None:
        launch = prefill_launch(device, shape)
    rows = max(launch.rows, next_power_of_two(shape.group))
    return KernelCall(
        prefill_kernel,
        grid=(shape.num_kv_heads, batch, -(-max_query_len // (rows // shape.group))),
        arguments={
            "q": q,
            "k_pool": k_pool,
            "v_pool": v_pool,
            "block_tables": block_tables,
            "cu_query_lens": cu_query_lens,
            "context_lens": context_lens,
            "sinks": scoring.sinks,
            "out": out,
            "lse": lse,
            "scale": scoring.scale * scoring.k_scale,
            "v_scale": scoring.v_scale,
            "stride_q_token": q.stride(0),
            "stride_q_head": q.stride(1),
            "stride_block": k_pool.stride(0),
            "stride_kv_head": k_pool.stride(1),
            "stride_slot": k_pool.stride(2),
            "stride_table": block_tables.stride(0),
            "stride_out_token": out.stride(0),
            "stride_out_head": out.stride(1),
            "stride_lse_token": 0 if lse is None else lse.stride(0),
            "stride_lse_head": 0 if lse is None else lse.stride(1),
        },
        constants={
            "GROUP": shape.group,
            "HEAD_DIM": shape.head_dim,
            "PADDED_DIM": shape.padded_dim,
            "BLOCK_SIZE": shape.block_size,
            "WINDOW": scoring.window,
            "SOFTCAP": scoring.softcap,
            "ROWS": rows,
            "TILE": launch.tile,
            "DOT": dot_dtype(q.dtype),
        },
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def prefill_reference(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    cu_query_lens: torch.Tensor,
    context_lens: torch.Tensor,
    scoring: Scoring,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`paged_prefill` in plain torch, one sequence at a time: (out, lse), both in `dtype`, which it computes in."""
    out = torch.zeros_like(q, dtype=dtype)
    lse = q.new_zeros(q.shape[:2], dtype=dtype)
    bounds = cu_query_lens.tolist()
    for begin, end, blocks, num_tokens in zip(bounds, bounds[1:], block_tables, context_lens.tolist(), strict=False):
        k = gather_sequence(k_pool, blocks, num_tokens)
        v = gather_sequence(v_pool, blocks, num_tokens)
        out[begin:end], lse[begin:end] = attend(q[begin:end], k, v, scoring, dtype)
    return out, lse
