"""The tensors of one step: what a model and its attention need to know of the sequences that they compute.

Sequences that compute one token come first and are *decodes*, the others are *prefills*, as `sim.plan.StepWork` has it;
so the queries of all decodes are a slice, and so are those of all prefills. Rows of logits come in the caller's order.

Nothing here grows with the tokens that are already in the pool, and Python touches each sequence a few times at most:
block tables stay in a matrix from step to step, and only what has changed of them is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16  # bytes; kernels load vectors from addresses they know to be such multiples
_WIDTH_STEP = 4  # entries; a table's rows then start at such addresses too


class SequenceWork(NamedTuple):
    """What one sequence computes in a step.

    Args:
        row: its row in the `BlockTables`.
        token_ids: ids of the tokens it computes, in order; at least one.
        context_len: its tokens with KV in the pool after the step, those computed in it included.
        blocks: its block table, with room for that many; may have more.
    """

    row: int
    token_ids: NDArray[np.int64]
    context_len: int
    blocks: Sequence[int]


class BlockTables:
    """Block tables of the running sequences, a row each, kept from step to step.

    Of a table that is already here, a step may have appended blocks, and may have replaced the block that it writes
    first (copy-on-write); the rest is taken as unchanged. A sequence that has lost its blocks must give its row back.

    Args:
        num_rows: most sequences that run at a time.
        max_blocks: most blocks of a sequence.

    Attributes:
        ids: int32 [num_rows, max_blocks, rounded up]; what lies beyond a row's table is left over from others.
    """

    def __init__(self, num_rows: int, max_blocks: int) -> None:
        self.ids = np.zeros((num_rows, _rounded(max_blocks, _WIDTH_STEP)), np.int32)
        self._filled = np.zeros(num_rows, np.int64)
        self._free = list(reversed(range(num_rows)))

    def take(self) -> int:
        """A row for a sequence that starts or resumes. Raises IndexError if all are taken."""
        return self._free.pop()

    def release(self, row: int) -> None:
        """Takes the row back."""
        self._filled[row] = 0
        self._free.append(row)

    def update(self, rows: NDArray[np.int64], tables: list[Sequence[int]], first_written: NDArray[np.int64]) -> None:
        """Brings rows up to date.

        Args:
            rows: [n], each once.
            tables: [n], the block tables as they are now.
            first_written: [n], which of its blocks each sequence writes first in the step.
        """
        lengths = np.fromiter(map(len, tables), np.int64, len(tables))
        filled = self._filled[rows]
        for i in np.flatnonzero(lengths > filled).tolist():
            self.ids[rows[i], filled[i] : lengths[i]] = tables[i][filled[i] :]
        self._filled[rows] = np.maximum(filled, lengths)
        self.ids[rows, first_written] = [
            table[block] for table, block in zip(tables, first_written.tolist(), strict=True)
        ]


class DecodeShape(NamedTuple):
    """A size that decode steps are padded to, so that all of them have the same tensors (CUDA graphs).

    Args:
        num_sequences: rows.
        table_width: entries of each block table; a multiple of 4.
    """

    num_sequences: int
    table_width: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. Tensors are on the device and valid until the next batch is built; T tokens, B sequences, W blocks.

    A padded batch has rows that belong to no sequence: they compute token 0 at position 0, write nowhere, and see no
    context. Their logits mean nothing.

    Attributes:
        token_ids: int64 [T], packed, sequence after sequence, decodes first.
        positions: int64 [T], from 0 in each sequence.
        slots: int64 [T], where each token's KV goes, block * block_size + offset; -1 is nowhere.
        last_tokens: int64 [B], index in T of each sequence's last token, which yields its logits; in caller's order.
        context_lens: int32 [B], tokens to attend to, the step's own included.
        block_tables: int32 [B, W]; entries beyond a sequence's context are arbitrary.
        prefill_starts: int32 [prefills + 1], where each prefill's queries start, counted from the first prefill's.
        num_decodes: sequences with one token, padding included; row i's query is token i.
        query_lens: host copy, int64 [B], of the tokens each sequence computes.
        host_context_lens: host copy of `context_lens`, int64 [B].
        max_query_len: most tokens of a prefill; 0 if there is none.
        max_context_len: most tokens of a context, or in a padded batch what its block tables have room for.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    last_tokens: Tensor
    context_lens: Tensor
    block_tables: Tensor
    prefill_starts: Tensor
    num_decodes: int
    query_lens: NDArray[np.int64]
    host_context_lens: NDArray[np.int64]
    max_query_len: int
    max_context_len: int


class BatchBuilder:
    """Makes batches in one buffer, which reaches the device in one copy.

    Where a tensor lies in the buffer depends on nothing but the numbers of tokens, sequences, prefills and table
    entries, so decode steps padded to one `DecodeShape` have the same addresses every time.

    Args:
        tables: the block tables that rows refer to.
        block_size: slots of a block.
        max_num_tokens: most tokens of a step.
        device: where the batches go.
    """

    def __init__(self, tables: BlockTables, block_size: int, max_num_tokens: int, device: torch.device | str) -> None:
        self.tables = tables
        self.block_size = block_size
        self.device = torch.device(device)
        num_rows, width = tables.ids.shape
        size = _Layout.of(max_num_tokens, num_rows, num_rows, width).size
        on_gpu = self.device.type == "cuda"
        self._staging = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        self._bytes = self._staging.numpy()
        self._buffer = torch.empty(size, dtype=torch.uint8, device=self.device) if on_gpu else self._staging
        make_event: Any = torch.cuda.Event  # untyped in torch
        self._copied = make_event() if on_gpu else None

    def build(self, works: Sequence[SequenceWork], pad_to: DecodeShape | None = None) -> Batch:
        """The batch of a step; the one built before is void from now on.

        Args:
            works: what each sequence computes; a sequence at most once, at least one.
            pad_to: the size of the batch if it has decodes only.

        Raises:
            ValueError: a table without room for its context, a sequence without tokens, or a batch beyond its limits.
        """
        num_works = len(works)
        rows = np.fromiter((work.row for work in works), np.int64, num_works)
        query_lens = np.fromiter((work.token_ids.size for work in works), np.int64, num_works)
        context_lens = np.fromiter((work.context_len for work in works), np.int64, num_works)
        computed = context_lens - query_lens
        tables = [work.blocks for work in works]
        self._check(query_lens, context_lens, tables)
        self.tables.update(rows, tables, computed // self.block_size)

        is_prefill = query_lens > 1
        order = np.argsort(is_prefill, kind="stable")
        rows, query_lens, context_lens, computed = (x[order] for x in (rows, query_lens, context_lens, computed))
        num_prefills = int(is_prefill.sum())
        num_decodes = num_works - num_prefills
        starts = np.zeros(num_works + 1, np.int64)
        np.cumsum(query_lens, out=starts[1:])
        num_tokens, num_rows = int(starts[-1]), num_works
        max_context_len = int(context_lens.max())
        width = _rounded(-(-max_context_len // self.block_size), _WIDTH_STEP)
        if pad_to is not None:
            if num_prefills or num_works > pad_to.num_sequences or width > pad_to.table_width:
                raise ValueError(
                    f"{num_works} sequences, {num_prefills} prefills, tables of {width}: no padding to {pad_to}"
                )
            num_tokens = num_rows = num_decodes = pad_to.num_sequences
            width = pad_to.table_width
            max_context_len = width * self.block_size
        layout = _Layout.of(num_tokens, num_rows, num_prefills, width)
        if layout.size > self._bytes.size:
            raise ValueError(f"a batch of {num_tokens} tokens and {num_rows} sequences is beyond the builder's limits")

        if self._copied is not None:
            self._copied.synchronize()  # the previous copy may still be reading the staging buffer
        host = layout.arrays(self._bytes)
        first = slice(0, int(starts[-1]))
        np.concatenate([works[i].token_ids for i in order.tolist()], out=host.token_ids[first], casting="same_kind")
        positions = np.arange(first.stop) + np.repeat(computed - starts[:-1], query_lens)
        host.positions[first] = positions
        blocks, offsets = np.divmod(positions, self.block_size)
        host.slots[first] = self.tables.ids[np.repeat(rows, query_lens), blocks].astype(np.int64)
        host.slots[first] *= self.block_size
        host.slots[first] += offsets
        host.last_tokens[order] = starts[1:] - 1
        host.context_lens[:num_works] = context_lens
        np.take(self.tables.ids[:, :width], rows, axis=0, out=host.block_tables[:num_works], mode="clip")
        host.prefill_starts[:] = starts[num_works - num_prefills :] - starts[num_works - num_prefills]
        if pad_to is not None:
            padding = slice(num_works, num_rows)
            host.token_ids[padding] = host.positions[padding] = host.context_lens[padding] = 0
            host.slots[padding] = -1
            host.last_tokens[padding] = 0
            host.block_tables[padding] = 0
        if self._copied is not None:
            self._buffer[: layout.size].copy_(self._staging[: layout.size], non_blocking=True)
            self._copied.record()
        return Batch(
            *layout.tensors(self._buffer),
            num_decodes=num_decodes,
            query_lens=query_lens,
            host_context_lens=context_lens,
            max_query_len=int(query_lens[-num_prefills:].max()) if num_prefills else 0,
            max_context_len=max_context_len,
        )

    def _check(
        self, query_lens: NDArray[np.int64], context_lens: NDArray[np.int64], tables: list[Sequence[int]]
    ) -> None:
        room = np.fromiter(map(len, tables), np.int64, len(tables)) * self.block_size
        if not query_lens.size or query_lens.min() < 1 or (context_lens < query_lens).any():
            raise ValueError("every sequence of a batch computes at least one token, and has it in its context")
        if (context_lens > room).any():
            raise ValueError("a sequence's block table has no room for its context")


class _Parts(NamedTuple):
    """The tensors of a batch, or their arrays on the host, in the order in which they lie in the buffer."""

    token_ids: Any
    positions: Any
    slots: Any
    last_tokens: Any
    context_lens: Any
    block_tables: Any
    prefill_starts: Any


class _Layout(NamedTuple):
    """Where the parts of a batch lie.

    Args:
        shapes: of each part.
        starts: first byte of each.
        size: bytes in all.
    """

    shapes: _Parts
    starts: _Parts
    size: int

    @classmethod
    def of(cls, num_tokens: int, num_sequences: int, num_prefills: int, width: int) -> _Layout:
        tokens, sequences = (num_tokens,), (num_sequences,)
        shapes = _Parts(
            tokens, tokens, tokens, sequences, sequences, (num_sequences, width), (num_prefills + 1,)
        )  # fmt: skip
        starts, end = [], 0
        for shape, dtype in zip(shapes, _DTYPES, strict=True):
            starts.append(end)
            end += _rounded(prod(shape) * dtype.itemsize, _ALIGNMENT)
        return cls(shapes, _Parts(*starts), end)

    def arrays(self, buffer: NDArray[np.uint8]) -> _Parts:
        return _Parts(
            *(
                np.frombuffer(buffer.data, _NUMPY_DTYPES[dtype], prod(shape), start).reshape(shape)
                for shape, start, dtype in zip(self.shapes, self.starts, _DTYPES, strict=True)
            )
        )

    def tensors(self, buffer: Tensor) -> _Parts:
        return _Parts(
            *(
                buffer[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
                for shape, start, dtype in zip(self.shapes, self.starts, _DTYPES, strict=True)
            )
        )


_DTYPES = _Parts(torch.int64, torch.int64, torch.int64, torch.int64, torch.int32, torch.int32, torch.int32)
_NUMPY_DTYPES = {torch.int64: np.int64, torch.int32: np.int32}


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
