"""Requests served by scheduler, memory and executor on a tiny model, and whether what was said is greedy.

A request arrives before the step that its `arrival_s` names. The pool is poisoned: a slot holds NaN until it is
written, and again as soon as nobody holds its block and no prefix is kept in it; what is computed from it is NaN too.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tiny_models import SIZES, plain_model
from transformers import PreTrainedModel

from gpu.executor import Eager, Executor, Forward
from gpu.models import PagedModel
from gpu.pool import KVPool
from gpu.step_log import MeasuredStep
from gpu.step_time import StepTime, VirtualTime
from gpu.tokens import PromptTokens
from sim.memory.interface import KVMemory
from sim.memory.paged import PagedMemory
from sim.plan import StepPlan
from sim.scheduler.continuous import ContinuousBatching
from workloads.request import Request

VOCABULARY: int = SIZES["vocab_size"]
ENOUGH_STEPS = 2_000
# Sums in another order move logits by some 1e-6 to 1e-5 at these sizes: two that are nearer may change places.
NEAR = 1e-3

paged_model: Callable[[], PagedModel] = functools.cache(lambda: PagedModel(plain_model("llama"), "llama"))
own_model: Callable[[], PreTrainedModel] = functools.cache(lambda: plain_model("llama"))


class Steps(list[MeasuredStep]):
    """A step log that keeps its rows in a list."""

    def add(self, step: MeasuredStep, *_: int) -> None:
        self.append(step)


class Turn(NamedTuple):
    """What a sequence computes in a step, and the tokens that it has in the pool afterwards."""

    request_id: int
    tokens: int
    context: int


@dataclass
class Served:
    """What came of the requests.

    Attributes:
        texts: by request, every output with its prompt, in the order in which they were complete.
        seen: how often something happened: preemption, swap_out, swap_in, copy (of blocks), fork, hit.
        plans: the batch of each step.
        steps: what was measured.
    """

    texts: dict[int, list[list[int]]] = field(default_factory=lambda: defaultdict(list))
    seen: Counter[str] = field(default_factory=Counter)
    plans: list[list[Turn]] = field(default_factory=list)
    steps: Steps = field(default_factory=Steps)

    def outputs(self, request: Request) -> list[list[int]]:
        """The outputs of a request, without the prompt."""
        return [text[request.prompt_tokens :] for text in self.texts[request.request_id]]


def serve(
    requests: list[Request],
    memory: KVMemory,
    scheduler: ContinuousBatching,
    num_host_blocks: int = 0,
    make_forward: Callable[[KVPool], Forward] = lambda pool: Eager(paged_model(), pool),
    time: StepTime | None = None,
) -> Served:
    """Serves the requests, which are sorted by arrival, to the end."""
    pool = KVPool(paged_model().spec, memory.num_blocks, memory.block_size, num_host_blocks=num_host_blocks)
    pool.blocks.fill_(torch.nan)
    pool.host_blocks.fill_(torch.nan)
    served = Served()
    log: Any = served.steps
    executor = Executor(
        make_forward(pool),
        pool,
        scheduler,
        PromptTokens(VOCABULARY),
        time or VirtualTime(),
        log,
        lambda sequence, tokens: served.texts[sequence.request.request_id].append(tokens.tolist()),
    )
    waiting, step = list(requests), 0
    while waiting or not scheduler.idle:
        assert step < ENOUGH_STEPS, "goes on and on"
        while waiting and waiting[0].arrival_s <= step:
            scheduler.arrive(waiting.pop(0))
        plan = scheduler.schedule()
        note(plan, served.seen)
        if plan.work.num_tokens or plan.swap_outs or plan.swap_ins:
            batch = scheduler.full_batch(plan)
            served.plans.append([Turn(one.request.request_id, tokens, one.computed) for one, tokens in batch])
            (seconds,) = executor.durations(plan)
            assert seconds == served.steps[-1].duration
        scheduler.commit(plan)
        poison(memory, pool)
        step += 1
    return served


def note(plan: StepPlan, seen: Counter[str]) -> None:
    seen["preemption"] += len(plan.preemptions)
    seen["swap_out"] += len(plan.swap_outs)
    seen["swap_in"] += len(plan.swap_ins)
    seen["copy"] += len(plan.copies)
    seen["fork"] += len(plan.forks)
    seen["hit"] += sum(hit > 0 for _, hit in plan.hits)


def poison(memory: KVMemory, pool: KVPool) -> None:
    """Puts NaN into every free block that keeps no prefix."""
    if isinstance(memory, PagedMemory):
        kept = set(memory.prefix.evictable()) if memory.prefix else set()
        pool.blocks[:, :, [block for block in memory.free_list() if block not in kept]] = torch.nan


def prompt_of(request: Request) -> NDArray[np.int64]:
    return PromptTokens(VOCABULARY).of(request)


def assert_greedy(served: Served, requests: list[Request], told: Counter[int] | None = None) -> None:
    """Every output of every request is what the model by itself says, token by token.

    Args:
        served: what was said.
        requests: all of them; none was turned away.
        told: by request, tokens of the output that were given beforehand and are not the model's.
    """
    assert set(served.texts) == {request.request_id for request in requests}
    for request in requests:
        outputs = served.texts[request.request_id]
        # Outputs that end before they fork are one.
        assert len(outputs) == (request.num_outputs if request.output_tokens > 1 else 1)
        for text in {tuple(text) for text in outputs}:
            assert text[: request.prompt_tokens] == tuple(prompt_of(request))
            assert len(text) == request.prompt_tokens + request.output_tokens
            first = request.prompt_tokens + (told or Counter())[request.request_id]
            with torch.inference_mode():
                logits = own_model()(torch.tensor([text])).logits[0, first - 1 : -1]
            said = torch.tensor(text[first:])
            largest, second = logits.topk(2).values.unbind(-1)
            behind = largest - logits.gather(1, said[:, None])[:, 0]
            assert bool((behind < NEAR).all()), f"request {request.request_id} says something else"
            assert bool(((behind == 0) | (largest - second < NEAR)).all())
