"""The executor: greedy tokens whatever happens to a sequence's blocks, and an honest account of the time."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, pairwise
from types import FrameType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine needs PyTorch")
pytest.importorskip("transformers", reason="the engine runs Hugging Face models")

from greedy import by_generate  # noqa: E402
from served import NEAR, VOCABULARY, Served, assert_greedy, own_model, paged_model, prompt_of, serve  # noqa: E402

from gpu.batch import Batch, BatchBuilder, SequenceWork  # noqa: E402
from gpu.executor import Executor  # noqa: E402
from gpu.pool import KVPool  # noqa: E402
from gpu.step_time import VirtualTime  # noqa: E402
from gpu.tokens import PromptTokens  # noqa: E402
from sim.memory.allocators.buddy import Buddy  # noqa: E402
from sim.memory.allocators.exact import ExactSlots  # noqa: E402
from sim.memory.allocators.fit import FirstFit  # noqa: E402
from sim.memory.contiguous import ContiguousMemory  # noqa: E402
from sim.memory.offload import OffloadingMemory  # noqa: E402
from sim.memory.paged import PagedMemory  # noqa: E402
from sim.memory.reservation import MaxReservation, OracleReservation, Pow2Reservation  # noqa: E402
from sim.plan import StepPlan  # noqa: E402
from sim.scheduler import victims  # noqa: E402
from sim.scheduler.continuous import ContinuousBatching  # noqa: E402
from sim.scheduler.queues import Fcfs, Priority, QueuePolicy  # noqa: E402
from sim.scheduler.recovery import Auto, Recompute, RecoveryPolicy, Swap  # noqa: E402
from sim.scheduler.victims import VictimPolicy  # noqa: E402
from workloads.errors import UserError  # noqa: E402
from workloads.request import HashIds, Request, TokenIds  # noqa: E402
from workloads.sampling import BeamSearch, ParallelSampling, Sampling  # noqa: E402

LIMIT = 48  # tokens of a request


def assert_generated(served: Served, requests: list[Request]) -> None:
    """Every output is, token by token, that of Hugging Face's `generate`."""
    said = set()
    for request in requests:
        expected, margin = by_generate(own_model(), prompt_of(request), request.output_tokens)
        assert margin > NEAR, "the two likeliest tokens are too near for a comparison: choose another prompt"
        assert served.outputs(request) == [expected] * request.num_outputs
        said |= set(expected)
    assert len(said) > 4  # a model that always says the same would prove little


# Prompts of 5 to 19 tokens that arrive one after another; the ids are chosen so that no two tokens are nearly tied.
REQUESTS = [Request(i, float(i), prompt, 9) for i, prompt in enumerate([13, 5, 19, 8])]


def test_tokens_are_those_of_generate_when_prompts_come_in_chunks_among_decodes() -> None:
    memory = PagedMemory(40, 4, prefix_caching=False)
    served = serve(REQUESTS, memory, ContinuousBatching(memory, LIMIT, Fcfs(), max_num_batched_tokens=7))
    assert_generated(served, REQUESTS)
    sizes = [{turn.tokens > 1 for turn in batch} for batch in served.plans]
    assert {True, False} in sizes  # prefills beside decodes


def test_tokens_are_those_of_generate_after_preemption_by_recompute() -> None:
    # Stored at their ends: 21, 13, 27 and 16 tokens, so 6 + 4 + 7 + 4 = 21 blocks of 4; there are 11.
    memory = PagedMemory(12, 4, prefix_caching=False)
    served = serve(REQUESTS, memory, ContinuousBatching(memory, LIMIT, Fcfs(), max_num_batched_tokens=32))
    assert served.seen["preemption"] > 0
    assert served.seen["swap_out"] == 0
    assert_generated(served, REQUESTS)


def test_tokens_are_those_of_generate_after_swapping() -> None:
    memory = PagedMemory(12, 4, prefix_caching=False, num_host_blocks=20)
    scheduler = ContinuousBatching(memory, LIMIT, Fcfs(), max_num_batched_tokens=32, recovery=Swap())
    served = serve(REQUESTS, memory, scheduler, num_host_blocks=20)
    assert served.seen["swap_out"] == served.seen["swap_in"] > 0
    assert_generated(served, REQUESTS)


