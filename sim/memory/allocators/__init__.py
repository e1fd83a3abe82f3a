"""How a contiguous policy finds a run of blocks in its pool, one file an algorithm."""
