"""What `kvtwin fit` and `kvtwin calibrate` print of a fit: its coefficients, and how good it is."""

from __future__ import annotations

from sim.timing.step_model import PARTS, StepFit


def print_fit(fit: StepFit) -> None:
    """A line a coefficient, and one on the quality."""
    for part, coefficient in fit.coefficients.items():
        print(f"{part:<22}{coefficient:.4g} {PARTS[part][1]}")
    quality = fit.quality
    print(f"R² {quality['r2']:.4f}, mean error {quality['mean_abs_error_pct']:.2f} %, {quality['rows']:,.0f} rows")
