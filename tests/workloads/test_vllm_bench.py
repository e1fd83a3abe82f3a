"""The random data set of `vllm bench serve`: the lengths of its published runs, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.errors import UserError
from workloads.request import Request
from workloads.vllm_bench import VllmBenchRandom

# Pull request 44594 of vLLM: `--num-prompts 450 --random-input-len 1000 --random-output-len 5000 --random-range-ratio
# 0.2`, no `--seed`; output token/s and requests/s of its five runs.
STUDY = (450, 1000, 5000, 0.2)
TOKENS_PER_SECOND = {2.306: 11582, 2.416: 12134, 2.423: 12167, 2.356: 11835, 2.317: 11635}


def mean_output(seed: int) -> float:
    return sum(request.output_tokens for request in VllmBenchRandom(*STUDY, seed)) / 450


def test_seed_0_draws_the_lengths_of_a_published_study() -> None:
    # Tokens a request are their quotient. All five ran the same requests, so the mean is in all five intervals that
    # rounding leaves: 5022.07 to 5022.70. About one draw in a hundred would be by chance: means scatter by
    # 2000 / sqrt(12 * 450) = 27.
    low = max((tokens - 0.5) / (rate + 0.0005) for rate, tokens in TOKENS_PER_SECOND.items())
    high = min((tokens + 0.5) / (rate - 0.0005) for rate, tokens in TOKENS_PER_SECOND.items())
    assert (round(low, 2), round(high, 2)) == (5022.07, 5022.70)
    assert low <= mean_output(0) <= high
    assert not any(low <= mean_output(seed) <= high for seed in range(1, 20))


def test_lengths_are_whole_numbers_within_the_range_and_reach_its_ends() -> None:
    requests = list(VllmBenchRandom(20_000, 10, 5, 0.25, 0))  # 7.5 to 12.5 and 3.75 to 6.25, rounded outwards
    assert {request.prompt_tokens for request in requests} == set(range(7, 14))
    assert {request.output_tokens for request in requests} == set(range(3, 8))


def test_without_a_range_all_are_alike_and_ready_at_once() -> None:
    workload = VllmBenchRandom(3, 1024, 128, 0.0, 7)
    assert workload.num_requests == 3
    assert list(workload) == [Request(number, 0.0, 1024, 128) for number in range(3)]


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(1, 40), st.floats(0, 0.99), st.integers(0, 2**32))
def test_iterating_twice_gives_the_same_requests(num_requests: int, mean: int, ratio: float, seed: int) -> None:
    workload = VllmBenchRandom(num_requests, 100 + mean, mean, ratio, seed)
    requests = list(workload)
    assert requests == list(workload)
    assert [request.request_id for request in requests] == list(range(num_requests))
    assert all(request.output_tokens >= 1 for request in requests)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"num_requests": 0}, "workload.num_requests is 0; expected a whole number of at least 1."),
        ({"random_output_len": 0}, "workload.random_output_len is 0; expected a whole number of at least 1."),
        ({"random_range_ratio": 1.0}, "workload.random_range_ratio is 1.0; expected at least 0 and below 1."),
        (
            {"random_input_len": 1, "random_range_ratio": 0.5},
            "workload.random_input_len is 1, so with workload.random_range_ratio=0.5 a prompt may have no token; take "
            "a longer one or a smaller ratio.",
        ),
        ({"seed": None}, "workload.seed is null; expected a whole number of at least 0."),
        ({"seed": -1}, "workload.seed is -1; expected a whole number of at least 0."),
    ],
)
def test_what_cannot_be_drawn_is_refused(options: dict[str, Any], line: str) -> None:
    given_options: dict[str, Any] = {
        "num_requests": 5,
        "random_input_len": 10,
        "random_output_len": 10,
        "random_range_ratio": 0.2,
        "seed": 0,
    }
    with pytest.raises(UserError) as error:
        VllmBenchRandom(**given_options | options)
    assert str(error.value) == line
