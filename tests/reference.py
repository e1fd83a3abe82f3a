"""Makes the committed tables and figures of `results/reference/` again: `make reference`.

Each is one command of its README, run into a temporary folder, of which a few small files are kept. What needs a public
trace is left as it is where the trace is not beside the repository.
"""

from __future__ import annotations

import shutil
import sys
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

from sim.cli import main

FOLDER = Path(__file__).parents[1] / "results" / "reference"
COMMANDS = {
    "demo": ["sim", "-m", "experiment=demo"],
    "kwon_fig2": ["sim", "-m", "experiment=kwon_fig2"],
    "kwon_fig13": ["sim", "-m", "experiment=kwon_fig13"],
    "kwon_fig15_parallel": ["sim", "-m", "experiment=kwon_fig15_parallel"],
    "kwon_fig15_beam": ["sim", "-m", "experiment=kwon_fig15_beam"],
    "kwon_fig16": ["sim", "-m", "experiment=kwon_fig16"],
    "why_paging": ["sim", "-m", "experiment=why_paging"],
    "watermark": ["sim", "-m", "experiment=watermark"],
}
TRACES = Path(__file__).parents[1] / "../shared/traces"
TRACE_COMMANDS = {  # run among the traces, so that tables name a trace by its file alone
    "mooncake_hits": ["sim", "-m", "experiment=mooncake_hits", "workload.path=mooncake_conversation.jsonl"],
}
KEPT = ("*.csv", "*.png")


def make(name: str) -> None:
    """Runs one command and replaces what is kept of it."""
    needs_trace = name in TRACE_COMMANDS
    if needs_trace and not TRACES.exists():
        print(f"{name}: left as it is; the traces are not beside the repository")
        return
    with TemporaryDirectory() as run, chdir(TRACES if needs_trace else "."):
        code = main([*(COMMANDS | TRACE_COMMANDS)[name], f"hydra.sweep.dir={run}"])
        if code:
            sys.exit(f"{name}: exit code {code}")
        target = FOLDER / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for pattern in KEPT:
            for file in Path(run).glob(pattern):
                shutil.copy(file, target)


if __name__ == "__main__":
    for name in sys.argv[1:] or (*COMMANDS, *TRACE_COMMANDS):
        make(name)
