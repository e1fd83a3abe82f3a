"""The simulator: memory policies, schedulers, timers and the engine that runs them. Never imports torch."""
