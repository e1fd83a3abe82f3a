"""How many tokens are set aside, by the rules of Kwon et al., SOSP 2023, §6.1."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.memory.reservation import MaxReservation, OracleReservation, Pow2Reservation, Reservation
from sim.sequence import Sequence
from workloads.request import Request

LIMIT = 2048


def reserved(reservation: Reservation, prompt: int, output: int, limit: int = LIMIT) -> int:
    return reservation.tokens(Sequence.of(Request(0, 0.0, prompt, output), limit), limit)


def test_max_reserves_the_model_limit_whatever_is_asked_for() -> None:
    assert reserved(MaxReservation(), 1, 1) == reserved(MaxReservation(), 1000, 500) == LIMIT


@pytest.mark.parametrize(
    ("output", "rounded"), [(1, 1), (2, 2), (3, 4), (4, 4), (16, 16), (17, 32), (25, 32), (32, 32), (33, 64)]
)
def test_pow2_rounds_the_output_up_to_a_power_of_two_and_not_the_prompt(output: int, rounded: int) -> None:
    # The paper's example is 25, which reserves 32. The prompt of 100 stays 100.
    assert reserved(Pow2Reservation(), 100, output) == 100 + rounded


def test_pow2_stops_at_the_model_limit() -> None:
    # 1,000 + 600 tokens: 600 would round to 1,024, and 2,024 <= 2,048. With 1,100 it would be 2,124.
    assert reserved(Pow2Reservation(), 1000, 600) == 2024
    assert reserved(Pow2Reservation(), 1100, 600) == LIMIT


def test_pow2_rounds_what_the_limit_leaves_of_the_output() -> None:
    # 2,040 + 100 is cut off at 2,048, so 8 tokens will be generated, and 8 is a power of two.
    assert reserved(Pow2Reservation(), 2040, 100) == 2048
    # 2,043 + 100: 5 are left of it; 8 would be 2,051, beyond the limit.
    assert reserved(Pow2Reservation(), 2043, 100) == 2048


def test_oracle_reserves_prompt_and_output_to_the_token() -> None:
    assert reserved(OracleReservation(), 161, 338) == 499


@given(prompt=st.integers(1, 40), output=st.integers(1, 40), limit=st.integers(1, 40))
def test_a_reservation_holds_all_that_will_be_stored_and_no_more_than_the_model_can_use(
    prompt: int, output: int, limit: int
) -> None:
    # A prompt at or beyond the limit still yields one token, so it may take one more than itself.
    final = max(prompt + 1, min(prompt + output, limit))
    oracle = reserved(OracleReservation(), prompt, output, limit)
    pow2 = reserved(Pow2Reservation(), prompt, output, limit)
    most = reserved(MaxReservation(), prompt, output, limit)
    assert oracle == final
    assert final <= pow2 <= max(limit, final)
    assert pow2 - prompt < 2 * (final - prompt)  # at most twice the true output
    assert most == max(limit, final)