@pytest.mark.parametrize("by", ["token ids", "hash ids"])
def test_tokens_are_those_of_generate_when_prefixes_are_shared(by: str) -> None:
    if by == "token ids":
        common = tuple(range(40, 52))
        prompts: list[TokenIds | HashIds] = [TokenIds((*common, *tail)) for tail in ((7, 90, 3), (8, 1), (99,))]
        lengths = [15, 14, 13]
    else:
        prompts = [HashIds((5, 6, 7, last), 4) for last in (21, 22, 21)]
        lengths = [15, 16, 14]
    requests = [
        Request(i, 4.0 * i, length, 8, prompt=prompt)
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    memory = PagedMemory(30, 4)
    served = serve(requests, memory, ContinuousBatching(memory, LIMIT, Fcfs()))
    assert served.seen["hit"] == 2
    assert_generated(served, requests)


def test_what_one_request_computes_another_reads_in_the_same_step() -> None:
    # Both arrive at once. A's two full blocks are registered at its admission; B hits them before they are computed.
    ids = tuple(range(60, 70))
    requests = [Request(i, 0.0, 10, 6, prompt=TokenIds(ids)) for i in range(2)]
    memory = PagedMemory(30, 4)
    served = serve(requests, memory, ContinuousBatching(memory, LIMIT, Fcfs()))
    assert [turn.tokens for turn in served.plans[0]] == [10, 2]
    assert_generated(served, requests)


@pytest.mark.parametrize("sampling", [ParallelSampling(3), BeamSearch(3, 2.0, 1)], ids=["parallel", "beams"])
@pytest.mark.parametrize("pool", ["large", "recompute", "swap"])
def test_all_outputs_are_those_of_generate(sampling: Sampling, pool: str) -> None:
    requests = [request._replace(sampling=sampling) for request in REQUESTS[:3]]
    # Alone, the third request holds its 4 common blocks and 3 x 3 of its own at its end: 13.
    memory = PagedMemory(100 if pool == "large" else 16, 4, num_host_blocks=40)
    recovery = Swap() if pool == "swap" else Recompute()
    scheduler = ContinuousBatching(memory, LIMIT, Fcfs(), max_num_seqs=9, max_num_batched_tokens=32, recovery=recovery)
    served = serve(requests, memory, scheduler, num_host_blocks=40)
    assert served.seen["fork"] >= 6  # two for each request, and more as beams die
    assert served.seen["copy"] > 0
    assert (served.seen["preemption"] > 0) == (pool != "large")
    assert (served.seen["swap_in"] > 0) == (pool == "swap")
    assert_generated(served, requests)


CONTIGUOUS: dict[str, tuple[Any, Any, int]] = {
    # Regions of 48 slots become 64, more than a request can ever fill.
    "max, buddy": (MaxReservation(), Buddy, 160),
    "pow2, buddy": (Pow2Reservation(), Buddy, 80),
    "oracle, first fit": (OracleReservation(), FirstFit, 60),
    "oracle, exact": (OracleReservation(), ExactSlots, 60),
}


@pytest.mark.parametrize("policy", CONTIGUOUS)
@pytest.mark.parametrize("block_size", [1, 4])
def test_tokens_are_those_of_generate_in_contiguous_regions(policy: str, block_size: int) -> None:
    reservation, allocator, slots = CONTIGUOUS[policy]
    num_blocks = slots // block_size
    memory = ContiguousMemory(num_blocks, LIMIT, reservation, allocator(num_blocks), block_size)
    served = serve(REQUESTS, memory, ContinuousBatching(memory, LIMIT, Fcfs(), chunked_prefill=False))
    assert_generated(served, REQUESTS)
    assert max(len(batch) for batch in served.plans) > 1


def test_an_output_that_the_trace_knows_is_computed_as_it_is_given() -> None:
    # The first three tokens of the output are told; the model goes on from there.
    given_ids = (3, 14, 15, 92, 65, 35, 101, 102, 103)
    request = Request(0, 0.0, 6, 9, prompt=TokenIds(given_ids))
    memory = PagedMemory(30, 4)
    served = serve([request], memory, ContinuousBatching(memory, LIMIT, Fcfs()))
    expected, _ = by_generate(own_model(), np.array(given_ids), 6)
    assert served.outputs(request) == [[101, 102, 103, *expected]]
    # Told or not, each was gained in a step of its own.
    assert [turn.tokens for batch in served.plans for turn in batch] == [6] + [1] * 8


def test_an_output_of_several_that_waits_for_the_others_may_still_lose_its_blocks() -> None:
    # With a budget of two tokens a step, one is for the first request and one for the second, whose two outputs take
    # turns; the pool is the 16 slots that the first stores at its end. When it needs one more than are free, the first
    # output of the second request has computed all but its last token and waits for the other, which has not.
    alone = Request(0, 0.0, 3, 14)
    both = Request(1, 1.0, 4, 3, sampling=ParallelSampling(2))
    memory = PagedMemory(17, 1, prefix_caching=False)
    scheduler = ContinuousBatching(memory, 24, Fcfs(), max_num_batched_tokens=2)
    served = serve([alone, both], memory, scheduler)
    assert served.seen["preemption"] == 1
    # Tokens 3 + 14 - 1 and 4 + 3 - 1 are the last that are computed: once by the first request; by the second request's
    # first output before the preemption, and by both afterwards.
    last = [turn.request_id for batch in served.plans for turn in batch if turn.context == (16, 6)[turn.request_id]]
    assert sorted(last) == [0, 1, 1, 1]
    assert_greedy(served, [alone, both])


class Parts:
    """An executor on a forward pass that computes nothing, and its scheduler."""

    def __init__(
        self, logits: Callable[[Batch], Any], ready: bool = False, clock: Any = None, limit: int = 4096
    ) -> None:
        memory = PagedMemory(600, 16)
        self.scheduler = ContinuousBatching(memory, limit, Fcfs(), max_num_seqs=4, max_num_batched_tokens=limit)
        pool = KVPool(paged_model().spec, 600, 16)
        self.rows: list[Any] = []
        log: Any = self
        time = VirtualTime(clock) if clock else VirtualTime()
        self._logits = logits
        self._ready = ready
        forward: Any = self
        prompts = PromptTokens(VOCABULARY)
        self.executor = Executor(forward, pool, self.scheduler, prompts, time, log)

    def add(self, step: Any, *moved: int) -> None:
        self.rows.append((step, *moved))

    def prepare(self, builder: BatchBuilder, works: list[SequenceWork]) -> Batch:
        return builder.build(works)

    def get_ready(self, batch: Batch) -> bool:
        return self._ready

    def logits(self, batch: Batch) -> Any:
        return self._logits(batch)

    def step(self) -> list[float]:
        plan = self.scheduler.schedule()
        durations = self.executor.durations(plan)
        self.scheduler.commit(plan)
        return durations


def nothing(batch: Batch) -> Any:
    return torch.zeros(batch.last_tokens.numel(), VOCABULARY)


def test_a_step_lasts_from_the_end_of_the_one_before_and_its_parts_add_up() -> None:
    # Every look at the clock advances it, by 1, 2, 4, 8 ...: no two sums of parts are equal. A step looks at its
    # begin and after moving, preparing, computing and noting.
    readings = [float(2**i) for i in range(20)]
    clock = iter(readings).__next__
    parts = Parts(nothing, clock=clock)
    parts.scheduler.arrive(Request(0, 0.0, 5, 3))
    first, second = parts.step(), parts.step()
    assert first == [readings[4] - readings[0]]  # nothing comes before the first step
    assert second == [readings[9] - readings[4]]
    (step, *_), (next_step, *_) = parts.rows
    spans = [b - a for a, b in pairwise(readings)]
    assert [step.between, step.move, step.prepare, step.model, step.note] == [0.0, *spans[:4]]
    later = [next_step.between, next_step.move, next_step.prepare, next_step.model, next_step.note]
    assert later == spans[4:9]
    assert next_step.duration == sum(later)
    assert (step.work.num_tokens, next_step.work.num_tokens) == (5, 1)
    assert step.device is None  # a CPU has no clock of its own


def test_getting_ready_belongs_to_no_step() -> None:
    # One more look at the clock, after what the first batch of a kind needs; what it says is left out.
    readings = [float(2**i) for i in range(20)]
    parts = Parts(nothing, ready=True, clock=iter(readings).__next__)
    parts.scheduler.arrive(Request(0, 0.0, 5, 3))
    assert parts.step() == [(readings[2] - readings[0]) + (readings[5] - readings[3])]


def test_a_plan_of_several_steps_is_refused() -> None:
    plan = StepPlan()
    plan.needs = [0]
    with pytest.raises(ValueError, match="one step, not 2"):
        Parts(nothing).executor.durations(plan)


def out_of_memory(_: Batch) -> Any:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.25 GiB of which 10.12 MiB "
        "is free.\nSee documentation for Memory Management."
    )


