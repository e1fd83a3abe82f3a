"""Kernels of others, measured beside ours in the same run where they are installed.

Each is given the same sequences: torch's attention in one piece, since it has no block tables; FlashInfer and the
FlashAttention that vLLM brings in the same scattered blocks. What plans or allocates once a step is done before.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gpu.bench.cases import Layout
from gpu.bench.session import Refused
from gpu.bench.tensors import Pool, Sequences
from gpu.bench.work import scale_of

WORKSPACE_BYTES = 256 << 20  # twice what FlashInfer's documentation recommends, for splits of long contexts


class Peer(Protocol):
    """Another implementation of attention."""

    package: str
    layout: Layout

    def attention(self, sequences: Sequences, pool: Pool) -> Callable[[], Tensor]:
        """What computes the attention of the sequences, [queries, query heads, head_dim] in any shape of that order.

        Raises:
            Refused: it does not take such a problem.
        """


class TorchAttention:
    """`scaled_dot_product_attention`, whichever kernel it picks. In decode, grouped heads are rows of one query."""

    package = "torch"
    layout: Layout = "contiguous"

    def attention(self, sequences: Sequences, pool: Pool) -> Callable[[], Tensor]:
        problem, q, keys, values = sequences.problem, sequences.queries, pool.keys, pool.values
        if keys.dtype != q.dtype:
            raise Refused(f"torch has no attention of {problem.dtype} queries on {problem.pool_dtype} keys")
        scale = scale_of(problem)
        if problem.kernel == "decode":
            rows = q.view(problem.batch, problem.num_kv_heads, problem.group, problem.head_dim)
            return lambda: scaled_dot_product_attention(rows, keys, values, scale=scale)
        by_head = q.view(problem.batch, problem.context, -1, problem.head_dim).transpose(1, 2)
        grouped = problem.group > 1
        return lambda: scaled_dot_product_attention(
            by_head, keys, values, is_causal=True, scale=scale, enable_gqa=grouped
        ).transpose(1, 2)


class FlashInferAttention:
    """FlashInfer's wrappers for paged KV, in the layout that is ours too (heads before slots)."""

    package = "flashinfer"
    layout: Layout = "paged"

    def attention(self, sequences: Sequences, pool: Pool) -> Callable[[], Tensor]:
        flashinfer: Any = importlib.import_module("flashinfer")
        problem, q = sequences.problem, sequences.queries
        block_size, blocks = pool.keys.shape[2], pool.tables.shape[1]
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
        first_blocks = torch.arange(problem.batch + 1, dtype=torch.int32, device=q.device) * blocks
        last_lens = torch.full_like(sequences.context_lens, problem.context - (blocks - 1) * block_size)
        heads = (q.shape[1], problem.num_kv_heads, problem.head_dim, block_size)
        types = {"q_data_type": q.dtype, "kv_data_type": pool.keys.dtype, "sm_scale": scale_of(problem)}
        indices = pool.tables.flatten()
        if problem.kernel == "decode":
            many_rows = problem.group > 1  # where a matrix instruction pays, by its documentation
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=many_rows)
            wrapper.plan(first_blocks, indices, last_lens, *heads, **types)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
            first_queries = sequences.cu_query_lens
            wrapper.plan(first_queries, first_blocks, indices, last_lens, *heads, causal=True, **types)
        return lambda: wrapper.run(q, (pool.keys, pool.values))


class VllmAttention:
    """The FlashAttention that vLLM brings and calls, in the version that it picks for the device.

    Its pool has slots before heads; ours is given as a view, as vLLM itself does where heads come first.
    """

    package = "vllm"
    layout: Layout = "paged"

    def attention(self, sequences: Sequences, pool: Pool) -> Callable[[], Tensor]:
        problem, q = sequences.problem, sequences.queries
        if pool.keys.dtype != q.dtype:
            raise Refused("vLLM's FlashAttention takes 8-bit keys only with 8-bit queries")
        fa: Any = importlib.import_module("vllm.v1.attention.backends.fa_utils")
        keys, values = pool.keys.transpose(1, 2), pool.values.transpose(1, 2)
        arguments = {
            "max_seqlen_q": 1 if problem.kernel == "decode" else problem.context,
            "cu_seqlens_q": sequences.cu_query_lens,
            "max_seqlen_k": problem.context,
            "seqused_k": sequences.context_lens,
            "block_table": pool.tables,
            "softmax_scale": scale_of(problem),
            "causal": True,
            "out": torch.empty_like(q),
        }
        chosen = fa.get_flash_attn_version()
        if chosen is not None:
            arguments["fa_version"] = chosen
        return lambda: fa.flash_attn_varlen_func(q, keys, values, **arguments)


KNOWN: tuple[Peer, ...] = (TorchAttention(), FlashInferAttention(), VllmAttention())


def installed(asked: list[str]) -> dict[str, Peer]:
    """The peers asked for that can be imported here, by name."""
    return {
        peer.package: peer
        for peer in KNOWN
        if peer.package in asked and importlib.util.find_spec(peer.package) is not None
    }


def versions(peers: dict[str, Peer]) -> dict[str, str]:
    """Of the peers' packages."""
    distribution = {"flashinfer": "flashinfer-python"}
    return {name: version(distribution.get(name, name)) for name in peers}
