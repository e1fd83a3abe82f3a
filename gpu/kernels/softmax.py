"""Softmax over keys that arrive tile by tile (Milakov and Gimelshein 2018, as in FlashAttention), in powers of two.

`top` is the largest exponent so far and `total` the sum of 2^(exponent - top). `top` begins at a finite number below
any real exponent instead of -inf, so that a row that has seen no key yet never computes inf - inf.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOWEST: tl.constexpr = tl.constexpr(-1.0e30)


@triton.jit
def begin_softmax(sinks: tl.tensor, head: tl.tensor, counts: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """(top, total), each [ROWS], before any key.

    A sink is a logit per query head that joins the denominator with a value of zero (gpt-oss): the softmax begins as if
    it had been seen, in the rows where it `counts`: where a sequence is split, only those of the first part.
    """
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=counts, other=-float("inf")).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
        total = tl.exp2(sink - top)
    return top, total


@triton.jit
def cap_scores(products: tl.tensor, scale: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """(scores, unit) of the products of queries and keys: the exponent of 2 in the softmax is score × unit.

    The unit is left to the softmax, where the multiplication costs nothing beside the subtraction of `top`.
    `scale` is positive, so the largest score has the largest exponent.
    """
    if SOFTCAP > 0:
        # tanh x = 1 - 2 / (e^2x + 1), which has the right limits where e^2x overflows or vanishes.
        scores = 1 - 2 / (tl.exp2(products * (scale * (2 * LOG2_E / SOFTCAP))) + 1)
        unit = SOFTCAP * LOG2_E
    else:
        scores = products
        unit = scale * LOG2_E
    return scores, unit


@triton.jit
def add_keys(scores: tl.tensor, unit: tl.tensor, top: tl.tensor, total: tl.tensor) -> tl.tensor:
    """(weights, shrink, top, total) after one more tile of scores, [ROWS, TILE]; hidden keys have -inf.

    What was summed under the old `top` is to be multiplied by `shrink`, [ROWS].
    """
    new_top = tl.maximum(top, tl.max(scores, 1) * unit)
    weights = tl.exp2(scores * unit - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    return weights, shrink, new_top, total * shrink + tl.sum(weights, 1)