def no_memory_on_a_cpu(_: Batch) -> Any:
    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes.")


@pytest.mark.parametrize("logits", [out_of_memory, no_memory_on_a_cpu])
def test_a_device_without_memory_for_a_step_is_one_line(logits: Callable[[Batch], Any]) -> None:
    parts = Parts(logits)
    parts.scheduler.arrive(Request(0, 0.0, 5, 3))
    with pytest.raises(UserError, match=r"no memory for a step of 5 tokens .*allocate .*; lower ") as refused:
        parts.step()
    assert "\n" not in str(refused.value)


def test_any_other_error_of_the_device_is_not_taken_for_that() -> None:
    def fail(_: Batch) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    parts = Parts(fail)
    parts.scheduler.arrive(Request(0, 0.0, 5, 3))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        parts.step()


def test_a_prompt_beyond_the_model_limit_is_one_line() -> None:
    memory = PagedMemory(40, 4)
    scheduler = ContinuousBatching(memory, 16, Fcfs(), max_num_batched_tokens=64, reject_oversize=False)
    with pytest.raises(UserError, match=r"request 3 has a prompt of 20 tokens, but max_model_len is 16; scheduler"):
        serve([Request(3, 0.0, 20, 2)], memory, scheduler)


def test_a_prompt_of_just_the_model_limit_still_yields_its_one_token() -> None:
    memory = PagedMemory(40, 4)
    scheduler = ContinuousBatching(memory, 16, Fcfs(), max_num_batched_tokens=64, reject_oversize=False)
    request = Request(0, 0.0, 16, 5)
    served = serve([request], memory, scheduler)
    assert served.outputs(request) == [by_generate(own_model(), prompt_of(request), 1)[0]]


