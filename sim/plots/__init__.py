"""Figures of runs and sweeps, drawn from the result tables alone."""
