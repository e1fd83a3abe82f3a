"""The real engine in the place of a timer: model, pool and executor, put together for one run.

The scheduler, the memory policy and the recorder are the simulator's. Nothing here decides anything about requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import simpy
import simpy.rt
import torch
import transformers

from gpu import models
from gpu.attention import AttentionBackend, SdpaAttention, TritonAttention
from gpu.executor import Eager, Executor, Forward, Tokens
from gpu.graphs import GraphedDecodes
from gpu.pool import KVPool
from gpu.step_log import StepLog
from gpu.step_time import StepTime, VirtualTime, WallTime
from gpu.tokens import PromptTokens
from sim.hardware import Deployment, cpu_name
from sim.kv_layout import GIB, ModelSpec, kv_bytes_per_token
from sim.plan import StepPlan
from sim.scheduler.base import Scheduler
from sim.sequence import Sequence
from workloads.errors import UserError


@dataclass(frozen=True)
class GpuOptions:
    """`gpu` of `conf/replay.yaml`.

    Raises:
        UserError: a number out of range.
    """

    device: str
    attention: Literal["auto", "triton", "sdpa"]
    weights: str | None
    dtype: str
    cuda_graphs: bool
    tuning: str | None
    threads: int
    clock: Literal["auto", "wall", "cpu"]

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise UserError(f"gpu.threads is {self.threads}; expected a whole number of at least 1.")


class Replay:
    """Runs the plans of one run on a model (`sim.run.RealEngine`).

    Args:
        options: device, kernels, weights.
        shape: of a model with random weights, if no others are named.
        folder: of the run; the measured steps go there.
        seed: of random weights and of the tokens of prompts that are known by their length only.
        in_real_time: whether requests arrive in real time.
        said: is given each output when it is complete: its sequence and all tokens.
        shown: is given each plan before it is executed, in time that counts towards no step.

    Raises:
        UserError: no such device or model, one that the engine cannot run, or no memory for it.
    """

    def __init__(
        self,
        options: GpuOptions,
        shape: ModelSpec | None,
        folder: Path,
        seed: int,
        in_real_time: bool = False,
        said: Callable[[Sequence, Tokens], None] | None = None,
        shown: Callable[[StepPlan], None] | None = None,
    ) -> None:
        self._options = options
        self._said = said
        self._shown = shown
        self._seed = seed
        self._device = chosen_device(options.device)
        on_gpu = self._device.type == "cuda"
        if options.clock == "cpu" and (on_gpu or in_real_time):
            raise UserError("gpu.clock=cpu counts what this thread computes; on a GPU or in real time choose wall.")
        self._uses_cpu_time = not (on_gpu or in_real_time) if options.clock == "auto" else options.clock == "cpu"
        if not on_gpu:
            torch.set_num_threads(options.threads)
        elif self._device.index is not None:
            torch.cuda.set_device(self._device)  # where streams, events and kernels are
        backend = self._backend()
        if options.weights is not None:
            self._model = models.load(options.weights, options.dtype, self._device, backend)
        else:
            if shape is None:
                raise UserError("gpu.weights and model are both missing; name one of them.")
            dtype = None if options.dtype == "auto" else options.dtype
            self._model = models.build(shape, dtype=dtype, device=self._device, seed=seed, backend=backend)
        self.env: simpy.Environment = (
            simpy.rt.RealtimeEnvironment(strict=False) if in_real_time else simpy.Environment()
        )
        self._folder = folder
        self._log: StepLog | None = None
        self._graphs: GraphedDecodes | None = None
        self._prompts = PromptTokens(self._model.spec.vocab_size, seed)

    @property
    def model(self) -> ModelSpec:
        """Of the model as it was loaded or built."""
        return self._model.spec

    def pool_blocks(self, deployment: Deployment, block_size: int) -> int:
        """What the shares for KV leave on the GPU beside the weights; the rest is for a step's activations.

        Raises:
            UserError: on a CPU, whose memory others use too, or if nothing is left.
        """
        if self._device.type != "cuda":
            raise UserError("memory.num_blocks is null, which leaves it to the GPU's memory; on a CPU give a number.")
        free, total = torch.cuda.mem_get_info(self._device)
        fraction = deployment.free_gpu_memory_fraction
        if fraction is None:
            share = f"gpu_memory_utilization={deployment.gpu_memory_utilization}"
            room = int(free - (1 - deployment.gpu_memory_utilization) * total)
        else:
            share = f"free_gpu_memory_fraction={fraction}"
            room = int(fraction * free)
        block = kv_bytes_per_token(self.model, deployment) * block_size
        if room < block:
            raise UserError(
                f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free on {self._device} beside the weights, which "
                f"{share} leaves no block of; raise it or choose a smaller model."
            )
        return room // block

    def timer(self, scheduler: Scheduler, num_blocks: int, num_host_blocks: int, deployment: Deployment) -> Executor:
        """An executor over a new pool. Raises UserError if there is no memory for that."""
        if deployment.num_gpus > 1:
            raise UserError("the real engine runs on one device; set tensor_parallel=1 pipeline_parallel=1.")
        memory = scheduler.memory
        pool = KVPool(
            self.model,
            num_blocks,
            memory.block_size,
            kv_cache_dtype=deployment.kv_cache_dtype,
            num_host_blocks=num_host_blocks if scheduler.uses_host else 0,  # it is pinned memory on a GPU
            device=self._device,
        )
        self._log = StepLog(self._folder)
        forward: Forward = Eager(self._model, pool)
        if self._options.cuda_graphs and self._device.type == "cuda":
            most_blocks = -(-scheduler.max_model_len // memory.block_size)
            compute = partial(self._model.forward, pool=pool)
            forward = self._graphs = GraphedDecodes(compute, scheduler.max_num_seqs, most_blocks)
        return Executor(forward, pool, scheduler, self._prompts, self._time(), self._log, self._said, self._shown)

    def identity(self) -> dict[str, Any]:
        """What its times depend on besides the model and the options: device, attention, clock and versions."""
        return {
            "hardware": device_name(self._device),
            "attention": type(self._model.backend).__name__.removesuffix("Attention").lower(),
            "clock": "cpu" if self._uses_cpu_time else "wall",
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__} | _triton_version(),
        }

    def facts(self) -> dict[str, Any]:
        """Device, versions, and where the time went."""
        facts = self.identity()
        if self._log is not None and self._log.steps:
            facts["step_s"] = self._log.seconds / self._log.steps
            facts["outside_model_s"] = self._log.outside_model / self._log.steps
            facts["outside_model_share"] = self._log.outside_model / self._log.seconds
        if self._graphs is not None:
            facts["cuda_graphs_refused"] = self._graphs.refused
        if (notice := self._prompts.notice) is not None:
            facts["notice"] = notice
        return facts

    def close(self) -> None:
        """Completes the table of measured steps."""
        if self._log is not None:
            try:
                self._log.close()
            finally:
                self._log.discard()

    def _time(self) -> StepTime:
        if isinstance(self.env, simpy.rt.RealtimeEnvironment):
            return WallTime(self.env)
        return VirtualTime(time.thread_time if self._uses_cpu_time else time.perf_counter)

    def _backend(self) -> AttentionBackend:
        kind = self._options.attention
        if kind == "auto":
            kind = "triton" if self._device.type == "cuda" else "sdpa"
        if kind == "sdpa":
            return SdpaAttention()
        try:
            from gpu.kernels.call import INTERPRETING
        except ImportError as error:
            raise UserError(f"gpu.attention=triton needs Triton ({error}); choose gpu.attention=sdpa.") from None
        if self._device.type == "cpu" and not INTERPRETING:
            raise UserError("gpu.attention=triton needs a GPU, but the device is a CPU; choose gpu.attention=sdpa.")
        if self._options.tuning is not None:
            from gpu.kernels.launch import load_tuning

            load_tuning(Path(self._options.tuning))
        return TritonAttention()


def chosen_device(name: str) -> torch.device:
    """The device that `gpu.device` means. Raises UserError if there is none such."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"gpu.device is {name}; expected auto, cpu, cuda or cuda:N.") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"gpu.device is {name}; expected auto, cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"gpu.device is {name}, but torch sees {torch.cuda.device_count()} GPUs; choose another.")
    return device


def device_name(device: torch.device) -> str:
    """As its maker calls it."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return cpu_name()


def _triton_version() -> dict[str, str]:
    try:
        import triton
    except ImportError:
        return {}
    return {"triton": str(triton.__version__)}
