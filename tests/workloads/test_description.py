"""The statistics of `kvtwin describe`, against the same figures computed from whole lists, and against real traces."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workloads.columns
from workloads.asked_limit import AskedLimit
from workloads.columns import Columns, columns_of
from workloads.description import describe
from workloads.limit import FirstRequests
from workloads.readers.burstgpt import BURSTGPT
from workloads.readers.csv_trace import CsvTrace
from workloads.readers.trace import Trace
from workloads.request import HashIds, Request, TokenIds, Workload
from workloads.sampling import ParallelSampling
from workloads.several_outputs import SeveralOutputs
from workloads.statistics.arrivals import MOST_BINS, Dispersion, Gaps, RateOverTime
from workloads.statistics.concurrency import Concurrency
from workloads.statistics.lengths import Correlation, LengthCounts
from workloads.statistics.prefix_reuse import PrefixReuse
from workloads.time_scale import ScaledTime

arrivals = st.lists(st.integers(0, 10**6), min_size=1, max_size=60).map(lambda ms: np.array(sorted(ms)) / 1000)
lengths = st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=60).map(lambda values: np.array(values, np.int64))


def in_pieces(column: np.ndarray, data: st.DataObject) -> Iterator[np.ndarray]:
    """The column cut at any places, without empty pieces."""
    cuts = data.draw(st.sets(st.integers(1, len(column) - 1))) if len(column) > 1 else set()
    yield from np.split(column, sorted(cuts))


@given(lengths, st.data())
@settings(deadline=None)
def test_lengths_are_counted_exactly(tokens: np.ndarray, data: st.DataObject) -> None:
    counts = LengthCounts()
    for piece in in_pieces(tokens, data):
        counts.add(piece)
    ordered = sorted(tokens.tolist())
    summary = counts.summary()
    assert (summary["min"], summary["max"], summary["total"]) == (ordered[0], ordered[-1], sum(ordered))
    assert summary["mean"] == sum(ordered) / len(ordered)
    for percent in (50, 90, 99):
        # The smallest value that at least so many per cent of the values do not exceed.
        expected = next(value for rank, value in enumerate(ordered, 1) if 100 * rank >= percent * len(ordered))
        assert summary[f"p{percent}"] == expected


@given(arrivals, st.data())
@settings(deadline=None)
def test_gaps_are_those_of_the_whole_list(arrival_s: np.ndarray, data: st.DataObject) -> None:
    gaps = Gaps()
    for piece in in_pieces(arrival_s, data):
        gaps.add(piece)
    summary, all_gaps = gaps.summary(), np.diff(arrival_s)
    if not len(all_gaps):
        assert set(summary.values()) == {None}
        return
    assert summary["mean_s"] == pytest.approx(all_gaps.mean(), abs=1e-9)
    assert summary["max_s"] == all_gaps.max()
    assert summary["zero_share"] == (all_gaps == 0).mean()
    if all_gaps.any():
        assert summary["cv"] == pytest.approx(all_gaps.std() / all_gaps.mean(), abs=1e-6)
    edges, shares = gaps.distribution()
    assert shares.tolist() == [(all_gaps <= edge).mean() for edge in edges]
    assert shares[-1] == 1


@given(arrivals, st.sampled_from([0.5, 1.0, 7.0, 100.0]), st.data())
@settings(deadline=None)
def test_dispersion_is_that_of_all_whole_windows(arrival_s: np.ndarray, window_s: float, data: st.DataObject) -> None:
    dispersion = Dispersion(window_s)
    for piece in in_pieces(arrival_s, data):
        dispersion.add(piece)
    summary = dispersion.summary()
    windows = ((arrival_s - arrival_s[0]) // window_s).astype(int)
    counts = np.bincount(windows)[:-1]
    assert summary["windows"] == len(counts)
    assert summary["mean"] == (pytest.approx(counts.mean()) if len(counts) else None)
    if len(counts) < 10:
        assert summary["index"] is None
    else:
        assert summary["index"] == pytest.approx(counts.var() / counts.mean(), abs=1e-9)


@given(arrivals, st.floats(1e-3, 1e4), st.data())
@settings(deadline=None)
def test_rate_over_time_loses_no_request(arrival_s: np.ndarray, stretch: float, data: st.DataObject) -> None:
    arrival_s = arrival_s * stretch
    rate = RateOverTime()
    for piece in in_pieces(arrival_s, data):
        rate.add(piece)
    counts, offsets = rate.counts(), arrival_s - arrival_s[0]
    edges = rate.bin_s * np.arange(len(counts) + 1)
    assert counts.tolist() == np.histogram(offsets[offsets < edges[-1]], edges)[0].tolist()
    assert edges[-1] + rate.bin_s > offsets[-1] or len(counts) == 1  # nothing but the last bin is missing
    assert len(counts) <= MOST_BINS and (rate.bin_s == 2**-10 or len(counts) >= MOST_BINS // 2 - 1)


@given(arrivals, st.floats(1e-3, 10), st.data())
@settings(deadline=None)
def test_concurrency_is_that_of_counting_at_each_arrival(
    arrival_s: np.ndarray, per_token_s: float, data: st.DataObject
) -> None:
    count = len(arrival_s)
    outputs = np.array(data.draw(st.lists(st.integers(1, 500), min_size=count, max_size=count)))
    held = outputs + np.array(data.draw(st.lists(st.integers(1, 9000), min_size=count, max_size=count)))
    concurrency = Concurrency(per_token_s)
    for places in in_pieces(np.arange(count), data):
        concurrency.add(arrival_s[places], outputs[places], held[places])
    ends = arrival_s + outputs * per_token_s
    there = [[j for j in range(count) if arrival_s[j] <= now < ends[j] and j <= i] for i, now in enumerate(arrival_s)]
    summary = concurrency.summary(100.0)
    assert summary["peak"] == max(map(len, there))
    assert summary["peak_tokens"] == max(int(held[who].sum()) for who in there)
    # Little's law: what all stay together, over the time.
    assert summary["mean"] == pytest.approx(outputs.sum() * per_token_s / 100)


@given(st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 9000)), min_size=2, max_size=50), st.data())
@settings(deadline=None)
def test_correlation_is_numpys(pairs: list[tuple[int, int]], data: st.DataObject) -> None:
    x, y = np.array(pairs).T
    correlation = Correlation()
    for places in in_pieces(np.arange(len(x)), data):
        correlation.add(x[places], y[places])
    if len(set(x.tolist())) == 1 or len(set(y.tolist())) == 1:
        assert correlation.value is None
    else:
        assert correlation.value == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-6)


def test_prefix_reuse_stops_at_the_first_new_block_and_knows_the_last_partial_one() -> None:
    reuse = PrefixReuse(16)
    reuse.add([HashIds((1, 2, 3), 512), None, HashIds((1, 2, 4), 512), HashIds((9, 2), 512)], [1100, 50, 1536, 600])
    # The first holds nothing; the second finds 1 and 2, 1,024 tokens; the third begins with a new block: none.
    reuse.add([HashIds((1, 2, 3), 512)], [1100])  # all three, of which the last is partial: 1,100 tokens and not 1,536
    assert reuse.summary() == {
        "requests_known": 4,
        "blocks": 3 + 3 + 2 + 3,
        "hit_blocks": 2 + 3,
        "hit_block_share": 5 / 11,
        "prompt_tokens": 1100 + 1536 + 600 + 1100,
        "hit_tokens": 1024 + 1100,
        "hit_token_share": 2124 / 4336,
        "distinct_blocks": 5,
        "counting_bytes": reuse.summary()["counting_bytes"],  # type: ignore[index]
    }


def test_prompts_known_token_by_token_share_full_blocks_from_the_front() -> None:
    reuse = PrefixReuse(4)
    first = TokenIds((1, 2, 3, 4, 5, 6, 7, 8, 9))
    # Same second block behind another first one; same first block; the whole prompt and an output token behind it.
    others = [TokenIds((0, 2, 3, 4, 5, 6, 7, 8)), TokenIds((1, 2, 3, 4, 0, 6, 7, 8)), TokenIds((*first.ids, 77))]
    reuse.add([first, *others], [9, 8, 8, 9])
    summary = reuse.summary()
    assert summary is not None
    assert (summary["blocks"], summary["hit_blocks"], summary["hit_tokens"]) == (8, 0 + 1 + 2, 12)


ROWS = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + "".join(
    f"{7 + number * 0.3},A,{number % 50 + 1},{number % 7},9,L\n" for number in range(400)
)


@pytest.fixture
def trace(tmp_path: Path) -> CsvTrace:
    path = tmp_path / "trace.csv"
    path.write_text(ROWS)
    return CsvTrace(str(path), BURSTGPT, "drop")


@pytest.mark.parametrize(
    "around",
    [
        lambda trace: trace,
        lambda trace: FirstRequests(trace, 150),
        lambda trace: FirstRequests(trace, 100_000),
        lambda trace: SeveralOutputs(ScaledTime(AskedLimit(FirstRequests(trace, 99), 7), 0.5), ParallelSampling(3)),
    ],
)
def test_columns_of_a_trace_are_those_of_its_requests(
    around: Callable[[Workload], Workload], trace: CsvTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = around(trace)
    requests = list(workload)
    columns = list(columns_of(workload))
    assert len(columns) == 1  # one block of the file, not one batch of requests

    def joined(pieces: list[Columns], name: str) -> list[float]:
        return [value for piece in pieces for value in getattr(piece, name).tolist()]

    monkeypatch.setattr(workloads.columns, "BATCH", 64)
    gathered = list(workloads.columns._gathered(iter(workload)))
    assert len(gathered) == -(-len(requests) // 64)
    for name in ("arrival_s", "prompt_tokens", "output_tokens", "num_outputs"):
        assert joined(columns, name) == joined(gathered, name) == [getattr(request, name) for request in requests]


def test_columns_count_from_the_first_row_where_the_format_does(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5,1,2\n2023-11-16 18:15:47,3,4\n")
    trace = Trace(str(path))
    (columns,) = columns_of(trace._workload)
    assert columns.arrival_s.tolist() == [0.0, 0.5]


def test_poisson_arrivals_are_told_from_bursts() -> None:
    # Gaps of a Poisson process have a CV of 1 and counts an index of 1; with 20,000 requests both are within 5 % or so.
    generator = np.random.default_rng(0)
    steady = np.cumsum(generator.exponential(0.1, 20_000))
    in_tens = np.repeat(np.cumsum(generator.exponential(1.0, 2_000)), 10)  # batches of ten: the index is ten
    for arrival_s, cv, index in ((steady, 1.0, 1.0), (in_tens, np.sqrt(2 * 10 - 1), 10.0)):
        # Nine gaps of ten are 0: E[g] = m / 10, E[g²] = 2 m² / 10, so CV² = 20 - 1.
        gaps, dispersion = Gaps(), Dispersion(10.0)
        gaps.add(arrival_s)
        dispersion.add(arrival_s)
        assert gaps.summary()["cv"] == pytest.approx(cv, rel=0.05)
        assert dispersion.summary()["index"] == pytest.approx(index, rel=0.25)


def test_requests_that_all_come_at_once_have_no_rate() -> None:
    summary = describe(SeveralAtOnce(), 16, 0.1).summary()
    assert (summary["span_s"], summary["request_rate"], summary["gaps"]["cv"]) == (0.0, None, None)
    assert summary["gaps"]["zero_share"] == 1.0
    assert (summary["concurrency"]["mean"], summary["concurrency"]["peak"]) == (None, 5)
    # 5 prompts of 10 tokens with two outputs of 3 tokens each.
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (50, 30)
    assert summary["concurrency"]["peak_tokens"] == 80
    assert summary["lengths"]["output"]["max"] == 3 and summary["lengths"]["total"]["max"] == 16
    assert summary["prefix_reuse"] is None


class SeveralAtOnce:
    num_requests = 5

    def __iter__(self) -> Iterator[Request]:
        return (Request(number, 2.0, 10, 3, sampling=ParallelSampling(2)) for number in range(5))


@pytest.mark.parametrize(
    ("name", "requests", "prompt_tokens", "output_tokens", "span_s"),
    [
        ("azure_2023_conv.csv", 19_366, 22_361_870, 4_088_665, 3501.72),
        ("azure_2023_code.csv", 8_819, 18_059_974, 245_896, 3435.95),
    ],
)
def test_totals_of_the_azure_traces(
    name: str,
    requests: int,
    prompt_tokens: int,
    output_tokens: int,
    span_s: float,
    real_trace: Callable[[str], str],
) -> None:
    summary = describe(Trace(real_trace(name)), 16, 0.025).summary()
    assert summary["requests"] == requests
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (prompt_tokens, output_tokens)
    assert summary["span_s"] == pytest.approx(span_s, abs=0.005)


def test_prefix_reuse_of_the_mooncake_conversation(real_trace: Callable[[str], str]) -> None:
    # Ids are chained, so each id that stands in the file more than once is a hit at all places but the first: 36.6 %.
    path = real_trace("mooncake_conversation.jsonl")
    ids = [one for line in Path(path).read_text().splitlines() for one in json.loads(line)["hash_ids"]]
    summary = describe(Trace(path), 16, 0.025).summary()
    assert summary["requests"] == 12_031
    reuse = summary["prefix_reuse"]
    assert (reuse["blocks"], reuse["distinct_blocks"]) == (len(ids), len(set(ids)))
    assert reuse["hit_blocks"] == len(ids) - len(set(ids))
    assert round(reuse["hit_block_share"], 3) == 0.366
    assert [window["window_s"] for window in summary["dispersion"] if window["index"] is not None] == [1, 10, 60]


def test_a_description_does_not_depend_on_how_requests_are_gathered() -> None:
    requests = [Request(n, n**1.5, n % 97 + 1, n % 13 + 1, prompt=HashIds((n % 5, n), 4)) for n in range(1000)]

    class Listed:
        num_requests = 1000

        def __iter__(self) -> Iterator[Request]:
            return iter(requests)

    usual = workloads.columns.BATCH
    try:
        summaries = []
        for size in (7, 64, usual):
            workloads.columns.BATCH = size
            summaries.append(describe(Listed(), 16, 0.5).summary())
    finally:
        workloads.columns.BATCH = usual
    assert summaries[0]["prefix_reuse"] == summaries[1]["prefix_reuse"] == summaries[2]["prefix_reuse"]
    assert summaries[0]["lengths"] == summaries[2]["lengths"]
    assert summaries[0]["concurrency"] == summaries[2]["concurrency"]
    assert summaries[0]["rate_over_time"] == summaries[2]["rate_over_time"]
    assert summaries[0]["dispersion"] == summaries[2]["dispersion"]
