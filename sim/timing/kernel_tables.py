"""Kernel times of one GPU and model, measured one layer at a time, as tables that answer for any step.

The layout is a folder of CSV files, times in microseconds:

- `dense.csv`: `layer,tokens,time_us`, the layers that see every token;
- `per_sequence.csv`: `layer,sequences,time_us`, output projection and sampler;
- `attention.csv`: `prefill_chunk,kv_prefill,n_decode,kv_decode,time_us`, one attention call of a batch with one prefill
  chunk after `kv_prefill` cached tokens (0: none) and `n_decode` decodes of `kv_decode` tokens each (0: none);
- `skew.csv`, if uneven contexts were measured: `n` decodes of which `nb` have `kv_big` tokens and the others `kvs`,
  beside a prefill chunk of `pc` tokens after `kp`, and `alpha`, the share of the way from the time of a batch with the
  same mean to that of one in which all are as long as the longest;
- `moe.csv`, if the model has experts: `tokens,activated_experts,time_us`, and `ep`, the degree of expert parallelism.

What a step is made of, and how often each layer runs in it, is the timer's business (`profile.py`).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sim.timing.interpolation import Curve, Grid, Patches, averaged, full_grid, locate, patches
from workloads.errors import UserError

MICROSECONDS = 1e-6
SHARES = (1 / 256, 1 / 128, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 9 / 10)  # of long sequences, skew table
LONG = 4  # length of the long sequences over that of the short ones in the skew table's batches

Chunk = tuple[int, int]
"""Tokens of a prefill chunk, and computed tokens before it."""


@dataclass(frozen=True, slots=True)
class AttentionTimes:
    """One attention call, in seconds.

    Args:
        prefill: by chunk and computed tokens before it.
        decode: by sequences and context of each.
        mixed: by chunk, computed tokens before it, sequences and context of each; None if no mixed batch was measured:
            then a mixed batch costs the sum of its parts.
    """

    prefill: Patches
    decode: Patches
    mixed: Patches | None

    def one_chunk(self, chunk: Chunk | None, decodes: int, context: float) -> float:
        """A batch of at most one chunk, and `decodes` sequences of `context` tokens each."""
        if chunk is None:
            return self.decode(decodes, context) if decodes else 0.0
        if not decodes:
            return self.prefill(*chunk)
        if self.mixed is None:
            return self.prefill(*chunk) + self.decode(decodes, context)
        return self.mixed(*chunk, decodes, context)

    def further_chunk(self, chunk: Chunk) -> float:
        """What a chunk adds to a call that has another one already: all but what even the smallest one costs."""
        smallest = min(grid.axes[0][0] for grid in self.prefill.grids)
        return max(0.0, self.prefill(*chunk) - self.prefill(smallest, 0))


@dataclass(frozen=True, slots=True)
class SkewTimes:
    """How much of the way to a batch of nothing but long sequences an uneven batch has gone.

    Args:
        pure: alpha by sequences, context of the short ones and share of long ones, decodes alone.
        mixed: the same beside a prefill chunk, which comes second and third: its tokens, and computed ones before it.
    """

    pure: Grid
    mixed: Grid | None

    def alpha(self, chunk: Chunk | None, decodes: int, mean: float, longest: float) -> float:
        """That of the measured batch with the same mean and longest context, or the nearest to it.

        In the measured ones the long sequences have `LONG` times the tokens of the short ones.
        """
        short = longest / LONG
        share = max((mean - short) / (longest - short), 1 / decodes)
        if chunk is None or self.mixed is None:
            return self.pure.clamped(decodes, short, share)
        return self.mixed.clamped(decodes, *chunk, short, share)


class ExpertTimes:
    """The experts of one layer, in seconds.

    Args:
        points: (tokens, experts activated) -> seconds.
    """

    def __init__(self, points: dict[tuple[float, ...], float]) -> None:
        self._tokens = sorted({place[0] for place in points})
        self._curves = [
            Curve({activated: value for (tokens, activated), value in points.items() if tokens == measured})
            for measured in self._tokens
        ]

    def __call__(self, tokens: int, activated: float) -> float:
        if len(self._tokens) == 1:
            return self._curves[0](activated)
        at, share = locate(self._tokens, tokens)
        low, high = self._curves[at](activated), self._curves[at + 1](activated)
        return low + (high - low) * share


@dataclass(frozen=True, slots=True)
class KernelTables:
    """Everything that was measured.

    Args:
        dense: layer -> seconds by tokens.
        per_sequence: layer -> seconds by sequences.
        attention: one call.
        skew: what uneven contexts cost, or None.
        experts: of one layer, or None.
    """

    dense: dict[str, Curve]
    per_sequence: dict[str, Curve]
    attention: AttentionTimes
    skew: SkewTimes | None = None
    experts: ExpertTimes | None = None


def read_kernel_tables(folder: Path) -> KernelTables:
    """The tables in `folder`.

    Raises:
        UserError: a file or column that is missing, or a field that is no number; it names the line.
    """
    return KernelTables(
        dense=_curves(folder / "dense.csv", "tokens"),
        per_sequence=_curves(folder / "per_sequence.csv", "sequences"),
        attention=_attention(folder / "attention.csv"),
        skew=_skew(folder / "skew.csv") if (folder / "skew.csv").exists() else None,
        experts=_experts(folder / "moe.csv") if (folder / "moe.csv").exists() else None,
    )


def rows_of(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and fields of each row of a CSV file with a header.

    Raises:
        UserError: no such file, or a column is missing.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            missing = [column for column in columns if column not in (reader.fieldnames or ())]
            if missing:
                raise UserError(f"{path} has no column {missing[0]}; expected {', '.join(columns)}.")
            for row in reader:
                yield reader.line_num, row
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; timing.path takes a folder with the kernel tables of a GPU.") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read as CSV ({error}); give another folder as timing.path.") from None


def number(path: Path, line: int, row: dict[str, str], column: str) -> float:
    """The field as a number of at least 0. Raises UserError."""
    text = row[column]
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UserError(f"{path}, line {line}: {column} is {text!r}; expected a number, 0 or more. Correct the row.")
    return value


def _measured(path: Path, keys: Sequence[str]) -> dict[tuple[float, ...], float]:
    """(the fields `keys`) -> seconds."""
    points = averaged(
        (tuple(number(path, line, row, key) for key in keys), number(path, line, row, "time_us") * MICROSECONDS)
        for line, row in rows_of(path, (*keys, "time_us"))
    )
    if not points:
        raise UserError(f"{path} has no row; measure the kernels again.")
    return points


def _curves(path: Path, position: str) -> dict[str, Curve]:
    points: dict[str, list[tuple[tuple[float, ...], float]]] = {}
    for line, row in rows_of(path, ("layer", position, "time_us")):
        place = (number(path, line, row, position),)
        points.setdefault(row["layer"], []).append((place, number(path, line, row, "time_us") * MICROSECONDS))
    if not points:
        raise UserError(f"{path} has no row; measure the kernels again.")
    return {
        layer: Curve({place[0]: value for place, value in averaged(rows).items()}) for layer, rows in points.items()
    }


def _attention(path: Path) -> AttentionTimes:
    points = _measured(path, ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode"))
    prefill = patches({place[:2]: value for place, value in points.items() if place[0] and not place[2]})
    decode = patches({place[2:]: value for place, value in points.items() if place[2] and not place[0]})
    for kind, grid in (("prefill", prefill), ("decode", decode)):
        if grid is None:
            raise UserError(f"{path} has no batch of {kind} alone; measure some.")
    assert prefill is not None and decode is not None
    mixed = patches({place: value for place, value in points.items() if place[0] and place[2]})
    return AttentionTimes(prefill, decode, mixed)


def _skew(path: Path) -> SkewTimes | None:
    """The table without the few batches whose long sequences are not `LONG` times as long as the short ones."""
    keys = ("n", "nb", "pc", "kp", "kvs", "kv_big")
    curves: dict[tuple[float, ...], dict[float, list[float]]] = {}
    for line, row in rows_of(path, (*keys, "alpha")):
        if not row["alpha"]:
            continue
        n, long, *chunk, short, big = (number(path, line, row, key) for key in keys)
        if n and short and big == LONG * short:
            curves.setdefault((n, *chunk, short), {}).setdefault(long / n, []).append(float(row["alpha"]))
    points: dict[tuple[float, ...], float] = {}
    for place, curve in curves.items():
        shares = sorted(curve)
        alphas = np.interp(SHARES, shares, [sum(curve[share]) / len(curve[share]) for share in shares])
        points |= {(*place, share): float(alpha) for share, alpha in zip(SHARES, alphas, strict=True)}
    pure = full_grid({(n, *rest): value for (n, pc, _, *rest), value in points.items() if not pc})
    mixed = full_grid({place: value for place, value in points.items() if place[1]})
    return None if pure is None else SkewTimes(pure, mixed)


def _experts(path: Path) -> ExpertTimes:
    with_degree = any("ep" in row for _, row in rows_of(path, ()))
    keys = ("tokens", "activated_experts", *(("ep",) if with_degree else ()))
    return ExpertTimes(
        {place[:2]: value for place, value in _measured(path, keys).items() if place[2:] in ((), (1.0,))}
    )
