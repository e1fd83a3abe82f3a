"""The PCIe link between a GPU and its host: a SimPy resource in which the swaps of a plan queue.

A swap is made of physical transfers, one for each contiguous run of bytes, and each costs a latency besides its bytes
(Kwon et al., SOSP 2023, §7.3: with small blocks, many small transfers). How many a block is made of follows from the
layout of the pool: with a tensor for each layer, K and V of each layer's part of a block lie apart, 8 to 72 KB each;
since vLLM 0.11 a block of all layers can lie in one piece of 0.44 to 2.5 MB (vLLM's blog on KV offloading).

A step starts when its swaps are done: nothing overlaps, as in vLLM v0. Copies on the device are the timer's business.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Literal, Protocol

import simpy

from sim.hardware import Deployment, Hardware
from sim.kv_layout import ModelSpec, stages
from workloads.errors import UserError


class TransferTime(Protocol):
    """How long a swap keeps the link busy."""

    def seconds(self, num_blocks: int) -> float:
        """For so many blocks, in one direction or the other; 0 or more."""


class PCIe:
    """A latency for each transfer, and the bytes over the bandwidth.

    Every GPU has a link of its own and moves its own part of a block at the same time as the others; of a pipeline, the
    stage with most layers decides.

    Args:
        model: whose KV is moved.
        hardware: says what the link can do.
        deployment: how the model is spread.
        block_size: tokens in a block.
        latency: seconds that a transfer costs whatever its size; 0 or more.
        efficiency: reached share of the link's peak, above 0 and at most 1.
        layout: what lies in one piece: a `layer`'s keys or values of a block, or the whole `block`.
        transfers_per_block: transfers that move a block, at least 1; None: as the layout has it.

    Raises:
        UserError: a number out of range, or hardware that does not say how fast its link is.
    """

    def __init__(
        self,
        model: ModelSpec,
        hardware: Hardware,
        deployment: Deployment,
        block_size: int,
        latency: float,
        efficiency: float,
        layout: Literal["layer", "block"],
        transfers_per_block: int | None = None,
    ) -> None:
        if latency < 0:
            raise UserError(f"link.latency is {latency}; expected a number of seconds, 0 or more.")
        if not 0 < efficiency <= 1:
            raise UserError(f"link.efficiency is {efficiency}; expected a share above 0 and at most 1.")
        if transfers_per_block is not None and transfers_per_block < 1:
            raise UserError(f"link.transfers_per_block is {transfers_per_block}; expected at least 1, or null.")
        if hardware.host_bandwidth is None:
            raise UserError(
                f"hardware {hardware.name} has no host_bandwidth; give it as +hardware.host_bandwidth=BYTES_PER_SECOND."
            )
        largest = max(stages(model, deployment), key=lambda stage: stage.kv_bytes_per_token)
        planes = 1 if model.latent_attention else 2
        pieces = planes * len(largest.layers) if layout == "layer" else 1
        self.transfers_per_block = pieces if transfers_per_block is None else transfers_per_block
        self.block_bytes = largest.kv_bytes_per_token * block_size
        self._block_seconds = self.transfers_per_block * latency + self.block_bytes / (
            hardware.host_bandwidth * efficiency
        )

    def seconds(self, num_blocks: int) -> float:
        """For so many blocks."""
        return num_blocks * self._block_seconds


class Free:
    """A swap takes no time: the bound that no link can beat. Whoever times the real swaps takes this too."""

    def seconds(self, num_blocks: int) -> float:
        """None."""
        return 0.0


class Link:
    """The link in a run; swaps that find it busy wait for their turn.

    Args:
        env: the clock.
        time: how long a swap takes.
    """

    def __init__(self, env: simpy.Environment, time: TransferTime) -> None:
        self._env = env
        self._time = time
        self._resource = simpy.Resource(env)

    def move(self, num_blocks: int) -> Generator[simpy.Event, Any, float]:
        """The process of one swap; returns how many seconds have passed, waiting included."""
        asked = self._env.now
        with self._resource.request() as turn:
            yield turn
            waited = self._env.now - asked
            seconds = self._time.seconds(num_blocks)
            yield self._env.timeout(seconds)
        return waited + seconds
