"""How many outputs a client asks for, and how they come about: `workload.sampling=…`.

Without either of these a request has one output. Each of several outputs has the request's `output_tokens` tokens.
Which beams survive a step is the simulator's model (`sim/scheduler/beams.py`); the client only sets its knobs.
"""

from __future__ import annotations

from dataclasses import dataclass

from workloads.errors import UserError


@dataclass(frozen=True, slots=True)
class ParallelSampling:
    """Outputs drawn independently of one another: `n` of the OpenAI API and of vLLM's `SamplingParams`.

    Args:
        n: outputs; at least 1.

    Raises:
        UserError: `n` is below 1.
    """

    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise UserError(f"workload.sampling.n is {self.n}; expected a whole number of at least 1.")

    @property
    def num_outputs(self) -> int:
        """`n`."""
        return self.n


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """The likeliest `width` outputs, chosen anew in every step among the continuations of all beams.

    Args:
        width: beams, all of which are returned; at least 1.
        concentration: of the Dirichlet distribution that a beam's continuations get their probabilities from, summed
            over them; above 0. Small: each beam has one likely continuation, and all beams survive. Large: all are as
            likely, and the survivors descend from few.
        seed: of the choice; at least 0. None is refused: it marks a knob that a run still has to fill in.

    Raises:
        UserError: a number out of range.
    """

    width: int
    concentration: float
    seed: int | None

    def __post_init__(self) -> None:
        if self.width < 1:
            raise UserError(f"workload.sampling.width is {self.width}; expected a whole number of at least 1.")
        if not 0 < self.concentration < float("inf"):
            raise UserError(
                f"workload.sampling.concentration is {self.concentration}; expected a finite number above 0."
            )
        if self.seed is None or self.seed < 0:
            shown = "null" if self.seed is None else self.seed
            raise UserError(f"workload.sampling.seed is {shown}; expected a whole number of at least 0.")

    @property
    def num_outputs(self) -> int:
        """`width`."""
        return self.width


Sampling = ParallelSampling | BeamSearch
