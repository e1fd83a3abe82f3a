"""SGLang's guess of what share of its limit a running request will still generate (0.5, `NewTokenRatioTracker`).

It begins high, falls with every decode step in which memory lasts, and is set anew by each retraction.
"""

from __future__ import annotations

from workloads.errors import UserError


class NewTokenRatio:
    """The guess, between a floor and 1.

    Args:
        conservativeness: SGLang's `schedule_conservativeness`; multiplies where it begins and so where it ends.
        initial: where it begins at a conservativeness of 1; SGLANG_INIT_NEW_TOKEN_RATIO.
        floor_factor: share of the beginning to which it falls; SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR.
        decay_steps: decode steps from the beginning to the floor; SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS.

    Attributes:
        value: the guess now.

    Raises:
        UserError: a number out of range.
    """

    def __init__(
        self,
        conservativeness: float = 1.0,
        initial: float = 0.7,
        floor_factor: float = 0.14,
        decay_steps: int = 600,
    ) -> None:
        if not conservativeness >= 0:
            raise UserError(f"scheduler.schedule_conservativeness is {conservativeness}; expected at least 0.")
        for name, share in (("init_new_token_ratio", initial), ("min_new_token_ratio_factor", floor_factor)):
            if not 0 <= share <= 1:
                raise UserError(f"scheduler.{name} is {share}; expected a share, 0 to 1.")
        if decay_steps < 1:
            raise UserError(f"scheduler.new_token_ratio_decay_steps is {decay_steps}; expected at least 1 step.")
        self._initial = min(initial * conservativeness, 1.0)
        self._floor = self._initial * floor_factor
        self._decay = (self._initial - self._floor) / decay_steps
        self.value = self._initial

    def fall(self, steps: int) -> None:
        """Memory has lasted for so many decode steps."""
        for _ in range(steps):  # one by one: this is how it rounds
            if self.value == self._floor:
                return
            self.value = max(self.value - self._decay, self._floor)

    def reset(self) -> None:
        """Nothing is left to run."""
        self.value = self._initial

    def after_retraction(self, generated: int, num_running: int, allowed: int, ahead: int) -> None:
        """What those that still run have generated of what they may, in `ahead` steps.

        Args:
            generated: output tokens of all of them.
            num_running: how many they are.
            allowed: tokens that they may generate together.
            ahead: steps.
        """
        self.value = min(1.0, (generated + ahead * num_running) / (allowed + 1))
