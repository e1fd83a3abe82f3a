"""A timer whose answers can be written down beforehand: for closed forms and hand-computed cases."""

from __future__ import annotations

from sim.plan import StepWork, WorkTimer
from workloads.errors import UserError


class Constant(WorkTimer):
    """A step takes `step_seconds`, and `seconds_per_token` more for each token it computes.

    Args:
        step_seconds: seconds of any step; 0 or more.
        seconds_per_token: seconds for each token, prefill and decode alike; 0 or more.

    Raises:
        UserError: a negative time, or both zero: time has to pass.
    """

    def __init__(self, step_seconds: float, seconds_per_token: float = 0.0) -> None:
        for key, value in (("step_seconds", step_seconds), ("seconds_per_token", seconds_per_token)):
            if value < 0:
                raise UserError(f"timing.{key} is {value}; expected a number of seconds, 0 or more.")
        if step_seconds == 0 and seconds_per_token == 0:
            raise UserError("timing.step_seconds and timing.seconds_per_token are both 0; set one above 0.")
        self.step_seconds = step_seconds
        self.seconds_per_token = seconds_per_token

    def seconds(self, work: StepWork) -> float:
        """Duration of one step in seconds."""
        return self.step_seconds + self.seconds_per_token * work.num_tokens
