"""Makes the committed tables and figures of `results/reference/` again: `make reference`.

Each is one command of the README, run into a temporary folder, of which a few small files are kept.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from sim.cli import main

FOLDER = Path(__file__).parents[1] / "results" / "reference"
COMMANDS = {
    "demo": ["sim", "-m", "experiment=demo"],
    "kwon_fig2": ["sim", "-m", "experiment=kwon_fig2", "engine=orca_max,orca_pow2,orca_oracle,vllm_v1"],
}
KEPT = ("*.csv", "*.png")


def make(name: str) -> None:
    """Runs one command and replaces what is kept of it."""
    with TemporaryDirectory() as run:
        code = main([*COMMANDS[name], f"hydra.sweep.dir={run}"])
        if code:
            sys.exit(f"{name}: exit code {code}")
        target = FOLDER / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for pattern in KEPT:
            for file in Path(run).glob(pattern):
                shutil.copy(file, target)


if __name__ == "__main__":
    for name in sys.argv[1:] or COMMANDS:
        make(name)
