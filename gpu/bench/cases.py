"""What is measured: problems around a base case, and how many bytes and operations each takes at the least.

The first value of each axis makes the base case. From there one axis is varied at a time, but batch and context, which
decide together how a decode is split, in all combinations. Nothing here knows torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from workloads.errors import UserError

Kernel = Literal["decode", "prefill", "write", "copy"]
Layout = Literal["paged", "contiguous"]
KERNELS: tuple[Kernel, ...] = ("decode", "prefill", "write", "copy")
ATTENTION: tuple[Kernel, ...] = ("decode", "prefill")
OURS = "kvtwin"
PEERS = ("torch", "flashinfer", "vllm")

# precision: (type of queries, bytes of one, type of the pool, bytes of one), as torch names them
_PRECISIONS = {
    "bfloat16": ("bfloat16", 2, "bfloat16", 2),
    "float16": ("float16", 2, "float16", 2),
    "float32": ("float32", 4, "float32", 4),
    "fp8": ("bfloat16", 2, "float8_e4m3fn", 1),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """What a kernel is given, all sequences alike.

    Args:
        kernel: decode (one query per sequence), prefill (every token is a query), write (K and V of every token into
            their slots) or copy (every block to another).
        batch: sequences.
        context: tokens of each.
        num_kv_heads: KV heads.
        group: query heads that share one KV head.
        head_dim: size of a head.
        block_size: tokens of a block.
        precision: bfloat16, float16, float32, or fp8: bfloat16 queries on a pool of e4m3.
    """

    kernel: Kernel
    batch: int
    context: int
    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    precision: str

    @property
    def dtype(self) -> str:
        """Type of the queries, as torch names it."""
        return _PRECISIONS[self.precision][0]

    @property
    def pool_dtype(self) -> str:
        """Type of the pool, as torch names it."""
        return _PRECISIONS[self.precision][2]

    @property
    def pool_bytes(self) -> int:
        """Bytes of one element of the pool."""
        return _PRECISIONS[self.precision][3]

    @property
    def num_tokens(self) -> int:
        """Of all sequences."""
        return self.batch * self.context

    @property
    def num_queries(self) -> int:
        """Tokens that attend, of all sequences."""
        if self.kernel == "decode":
            return self.batch
        return self.num_tokens if self.kernel == "prefill" else 0

    @property
    def bytes_moved(self) -> int:
        """Bytes that must cross the memory bus, each once: K, V and what the kernel makes of them.

        Attention reads queries, K and V and writes an output like the queries. Block tables and the parts of split
        sequences are not counted: they are the price of a method, and a kernel that needs none would be no faster by
        this figure, only in time.
        """
        kv_elements = 2 * self.num_tokens * self.num_kv_heads * self.head_dim
        kv = kv_elements * self.pool_bytes
        element = _PRECISIONS[self.precision][1]
        if self.kernel == "write":
            return kv_elements * element + kv
        if self.kernel == "copy":
            return 2 * kv
        return kv + 2 * self.num_queries * self.num_kv_heads * self.group * self.head_dim * element

    @property
    def flops(self) -> int:
        """Multiplications and additions of both matrix products, of all pairs of query and key that may meet."""
        if self.kernel not in ATTENTION:
            return 0
        pairs = self.context if self.kernel == "decode" else self.context * (self.context + 1) // 2
        return 4 * self.batch * pairs * self.num_kv_heads * self.group * self.head_dim

    @property
    def contiguous(self) -> Problem:
        """The same where each sequence is one block: the layout of an engine without paging."""
        return replace(self, block_size=self.context)


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement.

    Args:
        problem: of a contiguous layout in the form of `Problem.contiguous`.
        layout: paged (blocks anywhere in the pool, in no order) or contiguous.
        by: whose kernel: kvtwin, or a peer's name.
    """

    problem: Problem
    layout: Layout
    by: str = OURS


