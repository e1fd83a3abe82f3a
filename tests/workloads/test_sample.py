"""A seeded share of a workload, and one with longer requests: what is kept, what is renumbered, what is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.arrivals import Poisson
from workloads.errors import UserError
from workloads.generate import Synthetic
from workloads.length_scale import ScaledLengths
from workloads.lengths import Fixed, Uniform
from workloads.request import HashIds, Request
from workloads.sample import Sampled


class Given:
    """A workload of these requests."""

    def __init__(self, *requests: Request) -> None:
        self.requests = requests
        self.num_requests: int | None = len(requests)

    def __iter__(self):
        return iter(self.requests)


@st.composite
def forests(draw: st.DrawFn) -> list[Request]:
    num = draw(st.integers(1, 40))
    follows = [draw(st.none() | st.integers(0, number - 1)) if number else None for number in range(num)]
    return [Request(number, number / 4, number + 1, 1, after=after) for number, after in enumerate(follows)]


@given(forests(), st.floats(0.01, 1.0), st.integers(0, 99))
def test_a_sample_keeps_times_and_order_and_goes_by_whole_conversations(
    requests: list[Request], share: float, seed: int
) -> None:
    sample = list(Sampled(Given(*requests), share, seed))
    assert sample == list(Sampled(Given(*requests), share, seed))
    assert [request.request_id for request in sample] == list(range(len(sample)))
    old_ids = [request.prompt_tokens - 1 for request in sample]  # as `forests` numbers them
    assert old_ids == sorted(set(old_ids))
    kept = set(old_ids)
    for request in requests:
        assert request.after is None or (request.after in kept) == (request.request_id in kept)
    for request, old in zip(sample, old_ids, strict=True):
        before = requests[old]
        assert request.arrival_s == before.arrival_s
        assert (None if request.after is None else old_ids[request.after]) == before.after


@given(st.floats(0.01, 1.0), st.floats(0.01, 1.0), st.integers(0, 99))
def test_a_larger_share_has_all_of_a_smaller_one(one: float, other: float, seed: int) -> None:
    workload = Given(*(Request(number, float(number), 1, 1) for number in range(60)))
    few, many = ({request.arrival_s for request in Sampled(workload, share, seed)} for share in sorted((one, other)))
    assert few <= many


def test_a_sample_has_its_share_of_requests_at_its_share_of_the_rate() -> None:
    workload = Synthetic(40_000, 8.0, Poisson(), Fixed(1), Fixed(1), 0, 16)
    sample = list(Sampled(workload, 0.25, 3))
    # Binomial: 10,000 with a standard deviation of sqrt(40,000 * 0.25 * 0.75) = 87.
    assert len(sample) == pytest.approx(10_000, abs=4 * 87)
    assert len(sample) / sample[-1].arrival_s == pytest.approx(2.0, rel=4 * math.sqrt(1 / 10_000))


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, math.nan])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(UserError) as error:
        Sampled(Given(), share, 0)
    assert str(error.value) == (f"workload.sample is {share}; expected a share above 0 and at most 1, or null for all.")


def test_lengths_are_scaled_and_rounded_and_nothing_vanishes() -> None:
    # 1.5 times 7, 5 and 9: 10.5 becomes 11, 7.5 becomes 8, 13.5 becomes 14. A tenth of 7 and 1 is below 1.
    one = Request(0, 2.5, 7, 5, priority=1, max_tokens=9)
    assert list(ScaledLengths(Given(one), 1.5)) == [one._replace(prompt_tokens=11, output_tokens=8, max_tokens=14)]
    assert list(ScaledLengths(Given(Request(0, 0.0, 7, 1)), 0.1)) == [Request(0, 0.0, 1, 1)]


def test_means_grow_with_the_lengths() -> None:
    workload = Synthetic(5000, 1.0, Poisson(), Uniform(10, 90), Uniform(100, 300), 0, 4096)
    plain, scaled = (
        [sum(column) / 5000 for column in zip(*((r.prompt_tokens, r.output_tokens) for r in each), strict=True)]
        for each in (workload, ScaledLengths(workload, 2.5))
    )
    assert scaled == pytest.approx([2.5 * mean for mean in plain], abs=0.51)  # rounding is by half a token at most


def test_a_prompt_known_by_what_it_says_has_one_length() -> None:
    with pytest.raises(UserError) as error:
        list(ScaledLengths(Given(Request(0, 0.0, 7, 1, prompt=HashIds((1,), 16))), 2.0))
    assert str(error.value) == (
        "workload.length_scale is 2.0, but request 0 says what its prompt is, which has one length only. Leave it out, "
        "or take a workload that tells lengths alone."
    )


@pytest.mark.parametrize("factor", [0.0, -1.0, math.inf, math.nan])
def test_an_impossible_length_scale_is_refused(factor: float) -> None:
    with pytest.raises(UserError) as error:
        ScaledLengths(Given(), factor)
    assert str(error.value) == f"workload.length_scale is {factor}; expected a finite number above 0."
