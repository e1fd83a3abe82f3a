"""The kernel benchmark with times given by hand: cases, shares, tuning, what is kept, and what peers are given."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

torch = pytest.importorskip("torch", reason="the kernels need PyTorch")
pytest.importorskip("triton", reason="the kernels need Triton")

import hydra  # noqa: E402
from torch import Tensor  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402

from gpu.bench.cases import ATTENTION, BenchOptions, Case, Layout, Problem  # noqa: E402
from gpu.bench.device import DeviceBench  # noqa: E402
from gpu.bench.peers import FlashInferAttention, Peer, TorchAttention, VllmAttention, installed  # noqa: E402
from gpu.bench.report import heading, rows, sentences  # noqa: E402
from gpu.bench.results import Rates, Timing, content  # noqa: E402
from gpu.bench.session import Refused, Session  # noqa: E402
from gpu.bench.tensors import Pool, Sequences  # noqa: E402
from gpu.bench.timing import CudaTimer  # noqa: E402
from gpu.bench.tuning import (  # noqa: E402
    GAIN,
    Launch,
    ProblemClass,
    fastest,
    problem_class,
    table_launch,
    tuning_content,
)
from gpu.bench.work import attention_work  # noqa: E402
from gpu.commands.bench import measure_into, options_of  # noqa: E402
from gpu.kernels import launch as launches  # noqa: E402
from gpu.kernels.launch import DecodeLaunch, Device, PrefillLaunch, decode_launch, load_tuning  # noqa: E402
from gpu.kernels.reference import attend, gather_sequence  # noqa: E402
from gpu.kernels.scoring import Scoring  # noqa: E402
from gpu.kernels.shapes import AttentionShape  # noqa: E402
from sim.cli import main  # noqa: E402
from sim.plots.kernels import draw_kernels, kernel_figure  # noqa: E402
from tests.gpu_check import Step, check  # noqa: E402
from tests.gpu_check import main as gpu_check  # noqa: E402
from workloads.errors import UserError  # noqa: E402

H200 = Device("sm_90", 132)
ABOUT = {"name": "NVIDIA H200", "target": "sm_90"}
LONG = Problem("decode", 64, 4096, num_kv_heads=8, group=4, head_dim=128, block_size=16, precision="bfloat16")
SMALL = Problem("decode", 3, 50, num_kv_heads=2, group=2, head_dim=16, block_size=16, precision="float32")


def composed(*overrides: str) -> BenchOptions:
    with hydra.initialize_config_module("conf", version_base="1.3"):
        return options_of(hydra.compose("bench", overrides=list(overrides)))


FEW = (
    "bench.batches=[64,1]",
    "bench.contexts=[4096,1024]",
    "bench.prompts=[2048,512]",
    "bench.prompt_tokens=4096",
    "bench.block_sizes=[16,64]",
    "bench.groups=[4]",
    "bench.head_dims=[128]",
    "bench.precisions=[bfloat16,fp8]",
)


SETTINGS = composed(*FEW)


class TimesByHand:
    """A bench whose times are a function of the case and its launch; a Refused or another error is raised."""

    def __init__(
        self,
        time: Callable[[Case, Launch | None], float | BaseException],
        peers: Mapping[str, Layout] | None = None,
    ) -> None:
        self.device = H200
        self.peers = peers or {}
        self.measured: list[tuple[Case, Launch | None]] = []
        self._time = time

    def rates(self) -> Rates:
        return Rates(copy_bandwidth=4e12, matmul_rate=5e14)

    def measure(self, case: Case, launch: Launch | None) -> Timing:
        self.measured.append((case, launch))
        time = self._time(case, launch)
        if isinstance(time, BaseException):
            raise time
        return Timing(median=time, min=time / 2, repeats=7)


def found_by(bench: TimesByHand, *overrides: str) -> dict[str, Any]:
    session = Session(composed(*FEW, *overrides), bench)
    session.run()
    return content(session.record, ABOUT, {"triton": "3.9.0"})


def only(found: Mapping[str, Any], **wanted: object) -> dict[str, Any]:
    (entry,) = [entry for entry in found["cases"] if all(entry[key] == value for key, value in wanted.items())]
    return dict(entry)


# ---------------------------------------------------------------------------------------------------------------- cases


def test_bytes_and_operations_of_a_decode() -> None:
    # K and V: 2 × 64 × 4,096 tokens × 8 heads × 128 × 2 bytes = 1 GiB; queries and outputs: 2 × 64 × 32 × 128 × 2.
    assert LONG.bytes_moved == 2**30 + 2**20
    # Two products of 64 × 32 rows of 128 with 4,096 keys, a multiplication and an addition each.
    assert LONG.flops == 2 * 2 * 64 * 32 * 128 * 4096
    fp8 = replace(LONG, precision="fp8")
    assert (fp8.dtype, fp8.pool_dtype) == ("bfloat16", "float8_e4m3fn")
    assert fp8.bytes_moved == 2**29 + 2**20


def test_bytes_and_operations_of_a_prefill() -> None:
    # One head, three tokens: 1 + 2 + 3 pairs of query and key, 4 × 16 operations each.
    tiny = Problem("prefill", 1, 3, num_kv_heads=1, group=1, head_dim=16, block_size=16, precision="float16")
    assert tiny.flops == 6 * 4 * 16
    assert tiny.bytes_moved == 4 * 3 * 16 * 2  # queries, K, V and outputs


def test_bytes_of_kernels_that_move_data() -> None:
    # 2 × 10 tokens × 2 × 64 elements: read in bfloat16 and written in fp8, or read and written in fp8.
    moved = Problem("write", 1, 10, num_kv_heads=2, group=4, head_dim=64, block_size=16, precision="fp8")
    assert moved.bytes_moved == 2 * 10 * 2 * 64 * (2 + 1)
    assert replace(moved, kernel="copy").bytes_moved == 2 * 10 * 2 * 64 * (1 + 1)
    assert moved.flops == 0


def test_base_cases_come_first_and_one_axis_varies_at_a_time() -> None:
    problems = composed(*FEW).problems()
    assert len(set(problems)) == len(problems)
    assert problems[0] == LONG
    assert [problem.kernel for problem in problems[:4]] == ["decode", "prefill", "write", "copy"]
    assert (problems[1].batch, problems[1].context) == (2, 2048)  # 4,096 tokens in prompts of 2,048
    decodes = {problem for problem in problems if problem.kernel == "decode"}
    pairs = [(64, 4096), (64, 1024), (1, 4096), (1, 1024)]
    assert decodes == {
        *(replace(LONG, batch=batch, context=context) for batch, context in pairs),
        replace(LONG, block_size=64),
        replace(LONG, precision="fp8"),
    }


def test_the_contiguous_layout_and_contiguous_peers_are_measured_once_for_all_block_sizes() -> None:
    cases = composed(*FEW, "bench.kernels=[decode]").cases({"torch": "contiguous", "vllm": "paged"})
    at_base = [case for case in cases if replace(case.problem, block_size=16) == LONG]
    assert [(case.by, case.layout, case.problem.block_size) for case in at_base] == [
        ("kvtwin", "paged", 16),
        ("kvtwin", "contiguous", 4096),
        ("torch", "contiguous", 4096),
        ("vllm", "paged", 16),
        ("kvtwin", "paged", 64),
        ("vllm", "paged", 64),
    ]


def test_kernels_without_attention_have_neither_layouts_nor_peers() -> None:
    cases = composed(*FEW, "bench.kernels=[copy,write]").cases({"torch": "contiguous"})
    assert {(case.by, case.layout) for case in cases} == {("kvtwin", "paged")}


def test_the_committed_options_have_the_base_case_of_the_targets() -> None:
    options = composed()
    assert options.problems()[0] == LONG
    assert (options.base("prefill").dtype, options.base("prefill").head_dim) == ("bfloat16", 128)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("bench.kernels=[decoding]", "bench.kernels has decoding; expected some of decode, prefill, write, copy"),
        ("bench.kernels=[]", "bench.kernels is empty"),
        ("bench.precisions=[int4]", "bench.precisions has int4; expected some of bfloat16"),
        ("bench.peers=[cudnn]", "bench.peers has cudnn; expected some of torch, flashinfer, vllm"),
        ("bench.contexts=[0]", r"bench.contexts is \[0\]; expected whole numbers of at least 1"),
        ("bench.contexts=[]", r"bench.contexts is \[\]"),
        ("bench.contexts=long", "bench.contexts is 'long'"),
        ("bench.contexts=[a]", r"bench.contexts\[0\] is 'a'; expected a whole number"),
        ("bench.head_dims=[512]", "bench.head_dims has 512; the kernels take heads of up to 256"),
        ("bench.prompt_tokens=0", "bench.prompt_tokens is 0"),
        ("bench.budget=0", "bench.budget must be above 0 seconds"),
        ("bench.tune=maybe", "bench.tune is 'maybe'; expected true or false"),
    ],
)
def test_an_option_that_cannot_be_is_one_line_that_names_it(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        composed(override)
    assert "\n" not in str(error.value)


# --------------------------------------------------------------------------------------------------------------- shares


def hand_times(case: Case, launch: Launch | None) -> float:
    """Paged takes 1 ms, contiguous 0.98 ms, torch 2 ms, vLLM 0.5 ms."""
    if case.by != "kvtwin":
        return {"torch": 2e-3, "vllm": 5e-4}[case.by]
    return 1e-3 if case.layout == "paged" else 9.8e-4


def test_shares_are_of_what_the_same_run_measured() -> None:
    found = found_by(TimesByHand(hand_times, {"torch": "contiguous"}))
    assert (found["status"], found["copy_bandwidth"], found["matmul_rate"]) == ("complete", 4e12, 5e14)
    paged = found["cases"][0]
    assert (paged["kernel"], paged["layout"], paged["batch"], paged["block_size"]) == ("decode", "paged", 64, 16)
    assert paged["bandwidth"] == pytest.approx((2**30 + 2**20) / 1e-3)
    assert paged["share_of_copy"] == pytest.approx((2**30 + 2**20) / 1e-3 / 4e12)
    assert paged["share_of_contiguous"] == pytest.approx(0.98)
    assert (paged["seconds_median"], paged["seconds_min"], paged["repeats"]) == (1e-3, 5e-4, 7)
    assert (paged["by"], paged["dtype"], paged["pool_dtype"], paged["refused"]) == (
        "kvtwin",
        "bfloat16",
        "bfloat16",
        None,
    )
    # 2 prompts of 2,048 tokens: 2 × 2,048 × 2,049 / 2 pairs, 32 heads of 128.
    prefill = only(
        found, kernel="prefill", layout="contiguous", by="kvtwin", precision="bfloat16", context=2048, batch=2
    )
    rate = 4 * 2048 * 2049 * 32 * 128 / 9.8e-4
    assert prefill["flop_rate"] == pytest.approx(rate)
    assert prefill["share_of_matmul"] == pytest.approx(rate / 5e14)
    assert prefill["share_of_contiguous"] is None
    assert only(found, kernel="copy", precision="fp8")["share_of_matmul"] is None


def test_other_block_sizes_are_compared_with_the_same_contiguous_layout() -> None:
    found = found_by(TimesByHand(lambda case, _: case.problem.block_size * 1e-4))
    larger = only(found, kernel="decode", layout="paged", block_size=64, precision="bfloat16")
    assert larger["share_of_contiguous"] == pytest.approx(4096 / 64)


def test_a_refused_case_says_why_and_the_others_are_measured() -> None:
    def time(case: Case, launch: Launch | None) -> float | BaseException:
        if case.layout == "contiguous" or case.problem.precision == "fp8":
            return Refused("no such type")
        return 1e-3

    found = found_by(TimesByHand(time))
    refused = only(found, kernel="decode", layout="paged", precision="fp8")
    assert (refused["refused"], refused["seconds_median"], refused["share_of_copy"]) == ("no such type", None, None)
    base = found["cases"][0]
    assert base["share_of_copy"] is not None and base["share_of_contiguous"] is None
    assert found["status"] == "complete"


@given(
    median=st.floats(1e-6, 1.0),
    copy=st.floats(1e10, 1e13),
    context=st.integers(1, 10_000),
    kernel=st.sampled_from(["decode", "prefill", "write", "copy"]),
)
def test_a_share_times_its_reference_times_the_time_is_the_bytes(
    median: float, copy: float, context: int, kernel: Any
) -> None:
    problem = replace(LONG, kernel=kernel, context=context)
    bench = TimesByHand(lambda case, _: median)
    session = Session(SETTINGS, bench)
    session.record.rates = Rates(copy, 1e15)
    session.record.outcomes.append(session._outcome(Case(problem, "paged"), None))
    (entry,) = content(session.record, ABOUT, {})["cases"]
    assert entry["share_of_copy"] * copy * median == pytest.approx(problem.bytes_moved)


# ---------------------------------------------------------------------------------------------------------- the session


def test_no_case_begins_once_the_budget_is_used_up() -> None:
    now = iter(range(1000))  # each look at the clock is a second later
    bench = TimesByHand(hand_times)
    session = Session(composed(*FEW, "bench.budget=5"), bench, clock=lambda: next(now))
    total = len(composed(*FEW).cases({}))
    session.run()
    # Begun at 0; looked at 1, 2, 3 and 4, and at 5 the budget is used up.
    assert [case for case, _ in bench.measured] == composed(*FEW).cases({})[:4]
    found = content(session.record, ABOUT, {})
    assert (found["left_out"], found["status"]) == (total - 4, "complete")
    assert sentences(found)[-1] == f"Left out: {total - 4} cases, for want of time (bench.budget)."


def test_progress_is_told_after_each_case() -> None:
    told: list[tuple[int, int]] = []
    session = Session(composed(*FEW, "bench.kernels=[copy]"), TimesByHand(hand_times), lambda *done: told.append(done))
    session.run()
    assert told == [(1, 3), (2, 3), (3, 3)]  # the base, another block size, another precision


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), "interrupted"), (RuntimeError("the device is gone"), "failed")]
)
def test_what_was_measured_before_a_stop_is_kept(error: BaseException, status: str, tmp_path: Path) -> None:
    count = 0

    def time(case: Case, launch: Launch | None) -> float | BaseException:
        nonlocal count
        count += 1
        return error if count == 4 else 1e-3

    with pytest.raises(type(error)):
        measure_into(tmp_path, composed(*FEW), TimesByHand(time), ABOUT, {})
    found = json.loads((tmp_path / "bench.json").read_text())
    assert (found["status"], len(found["cases"])) == (status, 3)
    assert found["left_out"] == len(composed(*FEW).cases({})) - 3
    assert not list(tmp_path.glob(".*"))


def test_nothing_is_written_if_nothing_was_measured(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        measure_into(tmp_path, composed(*FEW), TimesByHand(lambda *_: KeyboardInterrupt()), ABOUT, {})
    assert not list(tmp_path.iterdir())


def test_a_run_writes_its_files_and_says_what_the_base_cases_reach(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = composed(*FEW, "bench.tune=true")
    measure_into(tmp_path, options, TimesByHand(hand_times, {"torch": "contiguous"}), ABOUT, {"triton": "3.9.0"})
    names = {"bench.json", "tuning.json", "decode.png", "decode.svg", "prefill.png", "prefill.svg"}
    assert {path.name for path in tmp_path.iterdir()} == names
    printed = capsys.readouterr().out
    # 1 GiB + 1 MiB in 1 ms are 1.0748 TB/s, 26.9 % of 4 TB/s.
    assert (
        "decode, 64 × 4,096 tokens, 8 × 4 of 128, bfloat16, blocks of 16: 26.9 % of the copy bandwidth, "
        "98.0 % of the speed on the contiguous layout.\n" in printed
    )
    assert printed.startswith("NVIDIA H200 (sm_90): copy 4,000 GB/s, bfloat16 matmul 500.0 TFLOP/s\n")
    assert printed.splitlines()[-1].startswith(f"written to {tmp_path}: bench.json, tuning.json, decode.png")


def test_the_table_compares_with_peers_of_either_layout() -> None:
    found = found_by(TimesByHand(hand_times, {"torch": "contiguous", "vllm": "paged"}))
    columns, made = rows("decode", [entry for entry in found["cases"] if entry["kernel"] == "decode"])
    assert columns[-3:] == ["of contiguous", "of torch", "of vllm"]
    assert len(made) == 6 and all(len(row) == len(columns) for row in made)
    # 1 ms against 0.98, 2 and 0.5 ms.
    assert {tuple(row[-3:]) for row in made} == {("98.0 %", "200.0 %", "50.0 %")}
    assert made[0][:7] == ["bfloat16", "64", "4,096", "8 × 4", "128", "16", "1,000.0"]
    assert "4,000 GB/s" in heading(found)


# --------------------------------------------------------------------------------------------------------------- tuning


@given(
    tile=st.sampled_from([16, 32, 64, 128, 256]),
    num_warps=st.sampled_from([1, 2, 4, 8, 16]),
    num_stages=st.integers(1, 8),
)
def test_the_search_reaches_the_best_launch_where_figures_do_not_depend_on_each_other(
    tile: int, num_warps: int, num_stages: int
) -> None:
    def seconds(launch: Launch) -> float:
        away = abs(math.log2(launch.tile / tile)) + abs(math.log2(launch.num_warps / num_warps))
        return 1.1 ** (away + abs(launch.num_stages - num_stages))

    assert fastest(DecodeLaunch(64, 4, 3), seconds) == DecodeLaunch(tile, num_warps, num_stages)


def test_the_table_stands_unless_a_launch_is_faster_by_more_than_times_scatter() -> None:
    start = PrefillLaunch(128, 64, 8, 3)
    assert fastest(start, lambda launch: 1.0 if launch == start else 1 - GAIN / 2) == start
    assert fastest(start, lambda launch: 1.0 if launch.rows == 128 else 1 - 2 * GAIN) == replace(start, rows=64)


def test_the_search_passes_over_launches_that_the_device_refuses() -> None:
    asked: list[Launch] = []

    def seconds(launch: Launch) -> float | None:
        asked.append(launch)
        return None if launch.tile >= 64 else 1.0 / launch.num_warps

    assert fastest(DecodeLaunch(64, 4, 3), seconds) == DecodeLaunch(32, 16, 3)
    assert len(asked) == len(set(asked))
    assert fastest(DecodeLaunch(64, 4, 3), lambda launch: None) is None


@pytest.fixture
def untuned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test loads is forgotten behind it."""
    monkeypatch.setattr(launches, "_decode_tuned", {})
    monkeypatch.setattr(launches, "_prefill_tuned", {})
    yield


@pytest.mark.usefixtures("untuned")
def test_what_was_tuned_is_measured_with_and_can_be_loaded(tmp_path: Path) -> None:
    # Decode is faster with half the tile of the table (64), prefill as the table has it.
    def time(case: Case, launch: Launch | None) -> float:
        return 0.5e-3 if isinstance(launch, DecodeLaunch) and launch.tile == 32 else 1e-3

    bench = TimesByHand(time)
    measure_into(tmp_path, composed(*FEW, "bench.tune=true"), bench, ABOUT, {"triton": "3.9.0"})
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["cases"][0]["launch"]["tile"] == 32
    assert {entry["launch"]["tile"] for entry in found["cases"] if entry["kernel"] == "decode"} == {32}
    assert only(found, kernel="copy", precision="fp8")["launch"] is None
    assert len(found["candidates"]) > 4
    before = table_launch(replace(LONG, kernel="prefill"), H200)
    assert load_tuning(tmp_path / "tuning.json") == 4  # decode and prefill, 2 bytes and 1
    assert decode_launch(H200, AttentionShape(8, 4, 128, 16, 2)).tile == 32
    assert table_launch(replace(LONG, kernel="prefill"), H200) == before


@pytest.mark.usefixtures("untuned")
@given(
    kernel=st.sampled_from(ATTENTION),
    head_dim=st.integers(1, 256),
    precision=st.sampled_from(["bfloat16", "float32", "fp8"]),
    changes=st.integers(0, 6),
)
def test_any_launch_that_is_tried_can_be_written_and_loaded(
    tmp_path_factory: pytest.TempPathFactory, kernel: Any, head_dim: int, precision: str, changes: int
) -> None:
    problem = replace(LONG, kernel=kernel, head_dim=head_dim, precision=precision)
    kind, start = problem_class(problem), table_launch(problem, H200)
    assert kind is not None and start is not None
    tried: list[Launch] = []
    fastest(start, lambda launch: tried.append(launch) or 0.9 ** min(len(tried), changes))  # type: ignore[func-returns-value]
    path = tmp_path_factory.mktemp("tuning") / "tuning.json"
    for launch in tried:
        path.write_text(json.dumps(tuning_content(H200, {}, {kind: launch})), encoding="utf-8")
        assert load_tuning(path) == 1
        assert table_launch(problem, H200) == launch


