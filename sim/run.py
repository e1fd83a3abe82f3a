"""One run from its config: builds the parts, lets the engine serve, and leaves a complete run folder behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import simpy
from omegaconf import DictConfig

from sim.clients import Arrivals, ClosedLoop
from sim.config import build, fill, resolved, typed, whole_number
from sim.engine import Engine
from sim.files import write_text
from sim.goodput import ServiceLevel
from sim.hardware import Deployment, Hardware
from sim.kv_layout import ModelSpec, host_blocks, kv_bytes_per_token, model_len, pool_blocks
from sim.layer_groups import LayerGroup, layer_groups, without_windows
from sim.link import Link, TransferTime
from sim.memory.interface import KVMemory
from sim.memory.offload import OffloadingMemory
from sim.memory.vattention import VAttentionMemory
from sim.plan import StepTimer
from sim.progress import Progress
from sim.recorder import Record, Recorder, Status
from sim.scheduler.base import Scheduler
from workloads.asked_limit import AskedLimit
from workloads.errors import UserError
from workloads.length_scale import ScaledLengths
from workloads.limit import FirstRequests
from workloads.readers.bad_rows import Fate
from workloads.request import Workload
from workloads.sample import Sampled
from workloads.sampling import Sampling
from workloads.several_outputs import SeveralOutputs
from workloads.time_scale import ScaledTime

HYBRID_SWITCH = "disable_hybrid_kv_cache_manager"  # an option of memories that keep a block table for each layer group


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is made of."""

    model: ModelSpec
    hardware: Hardware
    deployment: Deployment
    workload: Workload
    concurrency: int | None  # requests in flight at most
    memory: KVMemory
    scheduler: Scheduler
    timer: StepTimer
    transfers: TransferTime


class RealEngine(Protocol):
    """Does the steps of a run instead of pricing them (`gpu/replay.py`)."""

    @property
    def model(self) -> ModelSpec:
        """What it runs."""

    @property
    def env(self) -> simpy.Environment:
        """The clock that it keeps."""

    def pool_blocks(self, deployment: Deployment, block_size: int) -> int:
        """Blocks that its device has room for, if the config leaves that open."""

    def timer(self, scheduler: Scheduler, num_blocks: int, num_host_blocks: int, deployment: Deployment) -> StepTimer:
        """Gets ready to execute the plans of this scheduler over a pool of so many blocks."""

    def facts(self) -> dict[str, Any]:
        """What the summary says of it, at the end of the run."""

    def close(self) -> None:
        """The run is over: completes its own records."""


def assemble(config: DictConfig, real: RealEngine | None = None, timer: StepTimer | None = None) -> Parts:
    """Builds every part that the config names.

    Args:
        config: a composed `conf/sim.yaml`, or one that extends it.
        real: executes the steps, and brings the model; None: `model` and `timing` of the config do.
        timer: prices the steps instead of the config's.

    Raises:
        UserError: an option that does not exist, has the wrong type or does not fit the others.
    """
    deployment = fill(Deployment, config)
    model: ModelSpec = build(config.model, "model") if real is None else real.model
    hardware: Hardware = build(config.hardware, "hardware")
    limit = model_len(model, deployment)
    leap = typed(config.engine.leap, bool, "engine.leap")
    groups = _layer_groups(config, model)
    if groups and real is not None:
        raise UserError(
            "memory=hybrid keeps a block table for each group of layers, but the real engine reads one for each "
            "sequence; choose memory=paged."
        )
    given = config.memory.get("num_blocks")
    about: dict[str, Any] = {"model": model, "hardware": hardware, "deployment": deployment}
    block_size = whole_number(config, "memory.block_size", 1, **about)
    if given is None and real is not None:
        num_blocks = real.pool_blocks(deployment, block_size)
    else:
        num_blocks = pool_blocks(
            model,
            hardware,
            deployment,
            block_size=block_size,
            num_blocks=None if given is None else whole_number(config, "memory.num_blocks", 1),
            max_num_seqs=whole_number(config, "scheduler.max_num_seqs", 1),
            groups=[group.layers for group in groups],
        )
    swap_space: float = typed(config.memory.get("swap_space", 0.0), float, "memory.swap_space")
    num_host_blocks = host_blocks(model, deployment, block_size, swap_space)
    has_host_cache = "num_host_cache_blocks" in config.memory
    cache_size: float = typed(config.memory.get("host_cache_size", 0.0), float, "memory.host_cache_size")
    num_host_cache_blocks = host_blocks(model, deployment, block_size, cache_size, "host_cache_size")
    memory: KVMemory = build(
        config.memory,
        "memory",
        ("swap_space", "page_bytes", HYBRID_SWITCH, *(["host_cache_size"] if has_host_cache else [])),
        **about,
        block_size=block_size,
        num_layers=model.num_layers,
        num_blocks=num_blocks,
        layer_groups=groups,
        max_model_len=limit,
        num_host_blocks=num_host_blocks,
        num_host_cache_blocks=num_host_cache_blocks,
    )
    scheduler: Scheduler = build(
        config.scheduler, "scheduler", memory=memory, max_model_len=limit, leap=leap and real is None
    )
    if isinstance(memory, OffloadingMemory) and memory.host_cache is not None:
        num_host_blocks = memory.host_cache.num_blocks
    if groups and scheduler.async_scheduling:
        raise UserError(
            "memory=hybrid gives back what a step that has ended needed, which scheduler.async_scheduling=true plans "
            "ahead of; set scheduler.async_scheduling=false or choose memory=paged."
        )
    return Parts(
        **about,
        workload=workload_of(config, limit),
        concurrency=typed(config.workload.get("concurrency"), int | None, "workload.concurrency"),
        memory=memory,
        scheduler=scheduler,
        timer=real.timer(scheduler, num_blocks, num_host_blocks, deployment)
        if real is not None
        else timer or build(config.timing, "timing", **about),
        transfers=build(config.link, "link", block_size=block_size, **about),
    )


