"""The tensors of a step, against a plain loop over sequences and tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the engine needs PyTorch")

from gpu.batch import Batch, BatchBuilder, BlockTables, DecodeShape, SequenceWork  # noqa: E402


def work(row: int, ids: list[int], context_len: int, blocks: list[int]) -> SequenceWork:
    return SequenceWork(row, np.array(ids, np.int64), context_len, blocks)


def build(works: list[SequenceWork], block_size: int = 4, pad_to: DecodeShape | None = None) -> Batch:
    tables = BlockTables(8, 8)
    for _ in range(8):
        tables.take()
    return BatchBuilder(tables, block_size, 64, "cpu").build(works, pad_to)


def test_a_mixed_step() -> None:
    # Blocks of 4. A computes its tokens 6 and 7 of 7 (positions 5 and 6, in the second block, 9: slots 9 x 4 + 1 and
    # + 2); B decodes its 9th token (position 8, third block, 3: slot 12); C computes its whole prompt of 3 (block 7).
    batch = build(
        [
            work(0, [10, 11], 7, [2, 9]),
            work(1, [20], 9, [5, 6, 3]),
            work(2, [30, 31, 32], 3, [7]),
        ]
    )
    # The decode comes first.
    assert batch.token_ids.tolist() == [20, 10, 11, 30, 31, 32]
    assert batch.positions.tolist() == [8, 5, 6, 0, 1, 2]
    assert batch.slots.tolist() == [12, 37, 38, 28, 29, 30]
    assert batch.context_lens.tolist() == batch.host_context_lens.tolist() == [9, 7, 3]
    assert batch.query_lens.tolist() == [1, 2, 3]
    assert batch.num_decodes == 1
    assert batch.prefill_starts.tolist() == [0, 2, 5]
    assert batch.block_tables[0, :3].tolist() == [5, 6, 3]
    assert batch.block_tables[1, :2].tolist() == [2, 9]
    assert batch.block_tables[2, :1].tolist() == [7]
    assert (batch.max_query_len, batch.max_context_len) == (3, 9)
    # In the caller's order: A's last token is the third of all, B's the first, C's the sixth.
    assert batch.last_tokens.tolist() == [2, 0, 5]


def test_dtypes_are_what_models_and_kernels_take_and_rows_of_tables_start_at_16_bytes() -> None:
    batch = build([work(0, [1], 17, [1, 2, 3, 4, 5]), work(1, [1, 2, 3], 3, [6])])
    for tensor in (batch.token_ids, batch.positions, batch.slots, batch.last_tokens):
        assert tensor.dtype == torch.int64
    for tensor in (batch.context_lens, batch.block_tables, batch.prefill_starts):
        assert tensor.dtype == torch.int32
        assert tensor.data_ptr() % 16 == 0
    assert batch.block_tables.stride() == (8, 1)


def test_decodes_padded_to_a_shape_have_the_same_addresses_every_time() -> None:
    tables = BlockTables(8, 16)
    builder = BatchBuilder(tables, 4, 64, "cpu")
    rows = [tables.take() for _ in range(3)]
    shape = DecodeShape(4, 12)

    def addresses(batch: Batch) -> list[tuple[int, torch.Size]]:
        parts = (batch.token_ids, batch.positions, batch.slots, batch.last_tokens, batch.context_lens)
        return [(part.data_ptr(), part.shape) for part in (*parts, batch.block_tables)]

    first = addresses(builder.build([work(rows[0], [5], 1, [3]), work(rows[1], [6], 44, list(range(11)))], shape))
    builder.build([work(rows[2], list(range(20)), 20, [3, 4, 5, 6, 7])])
    batch = builder.build([work(rows[0], [8], 2, [3])], shape)
    assert addresses(batch) == first
    # Blocks of 4: position 1 of block 3 is slot 13. The three other rows are nobody's.
    assert batch.token_ids.tolist() == [8, 0, 0, 0]
    assert batch.positions.tolist() == [1, 0, 0, 0]
    assert batch.slots.tolist() == [13, -1, -1, -1]
    assert batch.context_lens.tolist() == [2, 0, 0, 0]
    assert batch.block_tables[1:].tolist() == [[0] * 12] * 3
    assert batch.num_decodes == 4
    assert batch.query_lens.tolist() == [1]
    assert batch.max_context_len == 48


@pytest.mark.parametrize(
    "works",
    [
        [],
        [work(0, [], 3, [1])],
        [work(0, [1, 2], 1, [1])],
        [work(0, [1], 5, [1])],  # one block of 4 has no room for 5
        [work(0, [0] * 4, 32, list(range(8))), *(work(i, [0] * 24, 24, list(range(6))) for i in range(1, 8))],
    ],
    ids=["nobody", "no tokens", "no context", "no room", "too many"],
)
def test_works_that_make_no_batch_are_refused(works: list[SequenceWork]) -> None:
    with pytest.raises(ValueError, match="sequence"):
        build(works)


@pytest.mark.parametrize(
    ("works", "shape"),
    [
        ([work(0, [1, 2], 2, [1])], DecodeShape(2, 4)),
        ([work(0, [1], 1, [1]), work(1, [1], 1, [2])], DecodeShape(1, 4)),
        ([work(0, [1], 17, [1, 2, 3, 4, 5])], DecodeShape(2, 4)),
    ],
    ids=["prefill", "too many", "too long"],
)
def test_what_does_not_fit_a_shape_is_refused(works: list[SequenceWork], shape: DecodeShape) -> None:
    with pytest.raises(ValueError, match="padding"):
        build(works, pad_to=shape)


def test_rows_run_out() -> None:
    tables = BlockTables(2, 1)
    row = tables.take()
    assert {row, tables.take()} == {0, 1}
    with pytest.raises(IndexError):
        tables.take()
    tables.release(row)
    assert tables.take() == row


@dataclass
class Running:
    """A sequence of the loop below."""

    row: int
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_tables_kept_from_step_to_step_say_what_the_lists_say(data: st.DataObject) -> None:
    """Sequences come, compute chunks, grow, copy the block they write, lose everything, and go."""
    block_size = data.draw(st.sampled_from([1, 3, 4]))
    tables = BlockTables(4, 24)
    builder = BatchBuilder(tables, block_size, 64, "cpu")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    running: list[Running] = []
    for _ in range(data.draw(st.integers(1, 12))):
        if len(running) < 4 and (not running or data.draw(st.booleans())):
            running.append(Running(tables.take()))
        works = []
        for sequence in running:
            start = len(sequence.tokens)
            ids = rng.integers(0, 1000, rng.choice([1, 1, int(rng.integers(1, 8))])).tolist()
            sequence.tokens += ids
            if start % block_size and rng.random() < 0.3:  # copy-on-write
                sequence.blocks[start // block_size] = int(rng.integers(0, 500))
            while len(sequence.blocks) * block_size < len(sequence.tokens):
                sequence.blocks.append(int(rng.integers(0, 500)))
            if rng.random() < 0.2:
                sequence.blocks.append(int(rng.integers(0, 500)))  # a block it does not need yet
            works.append(work(sequence.row, ids, len(sequence.tokens), sequence.blocks))
        check(builder.build(works), works, block_size)
        for sequence in list(running):
            if rng.random() < 0.2 or len(sequence.tokens) > 14:
                tables.release(sequence.row)
                running.remove(sequence)


def check(batch: Batch, works: list[SequenceWork], block_size: int) -> None:
    """The batch says of each sequence and token what `works` says, in whatever order."""
    ordered = [w for w in works if w.token_ids.size == 1] + [w for w in works if w.token_ids.size > 1]
    assert batch.num_decodes == sum(w.token_ids.size == 1 for w in works)
    token, starts = 0, {}
    for row, item in enumerate(ordered):
        starts[item.row] = token
        assert batch.context_lens[row] == item.context_len
        num_blocks = -(-item.context_len // block_size)
        assert batch.block_tables[row, :num_blocks].tolist() == list(item.blocks[:num_blocks])
        for i, token_id in enumerate(item.token_ids.tolist()):
            position = item.context_len - item.token_ids.size + i
            assert batch.token_ids[token] == token_id
            assert batch.positions[token] == position
            assert batch.slots[token] == item.blocks[position // block_size] * block_size + position % block_size
            token += 1
    assert batch.token_ids.numel() == token
    assert batch.last_tokens.tolist() == [starts[w.row] + w.token_ids.size - 1 for w in works]
    prefills = ordered[batch.num_decodes :]
    lengths = [w.token_ids.size for w in prefills]
    assert batch.prefill_starts.tolist() == [0, *np.cumsum(lengths).tolist()]
    assert batch.max_query_len == max(lengths, default=0)