def test_python_does_as_much_for_a_long_prompt_as_for_a_short_one() -> None:
    def instructions(prompt_tokens: int) -> int:
        parts = Parts(nothing)
        parts.scheduler.arrive(Request(0, 0.0, 3, 3))
        parts.step()  # what only the first step does is done
        parts.scheduler.arrive(Request(1, 0.0, prompt_tokens, 3))
        plan = parts.scheduler.schedule()
        executed = count()

        def trace(frame: FrameType, event: str, _: object) -> Any:
            frame.f_trace_opcodes = True
            if event == "opcode":
                next(executed)
            return trace

        former = sys.gettrace()
        sys.settrace(trace)
        try:
            parts.executor.durations(plan)
        finally:
            sys.settrace(former)
        return next(executed)

    assert instructions(40) == instructions(3000) > 0


@pytest.mark.parametrize(
    ("policy", "victim"),
    [
        pytest.param(Fcfs, victims.LowestPriority(), id="lowest priority"),
        pytest.param(
            Priority,
            None,
            id="vLLM's priority policy",
            marks=pytest.mark.xfail(
                reason="vLLM leaves prefix keys on such blocks; by itself its policy does likewise"
            ),
        ),
    ],
)
def test_a_prefix_that_was_planned_but_never_computed_is_not_hit(policy: Any, victim: VictimPolicy | None) -> None:
    # Nine blocks of 2. A computes 7 tokens, and then 5 beside B's prompt. Then it is given the last 4, and B, who is
    # worth more, preempts it for its third token. A comes back and finds 12 tokens, for no more were computed.
    requests = [Request(0, 0.0, 16, 2, priority=1), Request(1, 1.0, 2, 2, priority=0)]
    memory = PagedMemory(10, 2)
    cap: dict[str, Any] = {"max_num_batched_tokens": 7, "long_prefill_token_threshold": 5}
    served = serve(requests, memory, ContinuousBatching(memory, LIMIT, policy(), victim=victim, **cap))
    assert (served.seen["preemption"], served.seen["hit"]) == (1, 1)
    computed = [[(turn.request_id, turn.tokens) for turn in batch] for batch in served.plans]
    assert computed == [[(0, 7)], [(0, 5), (1, 2)], [(1, 1)], [(0, 4)], [(0, 1)]]
    assert_greedy(served, requests)


