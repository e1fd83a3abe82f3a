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
from sim.scheduler.base import Scheduler
from sim.sequence import Sequence
from workloads.errors import UserError
from workloads.request import TokenIds

Tokens = NDArray[np.int64]


class Forward(Protocol):
    """Computes batches: the model as it is, or its decode steps as CUDA graphs (`graphs.py`)."""

    def prepare(self, builder: BatchBuilder, works: Listing[SequenceWork]) -> Batch:
        """The batch of a step, padded as the computation needs it."""

    def get_ready(self, batch: Batch) -> bool:
        """Does for the batch prepared last what only the first of its kind needs; whether that was anything.

        It belongs to no step, as a server does it before it serves. What it writes into the pool, the batch's own KV,
        is written again by `logits`.
        """

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

    def get_ready(self, batch: Batch) -> bool:
        """No batch needs anything."""
        return False

    def logits(self, batch: Batch) -> Tensor:
        return self._model.forward(batch, self._pool)


@dataclass(slots=True)
class _Text:
    """What a sequence says.

    Args:
        tokens: prompt and output, [final]; the output as far as it is known.
        known: how many of them are: told beforehand, or generated. What the model says of them later, when they are
            computed again, counts no more.
        row: of the block tables, if `table` is the one that stands there.
        table: the sequence's block table when it was last computed; another object means that it has lost its blocks
            in the meantime.
    """

    tokens: Tokens
    known: int
    row: int | None = None
    table: Listing[int] = ()

    def copied(self) -> _Text:
        """The same tokens for another sequence, which has a table of its own."""
        return _Text(self.tokens.copy(), self.known)


class Executor:
    """Runs plans of one step on a model and a pool.

    Args:
        forward: computes batches.
        pool: where the KV is.
        scheduler: whose plans these are; it lists their batches, and its limits are those of a step.
        prompts: makes the token ids of a request's prompt.
        time: when a step begins and ends.
        log: takes down what each step took.
        said: is given each output when it is complete: its sequence, and its tokens, prompt included. Outputs of a
            request that ends with the token with which they would have forked are one.
        shown: is given each plan before it is executed, in time that counts towards no step.

    Attributes:
        pool: as above.
        last: what its last step took, part by part; None before the first.
    """

    def __init__(
        self,
        forward: Forward,
        pool: KVPool,
        scheduler: Scheduler,
        prompts: PromptTokens,
        time: StepTime,
        log: StepLog,
        said: Callable[[Sequence, Tokens], None] | None = None,
        shown: Callable[[StepPlan], None] | None = None,
    ) -> None:
        self._forward = forward
        self.pool = pool
        self.last: MeasuredStep | None = None
        self._scheduler = scheduler
        self._prompts = prompts
        self._time = time
        self._log = log
        self._said = said
        self._shown = shown
        self._tables = BlockTables(scheduler.max_num_seqs, -(-scheduler.max_model_len // pool.block_size))
        self._builder = BatchBuilder(self._tables, pool.block_size, scheduler.max_num_batched_tokens, pool.device)
        self._texts: dict[Sequence, _Text] = {}
        make_event: Any = torch.cuda.Event  # untyped in torch
        on_gpu = pool.device.type == "cuda"
        self._events = (make_event(enable_timing=True), make_event(enable_timing=True)) if on_gpu else None

    def durations(self, plan: StepPlan) -> list[float]:
        """Does the plan's one step; returns the seconds it took, host work since the last step included.

        Raises:
            UserError: the device has no memory for it, or a prompt is longer than the model limit.
        """
        if plan.repeat != 1:
            raise ValueError(f"a real step is one step, not {plan.repeat}")
        try:
            return [self._execute(plan)]
        except RuntimeError as error:
            if (line := _memory_error(error)) is None:
                raise
            raise UserError(
                f"{self.pool.device} has no memory for a step of {plan.work.num_tokens} tokens ({line}); lower "
                "gpu_memory_utilization, memory.num_blocks or scheduler.max_num_batched_tokens."
            ) from None

    def _execute(self, plan: StepPlan) -> float:
        between = self._time.begin()
        if self._shown is not None:
            self._shown(plan)
            self._time.lap()  # nobody's
        self._follow_forks(plan)
        self._mark(0)
        self.pool.swap_out(plan.swap_outs)
        self.pool.swap_in(plan.swap_ins)
        self.pool.copy(plan.copies)
        moved = self._time.lap()
        sequences = self._scheduler.full_batch(plan)
        prepared = computed = 0.0
        got_ready = False
        if sequences:
            batch = self._forward.prepare(self._builder, [self._work(*entry) for entry in sequences])
            prepared = self._time.lap()
            if got_ready := self._forward.get_ready(batch):
                self._time.lap()  # nobody's
            logits = self._forward.logits(batch)
            self._mark(1)
            predicted = logits[: len(sequences)].argmax(-1).tolist()  # waits for the device
            computed = self._time.lap()
            self._note([sequence for sequence, _ in sequences], predicted)
        else:
            self._mark(1)
            self._wait()
            moved += self._time.lap()
        noted = self._time.lap()
        self._time.end()
        seconds = between + moved + prepared + computed + noted
        device = None if got_ready else self._device_seconds()
        self.last = MeasuredStep(plan.work, seconds, between, moved, prepared, computed, noted, device)
        self._log.add(self.last, len(plan.swap_outs), len(plan.swap_ins), len(plan.copies))
        return seconds

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
        request, limit = sequence.request, self._scheduler.max_model_len
        if request.prompt_tokens > limit:
            raise UserError(
                f"request {request.request_id} has a prompt of {request.prompt_tokens} tokens, but max_model_len is "
                f"{limit}; scheduler.reject_oversize=true turns such requests away."
            )
        known = request.prompt_tokens
        if isinstance(request.prompt, TokenIds):
            known = max(known, min(len(request.prompt.ids), sequence.final))
        tokens = np.zeros(sequence.final, np.int64)
        tokens[:known] = self._prompts.of(request._replace(prompt_tokens=known))
        return _Text(tokens, known)

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
        for parent, child in plan.forks:
            if (text := self._texts.get(parent)) is None:  # the request has ended with the token before
                continue
            if (replaced := self._texts.get(child)) is not None and replaced.row is not None:
                self._tables.release(replaced.row)
            self._texts[child] = text.copied()

    def _note(self, sequences: Listing[Sequence], predicted: Listing[int]) -> None:
        """Notes the tokens after the last that is computed, and takes leave of the requests that end with them."""
        ending = []
        for sequence, token in zip(sequences, predicted, strict=True):
            position = sequence.computed
            if position < sequence.known:  # there is more to compute of what is known
                continue
            text = self._texts[sequence]
            if position >= text.known:
                text.tokens[position] = token
                text.known = position + 1
            if position + 1 == sequence.final:
                ending.append(sequence)
        for sequence in ending:
            group = sequence.group
            if group is None:
                self._end(sequence)
            elif group.caught_up:  # or else one of its sequences has to wait for others, and may yet be preempted
                for member in group.live:
                    if member in self._texts:
                        self._end(member)

    def _end(self, sequence: Sequence) -> None:
        """Its last token is there."""
        text = self._texts.pop(sequence)
        if text.row is not None:
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


def _memory_error(error: RuntimeError) -> str | None:
    """What torch says if memory has run out, asked for and free, as one line; None if it is something else."""
    text = str(error)
    if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in text:
        return None
    return " ".join(text.splitlines()[0].split()).rstrip(".")
