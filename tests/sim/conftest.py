"""Recorded runs for tests: what a simulation did, written down as a recorder of a real engine would."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from sim.commands.simulate import main as simulate

META = {
    "model": "meta-llama/Llama-3.1-8B",
    "vllm_version": "0.19.0",
    "engine_kwargs": {
        "tensor_parallel_size": 1,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 1024,
        "max_model_len": 4096,
    },
    "kv_cache": {"num_gpu_blocks": 900, "block_size": 16, "gpu_memory_utilization": 0.9, "enable_prefix_caching": True},
    "hardware": {"device_name": "NVIDIA GeForce RTX 4090"},
    "resolved": {"scheduler_config": {"async_scheduling": True}},
}
OPTIONS = [
    "model=llama-3.1-8b",
    "hardware=rtx-4090",
    "max_model_len=4096",
    "memory.num_blocks=900",
    "scheduler.max_num_seqs=64",
    "scheduler.max_num_batched_tokens=1024",
    "scheduler.async_scheduling=true",
    "record.steps=all",
    "plots=false",
]


@pytest.fixture
def recorded() -> Callable[..., Path]:
    """Simulates with a fitted timer and writes the result as a recorded run; returns its folder."""

    def record(folder: Path, fit: Path, num_requests: int, rate: float) -> Path:
        source = folder / "source"
        lengths = [
            word
            for kind, low, high in (("prompt", 20, 700), ("output", 2, 300))
            for word in (
                f"workload/{kind}_lengths=uniform",
                f"workload.{kind}_lengths.low={low}",
                f"workload.{kind}_lengths.high={high}",
            )
        ]
        workload = ["workload=synthetic", f"workload.num_requests={num_requests}", f"workload.rate={rate}", *lengths]
        timing = ["timing=fitted", f"timing.path={fit}"]
        assert simulate([*OPTIONS, *workload, *timing, f"hydra.run.dir={source}"]) == 0
        rows = pq.read_table(source / "requests.parquet").to_pandas().sort_values("request_id")
        start = float(rows["arrival_s"].iloc[0])
        with (folder / "requests.jsonl").open("w") as stream:
            for row in rows.itertuples():
                line = {
                    "request_id": f"r{row.request_id}",
                    "dataset_arrival_s": row.arrival_s,
                    "queued_s": row.arrival_s - start,
                    "first_token_s": row.first_token_s - start,
                    "last_token_s": row.finish_s - start,
                    "input_tokens": row.prompt_tokens,
                    "output_tokens": row.output_tokens,
                }
                stream.write(json.dumps(line) + "\n")
        steps = pq.read_table(source / "steps.parquet").to_pandas()
        with (folder / "timeseries.csv").open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(["t", "prompt_throughput", "gen_throughput", "running", "waiting", "kv_cache_pct"])
            for tick in np.arange(0.5, float(steps["start_s"].iloc[-1]) - start, 0.5):
                at = steps[steps["start_s"] - start <= tick].iloc[-1]
                held = at["used"] + at["reserved"] + at["internal"]
                writer.writerow([tick, 0, 0, at["running"], at["waiting"], 100 * held / (900 * 16)])
        (folder / "meta.json").write_text(json.dumps(META))
        return folder

    return record
