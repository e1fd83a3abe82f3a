"""Groups of layers that share a block table, as vLLM's hybrid KV cache manager forms them (0.33).

Layers of one attention type need the same blocks at any time, so one table serves many of them. All groups draw from
one pool, so a block must be as large in one group as in another: it holds `block_size` tokens of as many layers as the
largest group has, and a smaller group leaves the rest of each of its blocks empty (*padding*). Who holds the blocks is
`memory/hybrid.py`'s business, how many of them fit `kv_layout.py`'s. State-space layers are not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from sim.hardware import Deployment
from sim.kv_layout import ModelSpec, kv_bytes_per_layer

PADDED_RATIO = Fraction(3, 2)  # types whose layer counts differ by less become one group each (vLLM 0.33; 5/4 in 0.11)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one attention type.

    Args:
        layers: their numbers, ascending.
        window: positions that they attend to, the current one included; None: all.
    """

    layers: tuple[int, ...]
    window: int | None = None


def layer_groups(model: ModelSpec) -> tuple[LayerGroup, ...]:
    """The groups, in the order in which vLLM makes them: by the first layer of their type.

    A group has as many layers as the rarer type, for real models repeat a pattern with one layer of that type. Where
    the other type has less than half as many again, that count is taken instead, which pads less. Layers are dealt out
    in turn, so that each stage of a pipeline has layers of every group.
    """
    types: dict[int | None, list[int]] = {}
    for layer in range(model.num_layers):
        window = model.sliding_window.tokens if model.sliding_window and model.is_sliding(layer) else None
        types.setdefault(window, []).append(layer)
    counts = [len(layers) for layers in types.values()]
    size = max(counts) if max(counts) < PADDED_RATIO * min(counts) else min(counts)
    groups = []
    for window, layers in types.items():
        num_groups = -(-len(layers) // size)
        groups += [LayerGroup(tuple(layers[first::num_groups]), window) for first in range(num_groups)]
    return tuple(groups)


def without_windows(model: ModelSpec) -> tuple[LayerGroup, ...]:
    """One group of all layers: vLLM's `disable_hybrid_kv_cache_manager`.

    Sliding layers are then kept like full ones; if there are no full ones, they still slide, as in vLLM.
    """
    groups = layer_groups(model)
    return groups if len(groups) == 1 else (LayerGroup(tuple(range(model.num_layers))),)


def padding_layers(groups: Sequence[LayerGroup]) -> int:
    """Layers that a block has room for and its group does not have, over all groups."""
    sizes = [len(group.layers) for group in groups]
    return len(sizes) * max(sizes) - sum(sizes)


def grouped_kv_bytes(model: ModelSpec, deployment: Deployment, num_tokens: int, block_size: int) -> int:
    """KV that a decoding sequence of `num_tokens` holds in the blocks of all groups and over all GPUs, bytes.

    What padding leaves empty is included; so it is no less than `sequence_kv_bytes`, which knows of no groups.
    """
    groups = layer_groups(model)
    blocks = 0
    for group in groups:
        full = -(-num_tokens // block_size)
        blocks += full if group.window is None else min(full, -(-(group.window - 1) // block_size) + 1)
    layers = max(len(group.layers) for group in groups)
    return blocks * block_size * layers * kv_bytes_per_layer(model, deployment) * deployment.tensor_parallel
