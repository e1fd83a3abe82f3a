"""The whole loop on one device: calibrate, predict a workload that was not calibrated with, replay it, compare.

The calibration has a workload of the same kind from another seed. Predicted and measured run have the same scheduler,
so that they decide alike shows one thing only: that nothing in a decision hangs on how a step is carried out. Where
requests come one after the other, it also hangs on when a step ends, and a prediction that is 2 % early admits some
request a step sooner. So the decisions are compared twice: as they were predicted, and as they are when the prediction
is given the measured step times (`timing=recorded`). With all requests there from the start both must be equal, step by
step and block by block; otherwise the latter.

The replay is repeated: how far the measured runs lie apart says how much of an error may be the machine's noise.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import DictConfig

from gpu.calibrate import TIMING, calibrate
from gpu.commands.replay import real_engine
from gpu.decisions import Decisions, WatchedTimer
from sim.config import whole_number
from sim.progress import counting
from sim.run import assemble, simulate
from sim.served import read_served
from sim.validation import Figure, compare
from workloads.errors import UserError

CALIBRATION = "calibration"
PREDICTED = "predicted"
BOUNDED: dict[str, Callable[[dict[str, Any]], Figure]] = {  # what the promise is about
    "output_throughput": lambda comparison: comparison["throughput"]["output_throughput"],
    "median_tpot": lambda comparison: comparison["metrics"]["tpot"]["p50"],
    "p99_ttft": lambda comparison: comparison["metrics"]["ttft"]["p99"],
}


class Loop:
    """`loop` of an experiment of `kvtwin validate`.

    Args:
        repetitions: replays of the workload; at least 1.
        calibration_seed: of the calibration's workload; another one than the run's.
        throughput_pct: largest error of the output throughput, in percent, that counts as right.
        median_tpot_pct: likewise, of the median TPOT.
        p99_ttft_pct: likewise, of the 99th percentile of TTFT.

    Raises:
        UserError: no repetition.
    """

    def __init__(
        self,
        repetitions: int,
        calibration_seed: int,
        throughput_pct: float,
        median_tpot_pct: float,
        p99_ttft_pct: float,
    ) -> None:
        if repetitions < 1:
            raise UserError(f"loop.repetitions is {repetitions}; expected a whole number of at least 1.")
        self._repetitions = repetitions
        self._calibration_seed = calibration_seed
        self._bounds_pct = dict(zip(BOUNDED, (throughput_pct, median_tpot_pct, p99_ttft_pct), strict=True))

    def run(self, config: DictConfig, folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
        """Does it all below `folder`, where points of the calibration that are there already are kept.

        Args:
            config: of `kvtwin validate`, with all that `kvtwin calibrate` needs.
            folder: of the validation.
            facts: what the summaries of the runs say first.

        Returns:
            What `validation.json` is to say: `sim.validation.compare` for the repetition of median throughput, and of
            all of them `repetitions` (folder, decisions, figures), `spread` (of each bounded figure), and `decisions`.

        Raises:
            UserError: as a calibration, a simulation or a replay.
        """
        if self._calibration_seed == whole_number(config, "seed", 0):
            raise UserError(f"loop.calibration_seed is the run's seed, {config.seed}; choose another.")
        config = config.copy()
        config.engine.leap = False  # decisions are compared step by step
        _calibrate(config, folder / CALIBRATION, self._calibration_seed)
        config.timing.path = str(folder / CALIBRATION / TIMING)
        foreseen = _simulate(config, folder / PREDICTED, facts)
        predicted = read_served(folder / PREDICTED)
        repetitions, comparisons = [], []
        with counting("replays", "replaying") as progress:
            for number in range(1, self._repetitions + 1):
                measured = folder / f"measured_{number}"
                repetitions.append(_replay(config, measured, facts, foreseen))
                comparisons.append(compare(predicted, read_served(measured)))
                progress(number, self._repetitions)
        for repetition, comparison in zip(repetitions, comparisons, strict=True):
            repetition["figures"] = {name: pick(comparison) for name, pick in BOUNDED.items()}
        by_throughput = sorted(
            range(self._repetitions), key=lambda at: repetitions[at]["figures"]["output_throughput"]["measured"]
        )
        return comparisons[by_throughput[(self._repetitions - 1) // 2]] | {
            "repetitions": repetitions,
            "spread": {
                name: _spread([repetition["figures"][name] for repetition in repetitions], bound)
                for name, bound in self._bounds_pct.items()
            },
            "decisions": {
                kind: all(repetition["decisions"][kind]["equal"] for repetition in repetitions)
                for kind in repetitions[0]["decisions"]
            },
        }


def _calibrate(config: DictConfig, folder: Path, seed: int) -> None:
    config = config.copy()
    config.seed = seed
    with counting("points", "choosing steps to calibrate with") as progress:
        calibrate(config, folder, real_engine(config, "validate"), progress)


def _simulate(config: DictConfig, folder: Path, facts: dict[str, Any]) -> Decisions:
    decisions = Decisions()
    simulate(config, folder, facts, timer=WatchedTimer(assemble(config).timer, decisions))
    return decisions


def _replay(config: DictConfig, folder: Path, facts: dict[str, Any], foreseen: Decisions) -> dict[str, Any]:
    """One replay, and how its decisions compare."""
    taken = Decisions()
    summary = simulate(config, folder, facts, real_engine(config, "validate", shown=taken.add)(folder))
    again = config.copy()
    again.timing = {"_target_": "sim.timing.recorded.Recorded", "run": str(folder)}
    with TemporaryDirectory() as scratch:
        repeated = _simulate(again, Path(scratch), facts)
    return {
        "folder": str(folder),
        "hardware": summary["hardware"],
        "clock": summary["clock"],
        "preemptions": summary["preemptions"],
        "prefix_hit_tokens": summary["prefix_hit_tokens"],
        "digest": taken.digest,
        "decisions": {"predicted": _against(foreseen, taken), "with_measured_times": _against(repeated, taken)},
    }


def _against(ours: Decisions, theirs: Decisions) -> dict[str, Any]:
    difference = ours.first_difference(theirs)
    return {
        "equal": difference is None,
        "first_difference": difference,
        "steps": {"predicted": len(ours.digests), "measured": len(theirs.digests)},
    }


def _spread(figures: list[Figure], bound_pct: float) -> dict[str, Any]:
    """Of one figure over the repetitions; the prediction is the same in all."""
    measured = [figure["measured"] for figure in figures]
    errors = [figure["error_pct"] for figure in figures]
    middle = median(measured)
    error_pct = 100 * (figures[0]["predicted"] / middle - 1)
    return {
        "predicted": figures[0]["predicted"],
        "measured": {"min": min(measured), "median": middle, "max": max(measured)},
        "range_pct": 100 * (max(measured) - min(measured)) / middle,
        "error_pct": {"min": min(errors), "of_median": error_pct, "max": max(errors)},
        "bound_pct": bound_pct,
        "within": abs(error_pct) <= bound_pct,
    }
