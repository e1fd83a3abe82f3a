"""The GPU at hand as a `Bench`: builds a case's tensors, sees that the result is right, and times it."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import torch
import triton
from triton.runtime.errors import TritonError

from gpu.bench import peers as others
from gpu.bench.cases import OURS, Case, Layout, Problem
from gpu.bench.results import Rates, Timing
from gpu.bench.session import Refused
from gpu.bench.tensors import Pool, Sequences, like
from gpu.bench.tuning import Launch
from gpu.bench.work import TOLERANCE, Work, attention_work, our_work
from gpu.kernels.launch import Device, device_of
from workloads.errors import UserError

COPY_BYTES = 1 << 30  # read, and as many written
MATMUL_SIZE = 8192  # rows and columns of both matrices
COMPILER_GAVE_UP = "PassManager::run failed"  # said in a plain RuntimeError

Timer = Callable[[Callable[[], object], Callable[[], None]], Timing]


class DeviceBench:
    """Measures on one device.

    Args:
        timer: times a launch, once what it computes has been checked.
        peers: whose kernels may be measured too, by name.
        device: where the tensors are.
    """

    def __init__(self, timer: Timer, peers: Mapping[str, others.Peer], device: torch.device) -> None:
        self._time = timer
        self._peers = peers
        self._torch_device = device
        self._sequences: Sequences | None = None
        self._pool: tuple[Problem, Pool] | None = None

    @property
    def device(self) -> Device:
        """As launch configurations know it."""
        return device_of(torch.empty(0, device=self._torch_device))

    @property
    def peers(self) -> Mapping[str, Layout]:
        """Those given, and the layout that each works on."""
        return {name: peer.layout for name, peer in self._peers.items()}

    def rates(self) -> Rates:
        """Of a copy of 1 GiB, and of a product of two bfloat16 matrices of 8192 × 8192."""
        return Rates(self._copy_bandwidth(), self._matmul_rate())

    def measure(self, case: Case, launch: Launch | None) -> Timing:
        """Times a case once its result was found right.

        Raises:
            Refused: no memory or shared memory for it, a type that the device or the peer lacks, a launch that cannot
                be compiled, a peer that fails, or a wrong result.
        """
        try:
            work = self._work(case, launch)
            return self._time(work.launch, lambda: _require_right(work))
        except Refused:
            raise
        except torch.cuda.OutOfMemoryError:
            self._forget()
            raise Refused("not enough GPU memory") from None
        except UserError as error:
            raise Refused(str(error)) from None
        except Exception as error:
            # Others fail in their own ways, which end no run of ours. Ours may be launched as it cannot be compiled.
            if case.by == OURS and not (isinstance(error, TritonError) or COMPILER_GAVE_UP in str(error)):
                raise
            raise Refused(_first_line(error)) from None

    def _copy_bandwidth(self) -> float:
        source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=self._torch_device)
        target = torch.empty_like(source)
        return 2 * COPY_BYTES / self._time(lambda: target.copy_(source), _unchecked).median

    def _matmul_rate(self) -> float:
        size = (MATMUL_SIZE, MATMUL_SIZE)
        left, right = (torch.randn(size, dtype=torch.bfloat16, device=self._torch_device) for _ in range(2))
        product = torch.empty_like(left)
        return 2 * MATMUL_SIZE**3 / self._time(lambda: torch.mm(left, right, out=product), _unchecked).median

    def _work(self, case: Case, launch: Launch | None) -> Work:
        if self._sequences is None or not like(self._sequences, case.problem):
            self._forget()
            self._sequences = Sequences(case.problem, self._torch_device)
        sequences = self._sequences
        pool = sequences.in_order if case.layout == "contiguous" else self._paged(sequences, case.problem)
        if case.by == OURS:
            return our_work(case, sequences, pool, launch)
        return attention_work(sequences, self._peers[case.by].attention(sequences, pool))

    def _paged(self, sequences: Sequences, problem: Problem) -> Pool:
        if self._pool is None or self._pool[0] != problem:
            self._pool = None  # before the next one is built
            self._pool = problem, sequences.pool(problem.block_size)
        return self._pool[1]

    def _forget(self) -> None:
        self._sequences = self._pool = None


def device_facts() -> dict[str, Any]:
    """What `bench.json` says of the current CUDA device."""
    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    known = device_of(torch.empty(0, device="cuda"))
    return {
        "name": properties.name,
        "target": known.target,
        "capability": f"{properties.major}.{properties.minor}",
        "num_sms": known.num_sms,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
    }


def versions(peers: Mapping[str, others.Peer]) -> dict[str, str]:
    """Of everything that times depend on."""
    toolkit = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    return {
        "kvtwin": version("kvtwin"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": str(triton.__version__),
        **{name: said for name, said in toolkit.items() if said is not None},
        **others.versions({name: peer for name, peer in peers.items() if name != "torch"}),
    }


def _require_right(work: Work) -> None:
    difference = work.difference()
    if difference > TOLERANCE:
        raise Refused(f"the result is wrong: it differs from the reference by {100 * difference:.0f} % of its norm")


def _unchecked() -> None:
    """A library's copy and product are taken to be right."""


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
