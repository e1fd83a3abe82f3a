"""The executor: says how long a step takes by doing it.

To the engine it is a `StepTimer` like any other (`sim/plan.py`). It is given a complete plan, moves the blocks that the
plan moves, runs the model over the plan's batch, and takes the likeliest token for every sequence that has caught up.
Who is in the batch and which blocks are whose was decided before; when the next request comes is not its business.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu.batch import Batch, BatchBuilder, BlockTables, SequenceWork
from gpu.models import PagedModel
from gpu.pool import KVPool
from gpu.step_log import MeasuredStep, StepLog
from gpu.step_time import StepTime
from gpu.tokens import PromptTokens
from sim.plan import StepPlan
from sim.scheduler.continuous import ContinuousBatching
from sim.sequence import Sequence
from workloads.request import TokenIds

Tokens = NDArray[np.int64]


class Forward(Protocol):
    """Computes batches: the model as it is, or its decode steps as CUDA graphs (`graphs.py`)."""

    def prepare(self, builder: BatchBuilder, works: Listing[SequenceWork]) -> Batch:
        """The batch of a step, padded as the computation needs it."""

    def logits(self, batch: Batch) -> Tensor:
        """[sequences or more, vocab_size], in the order of the works."""


class Eager:
    """The model, step by step.

    Args:
        model: what to compute.
        pool: its KV.
    """

    def __init__(self, model: PagedModel, pool: KVPool) -> None:
        self._model = model
        self._pool = pool

    def prepare(self, builder: BatchBuilder, works: Listing[SequenceWork]) -> Batch:
        """Nothing is padded."""
        return builder.build(works)

    def logits(self, batch: Batch) -> Tensor:
        return self._model.forward(batch, self._pool)


@dataclass(slots=True)
class _Text:
    """What a sequence says.

    Args:
        tokens: prompt and output, [final]; the output as far as it is told or generated.
        told: how many of them were known beforehand, and are not replaced by what the model says.
        row: of the block tables, if `table` is the one that stands there.
        table: the sequence's block table when it was last computed; another object means that it has lost its blocks
            in the meantime.
    """

    tokens: Tokens
    told: int
    row: int | None = None
    table: Listing[int] = ()

    def copied(self) -> _Text:
        """The same tokens for another sequence, which has a table of its own."""
        return _Text(self.tokens.copy(), self.told)


class Executor:
    """Runs plans of one step on a model and a pool.

    Args:
        forward: computes batches.
        pool: where the KV is.
        scheduler: whose plans these are; it lists their batches.
        prompts: makes the token ids of a request's prompt.
        time: when a step begins and ends.
        log: takes down what each step took.
        max_num_seqs: most sequences that run at a time.
        max_num_tokens: most tokens of a step.
        said: is given each output when it is complete: its sequence, and its tokens, prompt included.
    """

    def __init__(
        self,
        forward: Forward,
        pool: KVPool,
        scheduler: ContinuousBatching,
        prompts: PromptTokens,
        time: StepTime,
        log: StepLog,
        max_num_seqs: int,
        max_num_tokens: int,
        said: Callable[[Sequence, Tokens], None] | None = None,
    ) -> None:
        self._forward = forward
        self._pool = pool
        self._scheduler = scheduler
        self._prompts = prompts
        self._time = time
        self._log = log
        self._said = said
        self._tables = BlockTables(max_num_seqs, -(-scheduler.max_model_len // pool.block_size))
        self._builder = BatchBuilder(self._tables, pool.block_size, max_num_tokens, pool.device)
        self._texts: dict[Sequence, _Text] = {}
        make_event: Any = torch.cuda.Event  # untyped in torch
        on_gpu = pool.device.type == "cuda"
        self._events = (make_event(enable_timing=True), make_event(enable_timing=True)) if on_gpu else None

    def durations(self, plan: StepPlan) -> list[float]:
        """Does the plan's one step; returns the seconds it took, host work since the last step included."""
        if plan.repeat != 1:
            raise ValueError(f"a real step is one step, not {plan.repeat}")
        between = self._time.begin()
        self._follow_forks(plan)
        self._mark(0)
        self._pool.swap_out(plan.swap_outs)
        self._pool.swap_in(plan.swap_ins)
        self._pool.copy(plan.copies)
        moved = self._time.lap()
        sequences = self._scheduler.full_batch(plan)
        prepared = computed = 0.0
        if sequences:
            batch = self._forward.prepare(self._builder, [self._work(*entry) for entry in sequences])
            prepared = self._time.lap()
            logits = self._forward.logits(batch)
            self._mark(1)
            predicted = logits[: len(sequences)].argmax(-1).cpu().numpy()  # waits for the device
            computed = self._time.lap()
            for (sequence, _), token in zip(sequences, predicted.tolist(), strict=True):
                self._say(sequence, token)
        else:
            self._mark(1)
            self._wait()
        noted = self._time.lap()
        seconds = between + moved + prepared + computed + noted
        self._time.end()
        self._log.add(
            MeasuredStep(plan.work, seconds, between, moved, prepared, computed, noted, self._device_seconds()),
            len(plan.swap_outs),
            len(plan.swap_ins),
            len(plan.copies),
        )
        return [seconds]

    def _work(self, sequence: Sequence, num_tokens: int) -> SequenceWork:
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = self._new_text(sequence)
        if text.table is not sequence.blocks:
            if text.row is not None:
                self._tables.release(text.row)
            text.row, text.table = self._free_row(), sequence.blocks
        assert text.row is not None
        computed = sequence.computed
        return SequenceWork(text.row, text.tokens[computed - num_tokens : computed], computed, sequence.blocks)

    def _new_text(self, sequence: Sequence) -> _Text:
        request = sequence.request
        told = request.prompt_tokens
        if isinstance(request.prompt, TokenIds):
            told = max(told, min(len(request.prompt.ids), sequence.final))
        tokens = np.zeros(sequence.final, np.int64)
        tokens[:told] = self._prompts.of(request._replace(prompt_tokens=told))
        return _Text(tokens, told)

    def _free_row(self) -> int:
        try:
            return self._tables.take()
        except IndexError:  # some belong to sequences that have lost their blocks and wait to come back
            for sequence, text in self._texts.items():
                if text.row is not None and text.table is not sequence.blocks:
                    self._tables.release(text.row)
                    text.row, text.table = None, ()
            return self._tables.take()

    def _follow_forks(self, plan: StepPlan) -> None:
        """A fork goes on from what its parent has said."""
        parents = {parent: self._texts[parent].copied() for parent, _ in plan.forks if parent in self._texts}
        for parent, child in plan.forks:
            if parent in parents:
                if (old := self._texts.get(child)) is not None and old.row is not None:
                    self._tables.release(old.row)
                self._texts[child] = parents[parent].copied()

    def _say(self, sequence: Sequence, token: int) -> None:
        """Notes the token after the last that is computed, unless it is known already."""
        position, text = sequence.computed, self._texts[sequence]
        if position < sequence.known:  # there is more to compute of what is known
            return
        if position >= text.told:
            text.tokens[position] = token
        if position + 1 == sequence.final:
            del self._texts[sequence]
            assert text.row is not None
            self._tables.release(text.row)
            if self._said is not None:
                self._said(sequence, text.tokens)

    def _mark(self, which: int) -> None:
        if self._events is not None:
            self._events[which].record()

    def _wait(self) -> None:
        if self._events is not None:
            self._events[1].synchronize()

    def _device_seconds(self) -> float | None:
        """What the device was busy with the step, by its own clock; None on a CPU."""
        if self._events is None:
            return None
        return float(self._events[0].elapsed_time(self._events[1])) / 1000