def _layer_groups(config: DictConfig, model: ModelSpec) -> tuple[LayerGroup, ...]:
    """Groups of layers with a block table each, if the memory keeps such; none for one that keeps a single table."""
    if HYBRID_SWITCH not in config.memory:
        return ()
    disabled: bool = typed(config.memory[HYBRID_SWITCH], bool, f"memory.{HYBRID_SWITCH}")
    return without_windows(model) if disabled else layer_groups(model)


def simulate(
    config: DictConfig,
    folder: Path,
    facts: dict[str, Any],
    real: RealEngine | None = None,
    timer: StepTimer | None = None,
) -> dict[str, Any]:
    """Runs to the end and writes the run folder; returns the summary.

    Args:
        config: a composed `conf/sim.yaml`, or one that extends it.
        folder: where the results go.
        facts: what the summary says of the run first, such as the names of its parts.
        real: executes the steps; None: they are priced.
        timer: prices them instead of the config's.

    Raises:
        UserError: the run cannot start, or makes no progress; in the latter case the folder is complete up to there.
    """
    parts = assemble(config, real, timer)
    record: Record = build(config.record, "record")
    promised: ServiceLevel = build(config.goodput, "goodput")
    with suppress(OSError):
        (folder / "summary.json").unlink()  # of an earlier run into the same folder: it is no longer true
    write_text(folder / "config.yaml", resolved(config))
    memory, model = parts.memory, parts.model
    facts = facts | {
        "block_size": memory.block_size,
        "pool_blocks": memory.num_slots // memory.block_size,
        "max_model_len": parts.scheduler.max_model_len,
        "kv_bytes_per_token": kv_bytes_per_token(model, parts.deployment),
    }
    streams = parts.scheduler.streams_tokens
    recorder = Recorder(folder, memory.num_slots, memory.block_size, record, memory.caches_prefixes, promised, streams)
    recorder.metrics.block_bytes = memory.block_size * kv_bytes_per_token(model, parts.deployment)
    env = simpy.Environment() if real is None else real.env
    try:
        with Progress(parts.workload.num_requests) as progress:
            link = Link(env, parts.transfers) if real is None else None
            serve(parts, recorder, env, link, progress.update)
    except BaseException as error:  # whatever ends the run, what was recorded of it is kept
        stopped: Status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        try:
            for sequence in parts.scheduler.unfinished():
                recorder.unfinished(sequence)
            _close(recorder, stopped, facts | _last_facts(parts, real), real, f"{error}" or type(error).__name__)
        finally:
            recorder.discard()
        raise
    return _close(recorder, "complete", facts | _last_facts(parts, real), real)


