"""Several outputs of one prompt: forks, copy-on-write, beams; how such requests come and go (Kwon et al., §4.4, §4.5).

Blocks are numbered from 1. The waste of a state is written in the order used, reserved, internal, idle.
"""

from __future__ import annotations

from typing import Any

import pytest

from sim.memory.allocators.fit import FirstFit
from sim.memory.contiguous import ContiguousMemory
from sim.memory.paged import PagedMemory
from sim.memory.reservation import MaxReservation
from sim.plan import StepPlan
from sim.scheduler.continuous import ContinuousBatching
from sim.scheduler.queues import Fcfs
from sim.sequence import Sequence
from workloads.errors import UserError
from workloads.request import Request, TokenIds
from workloads.sampling import BeamSearch, ParallelSampling, Sampling


def scheduler(usable: int, block_size: int, prefix_caching: bool = False, **knobs: Any) -> ContinuousBatching:
    memory = PagedMemory(usable + 1, block_size, prefix_caching=prefix_caching, num_host_blocks=100)
    return ContinuousBatching(memory, 64, Fcfs(), **knobs)


def arrive(
    engine: ContinuousBatching,
    number: int,
    prompt: int,
    output: int,
    sampling: Sampling | None = None,
    ids: tuple[int, ...] | None = None,
) -> Sequence:
    told = TokenIds(ids) if ids is not None else None
    first, reason = engine.arrive(Request(number, float(number), prompt, output, 0, told, sampling))
    assert reason is None
    return first


def step(engine: ContinuousBatching) -> tuple[StepPlan, list[Sequence]]:
    plan = engine.schedule()
    return plan, engine.commit(plan)


def tables(first: Sequence) -> list[list[int]]:
    return [list(sequence.blocks) for sequence in first.together]


def waste(engine: ContinuousBatching) -> tuple[int, int, int, int]:
    occupancy = engine.memory.occupancy(None)
    return occupancy.used, occupancy.reserved, occupancy.internal, occupancy.idle


# -------------------------------------------------------------------------------------------- fork and copy-on-write


def test_three_outputs_share_the_prompt_and_two_of_them_copy_the_block_they_write_to() -> None:
    # A prompt of 20 in blocks of 16: two blocks, the second with 4 tokens. 20 + 5 store 24, so of its 12 empty slots 4
    # are reserved and 8 internal. Once the first token is there all three hold both blocks: 4 blocks less than 6.
    engine = scheduler(usable=10, block_size=16)
    first = arrive(engine, 0, 20, 5, ParallelSampling(3))
    plan, _ = step(engine)
    assert [(one.request.request_id, tokens) for one, tokens in plan.batch] == [(0, 20)]
    assert tables(first) == [[1, 2]] * 3
    assert waste(engine) == (20, 4, 8, 128)
    assert engine.memory.occupancy(None).saved == 4 * 16
    # The next token of each belongs into block 2: the first two copy it, the last one writes in place. Each last block
    # then has 5 tokens, 3 slots that will be filled and 8 that will not; block 1 is shared to the end.
    plan = engine.schedule()
    assert (plan.copies, plan.copied) == (((2, 3), (2, 4)), ((first, 2),))
    assert plan.work.copied_slots == 2 * 16
    assert tables(first) == [[1, 3], [1, 4], [1, 2]]
    assert waste(engine) == (16 + 3 * 5, 3 * 3, 3 * 8, 96)
    assert engine.memory.occupancy(None).saved == 2 * 16
    engine.commit(plan)
    # No copy is needed any more; after five tokens of each, all end in the same step.
    ends = [step(engine) for _ in range(3)]
    assert [plan.copies for plan, _ in ends] == [()] * 3
    assert [finished for _, finished in ends] == [[], [], [first]]
    assert (first.generated, first.generated_in_all) == (5, 15)
    assert engine.idle and waste(engine) == (0, 0, 0, 160)


def test_a_prompt_of_whole_blocks_is_never_copied() -> None:
    # 8 tokens fill two blocks of 4; each output begins a third of its own.
    engine = scheduler(usable=10, block_size=4)
    first = arrive(engine, 0, 8, 3, ParallelSampling(2))
    step(engine)
    plan, _ = step(engine)
    assert plan.copies == ()
    assert tables(first) == [[1, 2, 3], [1, 2, 4]]


def test_a_full_block_of_the_prompt_is_freed_when_the_last_output_ends_and_hit_by_others() -> None:
    # Two outputs of a prompt of 4 hold its block together; a request with the same text and one token more hits it.
    engine = scheduler(usable=10, block_size=4, prefix_caching=True)
    first = arrive(engine, 0, 4, 3, ParallelSampling(2), ids=(7, 8, 9, 10))
    step(engine)
    other = arrive(engine, 1, 5, 9, ids=(7, 8, 9, 10, 11))
    plan, _ = step(engine)
    assert plan.hits == [(other, 4)]
    assert [table[0] for table in (*tables(first), list(other.blocks))] == [1, 1, 1]
    assert engine.memory.occupancy(None).saved == 2 * 4
    step(engine)  # the third token of both outputs: they end
    assert engine.memory.occupancy(None).saved == 0
    assert other.blocks[0] == 1


def test_what_is_told_of_the_output_is_the_first_ones_and_what_follows_it_may_hit_it() -> None:
    # Blocks of 2. The told output makes the text 1 2 3 4 5; of the other output nothing is known. Behind the prompt,
    # only the first one's block (3 4) can be hit.
    engine = scheduler(usable=20, block_size=2, prefix_caching=True)
    arrive(engine, 0, 2, 4, ParallelSampling(2), ids=(1, 2, 3, 4, 5, 6))
    while not engine.idle:
        step(engine)
    follower = arrive(engine, 1, 5, 1, ids=(1, 2, 3, 4, 9))
    plan, _ = step(engine)
    assert plan.hits == [(follower, 4)]


def test_the_block_of_another_output_is_not_taken_for_the_told_one() -> None:
    # As above: the prompt's block, and one full block of each output, the told one's first to be evicted. 17 of 20 are
    # idle, so a prompt of 18 blocks costs just that one: then only the prompt is hit.
    engine = scheduler(usable=20, block_size=2, prefix_caching=True)
    arrive(engine, 0, 2, 4, ParallelSampling(2), ids=(1, 2, 3, 4, 5, 6))
    while not engine.idle:
        step(engine)
    arrive(engine, 1, 36, 1)
    step(engine)
    follower = arrive(engine, 2, 5, 1, ids=(1, 2, 3, 4, 9))
    plan, _ = step(engine)
    assert plan.hits == [(follower, 2)]


def test_what_several_outputs_have_generated_is_not_found_again_by_the_blocks_place() -> None:
    # A prompt of 2 in blocks of 2 and two more full blocks. Whoever comes back alone finds all three; of two outputs,
    # each has another text there, so only the prompt's block is found.
    for sampling, hit in ((None, [1, 2, 3]), (ParallelSampling(2), [1])):
        memory = PagedMemory(11, 2)
        sequence = Sequence.of(Request(0, 0.0, 2, 9, sampling=sampling), 64)
        assert memory.admit(sequence, [], 6, 6, others_run=False)
        sequence.computed, sequence.known = 6, 7
        memory.release(sequence)
        sequence.computed = 0
        assert memory.lookup(sequence) == hit


def test_a_copy_for_a_request_that_is_preempted_in_the_same_step_is_not_made() -> None:
    # 4 blocks of 16. A holds one, the prompt of B two: one is left for the two copies that B's three outputs need. The
    # first takes it, the second finds none, and B is the last to come: all of it goes.
    engine = scheduler(usable=4, block_size=16)
    arrive(engine, 0, 3, 9)
    first = arrive(engine, 1, 20, 5, ParallelSampling(3))
    step(engine)
    plan, _ = step(engine)
    assert [event.victim for event in plan.preemptions] == [first]
    assert (plan.copies, plan.copied, plan.work.copied_slots) == ((), (), 0)
    assert engine.memory.num_free_blocks == 3


def test_one_output_asked_for_by_name_is_an_ordinary_request() -> None:
    engine = scheduler(usable=10, block_size=4)
    assert arrive(engine, 0, 3, 3, ParallelSampling(1)).group is None
    assert arrive(engine, 1, 3, 3, BeamSearch(1, 1.0, 0)).group is None


# ------------------------------------------------------------------------------------------------------------ admission


def test_every_output_has_a_seat_in_the_running_queue_from_the_admission_on() -> None:
    # Five seats: three outputs take three, though only one sequence computes the prompt; three more do not fit, and the
    # single request behind them may not pass.
    engine = scheduler(usable=50, block_size=4, max_num_seqs=5)
    arrive(engine, 0, 3, 3, ParallelSampling(3))
    arrive(engine, 1, 3, 3, ParallelSampling(3))
    arrive(engine, 2, 3, 3)
    assert [one.request.request_id for one in step(engine)[0].admitted] == [0]
    assert step(engine)[0].admitted == []
    assert [one.request.request_id for one in step(engine)[1]] == [0]
    assert [one.request.request_id for one in step(engine)[0].admitted] == [1, 2]


def test_a_gang_larger_than_the_pool_is_rejected_at_arrival_with_the_reason() -> None:
    # 5 + 8 store 12: 3 blocks of 4 for one output. Of several, only the full first block of the prompt is shared, so
    # three end with 1 + 3 * 2 = 7 blocks and four with 9.
    engine = scheduler(usable=8, block_size=4)
    arrive(engine, 0, 5, 8, ParallelSampling(3))
    _, reason = engine.arrive(Request(1, 1.0, 5, 8, sampling=ParallelSampling(4)))
    assert reason == "needs 9 blocks of 4 at its end, the pool has 8"


def test_more_outputs_than_seats_are_rejected_at_arrival() -> None:
    engine = scheduler(usable=50, block_size=4, max_num_seqs=3)
    _, reason = engine.arrive(Request(0, 0.0, 5, 8, sampling=BeamSearch(4, 1.0, 0)))
    assert reason == "needs 4 sequences at once, max_num_seqs is 3"


