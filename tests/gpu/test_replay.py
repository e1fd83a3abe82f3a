"""`kvtwin replay`: whole runs on the real engine, what they leave behind, and what they refuse."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import pandas as pd
import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

torch = pytest.importorskip("torch", reason="the engine needs PyTorch")
pytest.importorskip("transformers", reason="the engine runs Hugging Face models")

from greedy import by_generate  # noqa: E402
from served import NEAR, own_model  # noqa: E402

from gpu.models import PagedModel  # noqa: E402
from gpu.pool import KVPool  # noqa: E402
from gpu.replay import GpuOptions, Replay, chosen_device  # noqa: E402
from gpu.step_time import WallTime  # noqa: E402
from gpu.tokens import PromptTokens  # noqa: E402
from sim.cli import main  # noqa: E402
from sim.run import simulate  # noqa: E402
from workloads.errors import UserError  # noqa: E402
from workloads.request import Request  # noqa: E402

Trace = Callable[[list[tuple[float, int, int]]], list[str]]
Run = Callable[..., Path]

TABLES = {"requests.parquet", "steps.parquet", "events.parquet"}
FILES = TABLES | {"config.yaml", "summary.json", "measured.parquet"}
# One layer, so that a step takes a few milliseconds.
SMALL = [
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.head_dim=16",
    "model.intermediate_size=48",
    "model.vocab_size=64",
    "max_model_len=256",
    "memory.swap_space=0.01",
]
# Requests of 30 + 20 tokens store 49 at their ends, in 4 blocks of 16. Six come during the first step or before the
# second: 24 blocks where there are 18. Two come later, in the midst of it all.
ROWS = [(0.0001 * i, 30, 20) for i in range(6)] + [(0.03, 30, 20), (0.04, 30, 20)]
TIGHT = [*SMALL, "memory.num_blocks=19"]
SITUATIONS = {
    "recompute": TIGHT,
    "swap": [*TIGHT, "scheduler/recovery=swap"],
    "several outputs": [*TIGHT, "workload/sampling=parallel", "scheduler/recovery=auto"],
    "beams": [*TIGHT, "workload/sampling=beam"],
    "chunks": [*TIGHT, "scheduler.max_num_batched_tokens=17"],
    "contiguous": [*SMALL[:-1], "engine=orca_pow2", "memory.num_blocks=300"],
}
HAPPENS = {  # events that each situation must have
    "recompute": {"preemption"},
    "swap": {"preemption", "swap_out", "swap_in"},
    "several outputs": {"preemption", "swap_out", "swap_in", "copy"},
    "beams": {"preemption", "copy"},
    "chunks": {"preemption"},
    "contiguous": set(),
}


@pytest.fixture(scope="session")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs `kvtwin replay` with these overrides and without figures, once a session; returns the run folder."""

    @functools.cache
    def run(*overrides: str) -> Path:
        folder = tmp_path_factory.mktemp("replay")
        assert main(["replay", "plots=false", f"hydra.run.dir={folder}", *overrides]) == 0
        return folder

    return run


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("kvtwin: ")
    assert printed.err.count("\n") == 1
    return printed.err


# ------------------------------------------------------------------------------------------------------- what comes out


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_replays_decisions_are_those_of_a_simulation_with_its_measured_times(
    situation: str, replay: Run, simulate: Run, trace: Trace
) -> None:
    overrides = [*trace(ROWS), *SITUATIONS[situation]]
    measured = replay(*overrides)
    assert HAPPENS[situation] <= set(pd.read_parquet(measured / "events.parquet")["event"])
    given = ["model=tiny-llama", *overrides, "link=free", "timing=recorded", f"timing.run={measured}"]
    predicted = simulate(*given, "engine.leap=false")
    for table in TABLES:
        assert (predicted / table).read_bytes() == (measured / table).read_bytes()
    in_leaps = simulate(*given)
    for table in ("requests", "events"):
        assert (in_leaps / f"{table}.parquet").read_bytes() == (measured / f"{table}.parquet").read_bytes()


