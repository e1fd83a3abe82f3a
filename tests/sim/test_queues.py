"""Who waits in which order (rules 11 and 15). Who must go is seen only with a scheduler: `test_continuous.py`."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sim.scheduler.queues import Fcfs, Priority, QueuePolicy
from sim.sequence import Sequence
from workloads.request import Request


def sequence(request_id: int, priority: int = 0, arrival: float = 0.0) -> Sequence:
    return Sequence.of(Request(request_id, arrival, 1, 1, priority), 16)


def waiting(queue: QueuePolicy) -> list[int]:
    return [sequence.request.request_id for sequence in queue]


def test_fcfs_serves_in_order_of_arrival_whatever_the_priority() -> None:
    queue = Fcfs()
    for request_id, priority in ((0, 2), (1, 0), (2, 1)):
        queue.arrive(sequence(request_id, priority))
    assert (waiting(queue), len(queue)) == ([0, 1, 2], 3)
    assert queue.head().request.request_id == queue.pop().request.request_id == 0
    assert waiting(queue) == [1, 2]


def test_fcfs_puts_the_preempted_to_the_front_so_of_several_the_last_one_is_first() -> None:
    queue = Fcfs()
    queue.arrive(sequence(7))
    for victim in (3, 2):
        queue.return_preempted(sequence(victim))
    queue.arrive(sequence(8))
    assert waiting(queue) == [2, 3, 7, 8]


def test_priority_serves_the_smaller_number_first_then_the_earlier_then_the_lower_id() -> None:
    queue = Priority()
    for request_id, priority, arrival in ((0, 1, 0.0), (1, 0, 0.5), (2, 0, 0.5), (3, -1, 0.7), (4, 0, 0.7)):
        queue.arrive(sequence(request_id, priority, arrival))
    assert waiting(queue) == [3, 1, 2, 4, 0]
    assert [queue.pop().request.request_id for _ in range(5)] == [3, 1, 2, 4, 0]
    assert not queue


def test_priority_puts_the_preempted_to_their_ordinary_place() -> None:
    queue = Priority()
    for request_id, priority in ((1, 0), (2, 2)):
        queue.arrive(sequence(request_id, priority, 1.0))
    queue.return_preempted(sequence(0, 1))
    queue.return_preempted(sequence(3, 2, 2.0))
    assert waiting(queue) == [1, 0, 2, 3]


@given(st.lists(st.tuples(st.integers(-2, 2), st.booleans(), st.booleans()), max_size=20))
def test_priority_queue_is_sorted_after_any_arrivals_returns_and_pops(moves: list[tuple[int, bool, bool]]) -> None:
    queue = Priority()
    here: list[tuple[int, float, int]] = []
    for request_id, (priority, pop, returned) in enumerate(moves):
        if pop and here:
            here.remove(min(here))
            queue.pop()
        newcomer = sequence(request_id, priority, request_id / 2)
        queue.return_preempted(newcomer) if returned else queue.arrive(newcomer)
        here.append((priority, request_id / 2, request_id))
        assert waiting(queue) == [request_id for _, _, request_id in sorted(here)]
        assert queue.head() is next(iter(queue))
