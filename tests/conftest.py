"""What tests of whole runs share: the command in process, and traces of a few requests."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ["KVTWIN_COMPILED"] = "0"  # tests replace methods, and look at the code as it is written

from sim.cli import main


@pytest.fixture(scope="session")
def simulate(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Runs `kvtwin sim` with these overrides and without figures, expects success, and returns the run folder.

    The same overrides are run once a session, so a test must leave the folder as it is.
    """

    @functools.cache
    def run(*overrides: str) -> Path:
        folder = tmp_path_factory.mktemp("run")
        assert main(["sim", "plots=false", f"hydra.run.dir={folder}", *overrides]) == 0
        return folder

    return run


@pytest.fixture(scope="session")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[tuple[float, int, int]]], list[str]]:
    """Writes (arrival in seconds, prompt tokens, output tokens) as an Azure trace; returns the overrides that read it.

    The reader counts arrivals from the first row, whatever that row's time; the last may come within a minute of it.
    """

    @functools.cache
    def write(text: str) -> Path:
        path = tmp_path_factory.mktemp("trace") / "trace.csv"
        path.write_text(text, encoding="utf-8")
        return path

    def overrides(requests: list[tuple[float, int, int]]) -> list[str]:
        rows = [f"2023-11-16 18:00:{arrival_s:010.7f},{prompt},{output}" for arrival_s, prompt, output in requests]
        path = write("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
        return ["workload=azure", f"workload.path={path}"]

    return overrides
