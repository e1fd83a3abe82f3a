"""How CPU time and memory grow with the number of requests. Nothing is asserted.

    python -m tests.benchmarks.scale [REQUESTS …]

Each run is a process of its own; its CPU time includes start-up, its memory is the peak that the system counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.benchmarks.simulate import GENERATED, simpy_events_per_second

SIZES = (100_000, 300_000, 1_000_000)
OPTIONS = ["memory.prefix_caching=false", "record.steps=sampled", "record.requests=sampled"]


def run_apart(options: list[str]) -> tuple[float, float, int, dict[str, Any]]:
    """Wall seconds, CPU seconds, peak bytes and summary of one run in a process of its own."""
    with TemporaryDirectory() as folder:
        command = [
            str(Path(sys.executable).with_name("kvtwin")),
            "sim",
            *options,
            "plots=false",
            f"hydra.run.dir={folder}",
        ]
        start = time.perf_counter()
        null = os.open(os.devnull, os.O_WRONLY)
        child = os.posix_spawn(command[0], command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, null, 1)])
        _, status, usage = os.wait4(child, 0)
        os.close(null)
        if status:
            sys.exit(f"failed: {' '.join(command)}")
        summary = json.loads(Path(folder, "summary.json").read_text())
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, summary


if __name__ == "__main__":
    print(f"{'requests':>10} {'wall s':>8} {'CPU s':>8} {'requests/s':>11} {'peak MB':>8} {'SimPy events/s':>15}")
    for size in map(int, sys.argv[1:] or SIZES):
        events = simpy_events_per_second()
        wall, cpu, peak, _ = run_apart([*GENERATED, f"workload.num_requests={size}", *OPTIONS])
        print(f"{size:10,} {wall:8.1f} {cpu:8.1f} {size / cpu:11,.0f} {peak / 1e6:8.0f} {events:15,.0f}", flush=True)
