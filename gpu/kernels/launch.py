"""What the attention kernels are launched with: one table by device and problem, and one rule for the number of splits.

A table and no autotuning: autotuning measures inside the first launches, differs from run to run, and cannot be
compiled ahead or captured in a CUDA graph. What a benchmark finds for a device goes into a JSON file, which
`load_tuning` puts in place of the entries here.

How the entries were chosen. Decode streams K and V: a tile of 16 KiB of each with three stages keeps 64 KiB in flight
per program, and on GPUs with 164 KiB or more of shared memory two or three programs fit on an SM; where there are 100
KiB, tiles are halved. Prefill multiplies: 128 rows of queries, and as large a tile of keys as fits registers and shared
memory without spilling. In float32, which has no matrix instructions of full precision, products are done by ordinary
ones; such a model is for checking numbers, and its tiles are small. What each takes of a GPU is in `docs/kernels.md`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu.kernels.shapes import FP8, AttentionShape
from workloads.errors import UserError


@dataclass(frozen=True, slots=True)
class Device:
    """What a launch depends on.

    Args:
        target: compute capability as `sm_90`, or an AMD architecture as `gfx942`.
        num_sms: streaming multiprocessors, or compute units.
    """

    target: str
    num_sms: int


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """Args:
    tile: tokens of K and V that one iteration reads; a power of two of at least 16.
    num_warps: warps of a program.
    num_stages: iterations in flight, with the one being computed.
    splits: programs a sequence's context is divided among; None leaves it to `num_splits`.
    """

    tile: int
    num_warps: int
    num_stages: int
    splits: int | None = None


@dataclass(frozen=True, slots=True)
class PrefillLaunch:
    """Args:
    rows: queries times the query heads that share a KV head, of one program; a power of two of at least 16.
    tile: tokens of K and V that one iteration reads; a power of two of at least 16.
    num_warps: warps of a program.
    num_stages: iterations in flight, with the one being computed.
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int


# GPUs with a column of their own: A100, L40S, H100 and H200, B200, MI300X. Any other takes that of the last before it.
COLUMNS = ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942")
# But these have the shared memory of another: 100 KiB of an SM, or 164.
_SAME_AS = {"sm_86": "sm_89", "sm_87": "sm_80", "sm_120": "sm_89", "sm_121": "sm_89"}

# (bytes of a pool element, head size up to): (tile, warps, stages) for each device. One byte is fp8, which sm_80 lacks.
_DECODE: dict[tuple[int, int], tuple[tuple[int, int, int], ...]] = {
    #             sm_80         sm_89        sm_90         sm_100        gfx942
    (1, 64): ((128, 4, 3), (128, 4, 2), (128, 4, 3), (128, 4, 3), (128, 4, 2)),
    (1, 128): ((64, 4, 3), (64, 4, 3), (64, 4, 4), (64, 4, 4), (64, 4, 2)),
    (1, 256): ((32, 4, 3), (32, 4, 3), (32, 4, 4), (32, 4, 4), (32, 4, 2)),
    (2, 64): ((128, 4, 3), (64, 4, 3), (128, 4, 3), (128, 4, 3), (128, 4, 2)),
    (2, 128): ((64, 4, 3), (32, 4, 3), (64, 4, 3), (64, 4, 3), (64, 4, 2)),
    (2, 256): ((32, 4, 3), (16, 4, 3), (32, 4, 3), (32, 4, 3), (32, 4, 2)),
    (4, 64): ((32, 8, 2), (32, 8, 2), (32, 8, 2), (32, 8, 2), (32, 8, 2)),
    (4, 128): ((32, 8, 2), (16, 4, 2), (32, 8, 2), (32, 8, 2), (32, 8, 2)),
    (4, 256): ((16, 8, 2), (16, 8, 2), (16, 8, 2), (16, 8, 2), (16, 8, 2)),
}