def test_a_replay_leaves_what_a_simulation_leaves_and_what_it_measured(
    replay: Run, simulate: Run, trace: Trace
) -> None:
    folder = replay(*trace(ROWS), *TIGHT)
    assert {file.name for file in folder.iterdir()} == FILES
    summary, simulated = summary_of(folder), summary_of(simulate("model=tiny-llama", *trace(ROWS), *TIGHT))
    assert simulated.keys() <= summary.keys()
    assert (summary["status"], summary["error"], summary["completed"]) == ("complete", None, 8)
    assert (summary["model"], summary["workload"], summary["engine"]) == ("tiny-llama", "azure", "vllm_v1")
    assert (summary["attention"], summary["clock"], summary["pool_blocks"]) == ("sdpa", "cpu", 18)
    assert summary["versions"].keys() >= {"torch", "transformers"}
    assert summary["total_output_tokens"] == 8 * 20
    measured, steps = (pd.read_parquet(folder / f"{name}.parquet") for name in ("measured", "steps"))
    assert list(measured["step"]) == list(range(len(steps)))
    assert list(measured["num_tokens"]) == list(steps["num_tokens"])
    assert list(measured["num_sequences"]) == list(steps["num_sequences"])
    parts = measured[["between_s", "move_s", "prepare_s", "model_s", "note_s"]]
    assert (parts >= 0).all(axis=None)
    assert (parts["model_s"] > 0).all()
    np.testing.assert_allclose(measured["duration_s"], parts.sum(axis=1), rtol=1e-12)
    # Times in the run are running sums of the durations, which round.
    np.testing.assert_allclose(measured["duration_s"], steps["duration_s"], rtol=0, atol=1e-12)
    assert measured["device_s"].isna().all()
    outside = parts[["between_s", "prepare_s", "note_s"]].sum().sum()
    assert summary["outside_model_share"] == pytest.approx(outside / measured["duration_s"].sum())


def test_blocks_that_move_are_in_the_measured_steps(replay: Run, trace: Trace) -> None:
    folder = replay(*trace(ROWS), *SITUATIONS["several outputs"])
    measured, events = (pd.read_parquet(folder / f"{name}.parquet") for name in ("measured", "events"))
    blocks = events.groupby("event")["blocks"].sum()
    for column, event in (("swapped_out", "swap_out"), ("swapped_in", "swap_in"), ("copied", "copy")):
        assert measured[column].sum() == blocks[event] > 0


