"""Runs `interpreted_engine.py` under Triton's interpreter, which must be on before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the engine needs PyTorch")
pytest.importorskip("transformers", reason="the engine runs Hugging Face models")
pytest.importorskip("triton", reason="the kernels need Triton")


@pytest.mark.parametrize("group", ["tokens", "step or rows or pool or blocks"])
def test_engine_on_interpreted_kernels(group: str) -> None:
    file = Path(__file__).with_name("interpreted_engine.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(file), "-k", group]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, env=environment, cwd=file.parents[2], capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
