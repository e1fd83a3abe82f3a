"""Requests, and where they come from: trace readers and generators. Knows nothing of the simulator."""