def serve(
    parts: Parts,
    recorder: Recorder,
    env: simpy.Environment,
    link: Link | None = None,
    report: Callable[[int, float], None] = lambda requests, now: None,
) -> None:
    """Lets the engine serve the workload to its end.

    Args:
        parts: of the run.
        recorder: writes down what happens.
        env: the clock.
        link: see `Engine`, as for the next.
        report: told of progress.

    Raises:
        UserError: as `simulate`.
    """
    arrivals = _arrivals(parts.workload, parts.concurrency)
    engine = Engine(env, arrivals, parts.scheduler, parts.timer, recorder, report, link)
    env.process(engine.serve())
    try:
        with seldom_collected():
            env.run()
    finally:
        recorder.metrics.totals.never_sent = arrivals.num_never_sent


def _last_facts(parts: Parts, real: RealEngine | None) -> dict[str, Any]:
    notices = getattr(parts.timer, "notices", [])  # what a timer had to assume
    facts = trace_facts(parts.workload) | ({"timing_notices": notices} if notices else {})
    if isinstance(parts.memory, VAttentionMemory):
        facts |= parts.memory.mappings()
    return facts | (real.facts() if real is not None else {})


def _close(
    recorder: Recorder, status: Status, facts: dict[str, Any], real: RealEngine | None, error: str | None = None
) -> dict[str, Any]:
    if real is not None:
        real.close()
    return recorder.close(status, facts, error)


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Runs and workloads make many objects and no reference cycles; looking for them as often as usual costs a tenth of
    a run, and a third of reading a trace.
    """
    usual = gc.get_threshold()
    gc.set_threshold(100_000, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def trace_facts(workload: Workload) -> dict[str, Any]:
    """What a trace was taken for, and what became of its rows as far as they were read; generators drop nothing."""
    while isinstance(workload, (AskedLimit, FirstRequests, Sampled, ScaledLengths, ScaledTime, SeveralOutputs)):
        workload = workload.workload
    fate: Fate | None = getattr(workload, "fate", None)
    if fate is None:
        return {"rows_dropped": {}}
    taken_for = {"trace_format": workload.format.name} if hasattr(workload, "format") else {}
    counts = {"rows_read": fate.read, "rows_kept": fate.kept, "rows_dropped": dict(fate.dropped)}
    return taken_for | counts | {"rows_first_dropped": dict(fate.first_dropped)}


def workload_of(config: DictConfig, max_model_len: int) -> Workload:
    """The workload: a share `workload.sample` of its requests, cut to `workload.limit` of them, which are
    `workload.length_scale` times as long, come `workload.time_scale` times as slowly, all ask for `workload.sampling`
    and may generate `workload.max_tokens`.
    """
    seed = whole_number(config, "seed", 0)
    aside = ("concurrency", "length_scale", "limit", "max_tokens", "sample", "sampling", "time_scale")
    workload: Workload = build(config.workload, "workload", aside, seed=seed, max_model_len=max_model_len)
    share: float | None = typed(config.workload.get("sample"), float | None, "workload.sample")
    if share is not None:
        workload = Sampled(workload, share, seed)
    limit: int | None = typed(config.workload.get("limit"), int | None, "workload.limit")
    if limit is not None:
        workload = FirstRequests(workload, limit)
    length_scale: float = typed(config.workload.get("length_scale", 1.0), float, "workload.length_scale")
    if length_scale != 1:
        workload = ScaledLengths(workload, length_scale)
    time_scale: float = typed(config.workload.get("time_scale", 1.0), float, "workload.time_scale")
    if time_scale != 1:
        workload = ScaledTime(workload, time_scale)
    max_tokens: int | None = typed(config.workload.get("max_tokens"), int | None, "workload.max_tokens")
    if max_tokens is not None:
        workload = AskedLimit(workload, max_tokens)
    asked = config.workload.get("sampling")
    if asked is None:
        return workload
    sampling: Sampling = build(asked, "workload.sampling", seed=seed)
    return SeveralOutputs(workload, sampling)


def _arrivals(workload: Workload, concurrency: int | None) -> Arrivals:
    """When the requests are sent: each when it is due, or at most `concurrency` of them at a time."""
    requests = iter(workload)
    return Arrivals(requests) if concurrency is None else ClosedLoop(requests, concurrency)
