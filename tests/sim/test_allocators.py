"""Allocators of contiguous regions: scripts worked out by hand, and the laws that hold for any script."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pool_audit import fits_aligned, fits_anywhere, fits_run, largest_that_fits, next_power_of_two

from sim.memory.allocators.buddy import Buddy
from sim.memory.allocators.exact import ExactSlots
from sim.memory.allocators.fit import BestFit, FirstFit, NextFit
from sim.memory.allocators.interface import Allocator

OPT_13B_POOL = 15_728  # slots of OPT-13B on one A100-40GB; 8192 + 4096 + 2048 + 1024 + 256 + 64 + 32 + 16


def given(region: Sequence[int] | None) -> list[int] | None:
    return None if region is None else list(region)


def run(start: int, end: int) -> list[int]:
    return list(range(start, end))


# ---------------------------------------------------------------------------------------------------------------- buddy


def test_buddy_splits_a_pool_by_its_binary_digits_largest_first() -> None:
    # Each part begins where the larger ones before it end.
    parts = [(8192, 0), (4096, 8192), (2048, 12288), (1024, 14336), (256, 15360), (64, 15616), (32, 15680), (16, 15712)]
    assert sum(size for size, _ in parts) == OPT_13B_POOL
    buddy = Buddy(OPT_13B_POOL)
    for size, start in parts:
        assert buddy.largest_free == size
        assert buddy.allocate(size) == range(start, start + size)
    assert (buddy.num_free, buddy.largest_free) == (0, 0)
    assert buddy.allocate(1) is None


def test_buddy_pool_of_opt_13b_has_seven_regions_of_2048_and_no_eighth() -> None:
    # The smallest region that is large enough goes first: the 2048 one, then the 4096 one halved, then the 8192 one
    # quartered, lower half first: 1 + 2 + 4 = 7. What is left, 15,728 - 7 * 2,048 = 1,392 slots, is 1024 at most.
    buddy = Buddy(OPT_13B_POOL)
    regions = [buddy.allocate(2048) for _ in range(7)]
    assert [region.start for region in regions if region] == [12288, 8192, 10240, 0, 2048, 4096, 6144]
    assert buddy.allocate(2048) is None
    assert (buddy.num_free, buddy.largest_free) == (1392, 1024)


def test_buddies_merge_back_in_any_order_of_release() -> None:
    buddy = Buddy(OPT_13B_POOL)
    regions = [buddy.allocate(2048) for _ in range(7)]
    # Regions 2048 and 4096 are neighbours but no buddies, so both free make no more than 2048. The buddy of 2048 is 0:
    # together 4096. The buddy of 4096 is 6144: another 4096, whose buddy is the first, so 8192.
    for index, largest in ((4, 2048), (5, 2048), (3, 4096), (6, 8192)):
        region = regions[index]
        assert region is not None
        buddy.free(region)
        assert buddy.largest_free == largest
    assert buddy.allocate(8192) == range(0, 8192)


def test_buddy_rounds_up_to_a_power_of_two_and_leaves_the_halves() -> None:
    # 5 takes 8 of the 16: 0 to 7. 1 then takes 8, leaving 9, 10 to 11 and 12 to 15; 3 takes these last four.
    buddy = Buddy(16)
    assert [buddy.rounded(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, 16]
    assert given(buddy.allocate(5)) == run(0, 8)
    assert given(buddy.allocate(1)) == [8]
    assert given(buddy.allocate(3)) == run(12, 16)
    assert (buddy.num_free, buddy.largest_free) == (3, 2)


def test_buddy_takes_the_lowest_of_equal_regions_whatever_came_back_last() -> None:
    # Four regions of 2 in 8; 0 to 1 and then 4 to 5 come back, and their buddies stay out, so nothing merges.
    buddy = Buddy(8)
    regions = [buddy.allocate(2) for _ in range(4)]
    for index in (0, 2):
        region = regions[index]
        assert region is not None
        buddy.free(region)
    assert given(buddy.allocate(2)) == [0, 1]


def test_the_ragged_end_of_a_buddy_pool_never_merges_beyond_it() -> None:
    # 6 = 4 + 2: the buddy of 4 to 5 would be 6 to 7, which is not there.
    buddy = Buddy(6)
    regions = [buddy.allocate(2) for _ in range(3)]
    for region in regions:
        assert region is not None
        buddy.free(region)
    assert (buddy.num_free, buddy.largest_free) == (6, 4)
    assert buddy.allocate(5) is None


# ----------------------------------------------------------------------------------------- first, best, next fit, exact


def holes(allocator: Allocator) -> Allocator:
    """A pool of 20 with free runs 0-5, 8-11 and 14-19, and the last allocation ending at 14."""
    regions = [allocator.allocate(size) for size in (6, 2, 4, 2)]
    for region, start, end in ((regions[0], 0, 6), (regions[2], 8, 12)):
        assert region is not None and given(region) == run(start, end)
        allocator.free(region)
    assert allocator.num_free == 6 + 4 + 6
    return allocator


def test_first_fit_takes_the_lowest_run_that_is_large_enough() -> None:
    # Free 0-5, 8-11, 14-19. 3 goes to 0; then 3-5 is too small for 4, so 8; then only 14-19 holds 5, and 19 is left.
    allocator = holes(FirstFit(20))
    assert [given(allocator.allocate(n)) for n in (3, 4, 5, 4)] == [run(0, 3), run(8, 12), run(14, 19), None]
    assert (allocator.num_free, allocator.largest_free) == (4, 3)  # 3-5 and 19


def test_best_fit_takes_the_smallest_run_that_is_large_enough_and_the_lowest_of_equals() -> None:
    # 3 fits tightest into 8-11. 4 then finds two runs of 6 and takes the lower; 5 the other. Left: 4-5, 11, 19.
    allocator = holes(BestFit(20))
    assert [given(allocator.allocate(n)) for n in (3, 4, 5, 3)] == [run(8, 11), run(0, 4), run(14, 19), None]
    assert (allocator.num_free, allocator.largest_free) == (4, 2)


def test_next_fit_goes_on_where_it_stopped_and_begins_again_at_the_bottom() -> None:
    # It stopped at 14, so 3 goes to 14. Behind that only 17-19 is left: too small for 4, which wraps to 0. Free are now
    # 4-5, 8-11, 17-19: 9 blocks, but no 5 in a row. It stopped at 4, so 2 goes there, though 8 would do as well.
    allocator = holes(NextFit(20))
    assert [given(allocator.allocate(n)) for n in (3, 4, 5, 2)] == [run(14, 17), run(0, 4), None, run(4, 6)]
    assert (allocator.num_free, allocator.largest_free) == (7, 4)


def test_the_three_fits_differ_on_the_same_pool() -> None:
    assert [given(holes(fit(20)).allocate(3)) for fit in (FirstFit, BestFit, NextFit)] == [
        run(0, 3),
        run(8, 11),
        run(14, 17),
    ]


@pytest.mark.parametrize("fit", [FirstFit, BestFit, NextFit])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_a_freed_run_merges_with_both_neighbours(fit: Callable[[int], Allocator], order: tuple[int, ...]) -> None:
    allocator = fit(9)
    regions = [allocator.allocate(3) for _ in range(3)]
    for index in order:
        region = regions[index]
        assert region is not None
        allocator.free(region)
    assert allocator.largest_free == 9


def test_exact_slots_hands_out_the_last_freed_first_and_needs_no_neighbours() -> None:
    # 0, 1 and 2, 3 are out, 4 is left. 0, 1 come back: 1 was put back last, then 0, then 4.
    exact = ExactSlots(5)
    first, second = exact.allocate(2), exact.allocate(2)
    assert (given(first), given(second)) == ([0, 1], [2, 3])
    assert first is not None
    exact.free(first)
    assert exact.largest_free == 3
    assert given(exact.allocate(3)) == [1, 0, 4]
    assert exact.allocate(1) is None


# ----------------------------------------------------------------------------------------------------------------- laws


class AllocatorMachine(RuleBasedStateMachine):
    """Any order of allocations and releases; the free blocks are known from what was handed out."""

    make: Callable[[int], Allocator]
    fits: Callable[[Collection[int], int], bool]
    aligned = False

    @initialize(num_blocks=st.integers(1, 40))
    def begin(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.allocator = type(self).make(num_blocks)
        self.largest_at_start = self.allocator.largest_free
        self.free = set(range(num_blocks))
        self.regions: list[Sequence[int]] = []

    @rule(num_blocks=st.integers(1, 20))
    def allocate(self, num_blocks: int) -> None:
        granted = self.allocator.rounded(num_blocks) <= self.allocator.largest_free
        assert granted == type(self).fits(self.free, num_blocks)
        region = self.allocator.allocate(num_blocks)
        assert (region is not None) == granted
        if region is not None:
            assert len(region) == len(set(region)) == self.allocator.rounded(num_blocks)
            assert self.free.issuperset(region)
            if self.aligned:
                assert len(region) == next_power_of_two(num_blocks) and region[0] % len(region) == 0
            self.free.difference_update(region)
            self.regions.append(region)

    @precondition(lambda self: self.regions)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        region = self.regions.pop(data.draw(st.integers(0, len(self.regions) - 1)))
        self.allocator.free(region)
        self.free.update(region)

    @invariant()
    def free_blocks_are_counted(self) -> None:
        assert self.allocator.num_free == len(self.free)
        assert self.allocator.largest_free == largest_that_fits(self.free, type(self).fits)

    def teardown(self) -> None:
        if hasattr(self, "regions"):
            for region in self.regions:
                self.allocator.free(region)
            assert self.allocator.num_free == self.num_blocks
            assert self.allocator.largest_free == self.largest_at_start


class BuddyMachine(AllocatorMachine):
    make, fits, aligned = Buddy, staticmethod(fits_aligned), True


class FirstFitMachine(AllocatorMachine):
    make, fits = FirstFit, staticmethod(fits_run)


class BestFitMachine(AllocatorMachine):
    make, fits = BestFit, staticmethod(fits_run)


class NextFitMachine(AllocatorMachine):
    make, fits = NextFit, staticmethod(fits_run)


class ExactMachine(AllocatorMachine):
    make, fits = ExactSlots, staticmethod(fits_anywhere)


SOME = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestBuddyLaws = BuddyMachine.TestCase
TestFirstFitLaws = FirstFitMachine.TestCase
TestBestFitLaws = BestFitMachine.TestCase
TestNextFitLaws = NextFitMachine.TestCase
TestExactLaws = ExactMachine.TestCase
for case in (TestBuddyLaws, TestFirstFitLaws, TestBestFitLaws, TestNextFitLaws, TestExactLaws):
    case.settings = SOME
del case  # pytest would collect it as one more test
