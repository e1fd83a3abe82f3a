"""Runs recorded scheduler cases: the same workload and configuration as a real engine had, step by step.

A case is a folder with `config.json`, `trace.jsonl`, `steps.jsonl` and `summary.json` (any of them gzipped) in which
vLLM 0.33 recorded what its v1 scheduler and KV cache manager decided, without a model: a formula yields token ids. Here
the simulator's own scheduler and memory decide, under the protocol of those recordings: steps instead of seconds, and
nothing rejected at arrival.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from sim.memory.paged import PagedMemory
from sim.plan import StepPlan
from sim.scheduler.continuous import ContinuousBatching
from sim.scheduler.queues import Fcfs, Priority
from sim.sequence import Sequence
from workloads.errors import UserError
from workloads.request import Request, TokenIds

Record = dict[str, Any]

CONFIG_KEYS = (
    "block_size",
    "num_gpu_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive",
    "policy",
    "watermark",
    "scheduler_reserve_full_isl",
    "record_detail",
)
TRACE_KEYS = ("request_id", "arrival_step", "prompt_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a run left the recording: the step, the field, what was recorded and what we did."""

    step: int | str
    field: str
    expected: object
    got: object


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one case came out: lines compared, and the first difference or None."""

    name: str
    lines: int
    difference: Difference | None


def check_case(folder: Path, leap: bool = False) -> Verdict:
    """Runs the case in `folder` and compares every field of every line, then the summary.

    Args:
        folder: the case.
        leap: run the scheduler with its shortcut for steadily decoding sequences, one step at a time.

    Raises:
        UserError: a file of the case is missing or unreadable.
    """
    config = _json(folder, "config.json", "".join(_lines(folder, "config.json")), 1)
    expected_summary = _json(folder, "summary.json", "".join(_lines(folder, "summary.json")), 1)
    trace = list(_records(folder, "trace.jsonl"))
    _require(CONFIG_KEYS, config, f"{folder / 'config.json'}")
    for number, line in enumerate(trace, 1):
        _require(TRACE_KEYS, line, f"{folder / 'trace.jsonl'}, line {number}:")
    run = Run(config, trace, leap)
    lines = 0
    # A recording of a run that never ends stops after a first stretch; then so do we.
    cut_short = expected_summary.get("status") not in ("completed", "stuck")
    for expected, got in zip_longest(_records(folder, "steps.jsonl"), run.steps()):
        if expected is None and cut_short:
            return Verdict(folder.name, lines, None)
        lines += 1
        if difference := _first_difference((expected or got)["step"], expected or {}, got or {}):
            return Verdict(folder.name, lines, difference)
    return Verdict(folder.name, lines, _first_difference("summary", expected_summary, run.summary()))


def _require(keys: tuple[str, ...], record: Record, where: str) -> None:
    for key in keys:
        if key not in record:
            raise UserError(f"{where} has no {key}; see the cases in tests/data/conformance.")


def _first_difference(step: int | str, expected: Record, got: Record) -> Difference | None:
    """The first recorded field that differs; `vllm_version` is no decision."""
    for name in expected.keys() - {"vllm_version"} if isinstance(step, str) else expected:
        if name not in got or expected[name] != got[name]:
            return Difference(step, name, expected[name], got.get(name))
    extra = [name for name in got if name not in expected] if not isinstance(step, str) else []
    return Difference(step, extra[0], None, got[extra[0]]) if extra else None


@dataclass(slots=True)
class _Totals:
    recorded_steps: int = 0
    last_step: int = 0
    scheduled_tokens: int = 0
    preemptions: int = 0
    max_used_blocks: int = 0
    prefix_hit: int = 0
    prefix_queried: int = 0
    resume_hit: int = 0
    resume_queried: int = 0
    status: str = "completed"
    finish_order: list[str] = field(default_factory=list)
    finish_step: dict[str, int] = field(default_factory=dict)
    first_scheduled_step: dict[str, int] = field(default_factory=dict)
    first_token_step: dict[str, int] = field(default_factory=dict)


class Run:
    """One case being run.

    Args:
        config: the case's `config.json`.
        trace: its `trace.jsonl`, a request each.
        leap: let the scheduler not plan steadily decoding sequences one by one.
    """

    def __init__(self, config: Record, trace: list[Record], leap: bool = False) -> None:
        self._caching = config["enable_prefix_caching"]
        self.memory = PagedMemory(
            num_blocks=config["num_gpu_blocks"],
            block_size=config["block_size"],
            watermark=config["watermark"],
            prefix_caching=self._caching,
        )
        self.scheduler = ContinuousBatching(
            memory=self.memory,
            max_model_len=config["max_model_len"],
            policy=Priority() if config["policy"] == "priority" else Fcfs(),
            max_num_seqs=config["max_num_seqs"],
            max_num_batched_tokens=config["max_num_batched_tokens"],
            chunked_prefill=config["enable_chunked_prefill"],
            long_prefill_token_threshold=config["long_prefill_token_threshold"],
            long_prefill_token_threshold_adaptive=config["long_prefill_token_threshold_adaptive"],
            scheduler_reserve_full_isl=config["scheduler_reserve_full_isl"],
            reject_oversize=False,
            leap=leap,
        )
        self._detail = config["record_detail"]
        self._name = [str(line["request_id"]) for line in trace]
        requests = (request_of(index, line, self._caching) for index, line in enumerate(trace))
        self._arrivals = sorted(requests, key=lambda request: (request.arrival_s, request.request_id))
        self._sequences: list[Sequence] = []
        self._totals = _Totals()

    def steps(self) -> Iterator[Record]:
        """Runs to the end or until nothing can ever run again; yields a record for each step that was executed."""
        waiting, step = 0, 0
        while waiting < len(self._arrivals) or not self.scheduler.idle:
            if self.scheduler.idle:
                step = max(step, int(self._arrivals[waiting].arrival_s))
            added = []
            while waiting < len(self._arrivals) and self._arrivals[waiting].arrival_s <= step:
                sequence, _ = self.scheduler.arrive(self._arrivals[waiting])
                self._sequences.append(sequence)
                added.append(self._id(sequence))
                waiting += 1
            plan = self.scheduler.schedule()
            yield self._execute(step, added, plan)
            step += 1
            if not plan.work.num_tokens and not plan.preemptions and not self.scheduler.idle:
                if waiting == len(self._arrivals):
                    self._totals.status = "stuck"
                    return
                step = max(step, int(self._arrivals[waiting].arrival_s))

    def summary(self) -> Record:
        """Figures of the run so far, under the names of the recorded `summary.json`."""
        totals = self._totals
        by_name = sorted(self._sequences, key=self._id)
        return {
            "status": totals.status,
            "num_requests": len(self._name),
            "num_finished": len(totals.finish_order),
            "recorded_steps": totals.recorded_steps,
            "last_step": totals.last_step,
            "total_scheduled_tokens": totals.scheduled_tokens,
            "total_preemptions": totals.preemptions,
            "max_used_blocks": totals.max_used_blocks,
            "usable_blocks": self.memory.num_usable_blocks,
            "prefix_queried_tokens": totals.prefix_queried,
            "prefix_hit_tokens": totals.prefix_hit,
            "resume_queried_tokens": totals.resume_queried,
            "resume_hit_tokens": totals.resume_hit,
            "finish_order": totals.finish_order,
            "finish_step": totals.finish_step,
            "first_scheduled_step": totals.first_scheduled_step,
            "first_token_step": totals.first_token_step,
            "output_tokens": {self._id(s): s.generated for s in by_name},
            "preemptions": {self._id(s): s.preemptions for s in by_name if s.preemptions},
            "unfinished": [self._id(s) for s in by_name if s.known < s.final],
        }

    def _execute(self, step: int, added: list[str], plan: StepPlan) -> Record:
        memory, scheduler = self.memory, self.scheduler
        free_mid = memory.num_free_blocks
        block_ids = {self._id(s): list(s.blocks) for s in scheduler.running}
        batch = scheduler.full_batch(plan)
        self._count_lookups(plan)
        finished = scheduler.commit(plan)
        self._count(step, plan, batch, finished, memory.num_usable_blocks - free_mid)
        record: Record = {
            "step": step,
            "added": added,
            "scheduled": _sorted((self._id(s), tokens) for s, tokens in batch),
            "admitted": self._ids(plan.admitted),
            "resumed": self._ids(plan.resumed),
            "preempted": self._ids(preemption.victim for preemption in plan.preemptions),
            "finished": self._ids(finished),
            "hit_tokens": _sorted((self._id(s), tokens) for s, tokens in plan.hits),
            "num_running": len(scheduler.running),
            "num_waiting": len(scheduler.waiting),
            "free_blocks_mid": free_mid,
            "used_blocks_mid": memory.num_usable_blocks - free_mid,
            "free_blocks": memory.num_free_blocks,
            "used_blocks": memory.num_usable_blocks - memory.num_free_blocks,
            "blocks": _sorted((self._id(s), len(s.blocks)) for s in scheduler.running),
        }
        if self._detail:
            record |= {
                "batch_order": self._ids(s for s, _ in batch),
                "running_order": self._ids(scheduler.running),
                "waiting_order": self._ids(scheduler.waiting),
                "block_ids": _sorted(block_ids.items()),
                "free_list": memory.free_list(),
                "cached_blocks": memory.prefix.registered() if memory.prefix else [],
            }
        return record

    def _count(
        self, step: int, plan: StepPlan, batch: list[tuple[Sequence, int]], finished: list[Sequence], used_mid: int
    ) -> None:
        totals = self._totals
        totals.recorded_steps += 1
        totals.last_step = step
        totals.scheduled_tokens += plan.work.num_tokens
        totals.preemptions += len(plan.preemptions)
        totals.max_used_blocks = max(totals.max_used_blocks, used_mid)
        totals.finish_order += self._ids(finished)
        totals.finish_step |= {self._id(s): step for s in finished}
        for sequence, _ in batch:
            totals.first_scheduled_step.setdefault(self._id(sequence), step)
            if sequence.generated:
                totals.first_token_step.setdefault(self._id(sequence), step)

    def _count_lookups(self, plan: StepPlan) -> None:
        """Lookups of the sequences admitted in this step; their known tokens are still those of the lookup."""
        totals = self._totals
        for sequence, hit in plan.hits if self._caching else ():
            if sequence.preemptions:
                totals.resume_hit += hit
                totals.resume_queried += sequence.known
            else:
                totals.prefix_hit += hit
                totals.prefix_queried += sequence.known

    def _id(self, sequence: Sequence) -> str:
        return self._name[sequence.request.request_id]

    def _ids(self, sequences: Iterable[Sequence]) -> list[str]:
        return [self._id(sequence) for sequence in sequences]


def request_of(index: int, line: Record, caching: bool) -> Request:
    """The request of one trace line, with the token ids of prompt and output that the recordings' formulas give.

    Args:
        index: its line number from 0, the request index of the formulas.
        line: the parsed line.
        caching: whether content matters at all.
    """
    prompt, output = line["prompt_tokens"], line["output_tokens"]
    tokens = TokenIds((*_prompt_ids(index, line), *_output_ids(index, output))) if caching else None
    return Request(index, float(line["arrival_step"]), prompt, output, line.get("priority", 0), tokens)


def _prompt_ids(index: int, line: Record) -> Iterable[int]:
    if line.get("prompt_token_ids") is not None:
        return map(int, line["prompt_token_ids"])
    position = np.arange(line["prompt_tokens"], dtype=np.int64)
    if line.get("hash_ids") is not None:
        ids = np.asarray(line["hash_ids"], dtype=np.int64)
        return map(int, (ids[position // 512] * 512 + position % 512) % 50021 + 100)
    return map(int, 1_000_000 + index + (position * 7919) % 1_000_003)


def _output_ids(index: int, count: int) -> Iterable[int]:
    position = np.arange(count, dtype=np.int64)
    return map(int, (index * 7919 + position * 104_729 + 12_345) % 32_000)


def _sorted(pairs: Iterable[tuple[str, Any]]) -> Record:
    return dict(sorted(pairs))


def _records(folder: Path, name: str) -> Iterator[Record]:
    for number, line in enumerate(_lines(folder, name), 1):
        yield _json(folder, name, line, number)


def _json(folder: Path, name: str, text: str, line: int) -> Record:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise UserError(
            f"{folder / name}, line {line}: not JSON ({error}); see the cases in tests/data/conformance."
        ) from None
    if not isinstance(content, dict):
        raise UserError(f"{folder / name}, line {line}: expected an object; see the cases in tests/data/conformance.")
    return content


def _lines(folder: Path, name: str) -> Iterator[str]:
    """Lines of a file of the case, plain or gzipped."""
    plain, packed = folder / name, folder / f"{name}.gz"
    if not plain.is_file() and not packed.is_file():
        raise UserError(f"{folder} has no {name} or {name}.gz; a conformance case is a folder with that file.")
    with plain.open(encoding="utf-8") if plain.is_file() else gzip.open(packed, "rt", encoding="utf-8") as stream:
        yield from stream
