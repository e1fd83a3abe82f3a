"""Runs the kernels' tests in processes of their own: interpreted ones, and compiled ones.

Whether Triton interprets is settled when it is first imported, so neither kind can share a process with the other, or
with the tests of the rest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the kernels need PyTorch")
pytest.importorskip("triton", reason="the kernels need Triton")

HERE = Path(__file__).parent


def release(package: str) -> tuple[int, int]:
    """Major and minor version; 0.0 if it is absent."""
    try:
        major, minor = version(package).split(".")[:2]
    except PackageNotFoundError:
        return 0, 0
    return int(major), int(minor)


def run_apart(file: Path, interpret: str, *arguments: str) -> None:
    """Runs the tests of a file, of which there must be some, and expects them to pass."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_I"))}
    environment |= {"TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(file), *arguments]
    done = subprocess.run(
        command, env=environment, cwd=HERE.parents[2], capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(
    release("triton") < (3, 7) and release("numpy") >= (2, 4),
    reason="the interpreter of Triton before 3.7 needs NumPy before 2.4",
)
@pytest.mark.parametrize("name", ["decode_sizes", "decode_options", "prefill_cases", "moves"])
def test_interpreted_kernels_agree_with_float64(name: str) -> None:
    run_apart(HERE / "interpreted" / f"{name}.py", "1")


@pytest.mark.parametrize(
    "selection",
    [
        "main and sm_90 and decode",
        "main and sm_90 and not decode",
        "main and not sm_90",
        "three or buffers",
        pytest.param("other and sm_80", marks=pytest.mark.slow),
        pytest.param("other and sm_89", marks=pytest.mark.slow),
        pytest.param("other and sm_100", marks=pytest.mark.slow),
        pytest.param("other and gfx942", marks=pytest.mark.slow),
    ],
)
def test_kernels_compiled_for_gpus_that_are_not_here_fit_them(selection: str) -> None:
    run_apart(HERE / "compiled" / "offline_cases.py", "0", "-k", selection)
