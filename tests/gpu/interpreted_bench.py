"""What the benchmark launches, under Triton's interpreter on CPU tensors: all of it is right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpu.bench.cases import Case, Problem
from gpu.bench.tensors import Sequences
from gpu.bench.tuning import table_launch
from gpu.bench.work import TOLERANCE, our_work
from gpu.kernels.launch import INTERPRETED

SMALL = Problem("decode", 2, 40, num_kv_heads=2, group=2, head_dim=64, block_size=16, precision="float32")


@pytest.mark.parametrize(
    ("problem", "layout"),
    [
        (SMALL, "paged"),
        (replace(SMALL, group=1, block_size=24), "paged"),
        (SMALL.contiguous, "contiguous"),
        (replace(SMALL, precision="bfloat16"), "paged"),
        (replace(SMALL, precision="fp8"), "paged"),
        (replace(SMALL, kernel="prefill"), "paged"),
        (replace(SMALL, kernel="prefill").contiguous, "contiguous"),
        (replace(SMALL, kernel="write"), "paged"),
        (replace(SMALL, kernel="write", precision="fp8"), "paged"),
        (replace(SMALL, kernel="copy", precision="float16"), "paged"),
    ],
)
def test_what_is_launched_computes_what_is_expected(problem: Problem, layout: str) -> None:
    sequences = Sequences(problem, torch.device("cpu"))
    pool = sequences.in_order if layout == "contiguous" else sequences.pool(problem.block_size)
    case = Case(problem, "contiguous" if layout == "contiguous" else "paged")
    work = our_work(case, sequences, pool, table_launch(problem, INTERPRETED))
    work.launch()
    assert work.difference() <= TOLERANCE / 2


def test_a_kernel_that_reads_the_wrong_block_is_found_out() -> None:
    sequences = Sequences(SMALL, torch.device("cpu"))
    pool = sequences.pool(16)
    pool.tables[0, 1], pool.tables[0, 2] = pool.tables[0, 2].clone(), pool.tables[1, 2].clone()
    work = our_work(Case(SMALL, "paged"), sequences, pool, None)
    work.launch()
    assert work.difference() > 2 * TOLERANCE


@pytest.mark.parametrize("kernel", ["write", "copy"])
def test_what_was_not_moved_is_found_out(kernel: str) -> None:
    problem = replace(SMALL, kernel="write" if kernel == "write" else "copy")
    sequences = Sequences(problem, torch.device("cpu"))
    work = our_work(Case(problem, "paged"), sequences, sequences.pool(16), None)
    assert work.difference() > TOLERANCE
    work.launch()
    assert work.difference() == 0
