"""How fast a trace is read, and how long a simulated production week takes. Nothing is asserted.

    python -m tests.benchmarks.readers [ROWS]         parses it to columns, and turns it into requests
    python -m tests.benchmarks.readers [ROWS] week    serves it: one replica of eight H100, one process
    python -m tests.benchmarks.readers [ROWS] burst   reads a BurstGPT file whatever its format, and drops what failed
    python -m tests.benchmarks.readers [ROWS] describe    kvtwin describe of the same

The first two write a file of the shape of the Azure 2024 code trace (16.8 million rows over a week by default, about
600 MB) into a temporary folder. Its lengths are lognormal with the means of the 2023 code trace, 2,048 and 28 tokens.
The others write one of the shape of BurstGPT_3: 5,344,021 rows, 7.26 % of them without a response.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from tests.benchmarks.scale import run_apart
from tests.benchmarks.simulate import simpy_events_per_second
from workloads.readers.azure import AzureTrace
from workloads.readers.trace import Trace

ROWS = 16_803_695
BURST_ROWS = 5_344_021
WEEK_S = 604_799.9
CHUNK = 1_000_000
DESCRIBE = (
    "import resource, sys; from sim.commands.describe import main; main(sys.argv[1:]); "
    "print(f'peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:,.0f} MB')"
)


def write(path: Path, rows: int) -> None:
    """Sorted times over a week with six digits and an offset, lengths of two to four digits."""
    generator = np.random.default_rng(0)
    start = np.datetime64("2024-05-10T00:00:00", "us")
    with path.open("w", encoding="ascii") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n")
        for first in range(0, rows, CHUNK):
            count = min(CHUNK, rows - first)
            low, high = first / rows * WEEK_S * 1e6, (first + count) / rows * WEEK_S * 1e6
            times = start + np.sort(generator.uniform(low, high, count)).astype(np.int64).astype("timedelta64[us]")
            prompts, outputs = _lengths(generator, 2048, count), _lengths(generator, 28, count)
            texts = np.char.replace(np.datetime_as_string(times, unit="us"), "T", " ")
            lines = zip(texts.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
            file.writelines(f"{text}+00:00,{prompt},{output}\n" for text, prompt, output in lines)


def _lengths(generator: np.random.Generator, mean: int, count: int) -> np.ndarray:
    """Lognormal with sigma 1, which has the mean exp(mu + 1/2), from 1 to 7,999."""
    return generator.lognormal(np.log(mean) - 0.5, 1.0, count).astype(np.int64).clip(1, 7999)


def describe(path: Path) -> None:
    """Prints how long the command takes in a process of its own, start and figure included, and its peak memory."""
    start = time.perf_counter()
    arguments = [str(path), "workload.on_bad_row=drop", f"hydra.run.dir={path.parent / 'description'}"]
    subprocess.run([sys.executable, "-c", DESCRIBE, *arguments], check=True)
    print(f"described in {time.perf_counter() - start:.1f} s")


def read(path: Path) -> None:
    """Prints rows per CPU second, to columns and to requests."""
    start = time.process_time()
    parsed = sum(len(chunk.time_ns) for chunk in AzureTrace(str(path)).rows())
    columns = time.process_time() - start
    print(f"to columns:  {columns:6.1f} CPU s, {parsed / columns:11,.0f} rows/s")
    start = time.process_time()
    requests = sum(1 for _ in AzureTrace(str(path)))
    seconds = time.process_time() - start
    print(f"to requests: {seconds:6.1f} CPU s, {requests / seconds:11,.0f} rows/s")


def write_burst(path: Path, rows: int) -> None:
    """Eight columns, times from 19,440,110 s on at 3 a second, and 7.26 % of the rows without a response."""
    generator = np.random.default_rng(0)
    with path.open("w", encoding="ascii") as file:
        file.write("Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n")
        for first in range(0, rows, CHUNK):
            count = min(CHUNK, rows - first)
            prompts, outputs = _lengths(generator, 600, count), _lengths(generator, 200, count)
            outputs[generator.random(count) < 0.0726] = 0
            columns = zip(range(first, first + count), prompts.tolist(), outputs.tolist(), strict=True)
            file.writelines(
                f"{19_440_110 + row / 3:.2f},,{prompt / 1000:.3f},GPT-4,{prompt},{output},{prompt + output},API log\n"
                for row, prompt, output in columns
            )


def read_burst(path: Path) -> None:
    """Prints how long one pass takes, and how much memory."""
    start, started = time.perf_counter(), time.process_time()
    trace = Trace(str(path), on_bad_row="drop")
    tokens = sum(request.prompt_tokens + request.output_tokens for request in trace)
    wall, cpu = time.perf_counter() - start, time.process_time() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"{trace.format.name}: {trace.fate.read:,} rows read, {trace.fate.kept:,} kept, {tokens:,} tokens: "
        f"{wall:.1f} s, {cpu:.1f} CPU s, peak {peak / 1e6:,.0f} MB"
    )


def serve(path: Path) -> None:
    """Prints what a run over the whole file costs."""
    events = simpy_events_per_second()
    deployment = ["model=llama-3.1-8b", "hardware=h100-80gb", "tensor_parallel=8", "memory.prefix_caching=false"]
    rows = ["record.steps=sampled", "record.requests=sampled", "record.sample_interval_s=60"]
    wall, cpu, peak, summary = run_apart(["workload=azure", f"workload.path={path}", *deployment, *rows])
    requests = summary["completed"] + summary["failed"]
    print(
        f"{requests:,} requests, {summary['steps']:,} steps, {summary['mean_running']:.0f} running on average: "
        f"{wall / 60:.1f} min, {cpu / 60:.1f} CPU min, {requests / cpu:,.0f} requests/s, peak {peak / 1e6:,.0f} MB; "
        f"SimPy {events:,.0f} events/s at the start"
    )


if __name__ == "__main__":
    words = sys.argv[1:]
    burst = "burst" in words or "describe" in words
    rows = next((int(word) for word in words if word.isdecimal()), BURST_ROWS if burst else ROWS)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.csv"
        (write_burst if burst else write)(path, rows)
        print(f"{rows:,} rows, {path.stat().st_size / 1e6:,.0f} MB", flush=True)
        tasks = {"burst": read_burst, "describe": describe, "week": serve}
        next((task for word, task in tasks.items() if word in words), read)(path)
