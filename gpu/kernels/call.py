"""One kernel launch as data: what is launched, with which arguments and options.

A launcher builds a `KernelCall` and launches it; `resources.py` builds the same call from tensors without storage and
compiles it for a device that is not there. So what is checked offline is what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton

from workloads.errors import UserError

INTERPRETING: bool = triton.knobs.runtime.interpret
"""Whether Triton runs kernels in Python on CPU tensors (`TRITON_INTERPRET=1` before its first import)."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A launch that has not happened yet.

    Args:
        kernel: the function under `triton.jit`.
        grid: number of programs along each axis; a grid with a 0 launches nothing.
        arguments: values of the kernel's run-time parameters, by name.
        constants: values of its `tl.constexpr` parameters, by name.
        num_warps: warps of one program.
        num_stages: iterations of the main loop whose loads may be in flight.
    """

    kernel: Callable[..., None]
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, Any]:
        """What the compiler is told. a × b + c is one rounding, said so because Triton's default is about to change."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}

    def launch(self) -> None:
        """Starts the kernel on the current stream of the current device."""
        if 0 in self.grid:
            return
        jitted: Any = self.kernel
        jitted[self.grid](**self.arguments, **self.constants, **self.options)


def require_device(launcher: str, *tensors: torch.Tensor | None) -> None:
    """Refuses tensors that the kernel could not read.

    Raises:
        UserError: a tensor is on the CPU and Triton is not interpreting.
    """
    if INTERPRETING:
        return
    for tensor in tensors:
        if tensor is not None and tensor.device.type == "cpu":
            raise UserError(
                f"{launcher}: got a tensor on the CPU, where Triton kernels do not run; move the tensors to a GPU, "
                f"call the torch reference, or set TRITON_INTERPRET=1 before Python starts."
            )