def test_figures_and_tables_are_those_of_any_run(
    trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", f"hydra.run.dir={tmp_path}", *trace(ROWS[:3]), *TIGHT]) == 0
    assert {file.name for file in tmp_path.iterdir()} == FILES | {
        f"{name}.{kind}" for name in ("pool", "latency") for kind in ("png", "svg")
    }
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "requests finished" in printed.out


def test_a_sweep_replays_every_point(trace: Trace, tmp_path: Path) -> None:
    points = ["-m", f"hydra.sweep.dir={tmp_path}", "memory.block_size=8,16", "plots=false"]
    assert main(["replay", *points, *trace(ROWS[:3]), *TIGHT]) == 0
    for point in ("0", "1"):
        assert summary_of(tmp_path / point)["completed"] == 3
        assert len(pd.read_parquet(tmp_path / point / "measured.parquet")) > 0


def test_gaps_between_requests_take_no_time(replay: Run, trace: Trace) -> None:
    """Were they waited for, this test would take a minute."""
    folder = replay(*trace([(0, 5, 2), (50, 5, 2)]), *TIGHT, "workload.time_scale=2")
    requests = pd.read_parquet(folder / "requests.parquet").set_index("request_id")
    assert requests.loc[1, "first_scheduled_s"] == requests.loc[1, "arrival_s"] == 100
    assert requests.loc[1, "finish_s"] - 100 == pytest.approx(summary_of(folder)["duration"] - 100)


def test_limit_and_time_scale_take_a_slice_of_the_trace(replay: Run, trace: Trace) -> None:
    folder = replay(*trace([(0, 5, 2), (2, 6, 3), (4, 7, 4)]), *TIGHT, "replay.limit=2", "replay.time_scale=0.25")
    requests = pd.read_parquet(folder / "requests.parquet").sort_values("request_id")
    columns = ["arrival_s", "prompt_tokens", "output_tokens"]
    assert requests[columns].to_numpy().tolist() == [[0, 5, 2], [0.5, 6, 3]]
    config = OmegaConf.load(folder / "config.yaml")
    assert (config.workload.limit, config.workload.time_scale) == (2, 0.25)


def test_clients_wait_for_the_real_engine_too(replay: Run, trace: Trace) -> None:
    """One place: each request is sent when the one before has really finished."""
    folder = replay(*trace([(0, 5, 2), (0, 6, 3), (0, 7, 2)]), *TIGHT, "workload.concurrency=1")
    requests = pd.read_parquet(folder / "requests.parquet").sort_values("request_id")
    assert requests["arrival_s"].tolist() == [0, *requests["finish_s"].tolist()[:-1]]
    assert requests["first_scheduled_s"].tolist() == requests["arrival_s"].tolist()


def test_conversations_wait_for_the_real_engine_too_and_find_what_it_has_kept(replay: Run, simulate: Run) -> None:
    """Two users; each turn is sent when the one before has really finished and they have thought."""
    # New prompts of 20 and answers of 12 tokens: the second and third turn find the full blocks of 16 among 31 and 63.
    lengths = [f"workload/{kind}_lengths=fixed" for kind in ("prompt", "output")]
    tokens = ["workload.prompt_lengths.tokens=20", "workload.output_lengths.tokens=12", "workload.turns.turns=3"]
    users = ["workload=conversations", "workload/arrivals=all_at_once", "workload.num_conversations=2"]
    taking_turns = ["workload/turns=fixed", "workload/think=fixed", "workload.think.seconds=0.004"]
    overrides = [*users, *taking_turns, *lengths, *tokens, *TIGHT]
    measured = replay(*overrides)
    requests = pd.read_parquet(measured / "requests.parquet").sort_values("request_id")
    sent, ended = requests["arrival_s"].tolist(), requests["finish_s"].tolist()
    assert sent == [0, ended[0] + 0.004, ended[1] + 0.004, 0, ended[3] + 0.004, ended[4] + 0.004]
    assert requests["hit_tokens"].tolist() == [0, 16, 48] * 2
    given = ["model=tiny-llama", *overrides, "link=free", "timing=recorded", f"timing.run={measured}"]
    predicted = simulate(*given, "engine.leap=false")
    for table in TABLES:
        assert (predicted / table).read_bytes() == (measured / table).read_bytes()


# --------------------------------------------------------------------------------------------------------------- tokens


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model whose tokens are not all the same."""
    folder = tmp_path_factory.mktemp("weights")
    own_model().save_pretrained(folder)
    return folder


def composed(*overrides: str) -> Any:
    GlobalHydra.instance().clear()
    with hydra.initialize_config_module("conf", version_base="1.3"):
        return hydra.compose("replay", overrides=list(overrides))


def run_of(folder: Path, overrides: list[str], said: Any, in_real_time: bool = False) -> Replay:
    """A run whose outputs are handed to `said`."""
    config = composed(*overrides)
    options = GpuOptions(**config.gpu)
    engine = Replay(options, None, folder, 0, in_real_time, said)
    simulate(config, folder, {}, engine)
    return engine


PAGED = ["memory.block_size=8", "memory.swap_space=0.01"]


@pytest.mark.parametrize(
    ("overrides", "num_outputs", "events"),
    [
        ([*PAGED, "memory.num_blocks=60"], 1, set()),
        # At their ends the requests store 31, 22 and 39 tokens, in 4 + 3 + 5 blocks; there are 10.
        ([*PAGED, "memory.num_blocks=11"], 1, {"preemption"}),
        ([*PAGED, "memory.num_blocks=11", "scheduler/recovery=swap"], 1, {"preemption", "swap_out", "swap_in"}),
        ([*PAGED, "memory.num_blocks=16", "workload/sampling=parallel", "workload.sampling.n=3"], 3, {"copy"}),
        ([*PAGED, "memory.num_blocks=16", "workload/sampling=beam"], 2, {"copy"}),
        (["engine=orca_oracle", "memory.num_blocks=128"], 1, set()),
    ],
    ids=["large", "recompute", "swap", "parallel", "beams", "contiguous"],
)
def test_tokens_are_those_of_generate(
    overrides: list[str], num_outputs: int, events: set[str], weights: Path, trace: Trace, tmp_path: Path
) -> None:
    rows = [(0.0, 20, 12), (0.0001, 9, 14), (0.0002, 30, 10)]
    outputs: dict[int, list[list[int]]] = {i: [] for i in range(3)}

    def said(sequence: Any, tokens: Any) -> None:
        outputs[sequence.request.request_id].append(tokens.tolist())

    run_of(tmp_path, [f"gpu.weights={weights}", "max_model_len=64", *trace(rows), *overrides], said)
    assert events <= set(pd.read_parquet(tmp_path / "events.parquet")["event"])
    for request in (Request(i, *row) for i, row in enumerate(rows)):
        prompt = PromptTokens(128).of(request)
        expected, margin = by_generate(own_model(), prompt, request.output_tokens)
        assert margin > NEAR
        assert outputs[request.request_id] == [[*prompt.tolist(), *expected]] * num_outputs


def test_whoever_is_shown_the_plans_takes_time_from_no_step(
    monkeypatch: pytest.MonkeyPatch, weights: Path, trace: Trace, tmp_path: Path
) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    def shown(plan: Any) -> None:
        seen.append(plan.work.num_tokens)
        now[0] += 1e6

    monkeypatch.setattr(time, "thread_time", clock)
    seen: list[int] = []
    small = [f"gpu.weights={weights}", "max_model_len=64", "memory.num_blocks=60", "memory.swap_space=0.01"]
    config = composed(*small, *trace([(0.0, 20, 4), (0.1, 9, 3)]))
    simulate(config, tmp_path, {}, Replay(GpuOptions(**config.gpu), None, tmp_path, 0, shown=shown))
    measured = pd.read_parquet(tmp_path / "measured.parquet")
    assert seen == list(measured["num_tokens"])
    assert measured["duration_s"].max() < 20  # the clock is read a few times a step, a second each


# ------------------------------------------------------------------------------------------------------------ wall time


def test_in_wall_time_requests_arrive_in_real_time_and_the_clock_is_the_walls(
    weights: Path, trace: Trace, tmp_path: Path
) -> None:
    rows = [(0.0, 20, 4), (0.3, 9, 3), (0.31, 9, 3)]
    complete: dict[int, float] = {}

    def said(sequence: Any, _: Any) -> None:
        complete[sequence.request.request_id] = time.monotonic()

    small = [f"gpu.weights={weights}", "max_model_len=64", "memory.num_blocks=60", "memory.swap_space=0.01"]
    engine = run_of(tmp_path, [*small, *trace(rows)], said, in_real_time=True)
    over = time.monotonic()
    env: Any = engine.env
    requests = pd.read_parquet(tmp_path / "requests.parquet").set_index("request_id")
    for i, (arrival_s, _, _) in enumerate(rows):
        # The engine's clock says when the step was over in which the output was complete; the wall's agree.
        finish = env.real_start + requests.loc[i, "finish_s"]
        assert complete[i] - 1e-6 <= finish <= over
        assert complete[i] >= env.real_start + arrival_s
    facts = engine.facts()
    assert facts["clock"] == "wall"


def test_wall_time_counts_all_that_passes_and_no_pause() -> None:
    class Env:
        """An environment whose time a test sets."""

        now = 0.0
        real_start = 0.0

        def sync(self) -> None:
            self.real_start = wall[0]

    wall = [100.0]
    env: Any = Env()
    timer = WallTime(env)
    timer._clock = lambda: wall[0]  # the wall's
    wall[0] = 100.5  # setting up is done; the first request came at 0
    assert timer.begin() == 0.5
    wall[0] = 101.0
    assert timer.lap() == 0.5
    timer.end()
    wall[0] = 101.25  # scheduling
    assert timer.begin() == 0.25
    wall[0] = 102.0
    timer.lap()
    timer.end()
    env.now = 7.0  # nothing to do until a request comes at 7, by the wall 107; the sleep ends a little later
    wall[0] = 107.125
    assert timer.begin() == 0.125


# -------------------------------------------------------------------------------------------------------- interruptions


@pytest.fixture
def audible() -> Iterator[None]:
    """Tests that run in the background ignore SIGINT."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


def fail_in_step(monkeypatch: pytest.MonkeyPatch, number: int, how: Callable[[], None]) -> None:
    """Lets something happen in the middle of a forward pass of the run; those of the model's check come before."""
    forward, steps = PagedModel.forward, iter(range(1, 1000))

    def interrupted(self: PagedModel, batch: Any, pool: KVPool, observer: Any = None) -> Any:
        if observer is None and next(steps) == number:
            how()
        return forward(self, batch, pool, observer)

    monkeypatch.setattr(PagedModel, "forward", interrupted)


def assert_whole(folder: Path, status: str) -> None:
    """The folder holds what happened before the sixth step, and every request."""
    assert {file.name for file in folder.iterdir()} == FILES
    assert summary_of(folder)["status"] == status
    assert len(pd.read_parquet(folder / "measured.parquet")) == len(pd.read_parquet(folder / "steps.parquet")) == 5
    requests = pd.read_parquet(folder / "requests.parquet")
    assert "unfinished" in set(requests["status"])


@pytest.mark.usefixtures("audible")
def test_ctrl_c_leaves_a_complete_result_that_says_so(
    monkeypatch: pytest.MonkeyPatch, trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_in_step(monkeypatch, 6, lambda: signal.raise_signal(signal.SIGINT))
    assert main(["replay", f"hydra.run.dir={tmp_path}", *trace(ROWS), *TIGHT]) == 130
    assert one_line(capsys) == "kvtwin: interrupted\n"
    assert_whole(tmp_path, "interrupted")


def test_a_device_that_runs_out_of_memory_in_a_step_leaves_a_complete_result_and_one_line(
    monkeypatch: pytest.MonkeyPatch, trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_out() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB, of which 10 MiB are free.\nSee …")

    fail_in_step(monkeypatch, 6, run_out)
    assert main(["replay", f"hydra.run.dir={tmp_path}", *trace(ROWS), *TIGHT]) == 2
    assert "Tried to allocate 20 MiB, of which 10 MiB are free" in one_line(capsys)
    assert_whole(tmp_path, "failed")


# ------------------------------------------------------------------------------------------------------ what is refused

HUGE = ["memory.num_blocks=300000", "memory.block_size=300000", "model.num_layers=16"]
REFUSED = {
    "device": (["gpu.device=abacus"], "gpu.device is abacus; expected auto, cpu, cuda or cuda:N."),
    "device kind": (["gpu.device=meta"], "gpu.device is meta; expected auto, cpu, cuda or cuda:N."),
    "attention": (["gpu.attention=flash"], "gpu.attention is 'flash'; expected auto, triton or sdpa."),
    "triton on a CPU": (["gpu.device=cpu", "gpu.attention=triton"], "choose gpu.attention=sdpa."),
    "clock": (["gpu.clock=sun"], "gpu.clock is 'sun'; expected auto, wall or cpu."),
    "wall": (["gpu.device=cpu", "gpu.clock=cpu", "replay.clock=wall"], "in real time choose wall."),
    "replay.clock": (["replay.clock=atomic"], "replay.clock is atomic; expected virtual or wall."),
    "no pool": (["gpu.device=cpu", "memory.num_blocks=null"], "on a CPU give a number."),
    "no host": (["memory.num_blocks=19", "memory.swap_space=-1"], "swap_space"),
    "two GPUs": (["tensor_parallel=2"], "tensor_parallel=1"),
    "threads": (["gpu.threads=0"], "gpu.threads is 0; expected a whole number of at least 1."),
    "graphs": (["gpu.cuda_graphs=maybe"], "gpu.cuda_graphs is 'maybe'; expected true or false."),
    "dtype": (["gpu.dtype=int4"], "float32, float16 or bfloat16"),
    "option": (["+gpu.power=11"], "gpu.power is not an option of GpuOptions"),
    "weights": (["gpu.weights=/no/such/model"], "/no/such/model: no such file or folder"),
    "limit": (["replay.limit=0"], "limit is 0; expected a whole number of at least 1"),
    "limit kind": (["replay.limit=few"], "replay.limit is 'few'; expected a whole number or null."),
    "time scale": (["replay.time_scale=0"], "time_scale is 0.0; expected a finite number above 0."),
    "time scale kind": (["replay.time_scale=slow"], "replay.time_scale is 'slow'; expected a number or null."),
    # 9 x 10^10 tokens of 2 KiB are 1.8 x 10^14 bytes: more than an address space of 2^47 has room for.
    "pool memory": ([*HUGE, "gpu.device=cpu"], "171,661.4 GiB on cpu, where "),
    "seed": (["seed=-1"], "seed is -1; expected a whole number of at least 0."),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_run_is_one_line(
    case: str, trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, expected = REFUSED[case]
    assert main(["replay", f"hydra.run.dir={tmp_path}", *trace(ROWS[:1]), *TIGHT, *overrides]) == 2
    assert expected in one_line(capsys)
    assert not list(tmp_path.glob(".*.part"))


def test_tables_for_groups_of_layers_are_refused(
    trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [option for option in TIGHT if "swap_space" not in option]
    assert main(["replay", f"hydra.run.dir={tmp_path}", *trace(ROWS[:1]), *options, "memory=hybrid"]) == 2
    assert "the real engine reads one for each sequence; choose memory=paged." in one_line(capsys)


def test_a_model_that_the_engine_cannot_run_is_one_line(
    trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [*trace(ROWS[:1]), "memory.num_blocks=19", "model=deepseek-v3", f"hydra.run.dir={tmp_path}"]
    assert main(["replay", *overrides]) == 2
    assert "latent attention" in one_line(capsys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_where_there_is_none_is_one_line(
    trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", f"hydra.run.dir={tmp_path}", *trace(ROWS[:1]), *TIGHT, "gpu.device=cuda"]) == 2
    assert one_line(capsys) == "kvtwin: gpu.device is cuda, but torch sees 0 GPUs; choose another.\n"


def test_a_gpu_is_taken_when_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, expected in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert chosen_device("auto").type == expected
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert chosen_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(UserError, match=r"gpu\.device is cuda:2, but torch sees 2 GPUs"):
        chosen_device("cuda:2")


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_without_the_gpu_extra_a_replay_says_what_to_install(missing: str, tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules[{missing!r}] = None  # as if it were not installed
from sim.cli import main
sys.exit(main(["replay", "memory.num_blocks=19", "hydra.run.dir={tmp_path}"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("kvtwin: kvtwin replay needs torch and transformers (")
    assert done.stderr.endswith("install them with the gpu extra: kvtwin[gpu].\n")
    assert done.stderr.count("\n") == 1
