"""What a step's time is taken to be a sum of, when it is fitted to measurements rather than computed.

Each part is a coefficient, at least 0, times a sum over the batch that `StepWork` knows; `PARTS` says which. The file
of a fit is JSON: coefficients with their units, how good the fit is, over what range it was made, and on what.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sim.files import write_json
from sim.kv_layout import ModelSpec
from workloads.errors import UserError

FORMAT = "kvtwin step fit 1"
# Part -> (field of StepWork that it multiplies, unit); None multiplies 1.
PARTS: dict[str, tuple[str | None, str]] = {
    "step": (None, "s"),
    "prefill_token": ("prefill_tokens", "s/token"),
    "prefill_pair": ("prefill_pairs", "s/query-key pair"),
    "sequence": ("num_sequences", "s/sequence"),
    "decode_context_token": ("decode_context", "s/KV token"),
    "decode_block": ("decode_blocks", "s/block"),
}
SHAPE = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "dtype",
)


@dataclass(frozen=True, slots=True)
class StepFit:
    """A fitted step model.

    Args:
        coefficients: of every part, in the units of `PARTS`.
        largest: part -> the largest sum in a step that was measured; a step beyond is extrapolated.
        quality: `r2` of the durations, `mean_error_pct` and `mean_abs_error_pct` over them, and `rows` fitted to.
        device: what was measured.
        versions: of the software.
        source: where the measurements are.
        model: shape of the model that was measured (`shape_of`); empty if it is not known: then any may use the fit.
    """

    coefficients: dict[str, float]
    largest: dict[str, float]
    quality: dict[str, float]
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    source: str = ""
    model: dict[str, Any] = field(default_factory=dict)


def shape_of(model: ModelSpec) -> dict[str, Any]:
    """What the work of a step depends on, and the name; two models of one shape take the same time."""
    shape = {name: getattr(model, name) for name in ("name", *SHAPE)}
    experts = model.experts
    return shape | {"experts": None if experts is None else [experts.num_experts, experts.experts_per_token]}


def write_fit(path: Path, fit: StepFit) -> None:
    """Writes the JSON file."""
    units = {part: unit for part, (_, unit) in PARTS.items()}
    write_json(path, {"format": FORMAT, "units": units, **asdict(fit)})


def read_fit(path: Path) -> StepFit:
    """The fit in a JSON file.

    Raises:
        UserError: no such file, another format, or a coefficient that is missing, negative or no number.
    """
    remedy = "make one with kvtwin calibrate or kvtwin fit"
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; timing.path takes the JSON file of a fit: {remedy}.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable as JSON ({error}); {remedy}.") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path} is no fit (its format is not {FORMAT!r}); {remedy}.")
    coefficients, largest = ({**_part(content, key)} for key in ("coefficients", "largest"))
    for part in PARTS:
        value = coefficients.get(part)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
            raise UserError(f"{path}: coefficients.{part} is {value!r}; expected a number, 0 or more; {remedy}.")
    if not any(coefficients[part] for part in PARTS):
        raise UserError(f"{path}: all coefficients are 0, but time has to pass; {remedy}.")
    return StepFit(
        {part: float(coefficients[part]) for part in PARTS},
        {part: float(value) for part, value in largest.items() if part in PARTS},
        _part(content, "quality"),
        str(content.get("device", "")),
        _part(content, "versions"),
        str(content.get("source", "")),
        _part(content, "model"),
    )


def _part(content: dict[str, Any], key: str) -> dict[str, Any]:
    part = content.get(key)
    return part if isinstance(part, dict) else {}
