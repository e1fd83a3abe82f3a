"""What a workload asks for: counts, rates, burstiness, lengths, prefix reuse, concurrency; and a figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from workloads.description import Description


def main(argv: list[str]) -> int:
    """`kvtwin describe [FILE]`: FILE is `workload.path`; other arguments are Hydra's."""
    if {"-m", "--multirun"} & set(argv):
        raise UserError("kvtwin describe takes one workload at a time; leave out -m and --multirun.")

    from sim.bare_argument import with_path
    from sim.config import run_command

    return run_command("describe", _describe, with_path(argv))


def _describe(config: DictConfig) -> None:
    from hydra.core.hydra_config import HydraConfig

    from sim.config import build, fill, typed, whole_number
    from sim.description_table import print_description
    from sim.files import write_json
    from sim.hardware import Deployment
    from sim.kv_layout import model_len
    from sim.progress import Progress
    from sim.run import seldom_collected, trace_facts, workload_of
    from workloads.description import describe

    hydra = HydraConfig.get().runtime
    folder = Path(hydra.output_dir)
    limit = model_len(build(config.model, "model"), fill(Deployment, config))
    block_size = whole_number(config, "block_size", 1)
    per_token_s: float = typed(config.seconds_per_output_token, float, "seconds_per_output_token")
    if not 0 < per_token_s < float("inf"):
        raise UserError(f"seconds_per_output_token is {per_token_s}; expected a finite number of seconds above 0.")
    draws: bool = typed(config.plots, bool, "plots")
    workload = workload_of(config, limit)
    with Progress(workload.num_requests, "of the workload") as progress, seldom_collected():
        description = describe(workload, block_size, per_token_s, progress.update)
    facts = trace_facts(workload)
    kept = description.num_requests
    rows = {"rows_read": kept + sum(facts["rows_dropped"].values()), "rows_kept": kept}
    name = str(config.workload.get("path") or hydra.choices["workload"])
    summary: dict[str, Any] = {"workload": name, **rows, **facts, **description.summary()}
    write_json(folder / "description.json", summary)
    figures = _draw(description, summary, folder) if draws else []
    print_description(summary)
    print(f"written to {folder}: description.json{f', {figures[0].name}' if figures else ''}")


def _draw(description: Description, summary: dict[str, Any], folder: Path) -> list[Path]:
    from sim.plots.description import description_figure
    from sim.plots.style import save, settings

    with settings():
        return save(description_figure(description, summary), folder, "description")
