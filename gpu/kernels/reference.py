"""Attention of one sequence in plain torch, slow and plainly right; both references (decode, prefill) loop over it."""

from __future__ import annotations

import torch

from gpu.kernels.scoring import Scoring


def gather_sequence(pool: torch.Tensor, blocks: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The first `num_tokens` slots of `blocks` in order, [num_tokens, num_kv_heads, head_dim], as the pool stores them.

    Args:
        pool: [num_blocks, num_kv_heads, block_size, head_dim].
        blocks: block ids, at least as many as the tokens need; those beyond are not read.
    """
    block_size = pool.shape[2]
    needed = blocks[: -(-num_tokens // block_size)].long()
    return pool[needed].transpose(1, 2).flatten(0, 1)[:num_tokens]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the last `num_queries` tokens of one sequence.

    Args:
        q: [num_queries, query heads, head_dim].
        k, v: [num_tokens, num_kv_heads, head_dim] with num_tokens of at least num_queries.
        dtype: what is computed in.

    Returns:
        [num_queries, query heads, head_dim] and the natural logarithms of the softmax's denominators,
        [num_queries, query heads], both in `dtype`. Without tokens: 0 and -inf.
    """
    num_queries, num_heads, _ = q.shape
    num_tokens, num_kv_heads, _ = k.shape
    if num_tokens == 0:
        return torch.zeros_like(q, dtype=dtype), q.new_full((num_queries, num_heads), -torch.inf, dtype=dtype)
    group = num_heads // num_kv_heads
    keys = (k.to(dtype) * scoring.k_scale).repeat_interleave(group, dim=1)
    values = (v.to(dtype) * scoring.v_scale).repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.to(dtype), keys) * scoring.scale
    if scoring.softcap > 0:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    position = torch.arange(num_tokens - num_queries, num_tokens, device=q.device)[:, None]
    key = torch.arange(num_tokens, device=q.device)
    hidden = key > position
    if scoring.window > 0:
        hidden |= key <= position - scoring.window
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    if scoring.sinks is not None:
        lse = torch.logaddexp(lse, scoring.sinks.to(dtype)[:, None])
    out = torch.einsum("hqk,khd->qhd", torch.exp(scores - lse[:, :, None]), values)
    return out, lse.T