def test_tuning_takes_half_of_the_budget_at_most() -> None:
    now = iter(range(1000))  # each look at the clock is a second later
    bench = TimesByHand(hand_times)
    session = Session(composed(*FEW, "bench.tune=true", "bench.budget=40"), bench, clock=lambda: next(now))
    session.run()
    # One look before each class and one before each candidate: decode at 1 and 2 … 8 (the table's launch, and one
    # either way of tile, warps and stages), prefill, which has rows too, at 9 and 10 … 18, decode on fp8 at 19. At 20
    # half is used up, and its 7 candidates are not tried.
    assert len(session.record.candidates) == 7 + 9
    assert session.tuned.keys() == {ProblemClass("decode", 2, 128), ProblemClass("prefill", 2, 128)}
    assert len(session.record.outcomes) == 12  # at 28 … 39; 27 was prefill on fp8


# -------------------------------------------------------------------------------------------------- tensors and peers


@pytest.mark.parametrize("block_size", [1, 7, 16, 50, 64])
def test_the_blocks_of_a_pool_hold_the_sequences(block_size: int) -> None:
    sequences = Sequences(SMALL, torch.device("cpu"))
    pool = sequences.pool(block_size)
    assert sorted(pool.tables.flatten().tolist()) == list(range(pool.keys.shape[0]))
    for i in range(SMALL.batch):
        for blocks, whole in ((pool.keys, sequences.keys), (pool.values, sequences.values)):
            assert torch.equal(gather_sequence(blocks, pool.tables[i], 50), whole[i].transpose(0, 1))