@dataclass
class Situation:
    """Requests, a memory that is barely large enough, a scheduler over it, and the size of the host's pool."""

    requests: list[Request]
    memory: PagedMemory | ContiguousMemory
    scheduler: ContinuousBatching
    num_host_blocks: int


def some_requests(rng: np.random.Generator, sampling: bool, shared: bool) -> list[Request]:
    """Up to 20 tokens each; half of them begin alike if prefixes are `shared`, and a third have several outputs."""
    arrivals = np.cumsum(rng.integers(0, 4, int(rng.integers(2, 7))))
    requests = []
    for i, arrival in enumerate(arrivals.tolist()):
        prompt_tokens, output_tokens = int(rng.integers(1, 13)), int(rng.integers(1, 9))
        prompt: TokenIds | HashIds | None = None
        if shared:
            family = int(rng.integers(0, 2))
            ids = tuple((31 * family + 7 * place + 5) % VOCABULARY for place in range(prompt_tokens))
            prompt = [TokenIds(ids), HashIds(tuple(4 * family + place for place in range(13)), 1), None][
                int(rng.integers(0, 3))
            ]
        asked: Sampling | None = None
        if sampling and rng.random() < 0.35:
            width = int(rng.integers(2, 4))
            beams = BeamSearch(width, float(rng.choice([0.3, 3.0])), int(rng.integers(0, 9)))
            asked = beams if rng.random() < 0.5 else ParallelSampling(width)
        priority = int(rng.integers(0, 3))
        requests.append(Request(i, arrival, prompt_tokens, output_tokens, priority, prompt, asked))
    return requests


VICTIMS = [
    None,
    victims.Latest(),
    victims.LowestPriority(),
    victims.FewestOutputTokens(),
    victims.MostBlocks(),
    victims.LongestRemaining(),
]
LIMIT_OF_ALL = 24


