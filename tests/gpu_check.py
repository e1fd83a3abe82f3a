"""Everything that needs a GPU, in under eight minutes: `make gpu-check`.

Kernels against float64; the benchmark, with launches tuned on the way; the loop of calibration, prediction and replay
on an 8B-shaped model; the first requests of a public trace as they came, and the first 2,000 as fast as that model
takes them. What is worth keeping goes to
`results/reference/<device>/`, step by step, so that a step that fails leaves those before it. Steps share what time is
left; one that is not done by then is interrupted, as by Ctrl-C, and counts as failed.

    python -m tests.gpu_check [TRACE.csv]      TRACE: an Azure trace; without one that beside the repository
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from gpu.commands.bench import require_gpu
from workloads.errors import UserError

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "results" / "reference"
TRACE = ROOT / "../shared/traces/azure_2023_conv.csv"
KVTWIN = str(Path(sys.executable).with_name("kvtwin"))
LIMIT_S = 7.5 * 60
SHORTER = (  # axes of the benchmark that take no longer than there is time
    "bench.batches=[64,1,8]",
    "bench.prompts=[4096,1024,16384]",
    "bench.block_sizes=[16,8,32,64]",
    "bench.head_dims=[128]",
    "bench.precisions=[bfloat16,fp8]",
)
ON_GPU = (  # the loop of calibration, prediction and replay, on a model that a GPU has work with
    "gpu.device=cuda",
    "hardware=h200-141gb",
    "model=llama-3.1-8b",
    "max_model_len=4096",
    "memory.num_blocks=6000",  # 12 GiB: 96,000 slots for 256 requests of up to 1,100 tokens, so the pool runs dry
    "scheduler.max_num_seqs=256",
    "scheduler.max_num_batched_tokens=2048",
    "workload.num_requests=400",
    "workload.prompt_lengths.high=800",
    "workload.output_lengths.high=250",
)
STOP_S = 20.0  # what a step that is interrupted may take to write down what it has


@dataclass(frozen=True)
class Step:
    """One command.

    Args:
        name: of its folder below the device's; also what is printed.
        command: program and arguments.
        folder: where it writes.
        kept: patterns of the files that are kept of it.
        most_s: seconds it may take at most.
    """

    name: str
    command: tuple[str, ...]
    folder: Path
    kept: tuple[str, ...]
    most_s: float


def steps(runs: Path, trace: Path | None, device: str) -> Iterator[Step]:
    """All steps in order, each to be done before the next is asked for.

    Args:
        runs: the folder in which each gets its own.
        trace: an Azure trace; None leaves the replays out.
        device: the GPU as its driver calls it.
    """
    pytest = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "8", "tests/gpu/test_on_gpu.py")
    yield Step("kernels", pytest, runs / "kernels", (), 120.0)
    bench = runs / "bench"
    measure = (KVTWIN, "bench", *SHORTER, "bench.tune=true", "bench.budget=160", f"hydra.run.dir={bench}")
    yield Step("bench", measure, bench, ("bench.json", "tuning.json", "*.png"), 200.0)
    tuning = bench / "tuning.json"
    tuned = (f"gpu.tuning={tuning}",) if tuning.is_file() else ()
    loop = runs / "loop"
    validate = (KVTWIN, "validate", "experiment=cpu_loop", *ON_GPU, f"hardware.name='{device}'", *tuned)
    kept = ("validation.json", "*.png", "calibration/timing.json", "calibration/points.jsonl")
    yield Step("loop", (*validate, f"hydra.run.dir={loop}"), loop, kept, 150.0)
    if trace is None:
        return
    replay = [KVTWIN, "replay", "workload=azure", f"workload.path={trace}", "model=llama-3.1-8b", *tuned]
    for name, options in (
        ("replay_300", ("replay.limit=300",)),
        ("replay_2000_at_once", ("replay.limit=2000", "replay.time_scale=0.001")),
    ):
        command = (*replay, *options, f"hydra.run.dir={runs / name}")
        yield Step(name, command, runs / name, ("summary.json", "*.png"), LIMIT_S)


def check(chosen: Iterable[Step], target: Path, limit_s: float = LIMIT_S) -> list[str]:
    """Runs steps one after the other and keeps their results below `target`; returns the names of those that failed.

    Args:
        chosen: what to run.
        target: the folder of the device.
        limit_s: seconds for all of them.
    """
    until = time.monotonic() + limit_s
    failed = []
    for step in chosen:
        began = time.monotonic()
        code = run(step.command, min(step.most_s, until - began))
        print(f"{step.name}: {'done' if code == 0 else 'FAILED'}, {time.monotonic() - began:.0f} s", flush=True)
        if code:
            failed.append(step.name)
        elif step.kept:
            keep(step.folder, target / step.name, step.kept)
    return failed


def run(command: Sequence[str], most_s: float) -> int:
    """Runs a command for `most_s` seconds at most; its exit code, which is not 0 if it had to be interrupted."""
    if most_s <= 0:
        return 124
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            return process.wait(most_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
        return 124


def keep(folder: Path, target: Path, patterns: tuple[str, ...]) -> None:
    """Replaces `target` by those files of `folder`."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for pattern in patterns:
        for file in folder.glob(pattern):
            shutil.copy(file, target)


def main(arguments: list[str]) -> int:
    """Exit code: 0 all done, 1 a step failed, 2 there is no GPU or no such trace."""
    trace = Path(arguments[0]) if arguments else TRACE
    try:
        require_gpu()
        if arguments and not trace.is_file():
            raise UserError(f"{trace}: no such file; give an Azure trace as CSV, or none.")
    except UserError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    import torch

    if not trace.is_file():
        print("replay: left out; there is no trace beside the repository (python -m tests.gpu_check TRACE.csv)")
    device = torch.cuda.get_device_name()
    folder = REFERENCE / re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    with TemporaryDirectory() as runs:
        failed = check(steps(Path(runs), trace.resolve() if trace.is_file() else None, device), folder)
    if failed:
        print(f"gpu-check: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
