"""vLLM's recorded decisions under a hybrid memory whose only group attends to everything: it must decide the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim import conformance
from sim.layer_groups import LayerGroup
from sim.memory.block_pool import BlockPool
from sim.memory.hybrid import HybridPagedMemory


class OneFullGroup(HybridPagedMemory):
    """As `PagedMemory` is built and looked at by a recorded case."""

    def __init__(self, num_blocks: int, block_size: int, watermark: float, prefix_caching: bool) -> None:
        group = LayerGroup(layers=(0,))
        super().__init__(num_blocks, (group,), 1 << 30, None, block_size, watermark, prefix_caching)

    @property
    def prefix(self) -> BlockPool | None:
        return self.pool if self.caches_prefixes else None

    def free_list(self) -> list[int]:
        return self.pool.free_list()


def check_one_full_group(case: Path, monkeypatch: pytest.MonkeyPatch) -> conformance.Verdict:
    """The verdict on the case with such a memory."""
    monkeypatch.setattr(conformance, "PagedMemory", OneFullGroup)
    return conformance.check_case(case)
