"""What a model runs on: one GPU's published figures, and how many such GPUs the model is spread over.

Nothing is computed here. What fits is `kv_layout.py`'s business, how long it takes `timing/`'s.
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from workloads.errors import UserError

KV_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8")


@dataclass(frozen=True)
class Hardware:
    """One GPU.

    Args:
        name: as in messages and tables.
        memory_bytes: total memory as the driver reports it to a program (CUDA's `total_memory`), which is what
            `gpu_memory_utilization` is a share of; the nominal capacity only where the file says so.
        flops_per_second: peak of dense 16-bit matrix products with 32-bit accumulation, without sparsity.
        bandwidth: peak of the device memory, bytes per second.
        interconnect_bandwidth: peak from one GPU to the others in *one* direction, bytes per second; vendors print
            the sum of both directions.
        host_bandwidth: peak of the PCIe link between the GPU and its host in *one* direction, bytes per second; None
            if nothing is to be said of it.

    Raises:
        UserError: a figure that is not positive.
    """

    name: str
    memory_bytes: int
    flops_per_second: float
    bandwidth: float
    interconnect_bandwidth: float
    host_bandwidth: float | None = None

    def __post_init__(self) -> None:
        for key in ("memory_bytes", "flops_per_second", "bandwidth", "interconnect_bandwidth", "host_bandwidth"):
            if (value := getattr(self, key)) is not None and value <= 0:
                raise UserError(f"hardware {self.name}: {key} is {getattr(self, key)}; expected a number above 0.")


def this_cpu(flops_per_second: float, bandwidth: float) -> Hardware:
    """The processor at hand, under the name that it gives itself, with the machine's memory.

    Args:
        flops_per_second: nobody publishes it for a part of a machine; only a roofline asks.
        bandwidth: likewise, bytes per second; also to and from the host, which is the same memory.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware(cpu_name(), memory, flops_per_second, bandwidth, bandwidth, host_bandwidth=bandwidth)


def cpu_name() -> str:
    """As its maker calls it, or if nothing says that, its architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


@dataclass(frozen=True)
class Deployment:
    """How a model is spread over GPUs and what it may take of each; the names are vLLM's engine arguments,
    and TensorRT-LLM's for the share of what is free.

    Args:
        tensor_parallel: GPUs that share every layer.
        pipeline_parallel: stages of consecutive layers.
        gpu_memory_utilization: share of a GPU's *total* memory for weights, KV and everything else.
        free_gpu_memory_fraction: share for KV of what weights and everything else leave *free* of a GPU's memory, in
            place of `gpu_memory_utilization`; None leaves it to that.
        kv_cache_memory_bytes: bytes of KV on each GPU, taken literally; None leaves it to the two shares.
        non_kv_memory_bytes: bytes on each GPU that hold neither weights nor KV; None is `kv_layout.non_kv_bytes`.
        kv_cache_dtype: one of `KV_DTYPES`; `auto` is the model's own.
        max_model_len: longest sequence, prompt and output together, in tokens; None is the model's own limit.

    Raises:
        UserError: a value out of range; the message names the option.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    gpu_memory_utilization: float = 0.9
    free_gpu_memory_fraction: float | None = None
    kv_cache_memory_bytes: int | None = None
    non_kv_memory_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        lowest = {
            "tensor_parallel": 1,
            "pipeline_parallel": 1,
            "kv_cache_memory_bytes": 1,
            "non_kv_memory_bytes": 0,
            "max_model_len": 1,
        }
        for key, least in lowest.items():
            value = getattr(self, key)
            if value is not None and value < least:
                raise UserError(f"{key} is {value}; expected a whole number of at least {least}.")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise UserError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; expected a share above 0 and at most 1."
            )
        fraction = self.free_gpu_memory_fraction
        if fraction is not None and not 0 < fraction <= 1:
            raise UserError(f"free_gpu_memory_fraction is {fraction}; expected a share above 0 and at most 1, or null.")
        if self.kv_cache_dtype not in KV_DTYPES:
            raise UserError(f"kv_cache_dtype is {self.kv_cache_dtype}; expected one of {', '.join(KV_DTYPES)}.")

    @property
    def num_gpus(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel
