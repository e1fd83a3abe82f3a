"""The simulator: memory policies, schedulers, timers and the engine that runs them. Never imports torch."""

from sim.compiled import prefer_compiled

prefer_compiled()