# (bytes of a pool element, head size up to): (rows, tile, warps, stages) for each device
_PREFILL: dict[tuple[int, int], tuple[tuple[int, int, int, int], ...]] = {
    #                sm_80             sm_89             sm_90             sm_100            gfx942
    (1, 64): ((128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 3), (128, 64, 4, 1)),
    (1, 128): ((128, 32, 8, 3), (128, 32, 8, 2), (128, 64, 8, 3), (128, 64, 8, 3), (128, 32, 4, 1)),
    (1, 256): ((64, 32, 8, 2), (64, 32, 8, 2), (128, 32, 8, 2), (128, 32, 8, 2), (64, 32, 4, 1)),
    (2, 64): ((128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 3), (128, 128, 8, 3), (128, 64, 4, 1)),
    (2, 128): ((128, 32, 8, 3), (128, 32, 8, 2), (128, 64, 8, 3), (128, 64, 8, 3), (128, 32, 4, 1)),
    (2, 256): ((64, 32, 8, 2), (64, 32, 8, 2), (128, 32, 8, 3), (128, 32, 8, 3), (64, 32, 4, 1)),
    (4, 64): ((16, 32, 8, 2), (16, 32, 8, 2), (16, 32, 8, 2), (16, 32, 8, 2), (16, 32, 8, 1)),
    (4, 128): ((16, 32, 8, 2), (16, 32, 8, 2), (16, 32, 8, 2), (16, 32, 8, 2), (16, 32, 8, 1)),
    (4, 256): ((16, 16, 8, 2), (16, 16, 8, 2), (16, 16, 8, 2), (16, 16, 8, 2), (16, 16, 8, 1)),
}

# What `load_tuning` has put in place of entries above: (target, bytes of a pool element, head size up to) to a launch.
_decode_tuned: dict[tuple[str, int, int], DecodeLaunch] = {}
_prefill_tuned: dict[tuple[str, int, int], PrefillLaunch] = {}


def decode_launch(device: Device, shape: AttentionShape) -> DecodeLaunch:
    """The table's choice for a decode, with `splits` left open."""
    tuned = _decode_tuned.get((device.target, *_problem(shape)))
    if tuned is not None:
        return tuned
    return DecodeLaunch(*_DECODE[_problem(shape)][COLUMNS.index(_column(device.target))])


def prefill_launch(device: Device, shape: AttentionShape) -> PrefillLaunch:
    """The table's choice for a prefill."""
    tuned = _prefill_tuned.get((device.target, *_problem(shape)))
    if tuned is not None:
        return tuned
    return PrefillLaunch(*_PREFILL[_problem(shape)][COLUMNS.index(_column(device.target))])


PROGRAMS_PER_SM = 8
MIN_TILES_PER_SPLIT = 4
MAX_SPLITS = 128


