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
from operator import getitem
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
    A region may be longer than a sequence can get (a buddy's power of two); what is beyond a row is left out.

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

    def update(
        self,
        rows: NDArray[np.int64],
        tables: Sequence[Sequence[int]],
        lengths: NDArray[np.int64],
        first_written: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Brings rows up to date.

        Args:
            rows: [n], each once.
            tables: [n], the block tables as they are now.
            lengths: [n], of the tables.
            first_written: [n], which of its blocks each sequence writes first in the step.

        Returns:
            [n], the ids of those blocks.
        """
        filled = self._filled[rows]
        longer = lengths > filled
        if longer.any():
            for i in np.flatnonzero(longer).tolist():
                end = min(int(lengths[i]), self.ids.shape[1])
                self.ids[rows[i], filled[i] : end] = tables[i][filled[i] : end]
            self._filled[rows] = np.maximum(filled, lengths)
        written = np.array(list(map(getitem, tables, first_written.tolist())), np.int64)
        self.ids[rows, first_written] = written
        return written


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
        size = _Layout.of(_Size(max_num_tokens, num_rows, num_rows, width)).size
        on_gpu = self.device.type == "cuda"
        self._staging = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        self._bytes = self._staging.numpy()
        self._buffer = torch.empty(size, dtype=torch.uint8, device=self.device) if on_gpu else self._staging
        make_event: Any = torch.cuda.Event  # untyped in torch
        self._copied = make_event() if on_gpu else None
        self._laid_out: _LaidOut | None = None

    def build(self, works: Sequence[SequenceWork], pad_to: DecodeShape | None = None) -> Batch:
        """The batch of a step; the one built before is void from now on.

        Args:
            works: what each sequence computes; a sequence at most once, at least one.
            pad_to: the size of the batch if it has decodes only.

        Raises:
            ValueError: a table without room for its context, a sequence without tokens, or a batch beyond its limits.
        """
        if not works:
            raise ValueError("a batch needs a sequence")
        row_list, chunks, context_list, tables = zip(*works, strict=True)
        figures = (row_list, list(map(len, chunks)), context_list, list(map(len, tables)))
        rows, query_lens, context_lens, table_lens = np.array(figures, np.int64)
        computed = context_lens - query_lens
        self._check(query_lens, context_lens, table_lens)
        size = self._size_of(query_lens, context_lens, pad_to)
        parts = self._parts_of(size)
        written = self.tables.update(rows, tables, table_lens, computed // self.block_size)

        if self._copied is not None:
            self._copied.synchronize()  # the previous copy may still be reading the staging buffer
        host, num_works = parts.host, len(works)
        if size.num_prefills:
            order = np.argsort(query_lens > 1, kind="stable")
            rows, query_lens, context_lens, computed = (x[order] for x in (rows, query_lens, context_lens, computed))
            chunks = tuple(chunks[i] for i in order.tolist())
            self._fill_mixed(host, rows, query_lens, computed, order)
        else:
            host.positions[:num_works] = computed
            np.multiply(written - computed // self.block_size, self.block_size, out=host.slots[:num_works])
            host.slots[:num_works] += computed
            host.last_tokens[:num_works] = np.arange(num_works)
            host.prefill_starts[0] = 0
        num_tokens = size.num_tokens if pad_to is None else num_works
        np.concatenate(chunks, out=host.token_ids[:num_tokens], casting="same_kind")
        host.context_lens[:num_works] = context_lens
        np.take(self.tables.ids[:, : size.width], rows, axis=0, out=host.block_tables[:num_works], mode="clip")
        if pad_to is not None:
            _pad(host, num_works)
        if self._copied is not None:
            self._buffer[: parts.size].copy_(self._staging[: parts.size], non_blocking=True)
            self._copied.record()
        return Batch(
            *parts.device,
            num_decodes=size.num_sequences - size.num_prefills,
            query_lens=query_lens,
            host_context_lens=context_lens,
            max_query_len=int(query_lens.max()) if size.num_prefills else 0,
            max_context_len=int(context_lens.max()) if pad_to is None else size.width * self.block_size,
        )

    def _check(
        self, query_lens: NDArray[np.int64], context_lens: NDArray[np.int64], table_lens: NDArray[np.int64]
    ) -> None:
        if query_lens.min() < 1 or (context_lens < query_lens).any():
            raise ValueError("every sequence of a batch computes at least one token, and has it in its context")
        if (context_lens > table_lens * self.block_size).any():
            raise ValueError("a sequence's block table has no room for its context")

    def _size_of(
        self, query_lens: NDArray[np.int64], context_lens: NDArray[np.int64], pad_to: DecodeShape | None
    ) -> _Size:
        num_works, num_tokens = query_lens.size, int(query_lens.sum())
        num_prefills = int(np.count_nonzero(query_lens > 1)) if num_tokens > num_works else 0
        width = _rounded(-(-int(context_lens.max()) // self.block_size), _WIDTH_STEP)
        if pad_to is None:
            return _Size(num_tokens, num_works, num_prefills, width)
        if num_prefills or num_works > pad_to.num_sequences or width > pad_to.table_width:
            raise ValueError(
                f"{num_works} sequences, {num_prefills} prefills, tables of {width}: no padding to {pad_to}"
            )
        return _Size(pad_to.num_sequences, pad_to.num_sequences, 0, pad_to.table_width)

    def _parts_of(self, size: _Size) -> _LaidOut:
        """Where the parts of a batch lie. Decode steps often follow one of the same size, so the last is kept."""
        laid_out = self._laid_out
        if laid_out is None or laid_out.of != size:
            layout = _Layout.of(size)
            if layout.size > self._bytes.size or size.width > self.tables.ids.shape[1]:
                raise ValueError(
                    f"a batch of {size.num_tokens} tokens and {size.num_sequences} sequences, with tables "
                    f"of {size.width}, is beyond the builder's limits"
                )
            laid_out = _LaidOut(size, layout.size, layout.arrays(self._bytes), layout.tensors(self._buffer))
            self._laid_out = laid_out
        return laid_out

    def _fill_mixed(
        self,
        host: _Parts,
        rows: NDArray[np.int64],
        query_lens: NDArray[np.int64],
        computed: NDArray[np.int64],
        order: NDArray[np.int64],
    ) -> None:
        """What follows from the sequences' lengths, of a batch that has prefills, which come last."""
        ends = np.cumsum(query_lens)
        starts = ends - query_lens
        positions = np.arange(ends[-1]) + np.repeat(computed - starts, query_lens)
        host.positions[:] = positions
        blocks, offsets = np.divmod(positions, self.block_size)
        host.slots[:] = self.tables.ids[np.repeat(rows, query_lens), blocks]
        host.slots[:] *= self.block_size  # in 64 bits
        host.slots[:] += offsets
        host.last_tokens[order] = ends - 1
        num_decodes = rows.size - host.prefill_starts.size + 1
        host.prefill_starts[:-1] = starts[num_decodes:] - num_decodes
        host.prefill_starts[-1] = ends[-1] - num_decodes


def _pad(host: _Parts, num_own: int) -> None:
    """The rows of a batch of decodes that belong to nobody."""
    host.token_ids[num_own:] = 0
    host.positions[num_own:] = 0
    host.slots[num_own:] = -1
    host.last_tokens[num_own:] = 0
    host.context_lens[num_own:] = 0
    host.block_tables[num_own:] = 0


class _Parts(NamedTuple):
    """The tensors of a batch, or their arrays on the host, in the order in which they lie in the buffer."""

    token_ids: Any
    positions: Any
    slots: Any
    last_tokens: Any
    context_lens: Any
    block_tables: Any
    prefill_starts: Any


class _Size(NamedTuple):
    """All that the layout of a batch depends on."""

    num_tokens: int
    num_sequences: int
    num_prefills: int
    width: int


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
    def of(cls, batch: _Size) -> _Layout:
        tokens, sequences = (batch.num_tokens,), (batch.num_sequences,)
        tables, prefills = (batch.num_sequences, batch.width), (batch.num_prefills + 1,)
        shapes = _Parts(tokens, tokens, tokens, sequences, sequences, tables, prefills)
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


class _LaidOut(NamedTuple):
    """The parts of batches of one size.

    Args:
        of: that size.
        size: bytes in all.
        host: arrays in the staging buffer.
        device: tensors in the buffer on the device.
    """

    of: _Size
    size: int
    host: _Parts
    device: _Parts


_DTYPES = _Parts(torch.int64, torch.int64, torch.int64, torch.int64, torch.int32, torch.int32, torch.int32)
_NUMPY_DTYPES = {torch.int64: np.int64, torch.int32: np.int32}


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