def paged_situation(rng: np.random.Generator, recovery: RecoveryPolicy) -> Situation:
    prefix_caching = bool(rng.random() < 0.5)
    requests = some_requests(rng, sampling=True, shared=prefix_caching)
    block_size = int(rng.choice([1, 2, 4, 5]))
    largest = max(-(-(r.prompt_tokens + r.output_tokens - 1) // block_size) * r.num_outputs for r in requests)
    num_host_blocks = int(rng.choice([0, 6, 100]))
    num_blocks = 1 + largest + int(rng.integers(0, 3))
    memory = PagedMemory(num_blocks, block_size, 0.0, prefix_caching, num_host_blocks=num_host_blocks)
    policy: QueuePolicy = Fcfs() if rng.random() < 0.5 else Priority()
    victim = VICTIMS[int(rng.integers(0, len(VICTIMS)))]
    if victim is None and isinstance(policy, Priority):
        victim = victims.LowestPriority()  # the same choice, without vLLM's prefix keys on what is not computed
    scheduler = ContinuousBatching(
        memory,
        LIMIT_OF_ALL,
        policy,
        max_num_seqs=int(rng.integers(3, 8)),
        max_num_batched_tokens=int(rng.integers(2, 25)),
        long_prefill_token_threshold=int(rng.choice([0, 3])),
        victim=victim,
        recovery=recovery,
    )
    return Situation(requests, memory, scheduler, num_host_blocks)


def host_cache_situation(rng: np.random.Generator) -> Situation:
    """Several bursts, of which each evicts what the ones before have left."""
    bursts = [(burst, one) for burst in range(4) for one in some_requests(rng, sampling=True, shared=True)]
    requests = [
        one._replace(request_id=i, arrival_s=20 * burst + one.arrival_s) for i, (burst, one) in enumerate(bursts)
    ]
    block_size = int(rng.choice([1, 2, 4, 5]))
    largest = max(-(-(r.prompt_tokens + r.output_tokens - 1) // block_size) * r.num_outputs for r in requests)
    num_host_blocks = int(rng.choice([5, 20, 100]))
    prompt_priority, output_priority = [(35, 35), (20, 80), (80, 20)][int(rng.integers(0, 3))]
    memory = OffloadingMemory(
        largest + int(rng.integers(0, 3)),
        block_size,
        prompt_priority=prompt_priority,
        output_priority=output_priority,
        num_host_cache_blocks=num_host_blocks,
        secondary_offload_min_priority=int(rng.choice([0, 35])),
    )
    scheduler = ContinuousBatching(
        memory,
        LIMIT_OF_ALL,
        Fcfs(),
        max_num_seqs=int(rng.integers(3, 8)),
        max_num_batched_tokens=int(rng.integers(2, 25)),
    )
    return Situation(requests, memory, scheduler, num_host_blocks)


def contiguous_situation(rng: np.random.Generator) -> Situation:
    block_size = int(rng.choice([1, 4]))
    num_blocks = int(rng.choice([32, 52, 64])) // block_size
    reservation = [MaxReservation(), Pow2Reservation(), OracleReservation()][int(rng.integers(0, 3))]
    allocator = [Buddy, FirstFit, ExactSlots][int(rng.integers(0, 3))](num_blocks)
    memory = ContiguousMemory(num_blocks, LIMIT_OF_ALL, reservation, allocator, block_size)
    chunked = bool(rng.random() < 0.5)
    budget = int(rng.integers(2, 25)) if chunked else None
    scheduler = ContinuousBatching(memory, LIMIT_OF_ALL, Fcfs(), max_num_batched_tokens=budget, chunked_prefill=chunked)
    return Situation(some_requests(rng, sampling=False, shared=False), memory, scheduler, 0)


RANDOM: dict[str, tuple[Callable[[np.random.Generator], Situation], int, set[str]]] = {
    "recompute": (lambda rng: paged_situation(rng, Recompute()), 40, {"preemption", "fork", "copy", "hit"}),
    "swap": (
        lambda rng: paged_situation(rng, Swap()), 40, {"preemption", "swap_out", "swap_in", "fork", "copy", "hit"}
    ),
    "auto": (lambda rng: paged_situation(rng, Auto()), 20, {"preemption", "fork", "copy"}),
    "host cache": (host_cache_situation, 12, {"swap_out", "swap_in", "fork", "copy", "hit"}),
    "contiguous": (contiguous_situation, 15, set()),
}  # fmt: skip


@pytest.mark.parametrize("kind", RANDOM)
def test_every_output_is_greedy_whatever_happens_to_its_blocks(kind: str) -> None:
    situation, num_seeds, expected = RANDOM[kind]
    times = Counter[str]()  # situations in which something happened
    for seed in range(num_seeds):
        one = situation(np.random.default_rng(seed))
        try:
            served = serve(one.requests, one.memory, one.scheduler, one.num_host_blocks)
            assert_greedy(served, one.requests)
        except Exception as error:
            error.add_note(f"seed {seed}: {one}")
            raise
        times += Counter({what: 1 for what, often in served.seen.items() if often})
    rare = {what: times[what] for what in expected if times[what] < num_seeds / 10}
    assert not rare, f"of {num_seeds} situations too few had {rare}"
