"""Kernel times from Vidur's profiles (Agrawal et al., MLSys 2024): `attention.csv` and `mlp.csv` of a model on a GPU.

Times are medians in milliseconds, one row a measurement. `mlp.csv` has a column `time_stats.<operation>.median` for
each operation by `num_tokens`; `attention.csv` has `attn_prefill`, `attn_decode` and `attn_kv_cache_save` by
`prefill_chunk_size`, `kv_cache_size` and `batch_size`. A row of decodes has a chunk of 0 or `is_prefill` False. Both
hold several degrees of tensor parallelism. There is no output projection, no sampler, no mixed batch and no skew in
them: the first two are left out, a mixed batch is the sum of its parts. Writing to the cache is measured there and
added to attention.
"""

from __future__ import annotations

from pathlib import Path

from sim.timing.interpolation import Curve, Patches, averaged, patches
from sim.timing.kernel_tables import AttentionTimes, KernelTables, number, rows_of
from workloads.errors import UserError

MILLISECONDS = 1e-3
# Vidur's operations of a layer, by the names of `profile.py`: the norms are named apart there.
OPERATIONS = {
    "emb": "embedding",
    "input_layernorm": "input_layernorm",
    "attn_pre_proj": "qkv_proj",
    "attn_rope": "rotary_emb",
    "attn_post_proj": "o_proj",
    "post_attention_layernorm": "post_attention_layernorm",
    "mlp_up_proj": "gate_up_proj",
    "mlp_act": "act_fn",
    "mlp_down_proj": "down_proj",
    "add": "add",
}
DEGREE = "num_tensor_parallel_workers"
Points = list[tuple[tuple[float, ...], float]]


def is_vidur(folder: Path) -> bool:
    """Whether the folder has Vidur's layout."""
    return (folder / "mlp.csv").exists()


def read_vidur_tables(folder: Path, tensor_parallel: int) -> KernelTables:
    """The tables in `folder` for that degree.

    Raises:
        UserError: a file or column that is missing, a field that is no number, or no row of that degree.
    """
    return KernelTables(
        _layers(folder / "mlp.csv", tensor_parallel),
        {"none": Curve({1.0: 0.0})},
        _attention(folder / "attention.csv", tensor_parallel),
    )


def _layers(path: Path, degree: int) -> dict[str, Curve]:
    points: dict[str, Points] = {}
    for line, row in rows_of(path, ("num_tokens", DEGREE)):
        if number(path, line, row, DEGREE) != degree:
            continue
        for operation, layer in OPERATIONS.items():
            column = f"time_stats.{operation}.median"
            if row.get(column):
                seconds = number(path, line, row, column) * MILLISECONDS
                points.setdefault(layer, []).append(((number(path, line, row, "num_tokens"),), seconds))
    if not points:
        raise _no_row(path, degree)
    return {
        layer: Curve({place[0]: value for place, value in averaged(rows).items()}) for layer, rows in points.items()
    }


def _attention(path: Path, degree: int) -> AttentionTimes:
    prefill: Points = []
    decode: Points = []
    columns = ("batch_size", "prefill_chunk_size", "kv_cache_size", DEGREE)
    for line, row in rows_of(path, (*columns, "time_stats.attn_prefill.median", "time_stats.attn_decode.median")):
        batch, chunk, cached, row_degree = (number(path, line, row, column) for column in columns)
        if row_degree != degree:
            continue
        write = row.get("time_stats.attn_kv_cache_save.median")
        extra = number(path, line, row, "time_stats.attn_kv_cache_save.median") if write else 0.0
        if chunk > 0:
            seconds = (number(path, line, row, "time_stats.attn_prefill.median") + extra) * MILLISECONDS
            prefill.append(((chunk, cached), seconds))
        else:
            seconds = (number(path, line, row, "time_stats.attn_decode.median") + extra) * MILLISECONDS
            decode.append(((batch, cached), seconds))
    grids: list[Patches | None] = [patches(averaged(rows)) for rows in (prefill, decode)]
    if grids[0] is None or grids[1] is None:
        raise _no_row(path, degree)
    return AttentionTimes(grids[0], grids[1], None)


def _no_row(path: Path, degree: int) -> UserError:
    return UserError(f"{path} has no usable row of {DEGREE} = {degree}; choose tensor_parallel= as it was measured.")
