"""A workload that waits: so a test can meet a run half-way, however fast or slow the machine is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from workloads.request import Request

CONFIG = """
_target_: gated.Gated
gate: null
num_requests: 3
"""


class Gated:
    """One request each 100 s; the third is not read before there is a file `gate`, and `gate`.reached says so.

    Args:
        gate: null if there is nothing to wait for.
        num_requests: how many requests come.
    """

    def __init__(self, gate: Path | None, num_requests: int) -> None:
        self._gate = gate
        self.num_requests: int | None = num_requests

    def __iter__(self) -> Iterator[Request]:
        for number in range(self.num_requests or 0):
            if number == 2 and self._gate is not None:
                reached(self._gate).touch()
                while not self._gate.exists():
                    time.sleep(0.01)
            yield Request(number, 100.0 * number, prompt_tokens=40, output_tokens=8)


def reached(gate: Path) -> Path:
    """The file that says that a run has come to its gate."""
    return gate.with_name(f"{gate.name}.reached")
