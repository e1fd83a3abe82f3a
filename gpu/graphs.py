"""Decode steps as CUDA graphs: what the host does for a step is recorded once, and then replayed by the device.

A graph has fixed tensors, so decode steps are padded to one of a few shapes, each captured when it first occurs.
Steps with a prefill run as they are, and so does everything if the model cannot be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gpu.batch import Batch, BatchBuilder, DecodeShape, SequenceWork

WARM_UPS = 2  # runs before a capture, in which libraries load and allocate what they keep
Compute = Callable[[Batch], Tensor]


class Capture:
    """One recorded computation: the same tensors in, the same tensor out.

    Args:
        compute: what to record; works on tensors whose addresses stay.
        batch: the batch to record it on.
        memory: of the graphs' intermediate tensors; they share it, as only one runs at a time.
    """

    def __init__(self, compute: Compute, batch: Batch, memory: Any) -> None:
        cuda: Any = torch.cuda  # untyped in torch
        stream = cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                compute(batch)
        torch.cuda.current_stream().wait_stream(stream)
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory):
            self._logits = compute(batch)
        self._graph = graph

    def replay(self) -> Tensor:
        """Computes what now stands in the batch's tensors; the result is overwritten by the next replay."""
        self._graph.replay()
        return self._logits


class GraphedDecodes:
    """Computes batches; those with decodes only by graphs.

    Args:
        compute: the model's forward pass over its pool.
        max_num_seqs: most sequences of a step.
        max_blocks: most blocks of a sequence.
        capture: records a computation on a batch.

    Attributes:
        refused: why the model could not be captured, or None.
    """

    def __init__(
        self,
        compute: Compute,
        max_num_seqs: int,
        max_blocks: int,
        capture: Callable[[Compute, Batch, Any], Any] = Capture,
    ) -> None:
        self._compute = compute
        self._capture = capture
        self._row_counts = _sizes(max_num_seqs)
        self._widths = _widths(max_blocks)
        self._captured: dict[DecodeShape, Any] = {}
        self._memory: Any = None
        self._shape: DecodeShape | None = None  # of the batch prepared last
        self.refused: str | None = None

    def prepare(self, builder: BatchBuilder, works: Sequence[SequenceWork]) -> Batch:
        """Pads decode steps to the next shape."""
        self._shape = None
        if self.refused is None and all(work.token_ids.size == 1 for work in works):
            blocks = max(-(-work.context_len // builder.block_size) for work in works)
            self._shape = DecodeShape(
                next(size for size in self._row_counts if size >= len(works)),
                next(width for width in self._widths if width >= blocks),
            )
        return builder.build(works, self._shape)

    def get_ready(self, batch: Batch) -> bool:
        """Captures the shape of the batch prepared last, if it is new."""
        if self._shape is None or self._shape in self._captured:
            return False
        self._record(self._shape, batch)
        return True

    def logits(self, batch: Batch) -> Tensor:
        """[sequences or more, vocab_size]."""
        captured = None if self._shape is None else self._captured.get(self._shape)
        logits: Tensor = self._compute(batch) if captured is None else captured.replay()
        return logits

    def _record(self, shape: DecodeShape, batch: Batch) -> None:
        if self._memory is None:
            graphs: Any = torch.cuda
            self._memory = graphs.graph_pool_handle() if torch.cuda.is_available() else ()
        try:
            self._captured[shape] = self._capture(self._compute, batch, self._memory)
        except RuntimeError as error:  # the model looks at what it computes, as some routers of experts do
            self.refused = (str(error).strip() or type(error).__name__).splitlines()[0]


def _sizes(most: int) -> list[int]:
    """1, 2, 4, then multiples of 8 below `most`, and `most`: at most seven rows are padding."""
    return [*(size for size in (1, 2, 4) if size < most), *range(8, most, 8), most]


def _widths(most: int) -> list[int]:
    """Powers of two from 4 on below `most`, and `most`, rounded up to a multiple of 4 as tables are."""
    widths, width = [], 4
    while width < most:
        widths.append(width)
        width *= 2
    return [*widths, -(-most // 4) * 4]
