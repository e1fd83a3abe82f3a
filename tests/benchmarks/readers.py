"""How fast a trace is read. Nothing is asserted.

    python -m tests.benchmarks.readers [ROWS]

Writes a file of the shape of the Azure 2024 code trace (16.8 million rows by default, about 600 MB) into a temporary
folder, parses it to columns, and turns it into requests.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from workloads.readers.azure import AzureTrace

ROWS = 16_803_695
WEEK_S = 604_799.9
CHUNK = 1_000_000


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
            prompts, outputs = generator.integers(10, 8000, count), generator.integers(1, 600, count)
            texts = np.char.replace(np.datetime_as_string(times, unit="us"), "T", " ")
            lines = zip(texts.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
            file.writelines(f"{text}+00:00,{prompt},{output}\n" for text, prompt, output in lines)


if __name__ == "__main__":
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else ROWS
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.csv"
        write(path, rows)
        print(f"{rows:,} rows, {path.stat().st_size / 1e6:,.0f} MB")
        start = time.process_time()
        parsed = sum(len(chunk.time_ns) for chunk in AzureTrace(str(path)).rows())
        columns = time.process_time() - start
        print(f"to columns:  {columns:6.1f} CPU s, {parsed / columns:11,.0f} rows/s")
        start = time.process_time()
        requests = sum(1 for _ in AzureTrace(str(path)))
        seconds = time.process_time() - start
        print(f"to requests: {seconds:6.1f} CPU s, {requests / seconds:11,.0f} rows/s")
