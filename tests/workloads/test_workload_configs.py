"""The workload configs: each can be built, groups can be exchanged, and defaults are what their comments say."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from workloads.conversations import Conversations
from workloads.generate import Synthetic
from workloads.readers.azure import AzureTrace
from workloads.readers.mooncake import MooncakeTrace
from workloads.sampling import ParallelSampling

CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture(autouse=True)
def hydra() -> Iterator[None]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def workload_config(name: str, *overrides: str) -> dict[str, Any]:
    config = compose(overrides=[f"+workload={name}", *overrides]).workload
    return cast(dict[str, Any], OmegaConf.to_container(config))


def build(name: str, *overrides: str) -> Any:
    """The workload as a run builds it: limits, concurrency and time scale are not the constructor's; seed and model
    limit are the run's.
    """
    config = workload_config(name, *overrides)
    knobs = ("limit", "sample", "max_tokens", "concurrency", "time_scale", "length_scale")
    assert [config.pop(knob) for knob in knobs] == [None, None, None, None, 1.0, 1.0]
    for knob, value in {"seed": 0, "max_model_len": 2048}.items():
        if knob in config:
            assert config[knob] is None
            config[knob] = value
    return instantiate(config)


def test_every_workload_can_be_cut_and_slowed_down_and_sent_by_clients_that_wait() -> None:
    configs = [workload_config(file.stem) for file in (CONF / "workload").glob("*.yaml")]
    assert configs
    knobs = ("limit", "sample", "max_tokens", "concurrency", "time_scale", "length_scale")
    assert {tuple(config.get(knob, "missing") for knob in knobs) for config in configs} == {
        (None, None, None, None, 1.0, 1.0)
    }


def test_every_workload_may_ask_for_several_outputs(tmp_path: Path) -> None:
    for name in (file.stem for file in (CONF / "workload").glob("*.yaml")):
        assert "sampling" not in workload_config(name)
        assert instantiate(
            workload_config(name, "workload/sampling=parallel", "workload.sampling.n=3")["sampling"]
        ) == (ParallelSampling(3))


def test_readers_take_a_path(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,2\n")
    assert isinstance(build("azure", f"workload.path={trace}", "workload.on_bad_row=drop"), AzureTrace)
    assert isinstance(build("mooncake", f"workload.path={trace}"), MooncakeTrace)


@pytest.mark.parametrize(
    ("name", "rate", "prompt_mean", "output_mean"),
    [("sharegpt_like", 2.0, 161.31, 337.99), ("alpaca_like", 30.0, 19.31, 58.45)],
)
def test_paper_workloads_have_the_published_means(
    name: str, rate: float, prompt_mean: float, output_mean: float
) -> None:
    # Kwon et al., SOSP 2023, Fig. 11 and 13.
    config = workload_config(name)
    assert (config["rate"], config["arrivals"]["_target_"]) == (rate, "workloads.arrivals.Poisson")
    assert (config["prompt_lengths"]["mean"], config["output_lengths"]["mean"]) == (prompt_mean, output_mean)
    assert isinstance(build(name), Synthetic)


def test_groups_of_a_synthetic_workload_can_be_exchanged() -> None:
    workload = build(
        "synthetic",
        "workload/arrivals=gamma",
        "workload.arrivals.burstiness=2.0",
        "workload/prompt_lengths=uniform",
        "workload.prompt_lengths.low=10",
        "workload.prompt_lengths.high=20",
        "workload.num_requests=200",
    )
    requests = list(workload)
    assert {request.prompt_tokens for request in requests} == set(range(10, 21))
    assert {request.output_tokens for request in requests} == {128}


@pytest.mark.parametrize("name", ["sharegpt_like", "alpaca_like"])
def test_groups_of_a_paper_workload_can_be_exchanged(name: str) -> None:
    # Nothing of the lognormal lengths it came with may be left behind.
    workload = build(name, "workload/prompt_lengths=fixed", "workload/output_lengths=fixed")
    assert {(request.prompt_tokens, request.output_tokens) for request in workload} == {(1024, 128)}


@pytest.mark.parametrize("group", ["turns", "think"])
def test_every_choice_of_a_conversation_can_be_built(group: str) -> None:
    choices = sorted(file.stem for file in (CONF / "workload" / group).glob("*.yaml"))
    assert choices
    for choice in choices:
        assert isinstance(build("conversations", f"workload/{group}={choice}"), Conversations), choice


@pytest.mark.parametrize("group", ["arrivals", "prompt_lengths", "output_lengths"])
def test_every_choice_of_every_group_can_be_built(group: str, tmp_path: Path) -> None:
    choices = sorted(file.stem for file in (CONF / "workload" / group).glob("*.yaml"))
    assert choices
    (tmp_path / "lengths.csv").write_text("tokens\n7\n")
    for choice in choices:
        overrides = [f"workload/{group}={choice}"]
        if choice == "replayed":
            (tmp_path / "trace.csv").write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,1,1\n2,1,1\n")
            overrides += [f"workload.arrivals.path={tmp_path / 'trace.csv'}"]
        if choice == "empirical":
            overrides += [f"workload.{group}.path={tmp_path / 'lengths.csv'}", f"workload.{group}.column=tokens"]
        assert isinstance(build("synthetic", *overrides), Synthetic), choice
