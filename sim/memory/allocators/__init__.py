"""How a contiguous policy finds a run of units in its pool, one file an algorithm."""
