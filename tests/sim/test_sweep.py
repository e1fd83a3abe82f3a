"""Sweeps: the product in order, one table of it, figures, and failed points that harm no other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sim.cli import main

NAMES = ["used", "reserved", "internal", "cached", "external", "idle"]
POINT_FILES = {"config.yaml", "point.json", "summary.json", "requests.parquet", "steps.parquet", "events.parquet"}
ORCAS = ("orca_max", "orca_pow2", "orca_oracle")
SYNTHETIC = ["workload=synthetic", "workload.num_requests=6", "workload.prompt_lengths.tokens=40", "timing=constant"]
# Kwon et al., SOSP 2023, Fig. 2: used, reserved, internal, external & others. Their vLLM bar is not split.
PUBLISHED = {
    "orca_max": (0.204, 0.133, 0.573, 0.089),
    "orca_pow2": (0.268, 0.179, 0.136, 0.416),
    "orca_oracle": (0.382, 0.252, 0.000, 0.366),
}


@dataclass(frozen=True)
class Sweep:
    """A finished sweep: its folder, what it printed, and its exit code."""

    folder: Path
    out: str
    err: str
    code: int

    @property
    def table(self) -> pd.DataFrame:
        return pd.read_parquet(self.folder / "sweep.parquet")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Sweep]]:
    """Runs `kvtwin sim -m` with these overrides; figures in few pixels, for nobody looks at them."""

    def run(*overrides: str) -> Sweep:
        folder = tmp_path_factory.mktemp("sweep")
        with CapturedStreams() as streams:
            code = main(["sim", "-m", f"hydra.sweep.dir={folder}", *overrides])
        return Sweep(folder, streams.out, streams.err, code)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sim.plots.style.PNG_DPI", 30)
        yield run
