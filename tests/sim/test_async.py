"""Asynchronous scheduling by hand: who joins when, and when the memory of a finished request is free."""

from pathlib import Path

import pyarrow.parquet as pq
import simpy

from sim.engine import Arrivals, Engine
from sim.memory.paged import PagedMemory
from sim.recorder import Recorder
from sim.scheduler.continuous import ContinuousBatching
from sim.scheduler.queues import Fcfs
from sim.timing.constant import Constant
from workloads.request import Request


def served(folder: Path, requests: list[Request], leap: bool, num_blocks: int = 100, **options: object) -> list[dict]:
    """A run with steps of 1 s, blocks of 4 and no reserved block; returns the requests table."""
    memory = PagedMemory(num_blocks, 4, num_reserved_blocks=0, prefix_caching=False)
    scheduler = ContinuousBatching(memory, 64, Fcfs(), leap=leap, **options)  # type: ignore[arg-type]
    recorder = Recorder(folder, memory.num_slots, 4)
    env = simpy.Environment()
    engine = Engine(env, Arrivals(iter(requests)), scheduler, Constant(1.0), recorder, lambda done, now: None)
    env.process(engine.serve())
    env.run()
    recorder.close("complete", {})
    assert memory.num_free_blocks == num_blocks
    rows: list[dict] = pq.read_table(folder / "requests.parquet").to_pylist()
    return sorted(rows, key=lambda row: row["request_id"])


def test_an_arrival_during_a_step_waits_for_the_one_that_is_already_planned(tmp_path):
    # Steps end at 1, 2, 3 …; the second request comes at 1.5, in the second step. Without foresight it runs in the
    # third,
    # from 2 on; with it, that one is planned when it comes, and it runs in the fourth.
    requests = [Request(0, 0.0, 4, 20), Request(1, 1.5, 4, 2)]
    for leap in (False, True):
        (plain, ahead) = (
            served(tmp_path / f"{leap}{mode}", requests, leap, async_scheduling=mode)[1] for mode in (False, True)
        )
        assert (plain["first_scheduled_s"], plain["first_token_s"]) == (2.0, 3.0)
        assert (ahead["first_scheduled_s"], ahead["first_token_s"]) == (3.0, 4.0)


def test_an_idle_engine_takes_a_request_at_once_either_way(tmp_path):
    requests = [Request(0, 0.0, 4, 1), Request(1, 10.25, 4, 1)]
    for mode in (False, True):
        rows = served(tmp_path / f"{mode}", requests, True, async_scheduling=mode)
        assert [row["first_scheduled_s"] for row in rows] == [0.0, 10.25]


def test_what_comes_in_the_last_step_of_an_engine_runs_right_after_it(tmp_path):
    # Nothing could be planned ahead: when the only step ends, the engine looks again.
    rows = served(tmp_path, [Request(0, 0.0, 4, 1), Request(1, 0.5, 4, 1)], True, async_scheduling=True)
    assert rows[1]["first_scheduled_s"] == 1.0


def test_memory_and_seat_of_a_finished_request_are_free_one_plan_later(tmp_path):
    # 4 blocks, all held by the two that run: prompts of 6 and 4 tokens have 2 blocks each from the second step on.
    # The first
    # finishes with the step that ends at 2; the third, which is there from the start, needs 2 blocks. Planned in
    # step, it
    # runs from 2 on; planned ahead, from 3 on, for the plan of the step at 2 was made while the first still ran.
    requests = [Request(0, 0.0, 6, 2), Request(1, 0.0, 4, 5), Request(2, 0.0, 6, 1)]
    for options in ({"num_blocks": 4}, {"max_num_seqs": 2}):
        for leap in (False, True):
            starts = [
                served(tmp_path / f"{options}{leap}{mode}", requests, leap, async_scheduling=mode, **options)[2]
                for mode in (False, True)
            ]
            assert [row["first_scheduled_s"] for row in starts] == [2.0, 3.0]


def test_a_victim_that_has_finished_meanwhile_is_no_preemption(tmp_path):
    # 3 blocks of 4. Prompts of 7 (2 blocks) and 4 (1 block, output 1): the second finishes in the first step. In the
    # next
    # the first computes its 8th token, in the one after its 9th, which needs a third block: free again by then.
    rows = served(tmp_path, [Request(0, 0.0, 7, 5), Request(1, 0.0, 4, 1)], False, 3, async_scheduling=True)
    assert [row["preemptions"] for row in rows] == [0, 0]
    # With a prompt of 8 that block is needed in the very plan in which the second still holds it.
    rows = served(tmp_path / "b", [Request(0, 0.0, 8, 4), Request(1, 0.0, 4, 1)], False, 3, async_scheduling=True)
    assert [row["preemptions"] for row in rows] == [0, 0]
    assert rows[0]["finish_s"] == 4.0
