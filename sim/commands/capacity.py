"""How many requests of a shape fit, and what each policy wastes.

Pure arithmetic: no queue, no clock. Requests are taken at their full length, all alike, so the counts are what fits in
the worst moment; who may grow into what, and when, is what `kvtwin sim` is for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sim.config import build, fill, run_command, whole_number
from sim.hardware import Deployment, Hardware
from sim.kv_layout import (
    ModelSpec,
    Stage,
    kv_bytes_per_token,
    model_len,
    non_kv_bytes,
    pool_blocks,
    sequence_kv_bytes,
    stages,
)
from sim.layer_groups import grouped_kv_bytes, layer_groups
from workloads.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from rich.console import Console
    from rich.table import Table

WIDTH = 100  # columns where the output is no terminal, so that a file looks the same everywhere


@dataclass(frozen=True)
class Holding:
    """What one request holds under one policy at its full length.

    Args:
        policy: as in the table.
        slots: slots held, None where layers differ in how many they hold.
        held_bytes: KV memory held over all GPUs.
        used_bytes: KV memory that holds a token.
        fits: requests that the pool has room for.
        fits_buddy: the same if regions are aligned powers of two; None for paged memory.
    """

    policy: str
    slots: int | None
    held_bytes: int
    used_bytes: int
    fits: int
    fits_buddy: int | None

    @property
    def wasted(self) -> float:
        return 1 - self.used_bytes / self.held_bytes


@dataclass(frozen=True)
class Capacity:
    """A deployment with its pool, and the shape of the requests.

    Args:
        model: what is served.
        hardware: one GPU.
        deployment: how the model is spread.
        block_size: tokens of a block.
        num_blocks: blocks of the pool.
        max_model_len: tokens.
        prompt_tokens: of a request.
        output_tokens: of a request.
    """

    model: ModelSpec
    hardware: Hardware
    deployment: Deployment
    block_size: int
    num_blocks: int
    max_model_len: int
    prompt_tokens: int
    output_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def blocks_per_request(self) -> int:
        return -(-self.num_tokens // self.block_size)

    @property
    def pool_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def bytes_per_token(self) -> int:
        return kv_bytes_per_token(self.model, self.deployment)

    def holdings(self) -> Iterator[Holding]:
        """One for each policy, the most wasteful first: the reservations of Kwon et al., SOSP 2023, 6.1, then paged."""
        doubled = min(self.prompt_tokens + _power_of_two(self.output_tokens), self.max_model_len)
        yield self._contiguous("contiguous, max_model_len", self.max_model_len)
        yield self._contiguous("contiguous, pow2", doubled)
        yield self._contiguous("contiguous, oracle", self.num_tokens)
        slots, used = self.blocks_per_request * self.block_size, self.num_tokens * self.bytes_per_token
        fits = self.num_blocks // self.blocks_per_request
        yield Holding(f"paged, block {self.block_size}", slots, slots * self.bytes_per_token, used, fits, None)
        held = sequence_kv_bytes(self.model, self.deployment, self.num_tokens, self.block_size)
        if held < slots * self.bytes_per_token:
            used = sequence_kv_bytes(self.model, self.deployment, self.num_tokens, 1)
            fits = self.pool_slots * self.bytes_per_token // held
            yield Holding("paged, windows freed", None, held, used, fits, None)
        if (groups := len(layer_groups(self.model))) > 1:
            held = grouped_kv_bytes(self.model, self.deployment, self.num_tokens, self.block_size)
            used = sequence_kv_bytes(self.model, self.deployment, self.num_tokens, 1)
            fits = self.pool_slots * self.bytes_per_token // held
            yield Holding(f"paged, {groups} layer groups", None, held, used, fits, None)

    def _contiguous(self, policy: str, slots: int) -> Holding:
        size, used = self.bytes_per_token, self.num_tokens * self.bytes_per_token
        # A buddy allocator splits the pool by its binary digits, largest first, so aligned regions waste only the tail.
        buddy = self.pool_slots // _power_of_two(slots)
        return Holding(policy, slots, slots * size, used, self.pool_slots // slots, buddy)


def main(argv: list[str]) -> int:
    """Prints the tables; returns 0.

    Raises:
        UserError: an option that does not exist or has the wrong type, or a deployment that cannot hold the model.
    """
    return run_command("capacity", show, argv)


def show(config: DictConfig) -> None:
    """Prints the capacity of the deployment that `config` describes."""
    from rich.console import Console

    capacity = _capacity(config)
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    console.print(_heading(capacity), soft_wrap=True)
    console.print(_memory_table(capacity, int(config.scheduler.max_num_seqs)))
    for note in _notes(capacity):
        console.print(note, soft_wrap=True)
    console.print(_request_table(capacity))
    console.print(_request_sentence(capacity), soft_wrap=True)
    _show_batch(console, capacity, whole_number(config, "batch.requests", 0), whole_number(config, "batch.tokens", 1))
    _show_shared_prefix(
        console,
        capacity,
        whole_number(config, "request.shared_prefix_tokens", 0),
        whole_number(config, "request.conversations", 1),
    )


def _capacity(config: DictConfig) -> Capacity:
    model, hardware = build(config.model, "model"), build(config.hardware, "hardware")
    deployment = fill(Deployment, config)
    block_size = whole_number(config, "memory.block_size", 1, model=model, deployment=deployment)
    num_blocks = None if config.memory.num_blocks is None else whole_number(config, "memory.num_blocks", 1)
    rows = whole_number(config, "scheduler.max_num_seqs", 1)
    prompt, output = whole_number(config, "request.prompt_tokens", 1), whole_number(config, "request.output_tokens", 1)
    limit = model_len(model, deployment)
    if prompt + output > limit:
        raise UserError(
            f"request.prompt_tokens + request.output_tokens is {prompt + output}, above the limit of {limit} tokens; "
            f"shorten the request or raise max_model_len."
        )
    blocks = pool_blocks(model, hardware, deployment, block_size, num_blocks, rows)
    return Capacity(model, hardware, deployment, block_size, blocks, limit, prompt, output)


def _heading(capacity: Capacity) -> str:
    deployment = capacity.deployment
    spread = f"tensor parallel {deployment.tensor_parallel}, pipeline parallel {deployment.pipeline_parallel}"
    return f"{capacity.model.name} on {deployment.num_gpus} x {capacity.hardware.name} ({spread})"


def _memory_table(capacity: Capacity, max_num_seqs: int) -> Table:
    """Weights and KV on the fullest GPU and over all of them, and the pool."""
    parts, deployment = stages(capacity.model, capacity.deployment), capacity.deployment
    fullest = max(parts, key=lambda stage: stage.kv_bytes_per_token)
    others = non_kv_bytes(capacity.model, deployment, max_num_seqs)
    per_token, block_size, num_slots = fullest.kv_bytes_per_token, capacity.block_size, capacity.pool_slots
    table = _table("Memory", "", "fullest GPU", "all GPUs")
    all_weights = sum(stage.weight_bytes for stage in parts) * deployment.tensor_parallel
    table.add_row("weights", _gb(max(stage.weight_bytes for stage in parts)), _gb(all_weights))
    table.add_row("activations, context, libraries", _gb(others), _gb(others * deployment.num_gpus))
    table.add_row("KV pool", _gb(num_slots * per_token), _gb(num_slots * capacity.bytes_per_token))
    table.add_row("KV per token", f"{per_token:,} B", f"{capacity.bytes_per_token:,} B")
    table.add_row(
        f"KV per block of {block_size}",
        f"{per_token * block_size:,} B",
        f"{capacity.bytes_per_token * block_size:,} B",
    )
    table.add_section()
    table.add_row("pool, blocks", f"{capacity.num_blocks:,}", "")
    table.add_row("pool, tokens", f"{num_slots:,}", "")
    return table


def _notes(capacity: Capacity) -> Iterator[str]:
    parts = stages(capacity.model, capacity.deployment)
    if any(_exceeds(capacity, stage) for stage in parts):
        yield "Note: weights and this pool exceed the memory of one GPU; a pool that is given is taken literally."
    held = sequence_kv_bytes(capacity.model, capacity.deployment, capacity.num_tokens, capacity.block_size)
    full = capacity.blocks_per_request * capacity.block_size * capacity.bytes_per_token
    if held < full:
        yield (
            f"KV per token counts every layer as full. {capacity.model.num_sliding_layers} of "
            f"{capacity.model.num_layers} layers slide: where blocks behind the window are freed, "
            f"{capacity.num_tokens:,} tokens hold {_gb(held)}, not {_gb(full)}."
        )


def _exceeds(capacity: Capacity, stage: Stage) -> bool:
    return stage.weight_bytes + capacity.pool_slots * stage.kv_bytes_per_token > capacity.hardware.memory_bytes


def _request_table(capacity: Capacity) -> Table:
    shape = f"{capacity.prompt_tokens:,} + {capacity.output_tokens:,} tokens, limit {capacity.max_model_len:,}"
    table = _table(
        f"Requests of {shape}",
        "policy",
        "slots held",
        "KV held",
        "KV used",
        "wasted",
        "requests fit",
        "buddy allocator",
    )
    for holding in capacity.holdings():
        table.add_row(
            holding.policy,
            "-" if holding.slots is None else f"{holding.slots:,}",
            _gb(holding.held_bytes),
            _gb(holding.used_bytes),
            _percent(holding.wasted, 1),
            f"{holding.fits:,}",
            "-" if holding.fits_buddy is None else f"{holding.fits_buddy:,}",
        )
    return table


def _request_sentence(capacity: Capacity) -> str:
    holdings = list(capacity.holdings())
    limit, paged = holdings[0], holdings[3]
    return (
        f"Reserving the limit holds {_gb(limit.held_bytes)} for a request that uses {_gb(limit.used_bytes)} "
        f"({capacity.blocks_per_request:,} blocks of {capacity.block_size}): about {_percent(limit.wasted, 0)} of the "
        f"reservation is wasted. Requests that fit: {limit.fits:,} contiguous against {paged.fits:,} paged."
    )


def _show_batch(console: Console, capacity: Capacity, requests: int, tokens: int) -> None:
    """What `requests` of `tokens` each hold at one moment; nothing if there are none."""
    if requests == 0:
        return
    size, blocks = capacity.bytes_per_token, -(-tokens // capacity.block_size)
    reserved, used = requests * capacity.max_model_len * size, requests * tokens * size
    paged = requests * blocks * capacity.block_size * size
    console.print(
        f"\n{requests:,} requests of {tokens:,} tokens: {_gb(reserved, 1)} reserved at the limit, {_gb(used, 1)} used; "
        f"paged they hold {_gb(paged, 1)}.",
        soft_wrap=True,
    )


def _show_shared_prefix(console: Console, capacity: Capacity, tokens: int, conversations: int) -> None:
    """A prefix held once for each conversation, and held once; nothing if there is none."""
    if tokens == 0:
        return
    size = capacity.bytes_per_token
    whole = tokens - tokens % capacity.block_size  # only full blocks can be shared: the last one is written to
    apart, shared = tokens * conversations * size, (whole + (tokens - whole) * conversations) * size
    console.print(
        f"\nA prefix of {tokens:,} tokens in {conversations:,} conversations: {_gb(apart)} if each holds its own, "
        f"{_gb(shared)} if they share its full blocks.",
        soft_wrap=True,
    )


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=i == 0)
    return table


def _gb(size: int, decimals: int | None = None) -> str:
    """Bytes in GB (1e9, not GiB) to about three digits."""
    value = size / 1e9
    if decimals is None:
        decimals = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{decimals}f} GB"


def _percent(share: float, decimals: int) -> str:
    return f"{100 * share:.{decimals}f} %"


def _power_of_two(number: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << (number - 1).bit_length()
