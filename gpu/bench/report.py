"""What the terminal shows of a `bench.json`: a table for each kernel, and a sentence for each base case."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpu.bench.cases import ATTENTION, KERNELS, OURS

if TYPE_CHECKING:
    from rich.table import Table

Entry = Mapping[str, Any]
WIDTH = 140  # columns where the output is no terminal
_SHAPE = ("batch", "context", "num_kv_heads", "group", "head_dim", "block_size", "precision")


def print_results(found: Mapping[str, Any]) -> None:
    """Prints the content of a `bench.json`."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    console.print(heading(found), soft_wrap=True)
    for kernel in KERNELS:
        entries = [entry for entry in found["cases"] if entry["kernel"] == kernel]
        if entries:
            console.print(_table(kernel, entries))
    for sentence in sentences(found):
        console.print(sentence, soft_wrap=True)


def heading(found: Mapping[str, Any]) -> str:
    """The device and what it does at its best."""
    device = f"{found['device']['name']} ({found['device']['target']})"
    copy, matmul = found["copy_bandwidth"], found["matmul_rate"]
    return f"{device}: copy {copy / 1e9:,.0f} GB/s, bfloat16 matmul {matmul / 1e12:,.1f} TFLOP/s"


def sentences(found: Mapping[str, Any]) -> list[str]:
    """What the base cases, which come first, say; and what is missing."""
    said = []
    firsts: dict[str, Entry] = {}
    for entry in found["cases"]:
        if entry["by"] == OURS and entry["layout"] == "paged":
            firsts.setdefault(entry["kernel"], entry)
    for entry in firsts.values():
        what = (
            f"{entry['kernel']}, {entry['batch']:,} × {entry['context']:,} tokens, {_heads(entry)} of "
            f"{entry['head_dim']}, {entry['precision']}, blocks of {entry['block_size']}"
        )
        if entry["seconds_median"] is None:
            said.append(f"{what}: not measured: {entry['refused']}.")
            continue
        beside = entry["share_of_contiguous"]
        compared = "" if beside is None else f", {_percent(beside)} of the speed on the contiguous layout"
        said.append(f"{what}: {_percent(entry[_share(entry['kernel'])])} of {_reference(entry['kernel'])}{compared}.")
    refused = sum(entry["refused"] is not None for entry in found["cases"])
    if refused:
        said.append(f"Not measured: {refused} cases; bench.json says why.")
    if found["left_out"]:
        said.append(f"Left out: {found['left_out']} cases, for want of time (bench.budget).")
    return said


def rows(kernel: str, entries: Sequence[Entry]) -> tuple[list[str], list[list[str]]]:
    """The table of one kernel: its columns, and a row for each problem on paged memory."""
    peers = list(dict.fromkeys(entry["by"] for entry in entries if entry["by"] != OURS))
    columns = ["precision", "batch", "context", "heads", "size", "block", "time µs"]
    columns += ["TFLOP/s", "of matmul"] if kernel == "prefill" else ["GB/s", "of copy"]
    if kernel in ATTENTION:
        columns += ["of contiguous", *(f"of {peer}" for peer in peers)]
    times = {_key(entry): entry["seconds_median"] for entry in entries}
    made = []
    for entry in entries:
        if entry["by"] != OURS or entry["layout"] != "paged":
            continue
        row = [entry["precision"], f"{entry['batch']:,}", f"{entry['context']:,}", _heads(entry)]
        row += [f"{entry['head_dim']}", f"{entry['block_size']:,}"]
        own = entry["seconds_median"]
        if own is None:
            made.append([*row, *(["-"] * (len(columns) - len(row)))])
            continue
        rate = entry["flop_rate"] / 1e12 if kernel == "prefill" else entry["bandwidth"] / 1e9
        row += [f"{1e6 * own:,.1f}", f"{rate:,.1f}" if kernel == "prefill" else f"{rate:,.0f}"]
        row.append(_percent(entry[_share(kernel)]))
        if kernel in ATTENTION:
            row.append(_percent(entry["share_of_contiguous"]))
            row += [_percent(_ratio(own, _beside(entry, peer, times))) for peer in peers]
        made.append(row)
    return columns, made


def _table(kernel: str, entries: Sequence[Entry]) -> Table:
    from rich import box
    from rich.table import Table

    columns, made = rows(kernel, entries)
    view = Table(title=kernel, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for column in columns:
        view.add_column(column, justify="left" if column == "precision" else "right", no_wrap=True)
    for row in made:
        view.add_row(*row)
    return view


def _key(entry: Entry) -> tuple[Any, ...]:
    return (entry["by"], entry["layout"], *(entry[name] for name in _SHAPE))


def _beside(entry: Entry, peer: str, times: Mapping[tuple[Any, ...], float | None]) -> float | None:
    """The time of a peer for the same problem, in whichever layout it works on."""
    contiguous = {**entry, "by": peer, "layout": "contiguous", "block_size": entry["context"]}
    return _first(times.get(_key(other)) for other in ({**entry, "by": peer}, contiguous))


def _first(values: Iterable[float | None]) -> float | None:
    return next((value for value in values if value is not None), None)


def _ratio(own: float, other: float | None) -> float | None:
    """Our speed as a share of another's."""
    return None if other is None else other / own


def _share(kernel: str) -> str:
    return "share_of_matmul" if kernel == "prefill" else "share_of_copy"


def _reference(kernel: str) -> str:
    return "the matrix rate" if kernel == "prefill" else "the copy bandwidth"


def _heads(entry: Entry) -> str:
    return f"{entry['num_kv_heads']} × {entry['group']}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
