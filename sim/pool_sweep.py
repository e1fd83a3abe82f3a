"""Preemptions counted on a real GPU over a range of pool sizes, each run simulated and compared.

A sweep is a folder with a `runs.csv`, one run a line: so many identical requests at once against a pool of so many
blocks. The public one is of vLLM 0.5.0 (the v0 engine), recorded for arXiv 2508.08343; its settings are in
`recorded_settings.py`. All requests wait from the start, so counts depend on lengths and the pool alone, not on how
long a step takes; times are not compared.

Two columns are not what their names say; how they were found out, and what speaks for it, is in `docs/accuracy.md`.

- `output_tokens` counts the generated text, tokenized once more, as that benchmark did; that may be a token more than
  the engine had generated. How many it streamed follows from two means of one row: time per output token divides the
  same seconds by the one count, inter-token latency by the other.
- `tokens_recomputed` counts every token of a victim, its last one included, whose KV had not been computed yet.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import DictConfig, open_dict

from sim.recorded_settings import RUNS
from sim.validation import Figure, figure
from workloads.errors import UserError

COUNTS = ("preemptions", "tokens_recomputed")
INTEGERS = (
    "num_requests",
    "prompt_tokens",
    "output_tokens",
    "num_gpu_blocks",
    "preemptions",
    "tokens_recomputed",
    "max_running_sampled",
)
SECONDS = ("mean_tpot_ms", "mean_itl_ms")


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One line of `runs.csv`; the names are its own.

    Args:
        max_running_sampled: most requests seen running; a lower bound, for it was looked up about once a second.
        mean_tpot_ms: seconds from first to last token over `output_tokens` - 1, in milliseconds.
        mean_itl_ms: the same seconds over the tokens that were streamed after the first.
    """

    cell: str
    model: str
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    num_gpu_blocks: int
    preemptions: int
    tokens_recomputed: int
    max_running_sampled: int
    mean_tpot_ms: float
    mean_itl_ms: float

    @property
    def generated_tokens(self) -> int:
        """Tokens that the engine generated for each request."""
        return 1 + round((self.output_tokens - 1) * self.mean_tpot_ms / self.mean_itl_ms)

    @property
    def workload(self) -> tuple[str, int, int]:
        """What runs of different pools have in common."""
        return self.model, self.prompt_tokens, self.output_tokens


def read_runs(folder: Path) -> list[MeasuredRun]:
    """The runs, in the order of the file.

    Raises:
        UserError: a column is missing, a figure is none or below 1, or there are no runs.
    """
    path = folder / RUNS
    with path.open(newline="", encoding="utf-8-sig") as stream:
        reader = csv.DictReader(stream)
        missing = {"cell", "model", *INTEGERS, *SECONDS} - set(reader.fieldnames or ())
        if missing:
            raise UserError(f"{path} has no column {min(missing)}; a pool sweep has one run a line, with its counts.")
        runs = [_run(row, f"{path}, line {reader.line_num}") for row in reader]
    if not runs:
        raise UserError(f"{path} has no runs; there is nothing to compare.")
    return runs


def simulate_runs(config: DictConfig, runs: Iterable[MeasuredRun]) -> Iterator[dict[str, Any]]:
    """Simulates each run under the options of `config`, and yields the summary of each.

    Args:
        config: a composed `conf/sim.yaml` or one that extends it, of a synthetic workload.
        runs: lengths, number of requests and blocks are theirs.
    """
    from sim.run import simulate

    for run in runs:
        of_run = config.copy()
        with open_dict(of_run), TemporaryDirectory() as folder:
            of_run.memory.num_blocks = run.num_gpu_blocks
            of_run.workload.num_requests = run.num_requests
            of_run.workload.prompt_lengths.tokens = run.prompt_tokens
            of_run.workload.output_lengths.tokens = run.generated_tokens
            yield simulate(of_run, Path(folder), {})


def compare_runs(folder: Path, runs: list[MeasuredRun], summaries: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Everything that `validation.json` says of a sweep; errors in percent, as `sim.validation.figure` has them."""
    compared = [_compared(run, summary) for run, summary in zip(runs, summaries, strict=True)]
    return {
        "measured": str(folder),
        "runs": compared,
        "mean_abs_error_pct": _over(compared, lambda errors: sum(errors) / len(errors)),
        "max_abs_error_pct": _over(compared, max),
    }


def workloads_of(compared: list[dict[str, Any]]) -> dict[tuple[str, int, int], list[dict[str, Any]]]:
    """The compared runs by model, prompt and generated tokens, each from the smallest pool to the largest."""
    groups: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for run in sorted(compared, key=lambda run: (run["model"], run["prompt_tokens"], run["num_gpu_blocks"])):
        groups.setdefault((run["model"], run["prompt_tokens"], run["generated_tokens"]), []).append(run)
    return groups


def abs_errors(compared: Iterable[dict[str, Any]], count: str) -> list[float]:
    """Absolute errors of a count in percent, of the runs in which there was something to count."""
    return [abs(error) for run in compared if (error := run[count]["error_pct"]) is not None]


def _run(row: dict[str, str], where: str) -> MeasuredRun:
    try:
        figures: dict[str, Any] = {name: int(row[name]) for name in INTEGERS}
        figures |= {name: float(row[name]) for name in SECONDS}
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: {error}; expected numbers in {', '.join((*INTEGERS, *SECONDS))}.") from None
    for name, value in figures.items():
        least = 0 if name in (*COUNTS, "max_running_sampled") else 1e-9
        if not value >= least:
            raise UserError(f"{where}: {name} is {value}; expected a number {'above' if least else 'of at least'} 0.")
    return MeasuredRun(cell=row["cell"], model=row["model"], **figures)


def _compared(run: MeasuredRun, summary: dict[str, Any]) -> dict[str, Any]:
    victims: int = summary["preemptions"]
    predicted = {"preemptions": victims, "tokens_recomputed": summary["tokens_recomputed"] + victims}
    counts: dict[str, Figure] = {name: figure(predicted[name], getattr(run, name)) for name in COUNTS}
    return {
        "cell": run.cell,
        "model": run.model,
        "num_requests": run.num_requests,
        "prompt_tokens": run.prompt_tokens,
        "output_tokens": run.output_tokens,
        "generated_tokens": run.generated_tokens,
        "num_gpu_blocks": run.num_gpu_blocks,
        **counts,
        "max_running": {"predicted": summary["max_running"], "measured_at_least": run.max_running_sampled},
        "completed": summary["completed"],
    }


def _over(compared: list[dict[str, Any]], statistic: Callable[[list[float]], float]) -> dict[str, float | None]:
    errors = {name: abs_errors(compared, name) for name in COUNTS}
    return {name: statistic(values) if values else None for name, values in errors.items()}
