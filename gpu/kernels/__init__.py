"""Triton kernels on a paged KV pool, one file each, with a plain torch reference beside it.

The pool of one layer is a pair of tensors K and V of shape [num_blocks, num_kv_heads, block_size, head_dim]. Heads come
before slots, so that what one program reads of a block, its share of one KV head, is one run of memory. Strides are
free but for the last, which is 1: a layer is a view of one tensor that holds all of them.

What a kernel is launched with (tile, warps, stages, splits) is decided in `launch.py`, nowhere else.
"""
