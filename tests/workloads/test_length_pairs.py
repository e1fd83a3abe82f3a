"""Pairs under the limit: their law, and the means that a lognormal length asks for."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from workloads.errors import UserError
from workloads.length_pairs import LengthPairs, pairs_within
from workloads.lengths import Fixed, Gamma, LengthDistribution, Lognormal, Uniform


def drawn(pairs: LengthPairs, num_pairs: int, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return pairs.at(generator.random(num_pairs), generator.random(num_pairs))


def test_pairs_that_fit_are_as_likely_as_before_relative_to_one_another() -> None:
    # 1 to 3 with 1 to 3 under 4: (1,1) (1,2) (1,3) (2,1) (2,2) (3,1) are left of 9, all alike.
    pairs = pairs_within(4, Uniform(1, 3), Uniform(1, 3))
    assert pairs.share_accepted == pytest.approx(6 / 9)
    assert pairs.mean_prompt == pytest.approx((3 * 1 + 2 * 2 + 1 * 3) / 6)
    assert pairs.mean_output == pytest.approx((3 * 1 + 2 * 2 + 1 * 3) / 6)
    # Half of the prompts are 1, a third 2, a sixth 3; behind 1 outputs are thirds, behind 2 halves, behind 3 all 1.
    prompts, outputs = pairs.at(
        np.array([0.0, 0.49, 0.49, 0.51, 0.51, 0.83, 0.84]), np.array([0, 0.3, 0.9, 0.4, 0.6, 0.9, 0.9])
    )
    assert prompts.tolist() == [1, 1, 1, 2, 2, 2, 3]
    assert outputs.tolist() == [1, 1, 3, 1, 2, 2, 1]


def test_a_limit_that_never_binds_leaves_a_plain_lognormal() -> None:
    # Median = mean / exp(sigma²/2) = 1000 / exp(1/2) = 606.5; one sigma up (quantile 0.841345) e times that: 1648.7.
    pairs = pairs_within(131_072, Lognormal(1000.0, 1.0), Fixed(1))
    prompts, _ = pairs.at(np.array([0.5, 0.841345]), np.zeros(2))
    assert prompts.tolist() == pytest.approx([606.5, 1648.7], abs=1)
    assert pairs.share_accepted == pytest.approx(1.0, abs=1e-5)


def test_the_law_is_that_of_drawing_and_leaving_out() -> None:
    # Draw with NumPy, round, leave out what exceeds the limit, and ask for the means of what is left: the quantiles
    # have to be the same. With 300,000 pairs a median has a relative standard error of 1.25 * sigma / sqrt(n) = 0.3 %,
    # and the 5 % quantile, where the density is lowest, 2.1 * sigma / sqrt(n) = 0.5 %; the means have errors alike.
    generator = np.random.default_rng(11)
    prompts = np.maximum(1, np.rint(generator.lognormal(5.5, 1.0, 300_000)))
    outputs = np.maximum(1, np.rint(generator.lognormal(6.0, 1.2, 300_000)))
    fits = prompts + outputs <= 2048
    pairs = pairs_within(2048, Lognormal(prompts[fits].mean(), 1.0), Lognormal(outputs[fits].mean(), 1.2))
    assert pairs.share_accepted == pytest.approx(fits.mean(), abs=0.01)
    for ours, theirs in zip(drawn(pairs, 300_000), (prompts[fits], outputs[fits]), strict=True):
        quantiles = [0.05, 0.25, 0.5, 0.75, 0.95]
        assert np.quantile(ours, quantiles) == pytest.approx(np.quantile(theirs, quantiles), rel=0.03)


# Kwon et al., SOSP 2023, Fig. 11, under the limit of OPT; then a long context; then a limit that binds hard.
REACHABLE = [
    (2048, Lognormal(161.31, 1.0), Lognormal(337.99, 1.0)),
    (2048, Lognormal(19.31, 1.0), Lognormal(58.45, 1.0)),
    (131_072, Lognormal(12_035.0, 1.2), Lognormal(342.6, 1.0)),
    (2048, Lognormal(600.0, 1.0), Lognormal(600.0, 1.0)),
    (2048, Lognormal(900.0, 0.1), Lognormal(900.0, 0.1)),
    (2048, Lognormal(2.1, 0.01), Lognormal(1.0, 1.0)),
    (2048, Lognormal(161.31, 1.0), Gamma(337.99, 1.3)),
    (2048, Gamma(900.0, 100.0), Gamma(900.0, 100.0)),
    (131_072, Gamma(5_000.0, 0.2), Gamma(1.0, 0.01)),
]


@pytest.mark.parametrize(("limit", "prompt", "output"), REACHABLE)
def test_means_are_those_asked_for(limit: int, prompt: Lognormal | Gamma, output: Lognormal | Gamma) -> None:
    pairs = pairs_within(limit, prompt, output)
    assert pairs.mean_prompt == pytest.approx(prompt.mean, rel=1e-6)
    assert pairs.mean_output == pytest.approx(output.mean, rel=1e-6)


@pytest.mark.parametrize(("limit", "prompt", "output"), REACHABLE)
def test_sample_means_are_those_asked_for(limit: int, prompt: Lognormal | Gamma, output: Lognormal | Gamma) -> None:
    for lengths, wanted in zip(
        drawn(pairs_within(limit, prompt, output), 50_000), (prompt.mean, output.mean), strict=True
    ):
        assert lengths.mean() == pytest.approx(wanted, abs=4 * lengths.std() / np.sqrt(50_000) + 1e-9)


def test_a_lognormal_beside_another_kind_has_its_mean_too() -> None:
    pairs = pairs_within(2048, Lognormal(500.0, 1.0), Uniform(1, 1000))
    assert pairs.mean_prompt == pytest.approx(500.0, rel=1e-6)
    # Long outputs find less room, so theirs is below the (1 + 1000) / 2 that was not asked for.
    assert pairs.mean_output < 500.5


@settings(max_examples=50, deadline=None)
@given(
    limit=st.integers(100, 5000),
    prompt_share=st.floats(0.0, 0.9),
    output_share=st.floats(0.0, 0.9),
    sigmas=st.tuples(st.floats(0.01, 2.0), st.floats(0.01, 2.0)),
)
def test_means_are_reached_or_refused(
    limit: int, prompt_share: float, output_share: float, sigmas: tuple[float, float]
) -> None:
    prompt, output = Lognormal(1 + prompt_share * limit, sigmas[0]), Lognormal(1 + output_share * limit, sigmas[1])
    try:
        pairs = pairs_within(limit, prompt, output)
    except UserError:
        # What is refused has a reason: means that together take under a third of the limit leave room for these sigmas.
        assert prompt.mean + output.mean > 2 + limit / 3
        return
    assert pairs.mean_prompt == pytest.approx(prompt.mean, rel=1e-6)
    assert pairs.mean_output == pytest.approx(output.mean, rel=1e-6)


lengths = st.one_of(
    st.builds(Fixed, st.integers(1, 60)),
    st.builds(lambda low, more: Uniform(low, low + more), st.integers(1, 60), st.integers(0, 60)),
    st.builds(Lognormal, st.floats(1.0, 40.0), st.floats(0.1, 2.0)),
    st.builds(Gamma, st.floats(1.0, 40.0), st.floats(0.1, 20.0)),
)


@settings(max_examples=200, deadline=None)
@given(limit=st.integers(2, 100), prompt=lengths, output=lengths, quantiles=st.lists(st.floats(0, 1, exclude_max=True)))
def test_pairs_never_exceed_the_limit(
    limit: int, prompt: LengthDistribution, output: LengthDistribution, quantiles: list[float]
) -> None:
    try:
        pairs = pairs_within(limit, prompt, output)
    except UserError:
        assume(False)
    almost_one = np.nextafter(1.0, 0.0)
    sides = np.meshgrid([0.0, almost_one, *quantiles], [0.0, almost_one, *quantiles[::-1]])
    prompts, outputs = pairs.at(*(side.ravel() for side in sides))
    assert prompts.min() >= 1
    assert outputs.min() >= 1
    assert (prompts + outputs).max() <= limit


@pytest.mark.parametrize(
    ("limit", "prompt", "output", "message"),
    [
        (
            2048,
            Fixed(2000),
            Fixed(100),
            "no prompt (2000 tokens) with an output (100 tokens) fits the limit of 2048 tokens for both together. "
            "Make the lengths shorter or max_model_len larger.",
        ),
        (
            2048,
            Lognormal(1500.0, 1.0),
            Lognormal(600.0, 1.0),
            "the mean lengths asked for (prompt: lognormal with a mean of 1500 tokens and sigma 1; "
            "output: lognormal with a mean of 600 tokens and sigma 1) cannot be reached under the limit of 2048 tokens "
            "for both together. Lower a mean, or make max_model_len larger.",
        ),
        (
            100,
            Uniform(1, 1_000_000),
            Fixed(1),
            "under 1% of prompts (1 to 1000000 tokens) with outputs (1 tokens) would fit the limit of 100 tokens for "
            "both together; what is left has little to do with either. Make the lengths shorter or max_model_len "
            "larger.",
        ),
    ],
)
def test_lengths_that_cannot_be_had_are_refused(
    limit: int, prompt: LengthDistribution, output: LengthDistribution, message: str
) -> None:
    with pytest.raises(UserError) as error:
        pairs_within(limit, prompt, output)
    assert str(error.value) == message
