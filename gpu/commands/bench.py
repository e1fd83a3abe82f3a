"""Time the kernels on this GPU, beside a copy, a contiguous layout and the kernels of others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from gpu.bench.cases import BenchOptions
    from gpu.bench.session import Bench, Session
    from gpu.kernels.launch import Device

SWEEPS = ("-m", "--multirun")


def main(argv: list[str]) -> int:
    """`kvtwin bench …`: arguments are Hydra's.

    Raises:
        UserError: there is no GPU or no torch, which is found out before anything is written; or an option that does
            not exist or has the wrong type.
    """
    from sim.config import run_command
    from sim.stopping import Terminated, unwinding

    if all(word in SWEEPS or not word.startswith("-") for word in argv):  # else Hydra shows something and runs nothing
        require_gpu()
    with unwinding():
        try:
            return run_command("bench", _bench, argv)
        except Terminated:
            print("kvtwin: terminated", file=sys.stderr)
            return 143


def require_gpu() -> None:
    """Refuses to go on where there is nothing to measure.

    Raises:
        UserError: torch or triton is not installed, or torch sees no GPU.
    """
    try:
        import torch
        import triton  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise UserError(
            f"kvtwin bench needs torch and triton ({error}); install them with the gpu extra: kvtwin[gpu]."
        ) from None
    if not torch.cuda.is_available():
        raise UserError(
            f"no GPU: torch {torch.__version__} sees none, and kernels are timed on one; use a machine with a GPU "
            "and a torch built for it."
        )


def options_of(config: DictConfig) -> BenchOptions:
    """The options of a composed `conf/bench.yaml`, checked.

    Raises:
        UserError: a wrong type or value; the message names it.
    """
    from gpu.bench.cases import BenchOptions
    from sim.config import fill

    return fill(BenchOptions, config.bench, "bench")


def _bench(config: DictConfig) -> None:
    import torch
    from hydra.core.hydra_config import HydraConfig

    from gpu.bench.device import DeviceBench, device_facts, versions
    from gpu.bench.peers import installed
    from gpu.bench.timing import CudaTimer
    from gpu.kernels.launch import load_tuning

    options = options_of(config)
    if options.tuning is not None:
        load_tuning(Path(options.tuning))
    peers = installed(options.peers)
    bench = DeviceBench(CudaTimer(options.seconds), peers, torch.device("cuda", torch.cuda.current_device()))
    folder = Path(HydraConfig.get().runtime.output_dir)
    measure_into(folder, options, bench, device_facts(), versions(peers))


def measure_into(
    folder: Path, options: BenchOptions, bench: Bench, device: dict[str, Any], versions: dict[str, str]
) -> None:
    """Measures, writes and prints; if it is stopped or fails, what was measured until then.

    Args:
        folder: gets `bench.json`, the figures and, if anything was tuned, `tuning.json`.
        options: what to measure.
        bench: measures it.
        device: what `bench.json` says of the device.
        versions: what it says of the software.
    """
    from gpu.bench.session import Session
    from sim.progress import counting

    with counting("cases", "tuning and first cases") as progress:
        session = Session(options, bench, progress)
        try:
            session.run()
        except BaseException:
            if session.record.outcomes or session.record.candidates:
                _write(folder, session, bench.device, device, versions)
            raise
    found, written = _write(folder, session, bench.device, device, versions)
    from gpu.bench.report import print_results

    print_results(found)
    print(f"written to {folder}: {', '.join(written)}")


def _write(
    folder: Path, session: Session, tuned_for: Device, device: dict[str, Any], versions: dict[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """Writes each file whole; returns the content of `bench.json` and the files' names."""
    from gpu.bench.results import content
    from gpu.bench.tuning import tuning_content
    from sim.files import cannot_write, write_json
    from sim.plots.kernels import draw_kernels

    found = content(session.record, device, versions)
    write_json(folder / "bench.json", found)
    written = ["bench.json"]
    if session.tuned:
        write_json(folder / "tuning.json", tuning_content(tuned_for, versions, session.tuned))
        written.append("tuning.json")
    try:
        written += [path.name for path in draw_kernels(found, folder)]
    except OSError as error:
        raise cannot_write(folder, error) from None
    return found, written
