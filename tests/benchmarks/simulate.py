"""How fast the simulator is: CPU seconds of a run after imports, median of five. Nothing is asserted.

    python -m tests.benchmarks.simulate [AZURE.csv [MOONCAKE.jsonl]]

Runs the Azure chat hour if its path is given, else a generated workload of the same size and mean lengths; and the
Mooncake hour with prefix caching if its path is given too. Machines
differ, and a shared one differs from minute to minute: the events that SimPy alone handles in a second are printed
beside each figure as a measure of the machine at that moment.
"""

from __future__ import annotations

import io
import statistics
import sys
import time
from contextlib import redirect_stdout
from tempfile import TemporaryDirectory
from unittest import mock

import simpy

import sim.run
from sim.cli import main

RUNS = 5
GENERATED = [
    "workload=synthetic",
    "workload.num_requests=19366",
    "workload.rate=5.53",
    "workload/prompt_lengths=lognormal",
    "workload.prompt_lengths.mean=1154.7",
    "workload/output_lengths=lognormal",
    "workload.output_lengths.mean=211.1",
    "max_model_len=16384",
]
VARIANTS = {
    "no prefix caching, sampled steps": ["memory.prefix_caching=false", "record.steps=sampled"],
    "no prefix caching, every plan recorded": ["memory.prefix_caching=false"],
    "prefix caching, sampled steps": ["record.steps=sampled"],
    "27,000 blocks": ["memory.num_blocks=27000", "memory.prefix_caching=false", "record.steps=sampled"],
    "27,000 blocks, prefix caching": ["memory.num_blocks=27000", "record.steps=sampled"],
    "1,500 blocks": ["memory.num_blocks=1500", "memory.prefix_caching=false", "record.steps=sampled"],
    "1,500 blocks, prefix caching": ["memory.num_blocks=1500", "record.steps=sampled"],
}


def cpu_seconds(options: list[str]) -> tuple[list[float], int, int]:
    """CPU seconds of `RUNS` runs, and the requests and steps of one."""
    seconds: list[float] = []
    summary = {}
    simulate = sim.run.simulate

    def timed(*arguments: object) -> dict:
        nonlocal summary
        start = time.process_time()
        summary = simulate(*arguments)  # type: ignore[arg-type]
        seconds.append(time.process_time() - start)
        return summary

    for _ in range(RUNS):
        with TemporaryDirectory() as folder, mock.patch("sim.run.simulate", timed), redirect_stdout(io.StringIO()):
            if main(["sim", "plots=false", f"hydra.run.dir={folder}", *options]):
                sys.exit("the run failed")
    return seconds, summary["completed"], summary["steps"]


def simpy_events_per_second(events: int = 200_000) -> float:
    """What SimPy alone does in a CPU second here and now: a process that waits."""

    def waits(env: simpy.Environment):
        for _ in range(events):
            yield env.timeout(1)

    env = simpy.Environment()
    env.process(waits(env))
    start = time.process_time()
    env.run()
    return events / (time.process_time() - start)


def show(name: str, options: list[str]) -> None:
    """Measures a variant and prints its row."""
    events = simpy_events_per_second()
    seconds, requests, steps = cpu_seconds(options)
    median = statistics.median(seconds)
    print(f"{name:40} {median:7.2f} {requests / median:11,.0f} {steps / median:11,.0f} {events:15,.0f}", flush=True)


if __name__ == "__main__":
    workload = ["workload=azure", f"workload.path={sys.argv[1]}"] if len(sys.argv) > 1 else GENERATED
    print(f"{'variant':40} {'CPU s':>7} {'requests/s':>11} {'steps/s':>11} {'SimPy events/s':>15}")
    for name, options in VARIANTS.items():
        show(name, [*workload, *options])
    if len(sys.argv) > 2:
        mooncake = ["workload=mooncake", f"workload.path={sys.argv[2]}", "record.steps=sampled"]
        for block_size in (512, 16):
            show(f"Mooncake, blocks of {block_size}", [*mooncake, f"memory.block_size={block_size}"])
