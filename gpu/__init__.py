"""The real engine: paged attention kernels, the pool they read, and what runs a model on both.

Needs the extra `kvtwin[gpu]`; nothing outside this package imports torch.
"""