@dataclass(frozen=True)
class BenchOptions:
    """`bench` of `conf/bench.yaml`.

    Raises:
        UserError: a value that no kernel takes, or an axis without values.
    """

    kernels: list[str]
    batches: list[int]
    contexts: list[int]
    prompts: list[int]
    prompt_tokens: int
    block_sizes: list[int]
    groups: list[int]
    head_dims: list[int]
    precisions: list[str]
    num_kv_heads: int
    peers: list[str]
    tune: bool
    tuning: str | None
    seconds: float
    budget: float | None

    def __post_init__(self) -> None:
        for name, known in (("kernels", KERNELS), ("precisions", tuple(_PRECISIONS)), ("peers", PEERS)):
            values: list[str] = getattr(self, name)
            for value in values:
                if value not in known:
                    raise UserError(f"bench.{name} has {value}; expected some of {', '.join(known)}.")
            if not values and name != "peers":
                raise UserError(f"bench.{name} is empty; give at least one of {', '.join(known)}.")
        for name in ("batches", "contexts", "prompts", "block_sizes", "groups", "head_dims"):
            sizes: list[int] = getattr(self, name)
            if not sizes or min(sizes) < 1:
                raise UserError(f"bench.{name} is {sizes}; expected whole numbers of at least 1.")
        if max(self.head_dims) > 256:
            raise UserError(f"bench.head_dims has {max(self.head_dims)}; the kernels take heads of up to 256.")
        for name in ("prompt_tokens", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise UserError(f"bench.{name} is {getattr(self, name)}; expected a whole number of at least 1.")
        if self.seconds <= 0 or (self.budget is not None and self.budget <= 0):
            raise UserError("bench.seconds and bench.budget must be above 0 seconds; budget=null sets no limit.")

    def base(self, kernel: Kernel) -> Problem:
        """The problem of a kernel with the first value of every axis."""
        batch, context = self.batches[0], self.contexts[0]
        if kernel in ("prefill", "write"):
            batch, context = self._prompts(self.prompts[0])
        return Problem(
            kernel,
            batch,
            context,
            self.num_kv_heads,
            self.groups[0],
            self.head_dims[0],
            self.block_sizes[0],
            self.precisions[0],
        )

    def problems(self) -> list[Problem]:
        """All problems, each once: base cases first, so that a run that is cut short has them."""
        chosen = [kernel for kernel in KERNELS if kernel in self.kernels]
        bases = [self.base(kernel) for kernel in chosen]
        return list(dict.fromkeys([*bases, *(problem for base in bases for problem in self._around(base))]))

    def cases(self, layouts: dict[str, Layout]) -> list[Case]:
        """All measurements, each once, those of like tensors one after the other.

        Args:
            layouts: which the peers that take part in attention work on.
        """
        return list(dict.fromkeys(case for problem in self.problems() for case in _cases(problem, layouts)))

    def _prompts(self, length: int) -> tuple[int, int]:
        return max(1, self.prompt_tokens // length), length

    def _around(self, base: Problem) -> Iterator[Problem]:
        if base.kernel == "decode":
            for batch in self.batches:
                for context in self.contexts:
                    yield replace(base, batch=batch, context=context)
        elif base.kernel == "prefill":
            for length in self.prompts:
                batch, context = self._prompts(length)
                yield replace(base, batch=batch, context=context)
        for block_size in self.block_sizes:
            yield replace(base, block_size=block_size)
        for precision in self.precisions:
            yield replace(base, precision=precision)
        if base.kernel in ATTENTION:
            for group in self.groups:
                yield replace(base, group=group)
            for head_dim in self.head_dims:
                yield replace(base, head_dim=head_dim)


def _cases(problem: Problem, layouts: dict[str, Layout]) -> Iterator[Case]:
    yield Case(problem, "paged")
    if problem.kernel in ATTENTION:
        yield Case(problem.contiguous, "contiguous")
        for peer, layout in layouts.items():
            yield Case(problem if layout == "paged" else problem.contiguous, layout, peer)
