"""How the products of queries and keys become weights: the options that models ask of attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Scoring:
    """Options of one layer's attention.

    Args:
        scale: what the products are multiplied with; above 0.
        window: positions a query sees, itself included; 0 is all before it (Mistral, Gemma).
        softcap: scores become softcap × tanh(score / softcap) (Gemma 2); 0 is off.
        sinks: [query heads], a logit per head that joins the softmax's denominator only (gpt-oss); None is off.
        k_scale, v_scale: what the stored K and V are multiplied with (fp8 pools).

    Raises:
        ValueError: a figure out of range.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.scale * self.k_scale <= 0:
            raise ValueError(f"scale is {self.scale} and k_scale {self.k_scale}; expected a product above 0")
        if self.window < 0 or self.softcap < 0:
            raise ValueError(f"window is {self.window} and softcap {self.softcap}; expected 0 (off) or more")
