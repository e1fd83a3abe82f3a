"""Goodput: requests per second that are served as well as promised, as `vllm bench serve --goodput` counts it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from workloads.errors import UserError


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """What a request may take at most, in milliseconds; None: as long as it likes.

    Args:
        ttft: time to first token.
        tpot: time per output token after the first; a request with one token has none, and so meets any.
        e2el: end-to-end latency.

    Raises:
        UserError: a limit that is not above 0.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            limit = getattr(self, field.name)
            if limit is not None and not limit > 0:
                raise UserError(
                    f"goodput.{field.name} is {limit}; expected milliseconds, above 0, or null for no limit."
                )

    @property
    def promises(self) -> bool:
        """Whether there is any limit."""
        return any(limit is not None for limit in (self.ttft, self.tpot, self.e2el))

    def met(self, ttft_s: float, tpot_s: float | None, e2el_s: float) -> bool:
        """Whether a request that took so many seconds is within all limits."""
        return (
            (self.ttft is None or 1e3 * ttft_s <= self.ttft)
            and (self.tpot is None or tpot_s is None or 1e3 * tpot_s <= self.tpot)
            and (self.e2el is None or 1e3 * e2el_s <= self.e2el)
        )


NO_LIMITS = ServiceLevel()
