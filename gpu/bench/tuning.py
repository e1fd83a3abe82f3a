"""Which launch configuration is the fastest for a problem, and the file that `load_tuning` reads.

One figure of the configuration is changed at a time, from the table's choice on, and a change is kept only if it gains
more than times scatter. So a handful of compilations a problem does, and where nothing is gained the table stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from gpu.bench.cases import ATTENTION, Problem
from gpu.kernels.launch import DecodeLaunch, Device, PrefillLaunch, decode_launch, prefill_launch
from gpu.kernels.shapes import AttentionShape

Launch = DecodeLaunch | PrefillLaunch
GAIN = 0.01  # a candidate must be faster by this share of the time, which repeated runs do not scatter by
STEPS = {"rows": (0.5, 2), "tile": (0.5, 2), "num_warps": (0.5, 2), "num_stages": (-1, 1)}
LEAST = {"rows": 16, "tile": 16, "num_warps": 1, "num_stages": 1}
MOST = {"rows": 256, "tile": 256, "num_warps": 16, "num_stages": 8}


@dataclass(frozen=True, slots=True)
class ProblemClass:
    """Problems that share one entry of the table.

    Args:
        kernel: decode or prefill.
        pool_bytes: bytes of one element of the pool.
        head_dim: heads up to this size: 64, 128 or 256.
    """

    kernel: str
    pool_bytes: int
    head_dim: int


def problem_class(problem: Problem) -> ProblemClass | None:
    """The class of an attention problem; None for kernels that are not launched from the table."""
    if problem.kernel not in ATTENTION:
        return None
    head_dim = next(size for size in (64, 128, 256) if size >= problem.head_dim)
    return ProblemClass(problem.kernel, problem.pool_bytes, head_dim)


def table_launch(problem: Problem, device: Device) -> Launch | None:
    """What the table, or a tuning file that was loaded, gives a problem; None for kernels that have no entry."""
    shape = AttentionShape(
        problem.num_kv_heads, problem.group, problem.head_dim, problem.block_size, problem.pool_bytes
    )
    if problem.kernel == "decode":
        return decode_launch(device, shape)
    if problem.kernel == "prefill":
        return prefill_launch(device, shape)
    return None


def representatives(problems: Iterable[Problem]) -> dict[ProblemClass, Problem]:
    """The first problem of each class, which stands for it: a base case, or as near to one as its precision allows."""
    chosen: dict[ProblemClass, Problem] = {}
    for problem in problems:
        kind = problem_class(problem)
        if kind is not None:
            chosen.setdefault(kind, problem)
    return chosen


def fastest(start: Launch, seconds: Callable[[Launch], float | None]) -> Launch | None:
    """The best launch that is found from `start` by changing one figure after the other.

    Args:
        start: what is tried first.
        seconds: the time of a launch, or None if the device refuses it. Asked once for each launch.

    Returns:
        None if `start` and everything next to it is refused.
    """
    known: dict[Launch, float | None] = {}

    def time_of(launch: Launch) -> float | None:
        if launch not in known:
            known[launch] = seconds(launch)
        return known[launch]

    best, best_time = start, time_of(start)
    for name in figures(start):
        for step in STEPS[name]:
            while (next_one := _stepped(best, name, step)) is not None:
                time = time_of(next_one)
                if time is None or (best_time is not None and time >= best_time * (1 - GAIN)):
                    break
                best, best_time = next_one, time
    return None if best_time is None else best


def tuning_content(
    device: Device, versions: Mapping[str, str], launches: Mapping[ProblemClass, Launch]
) -> dict[str, Any]:
    """The tuning file: see `gpu.kernels.launch.load_tuning`."""
    return {
        "device": device.target,
        "versions": dict(versions),
        "entries": [{**asdict(kind), **figures(launch)} for kind, launch in launches.items()],
    }


def figures(launch: Launch) -> dict[str, int]:
    """The figures of a launch that the table has, by name."""
    return {name: value for name, value in asdict(launch).items() if name in STEPS}


def _stepped(launch: Launch, name: str, step: float) -> Launch | None:
    """`launch` with one figure halved, doubled, or one more or less; None beyond what a tuning file may say."""
    value = getattr(launch, name)
    changed = value + int(step) if name == "num_stages" else int(value * step)
    if not LEAST[name] <= changed <= MOST[name]:
        return None
    change: dict[str, Any] = {name: changed}
    return replace(launch, **change)