def run_once(launch: Callable[[], object], check: Callable[[], None]) -> Timing:
    launch()
    check()
    return Timing(1e-3, 1e-3, 1)


class Stranger:
    """A peer that computes what it is told."""

    package = "torch"
    layout: Layout = "contiguous"

    def __init__(self, compute: Callable[[Sequences], Tensor]) -> None:
        self._compute = compute

    def attention(self, sequences: Sequences, pool: Pool) -> Callable[[], Tensor]:
        return lambda: self._compute(sequences)


def bench_of(peer: Peer) -> DeviceBench:
    return DeviceBench(run_once, {"torch": peer}, torch.device("cpu"))


def test_a_peer_whose_result_is_wrong_is_not_timed() -> None:
    case = Case(SMALL.contiguous, "contiguous", "torch")
    with pytest.raises(Refused, match="the result is wrong: it differs from the reference by 100 % of its norm"):
        bench_of(Stranger(lambda sequences: torch.zeros_like(sequences.queries))).measure(case, None)
    with pytest.raises(Refused, match="the result is wrong"):
        bench_of(Stranger(lambda sequences: sequences.queries * torch.nan)).measure(case, None)


def test_a_peer_that_fails_says_how_in_a_line() -> None:
    def fail(sequences: Sequences) -> Tensor:
        raise RuntimeError("no kernel image\nis available")

    with pytest.raises(Refused, match=r"^RuntimeError: no kernel image$"):
        bench_of(Stranger(fail)).measure(Case(SMALL.contiguous, "contiguous", "torch"), None)


