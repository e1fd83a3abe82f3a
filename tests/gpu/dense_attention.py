"""Attention as the definition has it: one query at a time over a dense list of keys, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu.attention import ScoreRule


def dense_attention(query: Tensor, keys: Tensor, values: Tensor, rule: ScoreRule) -> Tensor:
    """The last queries of a sequence on all of it.

    Args:
        query: [Q, num_heads, D]; the last one belongs to the last key's token.
        keys: [K, num_kv_heads, D].
        values: likewise.
        rule: how to weigh.

    Returns:
        float64 [Q, num_heads, D].
    """
    num_queries, num_heads, _ = query.shape
    group = num_heads // keys.shape[1]
    out = torch.empty(query.shape, dtype=torch.float64)
    for i in range(num_queries):
        end = len(keys) - num_queries + i + 1
        start = max(0, end - rule.window) if rule.window else 0
        for head in range(num_heads):
            seen = slice(start, end)
            scores = keys[seen, head // group].double() @ query[i, head].double() * rule.scale
            if rule.softcap:
                scores = rule.softcap * torch.tanh(scores / rule.softcap)
            weights = scores.exp()
            total = weights.sum() + (rule.sinks[head].double().exp() if rule.sinks is not None else 0.0)
            out[i, head] = weights @ values[seen, head // group].double() / total
    return out