def test_contiguous_memory_cannot_share_a_prompt_and_says_so() -> None:
    memory = ContiguousMemory(64, 64, MaxReservation(), FirstFit(64))
    engine = ContinuousBatching(memory, 64, Fcfs())
    with pytest.raises(UserError, match="request 0 asks for 2 outputs of one prompt, which this memory cannot"):
        engine.arrive(Request(0, 0.0, 3, 3, sampling=ParallelSampling(2)))


# ---------------------------------------------------------------------------------------------- preemption by recompute


def test_the_outputs_of_a_request_go_together_and_come_back_over_the_common_prompt() -> None:
    # 6 blocks of 4. A, 4 + 12, takes one block and from then on one for every 4 tokens. B has a prompt of 6 and two
    # outputs of 6.
    #   step 1: A holds 1, B's prompt 2; 3 are free. B forks.
    #   step 2: A writes its 5th token, 2 blocks; B's first output copies the block with 2 tokens, 3 blocks. 1 is free.
    #   step 3: nobody needs one: each of B has 8 tokens.
    #   step 4: the ninth token of each of B needs a block; there is one. B's first takes it, its second finds
    #           none and B is the last: both go.
    engine = scheduler(usable=6, block_size=4)
    early = arrive(engine, 0, 4, 12)
    first = arrive(engine, 1, 6, 6, ParallelSampling(2))
    for _ in range(3):
        plan, _ = step(engine)
        assert not plan.preemptions
    assert len(early.blocks) == 2 and len({block for table in tables(first) for block in table}) == 3
    plan, _ = step(engine)
    (event,) = plan.preemptions
    assert (event.victim, event.because.request, event.recovery) == (first, first.request, "recompute")
    assert event.tokens == 4 + 2 * 4  # block 1 of the prompt is stored once; of the other 4 tokens each has its own
    assert [one.request.request_id for one, _ in plan.batch] == [0]
    assert (list(engine.waiting), list(engine.running)) == ([first], [early])
    # With 3 tokens generated each, 9 are known: the full block of the prompt once and 2 * 2 more, 5 blocks. A has its
    # third block in step 6 and its last token in step 12.
    while engine.waiting:
        plan, finished = step(engine)
    assert plan.resumed == [first] and early not in engine.running
    # The first computes the prompt again, then both fork and compute their own 3 tokens, then each gains its fourth.
    assert plan.batch == [(first, 6)] and first.generated_in_all == 6
    plan, _ = step(engine)
    assert [tokens for _, tokens in plan.batch] == [3, 3]
    assert len(plan.copies) == 1
    assert first.generated_in_all == 8
    while not engine.idle:
        plan, finished = step(engine)
    assert finished == [first] and first.generated_in_all == 12


# --------------------------------------------------------------------------------------------------------------- beams


class Scripted:
    """Replaces beams as told, step after step."""

    def __init__(self, *steps: list[tuple[int, int]]) -> None:
        self._steps = list(steps)

    def replaced(self) -> list[tuple[int, int]]:
        return self._steps.pop(0)


def test_a_beam_without_survivors_frees_its_blocks_and_one_with_several_forks() -> None:
    # Three beams of a prompt of 4 in blocks of 4. After the second token each has a block of its own, 2 to 4. Then the
    # second dies and the first survives twice: block 3 is free, block 2 held by two; with the next token the first of
    # the two copies it, and gets block 3 again.
    engine = scheduler(usable=9, block_size=4)
    first = arrive(engine, 0, 4, 9, BeamSearch(3, 1.0, 0))
    assert first.group is not None
    first.group.beams = Scripted([(1, 0)], [(0, 2), (1, 2)])  # type: ignore[assignment]
    step(engine)
    assert tables(first) == [[1], [1], [1]]
    step(engine)
    assert tables(first) == [[1, 2], [1, 2], [1, 4]]
    assert isinstance(engine.memory, PagedMemory) and engine.memory.free_list()[0] == 3
    # 5 slots used twice over count once: block 1 and the 5th token of two different beams.
    assert waste(engine) == (4 + 1 + 1, 3 + 3, 0, 6 * 4)
    plan, _ = step(engine)
    assert plan.copies == ((2, 3),)
    # The third survives three times: only block 1 and its block are left.
    assert tables(first) == [[1, 4]] * 3
    assert engine.memory.num_free_blocks == 7


def test_beams_gain_their_tokens_together_even_if_the_budget_does_not_serve_all_of_them() -> None:
    # Two tokens a step for three beams: every other step ends with a token for each.
    engine = scheduler(usable=30, block_size=4, max_num_batched_tokens=2)
    first = arrive(engine, 0, 2, 4, BeamSearch(3, 1.0, 0))
    generated = []
    while not engine.idle:
        step(engine)
        generated.append(first.generated_in_all)
    assert generated == [3, 3, 6, 6, 9, 9, 12]
