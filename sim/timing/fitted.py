"""The time of a step from a small physical model fitted to measured steps (`step_model.py`).

A file that says which model on which device was measured (`kvtwin calibrate`) is taken for these only.
"""

from __future__ import annotations

import re
from pathlib import Path

from sim.hardware import Deployment, Hardware
from sim.kv_layout import ModelSpec
from sim.plan import StepWork, WorkTimer
from sim.timing.step_model import PARTS, StepFit, read_fit, shape_of
from workloads.errors import UserError


class Fitted(WorkTimer):
    """Prices steps by fitted coefficients; copies of shared blocks are free.

    Args:
        path: the JSON file of the fit.
        model: whose steps are priced; None if nobody is to look.
        hardware: what they run on; likewise.
        deployment: on how many GPUs; likewise.

    Raises:
        UserError: no such file, none of a fit, or one of another model or device.
    """

    def __init__(
        self,
        path: str,
        model: ModelSpec | None = None,
        hardware: Hardware | None = None,
        deployment: Deployment | None = None,
    ) -> None:
        fit = read_fit(Path(path).expanduser())
        if fit.model:
            _require_same(path, fit, model, hardware, deployment)
        self._constant = fit.coefficients["step"]
        self._parts = [
            (part, name, fit.coefficients[part], fit.largest.get(part, float("inf")))
            for part, (name, _) in PARTS.items()
            if name is not None
        ]
        self._beyond: dict[str, tuple[int, float]] = {}  # part -> the largest sum asked for, and the largest measured

    def seconds(self, work: StepWork) -> float:
        """Duration of one step in seconds."""
        seconds = self._constant
        for part, name, coefficient, largest in self._parts:
            amount: int = getattr(work, name)
            seconds += coefficient * amount
            if amount > largest and coefficient and amount > self._beyond.get(part, (0, 0.0))[0]:
                self._beyond[part] = amount, largest
        return seconds

    @property
    def notices(self) -> list[str]:
        """What had to be extrapolated so far, a sentence each."""
        return [
            f"{PARTS[part][0]} of a step: {asked:,} were asked for, the fit has seen {largest:,.0f}; continued linearly"
            for part, (asked, largest) in sorted(self._beyond.items())
        ]


def names_device(name: str, device: str) -> bool:
    """Whether a hardware's name means a device as its driver calls it: `a100-80gb` an `NVIDIA A100-SXM4-80GB`.

    Every word of the name is one of the device's; a memory size may be missing there, as in `NVIDIA H200`.
    """
    wanted, found = (set(re.findall(r"[a-z0-9]+", text.lower())) for text in (name, device))
    sizes = {word for word in wanted if re.fullmatch(r"\d+gb", word)}
    if not any(re.fullmatch(r"\d+gb", word) for word in found):
        wanted -= sizes
    return bool(wanted) and wanted <= found


def _require_same(
    path: str, fit: StepFit, model: ModelSpec | None, hardware: Hardware | None, deployment: Deployment | None
) -> None:
    remedy = "measure this one with kvtwin calibrate"
    if model is not None:
        shape = shape_of(model)
        for name, value in shape.items():
            if name != "name" and fit.model.get(name) != value:
                raise UserError(
                    f"{path} was measured with {fit.model.get('name')} ({name} {fit.model.get(name)}), but this run's "
                    f"{model.name} has {name} {value}; {remedy}, or choose that model."
                )
    if hardware is not None and not names_device(hardware.name, fit.device):
        raise UserError(
            f"{path} was measured on {fit.device}, but this run's hardware is {hardware.name}; {remedy}, or choose "
            "the hardware of the file."
        )
    if deployment is not None and deployment.num_gpus > 1:
        raise UserError(
            f"{path} was measured on one device, but this run has {deployment.num_gpus}; set tensor_parallel=1 "
            "pipeline_parallel=1."
        )
