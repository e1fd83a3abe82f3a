"""What tests of whole runs share: the command in process, and traces of a few requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sim.cli import main


@pytest.fixture(scope="session")
def simulate(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Runs `kvtwin sim` with these overrides and without figures, expects success, and returns the run folder."""

    def run(*overrides: str) -> Path:
        folder = tmp_path_factory.mktemp("run")
        assert main(["sim", "plots=false", f"hydra.run.dir={folder}", *overrides]) == 0
        return folder

    return run


@pytest.fixture(scope="session")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[tuple[float, int, int]]], list[str]]:
    """Writes (arrival in seconds, prompt tokens, output tokens) as an Azure trace; returns the overrides that read it.

    The reader counts arrivals from the first row, whatever that row's time.
    """

    def write(requests: Sequence[tuple[float, int, int]]) -> list[str]:
        path = tmp_path_factory.mktemp("trace") / "trace.csv"
        rows = [f"2023-11-16 18:00:{arrival_s:010.7f},{prompt},{output}" for arrival_s, prompt, output in requests]
        path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]), encoding="utf-8")
        return ["workload=azure", f"workload.path={path}"]

    return write
