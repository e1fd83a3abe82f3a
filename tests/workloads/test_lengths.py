"""Length distributions before any limit on pairs, and the files that lengths can be taken from."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from workloads.errors import UserError
from workloads.lengths import Empirical, Fixed, Gamma, LengthDistribution, Lognormal, Uniform


def shares(lengths: Fixed | Uniform | Empirical, limit: int) -> dict[int, float]:
    """The lengths that occur, with their probabilities."""
    probabilities = lengths.probabilities(limit)
    assert len(probabilities) == limit + 1
    return {int(length): float(probabilities[length]) for length in np.flatnonzero(probabilities)}


def test_fixed_is_one_length() -> None:
    assert shares(Fixed(3), 5) == {3: 1.0}


def test_uniform_includes_both_ends() -> None:
    assert shares(Uniform(2, 5), 10) == {2: 0.25, 3: 0.25, 4: 0.25, 5: 0.25}


@pytest.mark.parametrize(("lengths", "left"), [(Fixed(6), 0.0), (Uniform(2, 9), 0.5)])
def test_lengths_above_the_limit_are_missing_from_the_sum(lengths: Fixed | Uniform, left: float) -> None:
    # Of 2 to 9, four of eight lengths are at most 5.
    assert lengths.probabilities(5).sum() == left


def test_lognormal_rounds_to_the_nearest_length_and_up_to_one() -> None:
    # Length k stands for all x with k - 1/2 <= x < k + 1/2, and 1 for everything below 3/2.
    def below(x: float) -> float:
        return 0.5 * math.erfc(-(math.log(x) - 1.0) / 0.8 / math.sqrt(2))

    probabilities = Lognormal(mean=5.0, sigma=0.8).probabilities(20, location=1.0)
    assert probabilities[0] == 0.0
    assert probabilities[1] == pytest.approx(below(1.5), abs=1e-8)
    for length in (2, 3, 10, 20):
        assert probabilities[length] == pytest.approx(below(length + 0.5) - below(length - 0.5), abs=1e-8)


@pytest.mark.parametrize(
    ("shape", "below"),
    [
        (0.5, lambda x: math.erf(math.sqrt(x))),
        (1.0, lambda x: 1 - math.exp(-x)),
        (3.0, lambda x: 1 - (1 + x + x * x / 2) * math.exp(-x)),
    ],
)
def test_gamma_rounds_to_the_nearest_length_and_up_to_one(shape: float, below: Callable[[float], float]) -> None:
    # Shapes whose distribution function has a closed form, with a scale of 10 tokens; 2,000 is far in the tail.
    probabilities = Gamma(mean=5.0, shape=shape).probabilities(2000, location=math.log(10.0))
    assert probabilities[0] == 0.0
    assert probabilities[1] == pytest.approx(below(0.15), abs=1e-12)
    for length in (2, 10, 50, 300):
        expected = below(length / 10 + 0.05) - below(length / 10 - 0.05)
        assert probabilities[length] == pytest.approx(expected, abs=1e-12)
    assert probabilities.sum() == pytest.approx(1.0, abs=1e-12)
    assert probabilities.min() >= 0.0


@pytest.mark.parametrize("name", ["trace.csv", "trace.jsonl", "trace.parquet"])
def test_empirical_lengths_come_as_often_as_in_the_file(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    if file.suffix == ".csv":
        file.write_text("TIMESTAMP,ContextTokens\n,7\n,9\n,7\n,8\n")
    elif file.suffix == ".jsonl":
        file.write_text("".join(f'{{"ContextTokens": {tokens}}}\n' for tokens in (7, 9, 7, 8)))
    else:
        pyarrow.parquet.write_table(pa.table({"ContextTokens": pa.array([7, 9, 7, 8], pa.int32())}), file)
    lengths = Empirical(str(file), "ContextTokens")
    assert shares(lengths, 20) == {7: 0.5, 8: 0.25, 9: 0.25}
    assert shares(lengths, 8) == {7: 0.5, 8: 0.25}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "tokens\n7\n\n0\n", "t.csv, line 4: tokens is 0; expected a whole number of at least 1."),
        ("t.csv", "tokens\n7\nmany\n", "t.csv, line 3: tokens is 'many'; expected a whole number of at least 1."),
        ("t.csv", "length\n7\n", "t.csv, line 1: the header is 'length'; expected the column names tokens,"),
        ("t.csv", "tokens\n", "t.csv has no rows; expected at least one length in tokens."),
        ("t.jsonl", '{"tokens": 7}\n{"tokens": 1.5}\n', "t.jsonl, line 2: tokens is 1.5; expected a whole number"),
        ("t.jsonl", '{"length": 7}\n', "t.jsonl, line 1: the key 'tokens' is missing; the row has length."),
        ("t.parquet", "tokens", "t.parquet is no Parquet file."),
        (
            "t.txt",
            "7\n",
            "t.txt is no file that lengths can be taken from; expected one ending in .csv, .jsonl, .parquet.",
        ),
    ],
)
def test_a_file_without_lengths_is_refused(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as error:
        Empirical(str(tmp_path / name), "tokens")
    assert str(error.value).removeprefix(f"{tmp_path}/").startswith(message)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([7, 8, 0]), "t.parquet, row 3: tokens is 0; expected a whole number of at least 1."),
        (pa.array([7, None]), "t.parquet, row 2: tokens is None; expected a whole number of at least 1."),
        (pa.array([7.0]), "t.parquet: column tokens holds double; expected whole numbers."),
    ],
)
def test_a_parquet_column_without_lengths_is_refused(column: pa.Array, message: str, tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pa.table({"tokens": column}), tmp_path / "t.parquet")
    with pytest.raises(UserError) as error:
        Empirical(str(tmp_path / "t.parquet"), "tokens")
    assert str(error.value).removeprefix(f"{tmp_path}/").startswith(message)


def test_a_missing_parquet_column_is_refused_with_those_that_are_there(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pa.table({"input": [1], "output": [2]}), tmp_path / "t.parquet")
    with pytest.raises(UserError, match=r"t\.parquet has no column 'tokens'; it has input, output\."):
        Empirical(str(tmp_path / "t.parquet"), "tokens")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fixed(0), "a fixed length is tokens=0; expected"),
        (lambda: Uniform(0, 5), "a uniform length has low=0 and high=5; expected 1 <= low <= high."),
        (lambda: Uniform(6, 5), "a uniform length has low=6 and high=5; expected 1 <= low <= high."),
        (lambda: Lognormal(0.5, 1.0), "a lognormal length has mean=0.5; expected"),
        (lambda: Lognormal(math.nan, 1.0), "a lognormal length has mean=nan; expected"),
        (lambda: Lognormal(100.0, 0.0), "a lognormal length has sigma=0.0; expected"),
        (lambda: Gamma(0.5, 1.0), "a gamma length has mean=0.5; expected"),
        (lambda: Gamma(100.0, 0.0), "a gamma length has shape=0.0; expected"),
    ],
)
def test_an_impossible_length_is_refused(make: Callable[[], LengthDistribution], message: str) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert str(error.value).startswith(message)
