"""When requests join, wait and end: closed forms of queueing theory, and the engine's rules one by one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import hydra
import numpy as np
import pandas as pd
import pytest
from hydra.core.global_hydra import GlobalHydra
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from sim.cli import main
from sim.run import simulate as simulate_config

ENGINES = ["orca_max", "orca_pow2", "orca_oracle", "vllm_v1", "sglang"]
SECONDS = ["timing=constant", "timing.step_seconds=1"]
ONE_AT_A_TIME = ["scheduler.max_num_seqs=1", "workload=synthetic", "workload.prompt_lengths.tokens=1"]

Simulate = Callable[..., Path]
Trace = Callable[..., list[str]]


def table(folder: Path, name: str) -> pd.DataFrame:
    return pd.read_parquet(folder / f"{name}.parquet")


def error_of(capsys: pytest.CaptureFixture[str], folder: Path, *overrides: str) -> str:
    """What a run that must fail says."""
    capsys.readouterr()
    assert main(["sim", "plots=false", f"hydra.run.dir={folder}", *overrides]) == 2
    return capsys.readouterr().err


def test_clockwork_arrivals_slower_than_service_never_wait(simulate: Simulate) -> None:
    # D/D/1 below saturation: one every 2 s, 1 s of service.
    arrivals = ["workload/arrivals=constant", "workload.rate=0.5", "workload.num_requests=40"]
    requests = table(
        simulate(*ONE_AT_A_TIME, *arrivals, *SECONDS, "workload.output_lengths.tokens=1"), "requests"
    ).sort_values("request_id")
    assert requests["arrival_s"].tolist() == [2.0 * (k + 1) for k in range(40)]
    assert (requests["first_scheduled_s"] == requests["arrival_s"]).all()
    assert (requests["finish_s"] == requests["arrival_s"] + 1).all()


def test_clockwork_arrivals_faster_than_service_wait_one_second_more_each(simulate: Simulate) -> None:
    # D/D/1 above saturation: one every 2 s from 2 s on, three steps of 1 s each. The k-th begins at 2 + 3k after
    # waiting 2 + 3k - 2(k + 1) = k seconds.
    arrivals = ["workload/arrivals=constant", "workload.rate=0.5", "workload.num_requests=40"]
    requests = table(
        simulate(*ONE_AT_A_TIME, *arrivals, *SECONDS, "workload.output_lengths.tokens=3"), "requests"
    ).sort_values("request_id")
    assert (requests["first_scheduled_s"] - requests["arrival_s"]).tolist() == list(range(40))
    assert (requests["finish_s"] - requests["arrival_s"]).tolist() == [k + 3 for k in range(40)]


def test_mean_wait_is_that_of_an_m_d_1_queue(simulate: Simulate) -> None:
    # Poisson arrivals at 0.5/s, 1 s of service: load 0.5, and W = load * D / (2 * (1 - load)) = 0.5 s
    # (Pollaczek-Khinchine). Waits follow one another closely, so the standard error is taken from the means of 50 runs
    # of 400 requests: many times longer than the queue remembers. Four of them are exceeded once in 16,000 seeds.
    arrivals = ["workload.rate=0.5", "workload.num_requests=20000", "workload.output_lengths.tokens=1"]
    folder = simulate(*ONE_AT_A_TIME, *arrivals, *SECONDS)
    requests = table(folder, "requests").sort_values("request_id")
    waits = (requests["first_scheduled_s"] - requests["arrival_s"]).to_numpy()
    error = waits.reshape(50, 400).mean(axis=1).std(ddof=1) / np.sqrt(50)
    assert error < 0.02  # or the next line would prove little
    assert abs(waits.mean() - 0.5) < 4 * error
    # The same request by request: who comes finds what is left of the one before (Lindley).
    expected = [0.0]
    for gap in np.diff(requests["arrival_s"].to_numpy()):
        expected.append(max(0.0, expected[-1] + 1 - gap))
    assert waits == pytest.approx(np.array(expected), abs=1e-6)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["mean_ttft_ms"] / 1000 - 1 == pytest.approx(waits.mean())
    assert summary["mean_running"] == pytest.approx(20000 / summary["duration"])  # the server is busy 20,000 s


def assert_littles_law(folder: Path) -> None:
    """Request-seconds counted in the queues are request-seconds counted at the requests."""
    steps, requests = table(folder, "steps"), table(folder, "requests")
    requests = requests[requests["status"] == "finished"]
    assert len(requests) > 0
    in_queues = ((steps["running"] + steps["waiting"]) * steps["duration_s"]).sum()
    # Who comes while a step runs is queued at its end, where the next one starts.
    starts = np.sort(steps["start_s"].to_numpy())
    joined = starts[np.searchsorted(starts, requests["arrival_s"].to_numpy())]
    before_queues = (joined - requests["arrival_s"]).sum()
    assert before_queues >= 0
    latencies = (requests["finish_s"] - requests["arrival_s"]).sum()
    assert in_queues + before_queues == pytest.approx(latencies, rel=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
def test_littles_law_holds_under_pressure(simulate: Simulate, engine: str) -> None:
    # 12 GiB for OPT-13B are 15,728 slots; 80 requests within some 4 s want about 80 * 500 = 40,000.
    model = ["model=opt-13b", "hardware=a100-40gb", "kv_cache_memory_bytes=12884901888"]
    folder = simulate(f"engine={engine}", *model, "workload.num_requests=80", "workload.rate=20")
    assert table(folder, "steps")["waiting"].max() > 0
    assert_littles_law(folder)


REQUESTS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=12
)  # gap in units of 0.1 s, prompt and output tokens


@pytest.fixture(scope="module")
def tiny() -> dict[str, DictConfig]:
    """Each engine with a pool of 64 slots, a limit of 60 tokens, at most 4 sequences and 0.3 s a step."""
    configs = {}
    GlobalHydra.instance().clear()
    with hydra.initialize_config_module("conf", version_base="1.3"):
        for engine in ENGINES:
            pool = ["memory.block_size=4", "memory.num_blocks=16", "max_model_len=60", "scheduler.max_num_seqs=4"]
            timing = ["timing=constant", "timing.step_seconds=0.3"]
            overrides = [f"engine={engine}", "workload=azure", "workload.path=unset", *pool, *timing]
            configs[engine] = hydra.compose("sim", overrides)
    return configs


@settings(deadline=None, max_examples=25)
@given(engine=st.sampled_from(ENGINES), requests=REQUESTS)
def test_littles_law_holds_for_any_small_run(
    tiny: dict[str, DictConfig],
    trace: Trace,
    tmp_path_factory: pytest.TempPathFactory,
    engine: str,
    requests: list[tuple[int, int, int]],
) -> None:
    times = np.cumsum([gap for gap, _, _ in requests]) / 10
    rows = [(float(t), prompt, output) for t, (_, prompt, output) in zip(times, requests, strict=True)]
    path = trace(rows)[1]
    folder, stepwise = (tmp_path_factory.mktemp("tiny") for _ in range(2))
    for into, leap in ((folder, "true"), (stepwise, "false")):
        config = OmegaConf.merge(tiny[engine], OmegaConf.from_dotlist([path, f"engine.leap={leap}"]))
        assert isinstance(config, DictConfig)
        summary = simulate_config(config, into, {})
    # 60 tokens at most fit the 15 blocks that paging hands out of 16, and Orca's region of 60 fits the 64 slots.
    assert summary["completed"] == len(requests)
    steps = table(folder, "steps")
    names = ["used", "reserved", "internal", "cached", "external", "idle"]
    assert (steps[names].sum(axis=1) == summary["pool_slots"]).all()
    assert steps["running"].max() <= 4
    assert_littles_law(folder)
    # Leaping over steps changes how many rows they take, and nothing else.
    for name in ("requests", "events"):
        assert (folder / f"{name}.parquet").read_bytes() == (stepwise / f"{name}.parquet").read_bytes()


def test_a_request_joins_at_the_end_of_the_step_it_comes_in(simulate: Simulate, trace: Trace) -> None:
    # Steps of 1 s from 0 on: B comes at 0.5 and joins at 1, C comes just as a step ends and joins there, at 2.
    requests = table(simulate(*trace([(0, 3, 4), (0.5, 3, 1), (2, 3, 1)]), *SECONDS), "requests")
    by_id = requests.set_index("request_id")
    assert by_id["first_scheduled_s"].to_dict() == {0: 0, 1: 1, 2: 2}
    assert by_id["finish_s"].to_dict() == {0: 4, 1: 2, 2: 3}


def test_idle_time_passes_at_once_and_takes_no_steps(simulate: Simulate, trace: Trace) -> None:
    folder = simulate(*trace([(0, 3, 2), (50.25, 3, 2)]), *SECONDS)
    steps = table(folder, "steps")
    assert steps["repeat"].sum() == 4
    assert steps["duration_s"].sum() == 4
    assert table(folder, "requests")["finish_s"].tolist() == [2, 52.25]


def test_steps_follow_one_another_without_gap_or_overlap_while_there_is_work(simulate: Simulate) -> None:
    steps = table(simulate("workload.num_requests=30", "workload.rate=20"), "steps")
    ends = (steps["start_s"] + steps["duration_s"]).to_numpy()[:-1]
    starts = steps["start_s"].to_numpy()[1:]
    assert (starts >= ends - 1e-9).all()
    assert (starts[steps["waiting"].to_numpy()[:-1] > 0] <= ends[steps["waiting"].to_numpy()[:-1] > 0] + 1e-9).all()


def test_a_request_that_can_never_fit_is_turned_away_and_the_run_goes_on(simulate: Simulate, trace: Trace) -> None:
    # 4 blocks of 4 to hand out. 10 + 7 tokens store 16 and fit just so; one more does not.
    pool = ["memory.block_size=4", "memory.num_blocks=5"]
    folder = simulate(*trace([(0, 10, 8), (1, 10, 7), (2, 1, 1)]), *pool, *SECONDS)
    requests = table(folder, "requests").set_index("request_id")
    assert requests["status"].to_dict() == {0: "rejected", 1: "finished", 2: "finished"}
    assert requests.loc[0, "finish_reason"] == "needs 5 blocks of 4 at its end, the pool has 4"
    assert pd.isna(requests.loc[0, ["first_scheduled_s", "first_token_s", "finish_s"]]).all()
    (event,) = table(folder, "events").to_dict("records")
    assert (event["event"], event["request_id"], event["time_s"]) == ("rejection", 0, 0)
    assert event["cause"] == requests.loc[0, "finish_reason"]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["completed"], summary["failed"], summary["total_input_tokens"]) == (2, 1, 11)


def test_a_prompt_that_leaves_no_room_for_output_is_turned_away(simulate: Simulate, trace: Trace) -> None:
    requests = table(simulate(*trace([(0, 16, 4), (0, 15, 4)]), "max_model_len=16", *SECONDS), "requests")
    by_id = requests.set_index("request_id")
    assert by_id["status"].to_dict() == {0: "rejected", 1: "finished"}
    assert by_id.loc[0, "finish_reason"] == "prompt of 16 tokens leaves no room for output under max_model_len 16"


def test_output_is_cut_off_at_the_model_limit(simulate: Simulate, trace: Trace) -> None:
    # 10 + 10 tokens under a limit of 16: six come, at 1 to 6 s. 10 + 6 ends by itself.
    folder = simulate(*trace([(0, 10, 10), (0, 10, 6)]), "max_model_len=16", *SECONDS)
    requests = table(folder, "requests").set_index("request_id")
    assert requests["generated_tokens"].to_dict() == {0: 6, 1: 6}
    assert requests["finish_reason"].to_dict() == {0: "length", 1: "stop"}
    assert requests["finish_s"].to_dict() == {0: 6, 1: 6}
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["completed"], summary["cut_off"], summary["total_output_tokens"]) == (2, 1, 12)


def test_a_blocked_queue_ends_the_run_and_says_who_waits_for_what(
    trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 16 slots; the head wants 20 at once and is not turned away, as in the real engine. Request 0 is long done.
    pool = ["memory.block_size=4", "memory.num_blocks=5", "scheduler.reject_oversize=false"]
    error = error_of(capsys, tmp_path, *trace([(0, 3, 1), (5, 20, 1), (6, 3, 1)]), *pool, *SECONDS)
    assert error == (
        "kvtwin: nothing can be scheduled any more: request 1 waits at the head of 2 with 20 tokens to place; "
        "16 of 16 slots are free, the largest run 16, and 0 requests run. "
        "Take a larger pool or scheduler.reject_oversize=true.\n"
    )
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


def test_a_request_that_preempts_itself_for_ever_ends_the_run(
    trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Admitted chunk by chunk: 8 of its 20 tokens, 16, and then there is no third chunk of room. It gives way to itself
    # and starts again; without an end to it the run would have none.
    pool = ["memory.block_size=4", "memory.num_blocks=5", "memory.prefix_caching=false"]
    scheduler = ["max_num_batched_tokens=8", "reject_oversize=false", "scheduler_reserve_full_isl=false"]
    options = [*pool, *(f"scheduler.{option}" for option in scheduler), *SECONDS]
    error = error_of(capsys, tmp_path, *trace([(0, 20, 1)]), *options)
    assert error.startswith("kvtwin: ")
    assert error.count("\n") == 1
    assert "tokens were computed and none was gained" in error
    assert "request 0" in error
    assert "scheduler_reserve_full_isl=true" in error
