"""Synthetic workloads: what the seed fixes, what it leaves apart, and where a workload ends."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.arrivals import AllAtOnce, ArrivalProcess, Constant, Gamma, Poisson
from workloads.errors import UserError
from workloads.generate import Synthetic
from workloads.lengths import Fixed, LengthDistribution, Lognormal, Uniform
from workloads.request import HashIds, Request


def synthetic(**changes: Any) -> Synthetic:
    knobs: dict[str, Any] = {
        "num_requests": 50,
        "rate": 2.0,
        "arrivals": Poisson(),
        "prompt_lengths": Lognormal(161.31, 1.0),
        "output_lengths": Lognormal(337.99, 1.0),
        "seed": 0,
        "max_model_len": 2048,
    }
    return Synthetic(**knobs | changes)


def arrivals(workload: Synthetic) -> list[float]:
    return [request.arrival_s for request in workload]


def prompts(workload: Synthetic) -> list[int]:
    return [request.prompt_tokens for request in workload]


def outputs(workload: Synthetic) -> list[int]:
    return [request.output_tokens for request in workload]


def test_constant_arrivals_and_fixed_lengths_are_known_in_advance() -> None:
    # The first comes one gap after 0, at 1/4 s.
    workload = synthetic(
        num_requests=3, rate=4.0, arrivals=Constant(), prompt_lengths=Fixed(6), output_lengths=Fixed(2)
    )
    assert list(workload) == [Request(0, 0.25, 6, 2), Request(1, 0.5, 6, 2), Request(2, 0.75, 6, 2)]


def test_a_shared_prefix_comes_before_every_prompt_and_nothing_else_is_shared() -> None:
    # 5 tokens of prefix and 6 of one's own; prompts and outputs are drawn as without, under a limit that is 5 lower.
    first, second = synthetic(num_requests=2, prompt_lengths=Fixed(6), shared_prefix_tokens=5)
    assert first.prompt_tokens == second.prompt_tokens == 11
    assert isinstance(first.prompt, HashIds) and isinstance(second.prompt, HashIds)
    assert first.prompt.block_size == 1
    assert first.prompt.ids[:5] == second.prompt.ids[:5]
    assert len({*first.prompt.ids, *second.prompt.ids}) == 5 + 6 + 6
    plain = synthetic(max_model_len=2043)
    behind = synthetic(shared_prefix_tokens=5)
    assert prompts(behind) == [tokens + 5 for tokens in prompts(plain)]
    assert outputs(behind) == outputs(plain)
    assert all(request.prompt is None for request in plain)


@pytest.mark.parametrize("tokens", [-1, 2047])
def test_a_shared_prefix_that_leaves_no_room_is_refused(tokens: int) -> None:
    with pytest.raises(UserError, match=rf"workload\.shared_prefix_tokens is {tokens}; expected 0 to 2046"):
        synthetic(shared_prefix_tokens=tokens)


def test_all_at_once_is_at_time_zero() -> None:
    assert arrivals(synthetic(arrivals=AllAtOnce())) == [0.0] * 50


def test_same_seed_same_requests() -> None:
    workload = synthetic(num_requests=5000)  # more than a chunk
    assert list(workload) == list(workload) == list(synthetic(num_requests=5000))


def test_requests_are_numbered_by_their_position() -> None:
    # Beyond the 4096 that are made at once.
    assert [request.request_id for request in synthetic(num_requests=9000)] == list(range(9000))


def test_another_seed_has_other_arrivals_and_lengths() -> None:
    assert arrivals(synthetic(seed=0)) != arrivals(synthetic(seed=1))
    assert prompts(synthetic(seed=0)) != prompts(synthetic(seed=1))
    assert outputs(synthetic(seed=0)) != outputs(synthetic(seed=1))


def test_arrivals_do_not_change_the_lengths() -> None:
    poisson, gamma, faster = synthetic(), synthetic(arrivals=Gamma(0.5)), synthetic(rate=3.0)
    assert arrivals(poisson) != arrivals(gamma)
    assert prompts(poisson) == prompts(gamma) == prompts(faster)
    assert outputs(poisson) == outputs(gamma) == outputs(faster)


def test_lengths_do_not_change_the_arrivals() -> None:
    assert arrivals(synthetic()) == arrivals(synthetic(prompt_lengths=Fixed(1), output_lengths=Uniform(1, 9)))


def test_outputs_do_not_change_prompts_where_the_limit_does_not_bind() -> None:
    shorter, longer = (synthetic(prompt_lengths=Uniform(1, 100), output_lengths=Fixed(tokens)) for tokens in (1, 1900))
    assert prompts(shorter) == prompts(longer)


def test_a_rate_twice_as_high_halves_every_arrival_time() -> None:
    assert arrivals(synthetic(rate=4.0)) == pytest.approx(
        [arrival_s / 2 for arrival_s in arrivals(synthetic(rate=2.0))]
    )


def test_prompts_and_outputs_are_drawn_apart() -> None:
    # One generator for both would pair each length with itself.
    workload = synthetic(prompt_lengths=Uniform(1, 1000), output_lengths=Uniform(1, 1000))
    assert prompts(workload) != outputs(workload)


@pytest.mark.parametrize(("lengths_of", "mean"), [(prompts, 161.31), (outputs, 337.99)])
def test_sample_means_are_those_asked_for(lengths_of: Any, mean: float) -> None:
    lengths = lengths_of(synthetic(num_requests=50_000))
    # Standard deviations are under 1.3 times the mean (untruncated: sqrt(e - 1) = 1.31), so the standard error is under
    # 1.31 / sqrt(50,000) = 0.6 % of it.
    assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=4 * 0.006)


def test_a_workload_can_end_by_time() -> None:
    # Gaps of 1/2 s from 1/2 s on: 0.5, 1.0, 1.5 are before 2 s, and 2.0 is not.
    workload = synthetic(num_requests=None, duration_s=2.0, arrivals=Constant())
    assert arrivals(workload) == [0.5, 1.0, 1.5]
    assert workload.num_requests is None


def test_ending_by_time_gives_the_requests_that_come_before_it() -> None:
    by_time = list(synthetic(num_requests=None, duration_s=10.0))
    by_number = list(synthetic(num_requests=len(by_time) + 1))
    assert by_time == by_number[:-1]
    assert by_number[-1].arrival_s >= 10.0


def test_knows_its_number_of_requests() -> None:
    assert synthetic(num_requests=7).num_requests == 7


# At the lowest limit, 100, the worst of these is 40 to 160 with 40 to 160: 21 * 22 / 2 of 121² pairs fit, 1.6 %.
lengths = st.one_of(
    st.builds(Fixed, st.integers(1, 40)),
    st.builds(lambda low, more: Uniform(low, low + more), st.integers(1, 40), st.integers(0, 120)),
    st.builds(Lognormal, st.floats(1.0, 12.0), st.floats(0.1, 1.5)),
)
processes = st.one_of(
    st.builds(Poisson), st.builds(Gamma, st.floats(0.1, 10.0)), st.builds(Constant), st.builds(AllAtOnce)
)


@settings(max_examples=50, deadline=None)
@given(process=processes, prompt=lengths, output=lengths, seed=st.integers(0, 2**64), limit=st.integers(100, 300))
def test_requests_fit_the_model_and_come_in_order(
    process: ArrivalProcess, prompt: LengthDistribution, output: LengthDistribution, seed: int, limit: int
) -> None:
    knobs = {"arrivals": process, "prompt_lengths": prompt, "output_lengths": output, "seed": seed}
    requests = list(synthetic(max_model_len=limit, num_requests=300, **knobs))
    assert [request.request_id for request in requests] == list(range(300))
    assert all(request.prompt_tokens >= 1 and request.output_tokens >= 1 for request in requests)
    assert all(request.prompt_tokens + request.output_tokens <= limit for request in requests)
    assert all(before.arrival_s <= after.arrival_s for before, after in pairwise(requests))


@settings(max_examples=20, deadline=None)
@given(process=processes, shorter=st.integers(1, 9000), more=st.integers(0, 9000), seed=st.integers(0, 2**32))
def test_a_longer_workload_begins_with_the_shorter_one(
    process: ArrivalProcess, shorter: int, more: int, seed: int
) -> None:
    long = list(synthetic(arrivals=process, num_requests=shorter + more, seed=seed))
    assert long[:shorter] == list(synthetic(arrivals=process, num_requests=shorter, seed=seed))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate": 0.0}, "workload.rate is 0.0; expected a finite number of requests/s above 0."),
        ({"rate": -1.0}, "workload.rate is -1.0; expected a finite number of requests/s above 0."),
        ({"rate": float("inf")}, "workload.rate is inf; expected a finite number of requests/s above 0."),
        ({"rate": float("nan")}, "workload.rate is nan; expected a finite number of requests/s above 0."),
        ({"num_requests": 0}, "workload.num_requests is 0; expected a whole number of at least 1."),
        ({"num_requests": None}, "workload.num_requests is null and workload.duration_s is null; expected one of them"),
        ({"duration_s": 5.0}, "workload.num_requests is 50 and workload.duration_s is 5.0; expected one of them"),
        ({"num_requests": None, "duration_s": 0.0}, "workload.duration_s is 0.0; expected a finite number of seconds"),
        (
            {"num_requests": None, "duration_s": 5.0, "arrivals": AllAtOnce()},
            "workload.duration_s cannot end arrivals that all come at once. Use workload.num_requests.",
        ),
        ({"seed": -1}, "workload.seed is -1; expected a whole number of at least 0."),
        ({"seed": None}, "workload.seed is null; expected a whole number of at least 0."),
        ({"max_model_len": 1}, "workload.max_model_len is 1; expected at least 2 tokens"),
        ({"max_model_len": None}, "workload.max_model_len is null; expected at least 2 tokens"),
        ({"max_model_len": 400}, "the mean lengths asked for (prompt: lognormal with a mean of 161.31 tokens"),
    ],
)
def test_an_impossible_workload_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        synthetic(**changes)
    assert str(error.value).startswith(message)
