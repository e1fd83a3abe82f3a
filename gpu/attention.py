"""Attention over the KV pool, in the place of a Hugging Face model's own.

`paged_attention` is registered with transformers under `IMPLEMENTATION`. A model set to it hands over queries, keys and
values of all tokens of a step, packed, after its rotary embedding; keys and values are written to the pool first, and
the queries then attend to what their sequences have there. What the step is comes from a context variable, because
some models do not pass unknown keyword arguments on.

Nothing here waits for the device or looks at what is in its memory, so a decode step can be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

from gpu.batch import Batch
from gpu.pool import KVPool, LayerKV
from workloads.errors import UserError

IMPLEMENTATION = "kvtwin_paged"  # no mask function is registered under it, so models build no mask

_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


class ScoreRule(NamedTuple):
    """How a layer turns products of queries and keys into weights.

    Args:
        scale: factor on each product.
        window: keys that a query sees at most, its own token included; 0 is all.
        softcap: scores become softcap * tanh(score / softcap); 0 leaves them.
        sinks: [num_heads], a further logit of each head that takes its share of the weights and has no value
            (gpt-oss); None if there is none.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None


class AttentionBackend(Protocol):
    """Computes attention of a step over one layer's share of the pool."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: LayerKV, batch: Batch, rule: ScoreRule
    ) -> Tensor:
        """Writes the step's keys and values into the pool, then attends, causally, to each sequence's context.

        Args:
            query: [T, num_heads, head_dim], packed as in `batch`.
            key: [T, num_kv_heads, head_dim].
            value: likewise.
            layer: where to write and read.
            batch: the step.
            rule: how to weigh.

        Returns:
            [T, num_heads, head_dim], in the queries' dtype.
        """


class TritonAttention:
    """Our kernels: one for the decodes of a step, one for its prefills. Needs a GPU, or Triton's interpreter."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: LayerKV, batch: Batch, rule: ScoreRule
    ) -> Tensor:
        # Triton exists on Linux only, and the other backend needs none.
        from gpu.kernels.cache_write import write_kv
        from gpu.kernels.decode import paged_decode
        from gpu.kernels.prefill import paged_prefill

        scales: dict[str, Any] = {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
        weighing = rule._asdict()
        write_kv(key, value, layer.keys, layer.values, batch.slots, **scales)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        decodes = batch.num_decodes
        if decodes:
            paged_decode(
                query[:decodes],
                layer.keys,
                layer.values,
                batch.block_tables[:decodes],
                batch.context_lens[:decodes],
                max_context=batch.max_context_len,
                out=out[:decodes],
                **weighing,
                **scales,
            )
        if batch.max_query_len:
            paged_prefill(
                query[decodes:],
                layer.keys,
                layer.values,
                batch.block_tables[decodes:],
                batch.prefill_starts,
                batch.context_lens[decodes:],
                max_query_len=batch.max_query_len,
                out=out[decodes:],
                **weighing,
                **scales,
            )
        return out


class SdpaAttention:
    """PyTorch's scaled_dot_product_attention, one sequence after the other; runs anywhere.

    A sequence's context is gathered through its block table and cut to its length, so what was never written is never
    computed with. Padded rows come out as zeros. One sequence at a time was faster on a CPU than a gather of all,
    padded to the longest, except for many short contexts: 46 against 77 ms for 64 sequences of 512 tokens, 25 against
    19 ms at 128 tokens (a prototype of this engine, 4 layers of 256 hidden units, 2 KV heads, one thread).
    """

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: LayerKV, batch: Batch, rule: ScoreRule
    ) -> Tensor:
        num_tokens = int(batch.query_lens.sum())  # the others are padding
        block_size = layer.keys.shape[2]
        slots = batch.slots[:num_tokens]
        blocks, offsets = slots // block_size, slots % block_size
        _write(layer.keys, key[:num_tokens], layer.k_scale, blocks, offsets)
        _write(layer.values, value[:num_tokens], layer.v_scale, blocks, offsets)

        out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        start = 0
        lengths = zip(batch.query_lens.tolist(), batch.host_context_lens.tolist(), strict=True)
        for row, (query_len, context_len) in enumerate(lengths):
            end = start + query_len
            first = max(0, context_len - query_len - rule.window + 1) if rule.window else 0
            skipped = first // block_size
            table = batch.block_tables[row, skipped : -(-context_len // block_size)]
            visible = slice(first - skipped * block_size, context_len - skipped * block_size)
            keys = _read(layer.keys, table, layer.k_scale, query.dtype)[:, visible]
            values = _read(layer.values, table, layer.v_scale, query.dtype)[:, visible]
            out[start:end] = _attend_one(query[start:end], keys, values, rule)
            start = end
        return out


def _write(cache: Tensor, new: Tensor, scale: float, blocks: Tensor, offsets: Tensor) -> None:
    """Stores [T, num_kv_heads, head_dim] in the given slots of the pool."""
    if cache.dtype == torch.float8_e4m3fn:
        # The cast turns what is out of range into NaN; saturating is what 8-bit caches do.
        new = (new.float() / scale).clamp(-_FP8_MAX, _FP8_MAX).to(cache.dtype).view(torch.uint8)
        cache = cache.view(torch.uint8)
    cache[blocks, :, offsets] = new.to(cache.dtype)


def _read(cache: Tensor, table: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """What the blocks of a table hold: [num_kv_heads, blocks * block_size, head_dim]."""
    if cache.dtype == torch.float8_e4m3fn:
        held = cache.view(torch.uint8).index_select(0, table).view(cache.dtype).float() * scale
    else:
        held = cache.index_select(0, table)
    return held.to(dtype).transpose(0, 1).flatten(1, 2)


def _attend_one(query: Tensor, keys: Tensor, values: Tensor, rule: ScoreRule) -> Tensor:
    """Attention of one sequence's [Q, num_heads, D] to its [num_kv_heads, K, D]; the last of both is the same token.

    The query heads of a KV head are folded into the queries' axis, so that keys and values are not repeated.
    """
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads, num_keys, _ = keys.shape
    group = num_heads // num_kv_heads
    folded = query.transpose(0, 1).reshape(num_kv_heads, group * num_queries, head_dim)
    hidden = None
    if num_queries > 1:
        age = torch.arange(num_keys - num_queries, num_keys, device=query.device)[:, None] - torch.arange(
            num_keys, device=query.device
        )
        hidden = age < 0
        if rule.window:
            hidden |= age >= rule.window
        hidden = hidden.repeat(group, 1)
    if rule.softcap or rule.sinks is not None:
        out = _weigh(folded, keys, values, hidden, rule)
    else:
        visible = None if hidden is None else ~hidden
        out = functional.scaled_dot_product_attention(
            folded[None], keys[None], values[None], attn_mask=visible, scale=rule.scale
        )[0]
    return out.reshape(num_heads, num_queries, head_dim).transpose(0, 1)


def _weigh(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, rule: ScoreRule) -> Tensor:
    """The same for what scaled_dot_product_attention does not know; sums in 32 bits."""
    scores = (query @ keys.transpose(1, 2)).float() * rule.scale
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    if rule.sinks is not None:
        num_kv_heads, num_rows, _ = scores.shape
        sinks = rule.sinks.float().view(num_kv_heads, -1, 1)
        sinks = sinks.repeat_interleave(num_rows // sinks.shape[1], dim=1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights.to(values.dtype) @ values


def default_backend(device: torch.device) -> AttentionBackend:
    """Triton on a GPU, torch elsewhere."""
    return TritonAttention() if device.type == "cuda" else SdpaAttention()


class LayerObserver(Protocol):
    """Is told of each layer that attends."""

    def attended(self, layer: int, rule: ScoreRule) -> None:
        """Layer number `layer` is about to attend by this rule."""


@dataclass(frozen=True, slots=True)
class Step:
    """What attention needs to know besides queries, keys and values.

    Args:
        batch: the sequences of the step.
        pool: where their KV is.
        backend: who computes.
        observer: told of each layer that attends; None is nobody.
    """

    batch: Batch
    pool: KVPool
    backend: AttentionBackend
    observer: LayerObserver | None = None


_STEP: ContextVar[Step | None] = ContextVar("kvtwin_step", default=None)


@contextmanager
def running(step: Step) -> Iterator[None]:
    """Within it, models set to `IMPLEMENTATION` compute this step."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer; its signature is transformers' `AttentionInterface`.

    Args:
        module: the layer's attention, with its `layer_idx`.
        query: [1, num_heads, T, head_dim].
        key: [1, num_kv_heads, T, head_dim].
        value: likewise.
        attention_mask: None, for no mask is asked for.
        scaling: None is 1 / sqrt(head_dim).
        sliding_window: keys that a query sees, its own included.
        softcap: see `ScoreRule`.
        s_aux: sinks, [num_heads].

    Returns:
        [1, T, num_heads, head_dim], and no weights.

    Raises:
        UserError: attention that this function cannot stand in for.
        RuntimeError: called outside `running`.
    """
    step = _STEP.get()
    if step is None:
        raise RuntimeError("the model was called outside a step; use PagedModel.forward")
    index = _layer_index(module)
    layer = step.pool.layer(index)
    num_kv_heads, head_dim = layer.keys.shape[1], layer.keys.shape[3]
    for tensor, what in ((key, "keys"), (value, "values")):
        if (tensor.shape[1], tensor.shape[3]) != (num_kv_heads, head_dim):
            raise UserError(
                f"layer {index} has {what} of {tensor.shape[1]} heads of {tensor.shape[3]}, but the pool is laid out "
                f"for {num_kv_heads} of {head_dim}; the engine needs models whose layers all store the same."
            )
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise UserError(
            f"layer {index} ({type(module).__name__}) has a mask of its own or does not attend causally, which the "
            f"engine cannot reproduce; choose a decoder-only model without attention biases."
        )
    rule = ScoreRule(scaling or query.shape[-1] ** -0.5, sliding_window or 0, softcap or 0.0, s_aux)
    if step.observer is not None:
        step.observer.attended(index, rule)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return step.backend.attend(query, key, value, layer, step.batch, rule)[None], None


def _layer_index(module: torch.nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise UserError(
            f"{type(module).__name__} does not say which layer it is, so its KV has no place in the pool; "
            f"choose a model that works with transformers' KV caches."
        )
    return index


AttentionInterface.register(IMPLEMENTATION, paged_attention)
