"""Times a launch on a CUDA (or ROCm) device: by events, as a graph, with cold caches.

A launch is captured once in a CUDA graph and replayed, as an engine does with decode steps, so that what Python takes
to start a kernel is not in its time. Before each replay a buffer of several times the L2 cache is read, so that nothing
of the last replay is found there; read and not written, because what was written would have to leave the cache
while the kernel runs. That reading also keeps the device busy until the replay is queued.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from gpu.bench.results import Timing

WARM_UPS = 2  # launches before the capture: compilation, and what libraries allocate once
TRIALS = 3  # replays that decide how many follow
LEAST_REPEATS, MOST_REPEATS = 10, 200
FLUSH_BYTES = 256 << 20
CACHE_SIZES = 4  # the buffer is at least so many times the L2 cache


class CudaTimer:
    """Times launches on the current device.

    Args:
        seconds: that the replays of one launch may take together, warm-up and flushing not counted.
    """

    def __init__(self, seconds: float) -> None:
        l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._flush = torch.zeros(max(FLUSH_BYTES, CACHE_SIZES * l2_bytes) // 4, dtype=torch.float32, device="cuda")
        self._seconds = seconds

    def __call__(self, launch: Callable[[], object], check: Callable[[], None] = lambda: None) -> Timing:
        """The time of a launch.

        Args:
            launch: queues its work on the current stream, always on the same tensors.
            check: called once the launch has run, before it is timed.
        """
        graph = self._capture(launch, check)
        expected = statistics.median(self._replays(graph, TRIALS))
        repeats = min(MOST_REPEATS, max(LEAST_REPEATS, int(self._seconds / max(expected, 1e-6))))
        times = self._replays(graph, repeats)
        return Timing(statistics.median(times), min(times), repeats)

    def _capture(self, launch: Callable[[], object], check: Callable[[], None]) -> Any:
        cuda: Any = torch.cuda  # untyped in torch
        stream = cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                launch()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        check()
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        return graph

    def _replays(self, graph: Any, count: int) -> list[float]:
        """Seconds of each of `count` replays."""
        cuda: Any = torch.cuda  # untyped in torch
        pairs = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in range(count)]
        for begin, end in pairs:
            self._flush.sum()
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
