"""The KV pool: where the keys and values of every block lie, on the device and, swapped out, on the host.

Which block belongs to whom is `sim/memory/`'s business, and how many there are `sim/kv_layout.py`'s; a block's bytes
here are that module's to the byte.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from gpu.block_transfer import BlockTransfer, Pairs, TorchTransfer, TritonTransfer
from sim.kv_layout import GIB, ModelSpec
from workloads.errors import UserError

TORCH_DTYPES: dict[str, torch.dtype] = {  # of `sim.kv_layout.BITS`, those a tensor can have
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}
FP8_NAMES = ("fp8", "fp8_e4m3")


class LayerKV(NamedTuple):
    """One layer's share of the pool.

    Args:
        keys: [num_blocks, num_kv_heads, block_size, head_dim], a view.
        values: likewise.
        k_scale: what a stored key is multiplied by to give the true one; 1 but for 8-bit pools.
        v_scale: likewise.
    """

    keys: Tensor
    values: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0


class KVPool:
    """K and V of all layers in one tensor, [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim].

    Heads come before slots, so that what one program of an attention kernel reads of a block, one head, is a single
    run of `block_size * head_dim` elements. All layers are one allocation, so that the pool's bytes are those of one
    storage and nothing is lost to the allocator's rounding of each. A block is then `2 * num_layers` runs that lie
    `num_blocks` blocks apart.

    Swapped blocks lie in a tensor [num_host_blocks, num_layers, 2, num_kv_heads, block_size, head_dim] on the host,
    pinned where there is a GPU: there a block is one run, which a transfer fills from front to back.

    Neither is cleared: a slot that was never written holds anything, NaN included, and must not be read.

    Args:
        model: whose KV it is; its layers, KV heads, head size and dtype count.
        num_blocks: blocks on the device, those a policy never hands out included.
        block_size: slots of a block.
        kv_cache_dtype: auto is the model's; or one of `FP8_NAMES`.
        num_host_blocks: blocks of the host pool.
        device: of the pool.
        scales: (k_scale, v_scale) of each layer, for 8-bit pools; None is 1 everywhere.
        transfer: moves blocks; None is Triton on a GPU and torch elsewhere.

    Raises:
        UserError: not enough memory, a dtype that no pool has, or a model that stores a latent in place of K and V.
    """

    def __init__(
        self,
        model: ModelSpec,
        num_blocks: int,
        block_size: int,
        kv_cache_dtype: str = "auto",
        num_host_blocks: int = 0,
        device: torch.device | str = "cpu",
        scales: Sequence[tuple[float, float]] | None = None,
        transfer: BlockTransfer | None = None,
    ) -> None:
        if model.latent_attention is not None:
            raise UserError(
                f"model {model.name} stores a latent in place of keys and values, which the engine cannot hold; "
                f"choose a model without latent attention."
            )
        name = model.dtype if kv_cache_dtype == "auto" else kv_cache_dtype
        if name != model.dtype and name not in FP8_NAMES:
            raise UserError(
                f"kv_cache_dtype is {name}, but {model.name} computes its KV in {model.dtype} and the engine stores it "
                f"so or in 8 bits; choose auto or one of {', '.join(FP8_NAMES)}."
            )
        if name not in TORCH_DTYPES:
            raise UserError(f"model {model.name}: the engine has no KV pool of {name}; choose another dtype.")
        for option, value, least in (
            ("num_blocks", num_blocks, 1),
            ("block_size", block_size, 1),
            ("num_host_blocks", num_host_blocks, 0),
        ):
            if value < least:
                raise UserError(f"memory.{option} is {value}; expected a whole number of at least {least}.")
        self.device = torch.device(device)
        self.dtype = TORCH_DTYPES[name]
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        block = (model.num_kv_heads, block_size, model.head_dim)
        on_gpu = self.device.type == "cuda"
        self.blocks = _allocate("num_blocks", (model.num_layers, 2, num_blocks, *block), self.dtype, self.device)
        self.host_blocks = _allocate(
            "num_host_blocks", (num_host_blocks, model.num_layers, 2, *block), self.dtype, torch.device("cpu"), on_gpu
        )
        self._layers = [
            LayerKV(layer[0], layer[1], *scale)
            for layer, scale in zip(self.blocks, scales or [(1.0, 1.0)] * model.num_layers, strict=True)
        ]
        self._transfer: BlockTransfer = transfer or (TritonTransfer() if on_gpu else TorchTransfer())
        self._planes = self.blocks.flatten(0, 1)
        self._host_planes = self.host_blocks.flatten(1, 2)

    @property
    def num_layers(self) -> int:
        """Layers with KV."""
        return len(self._layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of the device pool, as its storage counts them."""
        return self.blocks.untyped_storage().nbytes()

    @property
    def num_host_bytes(self) -> int:
        """Bytes of the host pool, likewise."""
        return self.host_blocks.untyped_storage().nbytes()

    def layer(self, index: int) -> LayerKV:
        """Keys and values of one layer."""
        return self._layers[index]

    def copy(self, pairs: Pairs) -> None:
        """Copies blocks in all layers, bit for bit (copy-on-write).

        Args:
            pairs: (source, destination); no block is both, and none is a destination twice.
        """
        if pairs:
            self._transfer.copy(self._planes, pairs)

    def swap_out(self, pairs: Pairs) -> None:
        """Moves blocks to the host, bit for bit.

        Args:
            pairs: (device block, host block); no host block twice.
        """
        if pairs:
            self._transfer.swap_out(self._planes, self._host_planes, pairs)

    def swap_in(self, pairs: Pairs) -> None:
        """Moves blocks back to the device, bit for bit.

        Args:
            pairs: (host block, device block); no device block twice.
        """
        if pairs:
            self._transfer.swap_in(self._host_planes, self._planes, pairs)


def _allocate(
    option: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, pinned: bool = False
) -> Tensor:
    """An uninitialised tensor. Raises UserError if there is no room for it."""
    try:
        return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)
    except RuntimeError as error:
        # Only CUDA has a class of its own for it; a size beyond 64 bits is an overflow instead.
        text = str(error)
        if not isinstance(error, torch.OutOfMemoryError) and "memory" not in text and "overflow" not in text:
            raise
    num_bytes = prod(shape) * dtype.itemsize
    raise UserError(
        f"memory.{option}: the KV pool asks for {num_bytes / GIB:,.1f} GiB on {device}, where {_room(device)}; "
        f"choose fewer blocks."
    )


def _room(device: torch.device) -> str:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return f"{free / GIB:,.1f} of {total / GIB:,.1f} GiB are free"
    page = os.sysconf("SC_PAGE_SIZE")
    free, total = page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
    return f"{free / GIB:,.1f} of {total / GIB:,.1f} GiB are free"