@pytest.mark.parametrize(
    "error", [OutOfResources(300_000, 232_448, "shared memory"), RuntimeError("PassManager::run failed")]
)
def test_a_launch_of_ours_that_cannot_be_compiled_is_refused(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("gpu.bench.device.our_work", fail)
    with pytest.raises(Refused, match=r"out of resource|PassManager"):
        bench_of(TorchAttention()).measure(Case(SMALL, "paged"), None)


def test_a_kernel_of_ours_that_fails_otherwise_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("gpu.bench.device.our_work", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        bench_of(TorchAttention()).measure(Case(SMALL, "paged"), None)


PROBLEMS = [
    SMALL,
    replace(SMALL, group=1, batch=1),
    replace(SMALL, kernel="prefill"),
    replace(SMALL, kernel="prefill", group=1, precision="bfloat16"),
]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_torchs_attention_is_given_the_same_problem(problem: Problem) -> None:
    timing = bench_of(TorchAttention()).measure(Case(problem.contiguous, "contiguous", "torch"), None)
    assert timing.median == 1e-3


@pytest.mark.parametrize("peer", [TorchAttention(), VllmAttention()])
def test_peers_refuse_keys_of_another_type_than_the_queries(peer: Peer) -> None:
    sequences = Sequences(replace(SMALL, precision="fp8"), torch.device("cpu"))
    with pytest.raises(Refused):
        peer.attention(sequences, sequences.pool(16))


class PagedWrapper:
    """Both of FlashInfer's wrappers as their documentation has them, in plain torch: pages in the layout HND."""

    def __init__(self, workspace: Tensor, kv_layout: str, use_tensor_cores: bool = False) -> None:
        assert kv_layout == "HND" and workspace.dtype == torch.uint8 and not workspace.any()

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        parts = []
        for i in range(len(self.last_page_len)):
            pages = self.indices[self.indptr[i] : self.indptr[i + 1]]
            num_tokens = (len(pages) - 1) * self.page_size + int(self.last_page_len[i])
            k, v = (gather_sequence(cache, pages, num_tokens) for cache in paged_kv_cache)
            rows = slice(int(self.qo_indptr[i]), int(self.qo_indptr[i + 1]))
            parts.append(attend(q[rows], k, v, Scoring(self.sm_scale), q.dtype)[0])
        return torch.cat(parts)


class DecodeWrapper(PagedWrapper):
    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float,
    ) -> None:
        assert (num_qo_heads, num_kv_heads, head_dim) == (4, 2, 16) and q_data_type == kv_data_type == torch.float32
        self.indptr, self.indices, self.last_page_len = indptr, indices, last_page_len
        self.qo_indptr = torch.arange(len(last_page_len) + 1)
        self.page_size, self.sm_scale = page_size, sm_scale


class PrefillWrapper(DecodeWrapper):
    def plan(self, qo_indptr: Tensor, *arguments: Any, causal: bool = False, **types: Any) -> None:  # type: ignore[override]
        assert causal
        super().plan(*arguments, **types)
        self.qo_indptr = qo_indptr


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """vLLM's, in plain torch: caches are [blocks, block size, heads, head_dim], causality ends at the last key."""
    assert given["causal"] and given["fa_version"] == 3
    assert given["max_seqlen_k"] == 50 and given["max_seqlen_q"] in (1, 50)
    bounds = given["cu_seqlens_q"].tolist()
    for i, (begin, end) in enumerate(pairwise(bounds)):
        num_tokens = int(given["seqused_k"][i])
        keys, values = (gather_sequence(kv.transpose(1, 2), given["block_table"][i], num_tokens) for kv in (k, v))
        out, _ = attend(q[begin:end], keys, values, Scoring(given["softmax_scale"]), q.dtype)
        given["out"][begin:end] = out
    result: Tensor = given["out"]
    return result


@pytest.mark.parametrize("kernel", ATTENTION)
@pytest.mark.parametrize("block_size", [16, 25])  # the last block of 50 tokens has 2, or is full
def test_paged_peers_are_given_the_same_problem(kernel: Any, block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer: Any = ModuleType("flashinfer")
    flashinfer.BatchDecodeWithPagedKVCacheWrapper = DecodeWrapper
    flashinfer.BatchPrefillWithPagedKVCacheWrapper = PrefillWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    vllm: Any = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func, get_flash_attn_version=lambda: 3)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.fa_utils", vllm)
    sequences = Sequences(replace(SMALL, kernel=kernel), torch.device("cpu"))
    peers: tuple[Peer, ...] = (FlashInferAttention(), VllmAttention())
    for peer in peers:
        work = attention_work(sequences, peer.attention(sequences, sequences.pool(block_size)))
        work.launch()
        assert work.difference() < 1e-5


def test_only_peers_that_are_asked_for_and_installed_take_part() -> None:
    assert installed([]) == {}
    assert list(installed(["torch", "a_package_that_is_not"])) == ["torch"]


def test_what_is_launched_is_right_under_the_interpreter() -> None:
    file = Path(__file__).with_name("interpreted_bench.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(file)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, cwd=file.parents[2], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# -------------------------------------------------------------------------------------------------------------- figures


def lines_of(figure: Figure, title: str, axis: str) -> dict[str, list[tuple[float, float]]]:
    """The points of each line in the panel so named, by the marker's fill and shape."""
    (ax,) = [ax for ax in figure.axes if ax.get_title(loc="left") == title and ax.get_xlabel().startswith(axis)]
    return {
        f"{line.get_marker()} {'open' if line.get_markerfacecolor() == 'white' else 'filled'}": [
            (float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)
        ]
        for line in ax.get_lines()
        if line.get_marker() != "None"
    }


def test_a_figure_shows_the_shares_of_the_cases_along_each_axis() -> None:
    found = found_by(TimesByHand(hand_times, {"torch": "contiguous"}))
    figure = kernel_figure(found, "decode")
    assert figure is not None
    # K and V of 64 sequences, 1 MiB of queries and outputs, as a share of what a copy moves in a second.
    short, long = ((2 * 64 * context * 8 * 128 * 2 + 2**20) / 4e12 for context in (1024, 4096))
    drawn = lines_of(figure, "batch 64", "tokens per sequence")
    for line, seconds in (("o filled", 1e-3), ("o open", 9.8e-4), ("s open", 2e-3)):
        assert drawn[line][0] == pytest.approx((1024, short / seconds))
        assert drawn[line][1] == pytest.approx((4096, long / seconds))
    level = lines_of(figure, "batch 64 of 4,096 tokens", "block size")
    assert [x for x, _ in level["o open"]] == [16, 64]
    assert [y for _, y in level["o open"]] == pytest.approx([long / 9.8e-4] * 2)
    assert [len(points) for points in lines_of(figure, "batch 64 of 4,096 tokens", "precision").values()] == [2, 2, 2]
    assert len(figure.axes) == 4  # batches 1 and 64, block size, precision; one group and one head size are no axis


def test_a_figure_counts_what_is_missing_and_none_is_drawn_of_nothing(tmp_path: Path) -> None:
    def time(case: Case, launch: Launch | None) -> float | BaseException:
        return Refused("no memory") if case.problem.kernel == "prefill" or case.problem.batch == 1 else 1e-3

    found = found_by(TimesByHand(time))
    figure = kernel_figure(found, "decode")
    assert figure is not None and figure._supxlabel is not None
    assert "Not measured: 4 cases." in figure._supxlabel.get_text()  # batch 1, two contexts, both layouts
    assert kernel_figure(found, "prefill") is None
    assert {path.name for path in draw_kernels(found, tmp_path)} == {"decode.png", "decode.svg"}


# -------------------------------------------------------------------------------------------------------- without a GPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("arguments", [[], ["bench.contexts=[1024]"], ["-m", "bench.num_kv_heads=1,8"]])
def test_without_a_gpu_the_command_says_so_and_writes_nothing(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("kvtwin: no GPU: torch ") and printed.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_without_torch_the_command_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["bench"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvtwin: kvtwin bench needs torch and triton") and "kvtwin[gpu]" in error
    assert error.count("\n") == 1


def test_help_is_given_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    assert capsys.readouterr().out.startswith("kvtwin bench: time the attention kernels")


# ---------------------------------------------------------------------------------------------------- a GPU by pretence


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Callable[[TimesByHand], None]:
    """Makes the command measure with times given by hand, as if they came from a GPU."""

    def use(bench: TimesByHand) -> None:
        monkeypatch.setattr("gpu.bench.device.DeviceBench", lambda timer, peers, device: bench)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("gpu.bench.timing.CudaTimer", lambda seconds: None)
    monkeypatch.setattr("gpu.bench.device.device_facts", lambda: ABOUT)
    return use


def test_the_command_measures_into_the_folder_that_is_asked_for(
    pretended: Callable[[TimesByHand], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended(TimesByHand(hand_times))
    assert main(["bench", *FEW, "bench.kernels=[copy]", f"hydra.run.dir={tmp_path}"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"bench.json"}
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["versions"].keys() >= {"kvtwin", "python", "torch", "triton"}
    assert found["device"] == ABOUT and len(found["cases"]) == 3
    assert "copy, 64 × 4,096 tokens" in capsys.readouterr().out


def test_ctrl_c_keeps_what_was_measured(pretended: Callable[[TimesByHand], None], tmp_path: Path) -> None:
    pretended(TimesByHand(lambda case, _: KeyboardInterrupt() if case.problem.kernel == "write" else 1e-3))
    assert main(["bench", *FEW, f"hydra.run.dir={tmp_path}"]) == 130
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["status"] == "interrupted"
    assert {entry["kernel"] for entry in found["cases"]} == {"decode", "prefill"}


def test_a_tuning_file_that_is_not_there_is_one_line(
    pretended: Callable[[TimesByHand], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended(TimesByHand(hand_times))
    assert main(["bench", f"bench.tuning={tmp_path / 'absent.json'}", f"hydra.run.dir={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert "absent.json: not a readable JSON file" in error and error.count("\n") == 1


class PretendedCuda:
    """As much of `torch` as the timer uses; time passes only when a graph is replayed or the caches are emptied."""

    float32 = "float32"

    def __init__(self, replays: Iterator[float]) -> None:
        self.now = 0.0
        self.log: list[str] = []
        self._replays = replays
        self.cuda = self
        self.Stream = self.CUDAGraph = lambda: self

    def zeros(self, count: int, dtype: str, device: str) -> PretendedCuda:
        assert device == "cuda" and 4 * count >= 4 * self.L2_cache_size
        return self

    L2_cache_size = 100 << 20

    def get_device_properties(self, index: int) -> PretendedCuda:
        return self

    def current_device(self) -> int:
        return 0

    def current_stream(self) -> PretendedCuda:
        return self

    def wait_stream(self, other: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        yield

    @contextmanager
    def graph(self, graph: object) -> Iterator[None]:
        self.log.append("capture")
        yield

    def sum(self) -> None:
        self.log.append("flush")
        self.now += 7.0

    def replay(self) -> None:
        self.log.append("replay")
        self.now += next(self._replays)

    def Event(self, enable_timing: bool) -> PretendedEvent:
        return PretendedEvent(self)


class PretendedEvent:
    def __init__(self, cuda: PretendedCuda) -> None:
        self._cuda = cuda

    def record(self) -> None:
        self.at = self._cuda.now

    def elapsed_time(self, end: PretendedEvent) -> float:
        return 1e3 * (end.at - self.at)


def test_the_timer_checks_then_captures_then_replays_with_empty_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    # Trials of 20 ms; 250 ms are 12 of them. The flushing of 7 s is in no time.
    replays = [0.02] * 3 + [0.01, 0.03, 0.02, 0.04] * 3
    cuda = PretendedCuda(iter(replays))
    monkeypatch.setattr("gpu.bench.timing.torch", cuda)
    timing = CudaTimer(0.25)(lambda: cuda.log.append("launch"), lambda: cuda.log.append("check"))
    assert cuda.log == ["launch", "launch", "check", "capture", "launch", *["flush", "replay"] * 15]
    assert (timing.median, timing.min, timing.repeats) == (pytest.approx(0.025), pytest.approx(0.01), 12)


@pytest.mark.parametrize(("seconds", "repeats"), [(1e-7, 200), (1e-3, 100), (5.0, 10)])
def test_repeats_fill_the_time_asked_for_but_are_never_few_or_many(
    seconds: float, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu.bench.timing.torch", PretendedCuda(cycle([seconds])))
    assert CudaTimer(0.1)(lambda: None).repeats == pytest.approx(repeats, abs=1)


# ------------------------------------------------------------------------------------------------------- make gpu-check


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_check_without_a_gpu_says_so_and_stops(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check([]) == 2
    assert capsys.readouterr().err.startswith("gpu-check: no GPU")


def python(folder: Path, code: str, most_s: float = 60.0) -> Step:
    folder.mkdir()
    return Step(folder.name, (sys.executable, "-c", code), folder, ("*.json",), most_s)


def test_gpu_check_keeps_what_was_done_and_names_what_was_not(tmp_path: Path) -> None:
    write = "import pathlib; pathlib.Path(r'{0}/a.json').touch(); pathlib.Path(r'{0}/b.txt').touch(); "
    runs, target = tmp_path / "runs", tmp_path / "device"
    runs.mkdir()
    (target / "good").mkdir(parents=True)
    (target / "good" / "old.json").touch()
    chosen = [
        python(runs / "good", write.format(runs / "good")),
        python(runs / "bad", write.format(runs / "bad") + "raise SystemExit(3)"),
        python(runs / "slow", write.format(runs / "slow") + "import time; time.sleep(60)", most_s=2.0),
        python(runs / "last", write.format(runs / "last")),
    ]
    assert check(chosen, target) == ["bad", "slow"]
    assert sorted(str(path.relative_to(target)) for path in target.rglob("*.*")) == ["good/a.json", "last/a.json"]


def test_gpu_check_begins_nothing_once_its_time_is_up(tmp_path: Path) -> None:
    assert check([python(tmp_path / "late", "print()")], tmp_path / "device", limit_s=0.0) == ["late"]
    assert not (tmp_path / "device").exists()