def num_splits(batch: int, num_kv_heads: int, max_context: int, tile: int, num_sms: int) -> int:
    """Programs among which each sequence's context is divided.

    Enough that every SM gets PROGRAMS_PER_SM of them, two or three at a time, so that the last ones to end leave little
    idle; but none with fewer than MIN_TILES_PER_SPLIT tiles of the longest context: its start would outweigh its work.
    Only sizes the host knows count, so that one launch serves every step of the same batch.
    """
    wanted = -(-PROGRAMS_PER_SM * num_sms // max(1, batch * num_kv_heads))
    most = max_context // (MIN_TILES_PER_SPLIT * tile)
    return max(1, min(wanted, most, MAX_SPLITS))


INTERPRETED = Device("sm_90", 4)
"""What CPU tensors are taken to be on, where Triton interprets."""


def device_of(tensor: torch.Tensor) -> Device:
    """The device a tensor is on."""
    if tensor.device.type != "cuda":
        return INTERPRETED
    return _cuda_device(torch.cuda.current_device() if tensor.device.index is None else tensor.device.index)


@functools.cache
def _cuda_device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        target = properties.gcnArchName.split(":")[0]
    else:
        target = f"sm_{properties.major}{properties.minor}"
    return Device(target, properties.multi_processor_count)


def require_pool_dtype(dtype: torch.dtype, device: Device) -> None:
    """Refuses an fp8 pool on a GPU whose compiler has no such type.

    Raises:
        UserError: float8_e4m3fn on an NVIDIA GPU before compute capability 8.9.
    """
    if dtype == FP8 and device.target in ("sm_80", "sm_86", "sm_87"):
        raise UserError(f"an fp8 (e4m3) KV cache on {device.target}: needs sm_89 or newer; use the model's own type.")


def load_tuning(path: Path) -> int:
    """Puts the launches of a file in place of the table's, for this process; returns how many.

    The file is what a kernel benchmark writes:

        {"device": "sm_90", "versions": {"triton": "3.7.1"}, "entries": [
            {"kernel": "decode", "pool_bytes": 2, "head_dim": 128, "tile": 64, "num_warps": 4, "num_stages": 3},
            {"kernel": "prefill", "pool_bytes": 2, "head_dim": 128, "rows": 128, "tile": 64, "num_warps": 8,
             "num_stages": 3}]}

    An entry is for pools of `pool_bytes` per element and for heads up to `head_dim` (64, 128 or 256) that no smaller
    entry is for. `versions` is for the reader.

    Raises:
        UserError: the file cannot be read, or says anything else. Then nothing has been replaced.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable JSON file ({error}); write one with the kernel benchmark.") from error
    if not isinstance(content, dict) or content.keys() != {"device", "versions", "entries"}:
        raise UserError(f"{path}: expected an object with device, versions and entries; write one with the benchmark.")
    target = content["device"]
    if not isinstance(target, str) or not isinstance(content["versions"], dict):
        raise UserError(f"{path}: device is {target!r}; expected a name such as sm_90, and versions as an object.")
    _column(target)
    if not isinstance(content["entries"], list):
        raise UserError(f"{path}: entries is {content['entries']!r}; expected a list.")
    decode: dict[tuple[str, int, int], DecodeLaunch] = {}
    prefill: dict[tuple[str, int, int], PrefillLaunch] = {}
    for number, entry in enumerate(content["entries"], start=1):
        where = f"{path}, entry {number}"
        kernel = entry.get("kernel") if isinstance(entry, dict) else None
        if kernel == "decode":
            values = _figures(entry, ("tile", "num_warps", "num_stages"), where)
            decode[target, entry["pool_bytes"], entry["head_dim"]] = DecodeLaunch(**values)
        elif kernel == "prefill":
            values = _figures(entry, ("rows", "tile", "num_warps", "num_stages"), where)
            prefill[target, entry["pool_bytes"], entry["head_dim"]] = PrefillLaunch(**values)
        else:
            raise UserError(f"{where}: kernel is {kernel!r}; expected decode or prefill.")
    _decode_tuned.update(decode)
    _prefill_tuned.update(prefill)
    return len(decode) + len(prefill)


_ALLOWED: Mapping[str, tuple[int, ...]] = {
    "pool_bytes": (1, 2, 4),
    "head_dim": (64, 128, 256),
    "rows": (16, 32, 64, 128, 256),
    "tile": (16, 32, 64, 128, 256),
    "num_warps": (1, 2, 4, 8, 16),
    "num_stages": (1, 2, 3, 4, 5, 6, 7, 8),
}


def _figures(entry: Mapping[str, Any], names: tuple[str, ...], where: str) -> dict[str, int]:
    """The named figures of an entry, all checked, and that it has nothing else."""
    expected = ("pool_bytes", "head_dim", *names)
    if entry.keys() != {"kernel", *expected}:
        raise UserError(f"{where}: has {', '.join(sorted(entry))}; expected kernel, {', '.join(expected)}.")
    for name in expected:
        value = entry[name]
        if type(value) is not int or value not in _ALLOWED[name]:
            raise UserError(f"{where}: {name} is {value!r}; expected one of {', '.join(map(str, _ALLOWED[name]))}.")
    return {name: entry[name] for name in names}


def _problem(shape: AttentionShape) -> tuple[int, int]:
    return shape.pool_bytes, max(64, shape.padded_dim)


def _column(target: str) -> str:
    """The device whose column a target takes: itself, one with the same shared memory, or the last one before it.

    Raises:
        UserError: nothing comes before it.
    """
    target = _SAME_AS.get(target, target)
    if target in COLUMNS:
        return target
    if target.startswith("gfx"):
        return "gfx942"
    number = target.removeprefix("sm_")
    older = [
        column for column in COLUMNS if number.isdecimal() and column[3:].isdecimal() and int(column[3:]) <= int(number)
    ]
    if not target.startswith("sm_") or not older:
        raise UserError(f"GPU architecture {target}: the kernels need sm_80 or newer, or an AMD gfx architecture.")
    return older[-1]
