"""What the `meta.json` of a recorded serving run says of its engine, as options of `kvtwin sim`.

A block count that the engine logged is taken from there: a wrong one is a larger error than a wrong timer. Where the
file is silent, the engine's defaults hold: blocks of 16 tokens, prefix caching, asynchronous scheduling (vLLM 0.19).
A sweep over pool sizes has no such file; its settings stand here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from workloads.errors import UserError

META = "meta.json"
PROFILE = "profile"  # the folder with the kernel tables
RUNS = "runs.csv"  # of a pool sweep (`pool_sweep.py`), which says nothing of its engine: these are the public one's
SWEEP_SETTINGS = {
    "engine": "vllm_v0",
    "model": "llama-2-7b",  # of no account, as the hardware: the pool is given in blocks, and no time is compared
    "hardware": "h100-80gb",
    "workload": "synthetic",
    "workload/arrivals": "all_at_once",
    "timing": "constant",
    "max_model_len": "4096",
    "scheduler.max_num_seqs": "4096",
    "record.steps": "none",
    "record.requests": "none",
}


def recorded_settings(folder: Path) -> dict[str, str]:
    """Options, by name, that make `kvtwin sim` run what was recorded in `folder`.

    Groups (`model`, `hardware`) are named as in `conf/`; one that nothing there fits is left out, for the user to give.

    Raises:
        UserError: no such file, or no JSON object.
    """
    meta = _meta(folder / META)
    engine, cache = _part(meta, "engine_kwargs"), _part(meta, "kv_cache")
    resolved = _part(meta, "resolved")
    scheduler, cache_config = _part(resolved, "scheduler_config"), _part(resolved, "cache_config")
    block_size = cache.get("block_size") or cache_config.get("block_size") or 16
    options: dict[str, Any] = {
        "workload": "recorded_run",
        "workload.path": folder,
        "workload.block_size": block_size,
        "model": _choice("model", [str(meta.get("model", "")).rpartition("/")[2]]),
        "hardware": _choice("hardware", [_part(meta, "hardware").get("device_name", ""), folder.resolve().name]),
        "engine": "vllm_v1",
        "tensor_parallel": engine.get("tensor_parallel_size"),
        "max_model_len": engine.get("max_model_len"),
        "gpu_memory_utilization": cache.get("gpu_memory_utilization"),
        "memory.block_size": block_size,
        "memory.num_blocks": cache.get("num_gpu_blocks") or cache_config.get("num_gpu_blocks"),
        "memory.prefix_caching": cache_config.get("enable_prefix_caching", cache.get("enable_prefix_caching")),
        "scheduler.max_num_seqs": engine.get("max_num_seqs"),
        "scheduler.max_num_batched_tokens": engine.get("max_num_batched_tokens"),
        "scheduler.chunked_prefill": scheduler.get("enable_chunked_prefill"),
        "scheduler.scheduler_reserve_full_isl": scheduler.get("scheduler_reserve_full_isl"),
        "scheduler.async_scheduling": scheduler.get("async_scheduling") is not False,
    }
    if (folder / PROFILE).is_dir():
        options |= {"timing": "profile", "timing.path": folder / PROFILE}
    return {key: _spelled(value) for key, value in options.items() if value is not None}


def is_pool_sweep(path: Path) -> bool:
    """Whether a folder holds a sweep over pool sizes."""
    return (path / RUNS).is_file()


def with_settings(argv: list[str]) -> list[str]:
    """The arguments, and behind `measured=` those under which the recorded run was made that it names.

    The same for a pool sweep. Nothing is added if it names another kind of run, or if the prediction is there already,
    as `predicted=`.

    Raises:
        UserError: as `recorded_settings`, or its model or hardware has no config of its own and the user gives none.
    """
    given = {key: value for key, _, value in (word.partition("=") for word in argv)}
    measured = Path(given.get("measured", "").strip("'\"")).expanduser()
    if given.get("predicted", "null") != "null":
        return argv
    if is_pool_sweep(measured):
        settings = SWEEP_SETTINGS
    elif (measured / META).is_file():
        settings = recorded_settings(measured)
    else:
        return argv
    for group in ("model", "hardware"):
        if group not in settings and group not in given:
            raise UserError(f"no file of conf/{group} fits what {measured / META} says; give {group}=NAME.")
    place = next(at for at, word in enumerate(argv, 1) if word.startswith("measured="))
    return [*argv[:place], *overrides(settings, argv), *argv[place:]]


def overrides(settings: dict[str, str], given: Iterable[str]) -> list[str]:
    """The settings as Hydra overrides, less those that `given` has a word on: the user's own come first.

    An option below a group that the user chooses anew is left to the group's file.
    """
    given = [word.partition("=")[0].lstrip("+~") for word in given]
    taken = set(given)
    chosen = {name for name in given if name in ("workload", "timing", "memory", "scheduler")}
    return [
        f"{name}={value}"
        for name, value in settings.items()
        if name not in taken and name.partition(".")[0] not in chosen
    ]


def _meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; a recorded run is a folder with {META} and requests.jsonl.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable as JSON ({error}); expected what the recorder wrote.") from None
    if not isinstance(meta, dict):
        raise UserError(f"{path}: expected a JSON object; give the folder of a recorded run.")
    return meta


def _part(values: dict[str, Any], key: str) -> dict[str, Any]:
    part = values.get(key)
    return part if isinstance(part, dict) else {}


def _choice(group: str, descriptions: Iterable[str]) -> str | None:
    """The file of `conf/<group>/` whose name is part of a description, letters and digits alone; the longest such."""
    names = [file.name.removesuffix(".yaml") for file in resources.files("conf").joinpath(group).iterdir()]
    for description in map(_plain, descriptions):
        fitting = [name for name in names if _plain(name) and _plain(name) in description]
        if fitting:
            return max(fitting, key=len)
    return None


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _spelled(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Path):
        return "'" + str(value.resolve()).replace("\\", "\\\\").replace("'", "\\'") + "'"
    return str(value)
