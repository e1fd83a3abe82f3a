"""Decode steps as graphs: padding, one capture for each shape, and what becomes of a model that refuses.

A capture stands in for a CUDA graph here: it keeps the tensors that it was made on, and computes later what stands in
them then. Of the host's side of a batch it knows nothing but what it saw at first, as a graph does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the engine needs PyTorch")
pytest.importorskip("transformers", reason="the engine runs Hugging Face models")

from served import VOCABULARY, assert_greedy, paged_model, serve  # noqa: E402

from gpu.batch import Batch, BatchBuilder, BlockTables, SequenceWork  # noqa: E402
from gpu.executor import Eager  # noqa: E402
from gpu.graphs import Compute, GraphedDecodes  # noqa: E402
from gpu.pool import KVPool  # noqa: E402
from sim.memory.paged import PagedMemory  # noqa: E402
from sim.scheduler.continuous import ContinuousBatching  # noqa: E402
from sim.scheduler.queues import Fcfs  # noqa: E402
from workloads.request import Request  # noqa: E402

MAX_SEQS, BLOCK, MAX_BLOCKS = 21, 4, 9


class Recorded:
    """What a graph would do: the computation of `batch`, as its tensors are at the time."""

    made: list[tuple[int, int]]  # (rows, table entries) of each that was made

    def __init__(self, compute: Compute, batch: Batch, memory: Any) -> None:
        self.made.append((batch.num_decodes, batch.block_tables.shape[1]))
        compute(batch)  # the warm-up, which writes into the pool
        self._compute, self._batch = compute, batch
        self.replays = 0

    def replay(self) -> Any:
        self.replays += 1
        contexts = self._batch.context_lens.numpy().astype(np.int64)
        own = contexts[contexts > 0]  # torch's attention goes by the host's copies, which the kernels do not look at
        now = replace(self._batch, query_lens=np.ones(len(own), np.int64), host_context_lens=own)
        logits = self._compute(now)
        assert torch.isfinite(logits[: len(own)]).all()
        return logits


@pytest.fixture(autouse=True)
def made() -> list[tuple[int, int]]:
    Recorded.made = []
    return Recorded.made


def graphed(pool: KVPool, capture: Any = Recorded) -> GraphedDecodes:
    compute = partial(paged_model().forward, pool=pool)
    return GraphedDecodes(compute, MAX_SEQS, MAX_BLOCKS, capture)


class Decodes:
    """Sequences that decode, over a poisoned pool in which each has a context already."""

    def __init__(self, contexts: list[int]) -> None:
        self.tables = BlockTables(MAX_SEQS, MAX_BLOCKS)
        self.builder = BatchBuilder(self.tables, BLOCK, 64, "cpu")
        rng = np.random.default_rng(len(contexts))
        self.pool = KVPool(paged_model().spec, MAX_SEQS * MAX_BLOCKS, BLOCK)
        self.pool.blocks.fill_(torch.nan)
        self.free = ids = rng.permutation(MAX_SEQS * MAX_BLOCKS).tolist()
        self.contexts = list(contexts)
        self.blocks = [[ids.pop() for _ in range(-(-context // BLOCK))] for context in contexts]
        for table, context in zip(self.blocks, contexts, strict=True):
            # All slots before the one that the step writes; the last block's others stay poisoned.
            for position in range(context - 1):
                self.pool.blocks[:, :, table[position // BLOCK], :, position % BLOCK] = torch.from_numpy(
                    rng.normal(size=self.pool.blocks[:, :, 0, :, 0].shape)
                ).float()
        self.rows = [self.tables.take() for _ in contexts]
        self.ids = rng.integers(0, VOCABULARY, len(contexts))

    def works(self) -> list[SequenceWork]:
        return [
            SequenceWork(row, self.ids[i : i + 1], self.contexts[i], self.blocks[i]) for i, row in enumerate(self.rows)
        ]


def assert_same_as_without(forward: GraphedDecodes, decodes: Decodes) -> None:
    works = decodes.works()
    before = decodes.pool.blocks.clone()
    expected = paged_model().forward(decodes.builder.build(works), decodes.pool).clone()
    written = decodes.pool.blocks.clone()
    decodes.pool.blocks.copy_(before)
    batch = forward.prepare(decodes.builder, works)
    forward.get_ready(batch)
    logits = forward.logits(batch)[: len(works)]
    # Rows of a matrix product may be summed in another order when there are more of them: some units in the last place.
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(decodes.pool.blocks, written, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("num_sequences", range(1, MAX_SEQS + 1))
def test_logits_are_those_without_padding_for_every_number_of_sequences(num_sequences: int) -> None:
    contexts = np.random.default_rng(num_sequences).integers(1, MAX_BLOCKS * BLOCK + 1, num_sequences).tolist()
    decodes = Decodes(contexts)
    assert_same_as_without(graphed(decodes.pool), decodes)


@pytest.mark.parametrize("context", range(1, MAX_BLOCKS * BLOCK + 1))
def test_logits_are_those_without_padding_for_every_context(context: int) -> None:
    decodes = Decodes([context, 1])
    assert_same_as_without(graphed(decodes.pool), decodes)


def test_a_shape_is_captured_once_and_then_computes_other_batches(made: list[tuple[int, int]]) -> None:
    decodes = Decodes([3, 9, 14])
    forward = graphed(decodes.pool)
    for _ in range(3):
        assert_same_as_without(forward, decodes)
        # The sequences go on and change places: what stands in the tensors changes, their shapes do not.
        for i, context in enumerate(decodes.contexts):
            decodes.contexts[i] = context + 1
            if context % BLOCK == 0:
                decodes.blocks[i].append(decodes.free.pop())
        decodes.ids = (decodes.ids + 5) % VOCABULARY
        decodes.rows, decodes.contexts, decodes.blocks = (
            [*values[1:], values[0]] for values in (decodes.rows, decodes.contexts, decodes.blocks)
        )
    assert made == [(4, 4)]


def test_only_the_first_batch_of_a_shape_has_anything_to_get_ready() -> None:
    decodes = Decodes([3, 9, 14])
    forward = graphed(decodes.pool)
    works = decodes.works()
    assert forward.get_ready(forward.prepare(decodes.builder, works))
    assert not forward.get_ready(forward.prepare(decodes.builder, works))
    assert forward.get_ready(forward.prepare(decodes.builder, works[:1]))  # one row instead of four
    prefill = [works[0]._replace(token_ids=np.array([1, 2]))]
    assert not forward.get_ready(forward.prepare(decodes.builder, prefill))


def test_steps_with_a_prefill_are_not_padded(made: list[tuple[int, int]]) -> None:
    decodes = Decodes([3, 9, 14])
    forward = graphed(decodes.pool)
    works = decodes.works()
    works[1] = works[1]._replace(token_ids=np.array([5, 6]))
    batch = forward.prepare(decodes.builder, works)
    assert batch.token_ids.numel() == 4
    forward.get_ready(batch)
    assert forward.logits(batch).shape == (3, VOCABULARY)
    assert made == []


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 4096), st.data())
def test_any_step_has_a_shape_with_few_rows_of_padding(max_seqs: int, max_blocks: int, data: st.DataObject) -> None:
    num_sequences = data.draw(st.integers(1, max_seqs))
    blocks = data.draw(st.integers(1, max_blocks))

    class Shapes:
        """A builder that only looks at the shape."""

        block_size = 1

        def build(self, works: list[SequenceWork], shape: Any) -> Any:
            return shape

    forward = GraphedDecodes(lambda batch: batch, max_seqs, max_blocks, Recorded)  # type: ignore[arg-type, return-value]
    works = [SequenceWork(i, np.zeros(1, np.int64), blocks, [0]) for i in range(num_sequences)]
    builder: Any = Shapes()
    shape: Any = forward.prepare(builder, works)
    assert 0 <= shape.num_sequences - num_sequences <= 7
    assert shape.num_sequences <= max_seqs
    assert blocks <= shape.table_width < max(8, 2 * blocks + 4)
    assert shape.table_width % 4 == 0
    assert shape.table_width < max_blocks + 4


def test_a_model_that_cannot_be_captured_goes_on_as_it_is(made: list[tuple[int, int]]) -> None:
    class Refusing(Recorded):
        def __init__(self, compute: Compute, batch: Batch, memory: Any) -> None:
            super().__init__(compute, batch, memory)
            raise RuntimeError("operation not permitted when stream is capturing\nand a second line")

    decodes = Decodes([3, 9, 14])
    forward = graphed(decodes.pool, Refusing)
    assert forward.refused is None
    assert_same_as_without(forward, decodes)
    assert forward.refused == "operation not permitted when stream is capturing"
    assert_same_as_without(forward, decodes)
    assert forward.prepare(decodes.builder, decodes.works()).token_ids.numel() == 3  # no padding any more
    assert len(made) == 1  # and no further attempt


def test_an_error_of_the_model_itself_is_not_hidden() -> None:
    def broken(batch: Batch) -> Any:
        raise RuntimeError("the model is broken")

    decodes = Decodes([3])
    forward = GraphedDecodes(broken, MAX_SEQS, MAX_BLOCKS, Recorded)
    batch = forward.prepare(decodes.builder, decodes.works())
    forward.get_ready(batch)
    with pytest.raises(RuntimeError, match="the model is broken"):
        forward.logits(batch)


def test_a_served_workload_says_the_same_with_graphs(made: list[tuple[int, int]]) -> None:
    requests = [Request(i, float(i), prompt, 9) for i, prompt in enumerate([13, 5, 19, 8])]

    def run(with_graphs: bool) -> dict[int, list[list[int]]]:
        memory = PagedMemory(14, 4)
        scheduler = ContinuousBatching(memory, 48, Fcfs(), max_num_batched_tokens=16)

        def forward(pool: KVPool) -> Any:
            if not with_graphs:
                return Eager(paged_model(), pool)
            return GraphedDecodes(partial(paged_model().forward, pool=pool), scheduler.max_num_seqs, 12, Recorded)

        served = serve(requests, memory, scheduler, make_forward=forward)
        assert served.seen["preemption"] > 0
        assert_greedy(served, requests)
        return dict(served.texts)

    assert run(True) == run(False)
    assert len(made) > 1
    assert len(set(made)) == len(made)
