"""The bundled GPUs and the deployment's options."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from sim.config import build, fill
from sim.hardware import Deployment, Hardware, cpu_name
from workloads.errors import UserError

CONF = Path(__file__).parents[2] / "conf"
GPUS = sorted(path.stem for path in (CONF / "hardware").glob("*.yaml") if path.stem != "cpu")


def load(group: str, name: str) -> Any:
    node = OmegaConf.load(CONF / group / f"{name}.yaml")
    assert isinstance(node, DictConfig)
    return build(node, group)


def test_the_cpu_has_the_name_that_it_gives_itself_and_the_machines_memory() -> None:
    cpu = load("hardware", "cpu")
    assert isinstance(cpu, Hardware)
    assert cpu.name == cpu_name() != ""
    assert cpu.memory_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("name", GPUS)
def test_bundled_gpu_is_named_as_its_file_and_close_to_its_nominal_size(name: str) -> None:
    gpu = load("hardware", name)
    assert isinstance(gpu, Hardware)
    assert gpu.name == name
    nominal = {"l4": 24, "l40s": 48, "rtx-4090": 24, "rtx-pro-6000": 96, "b200": 180}
    size = nominal.get(name) or int(name.rpartition("-")[2].removesuffix("gb"))
    # What a driver reports is between 90 % of the nominal GiB and all of them.
    assert 0.9 * size <= gpu.memory_bytes / 2**30 <= size


@pytest.mark.parametrize("name", GPUS)
def test_peaks_are_dense_and_one_way(name: str) -> None:
    # FLOPs per byte of 16-bit dense peaks lie between 153 (A100-80GB) and 419 (L40S); one with sparsity would double.
    gpu = load("hardware", name)
    assert 150 < gpu.flops_per_second / gpu.bandwidth < 425
    assert gpu.interconnect_bandwidth < gpu.bandwidth


def test_issue_names_are_bundled() -> None:
    assert {"a100-40gb", "a100-80gb", "h100-80gb", "h200-141gb", "l4", "l40s", "rtx-4090", "b200"} <= set(GPUS)


def test_figure_below_zero_is_refused() -> None:
    with pytest.raises(UserError, match="hardware toy: bandwidth is 0"):
        Hardware("toy", 1, 1.0, 0, 1.0)


def test_defaults_of_the_file_are_those_of_the_class() -> None:
    assert fill(Deployment, OmegaConf.load(CONF / "deployment.yaml")) == Deployment()  # type: ignore[arg-type]


def options(**changes: object) -> dict[str, object]:
    return {**vars(Deployment()), **changes}


def test_whole_floats_pass_for_integers() -> None:
    assert fill(Deployment, options(kv_cache_memory_bytes=435e9)).kv_cache_memory_bytes == 435_000_000_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel is 0; expected a whole number of at least 1"),
        ({"tensor_parallel": "two"}, "tensor_parallel is 'two'; expected a whole number"),
        ({"tensor_parallel": True}, "tensor_parallel is True; expected a whole number"),
        ({"pipeline_parallel": 1.5}, "pipeline_parallel is 1.5; expected a whole number"),
        ({"gpu_memory_utilization": 90}, "gpu_memory_utilization is 90.0; expected a share above 0 and at most 1"),
        ({"free_gpu_memory_fraction": 0.0}, "free_gpu_memory_fraction is 0.0; expected a share above 0 and at most 1"),
        ({"non_kv_memory_bytes": -1}, "non_kv_memory_bytes is -1; expected a whole number of at least 0"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype is fp4; expected one of auto, "),
        ({"max_model_len": 0}, "max_model_len is 0"),
    ],
)
def test_bad_option_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        fill(Deployment, options(**changes))


def test_missing_option_is_named() -> None:
    values = options()
    del values["kv_cache_dtype"]
    with pytest.raises(UserError, match="kv_cache_dtype is not set"):
        fill(Deployment, values)
