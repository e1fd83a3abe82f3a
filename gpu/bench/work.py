"""What is launched for a case with our own kernels, and what must come out.

Every result is compared with plain torch in float64 before it is timed: of attention the last few queries of the first
and the last sequence, of what moves data all of it. A fast kernel that computes something else is no result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu.bench.cases import Case, Problem
from gpu.bench.tensors import Pool, Sequences
from gpu.bench.tuning import Launch
from gpu.kernels.block_copy import copy_blocks
from gpu.kernels.cache_write import write_kv
from gpu.kernels.decode import contiguous_decode, paged_decode
from gpu.kernels.launch import DecodeLaunch, PrefillLaunch
from gpu.kernels.prefill import paged_prefill
from gpu.kernels.reference import attend
from gpu.kernels.scoring import Scoring

CHECKED_QUERIES = 8  # of a sequence
TOLERANCE = 0.05  # of the norm: 16-bit weights and outputs round by 1 %, another computation differs by 100 %


@dataclass(frozen=True, slots=True)
class Work:
    """A launch, and how to see whether it did what it should.

    Args:
        launch: starts it on the current stream; always on the same tensors.
        difference: after a launch: by how much the result differs from the reference, as a share of its norm.
    """

    launch: Callable[[], object]
    difference: Callable[[], float]


def our_work(case: Case, sequences: Sequences, pool: Pool, launch: Launch | None) -> Work:
    """A case with our kernels.

    Args:
        case: what to launch.
        sequences: of the case's problem.
        pool: their K and V in the case's layout.
        launch: the launch configuration; None for kernels that have none.
    """
    if case.problem.kernel == "write":
        return _write(case.problem, sequences, pool)
    if case.problem.kernel == "copy":
        return _copy(pool)
    return attention_work(sequences, _attention(case, sequences, pool, launch))


def attention_work(sequences: Sequences, attention: Callable[[], Tensor]) -> Work:
    """Attention of the sequences by `attention`, which returns [queries, query heads, head_dim] in any such shape."""
    latest: list[Tensor] = []

    def run() -> None:
        latest[:] = [attention()]

    return Work(run, lambda: attention_difference(sequences, latest[0].reshape(sequences.queries.shape)))


def attention_difference(sequences: Sequences, out: Tensor) -> float:
    """By how much `out`, [queries, query heads, head_dim], differs from float64, as a share of the norm."""
    problem = sequences.problem
    per_sequence = problem.num_queries // problem.batch
    checked = min(per_sequence, CHECKED_QUERIES)
    got, expected = [], []
    for sequence in dict.fromkeys((0, problem.batch - 1)):
        rows = slice((sequence + 1) * per_sequence - checked, (sequence + 1) * per_sequence)
        k, v = (kv[sequence].transpose(0, 1) for kv in (sequences.keys, sequences.values))
        scoring = Scoring(scale_of(problem))
        expected.append(attend(sequences.queries[rows], k, v, scoring, torch.float64)[0])
        got.append(out[rows])
    return _difference(torch.cat(got), torch.cat(expected))


def scale_of(problem: Problem) -> float:
    """What products of queries and keys are multiplied with."""
    return float(problem.head_dim**-0.5)


def _attention(case: Case, sequences: Sequences, pool: Pool, launch: Launch | None) -> Callable[[], Tensor]:
    problem, q = case.problem, sequences.queries
    scale, out = scale_of(problem), torch.empty_like(q)
    if problem.kernel == "prefill":
        assert launch is None or isinstance(launch, PrefillLaunch)
        return lambda: paged_prefill(
            q,
            pool.keys,
            pool.values,
            pool.tables,
            sequences.cu_query_lens,
            sequences.context_lens,
            max_query_len=problem.context,
            scale=scale,
            out=out,
            launch=launch,
        )
    assert launch is None or isinstance(launch, DecodeLaunch)
    if case.layout == "contiguous":
        first_blocks = pool.tables[:, 0].contiguous()
        return lambda: contiguous_decode(
            q,
            pool.keys,
            pool.values,
            first_blocks,
            sequences.context_lens,
            scale=scale,
            max_context=problem.context,
            out=out,
            launch=launch,
        )
    return lambda: paged_decode(
        q,
        pool.keys,
        pool.values,
        pool.tables,
        sequences.context_lens,
        scale=scale,
        max_context=problem.context,
        out=out,
        launch=launch,
    )


def _write(problem: Problem, sequences: Sequences, pool: Pool) -> Work:
    """All tokens into the slots where the pool has them, in a pool that is empty."""
    dtype = getattr(torch, problem.dtype)
    new_k, new_v = (kv.to(dtype).transpose(1, 2).flatten(0, 1) for kv in (sequences.keys, sequences.values))
    position = torch.arange(problem.context, device=pool.tables.device)
    blocks = pool.tables[:, position // problem.block_size].long()
    slots = (blocks * problem.block_size + position % problem.block_size).flatten()
    keys, values = torch.zeros_like(pool.keys), torch.zeros_like(pool.values)

    def difference() -> float:
        return 0.0 if _same(keys, pool.keys) and _same(values, pool.values) else math.inf

    return Work(lambda: write_kv(new_k, new_v, keys, values, slots), difference)


def _copy(pool: Pool) -> Work:
    """All blocks into as many others, in another order."""
    count = pool.keys.shape[0]
    planes = pool.keys.new_zeros((2, 2 * count, *pool.keys.shape[1:]))
    planes[0, :count], planes[1, :count] = pool.keys, pool.values
    sources = pool.tables.flatten().long()
    pairs = torch.stack([sources, count + torch.arange(count, device=sources.device)], 1)

    def difference() -> float:
        expected = planes.view(torch.uint8)[:, sources]
        return 0.0 if torch.equal(planes.view(torch.uint8)[:, count:], expected) else math.inf

    return Work(lambda: copy_blocks(planes, pairs), difference)


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _difference(got: Tensor, expected: Tensor) -> float:
    """The norm of the difference as a share of that of `expected`; infinite if anything is not finite."""
    error = (got.double() - expected).norm() / expected.norm()
    return float(error) if error.isfinite() else math.inf
