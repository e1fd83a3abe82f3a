"""Whole runs of any policy, audited step by step, for tests that hold every policy to the same laws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hypothesis import strategies as st

from sim.plan import StepPlan
from sim.scheduler.base import Scheduler
from sim.sequence import Sequence
from workloads.request import HashIds, Request, TokenIds

LIMIT = 48  # tokens of one request
ENOUGH_STEPS = 20_000

Audit = Callable[[list[Sequence], Sequence | None], None]


@st.composite
def limited_requests(draw: st.DrawFn) -> list[Request]:
    """Bursts and gaps; each client allows as many tokens as will be generated, or more, or beyond the model's limit."""
    now, requests = 0.0, []
    for index in range(draw(st.integers(1, 20))):
        now += draw(st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.7, 20.0]))
        prompt, output = draw(st.integers(1, 24)), draw(st.integers(1, 24))
        family = draw(st.integers(0, 2))
        content = {
            "none": None,
            "told": TokenIds(tuple(family * 1000 + j // 3 for j in range(prompt + output))),
            "hashed": HashIds(tuple(family * 100 + j for j in range(-(-prompt // 4))), 4),
        }[draw(st.sampled_from(["none", "told", "hashed"]))]
        allowed = output + draw(st.sampled_from([0, 0, 1, 7, 60]))
        requests.append(Request(index, now, prompt, output, prompt=content, max_tokens=allowed))
    return requests


def serve_audited(engine: Scheduler, requests: list[Request], audit: Audit) -> Counter[str]:
    """Serves the requests one step at a time, each arrival a step after the last if it comes later; fails if a slot is
    not what it is said to be, or if somebody who was let in does not finish with all tokens.

    Returns:
        How often what happened: steps, preemptions, pauses (steps in which somebody runs who computes nothing).
    """
    seen: Counter[str] = Counter()
    finished: list[Sequence] = []
    accepted = 0
    to_come = list(requests)
    now = 0.0
    while to_come or not engine.idle:
        assert seen["steps"] < ENOUGH_STEPS, "somebody never finishes"
        if engine.idle:
            now = max(now, to_come[0].arrival_s)
        while to_come and to_come[0].arrival_s <= now:
            accepted += engine.arrive(to_come.pop(0))[1] is None
        plan = engine.schedule()
        seen["steps"] += 1
        seen["preemptions"] += len(plan.preemptions)
        seen["pauses"] += len(plan.batch) + plan.steady < len(engine.running)
        audit_now(engine, audit)
        assert plan.batch or plan.steady or plan.preemptions or engine.idle, "nothing is planned, though somebody waits"
        finished += commit_checked(engine, plan)
        audit_now(engine, audit)
        now += 0.2
    assert len(finished) == len(set(finished)) == accepted
    assert all(sequence.known == sequence.final for sequence in finished)
    return seen


def commit_checked(engine: Scheduler, plan: StepPlan) -> list[Sequence]:
    """Commits, and fails unless exactly those have finished who have all their tokens."""
    finished = engine.commit(plan)
    assert all(sequence.known < sequence.final for sequence in engine.running)
    return finished


def audit_now(engine: Scheduler, audit: Audit) -> None:
    audit(list(engine.running), engine.waiting.head() if engine.waiting else None)
