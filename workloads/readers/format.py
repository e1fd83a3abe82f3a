"""What a trace format is to us: how it is recognised, what its times count, and who reads it.

A file is recognised by the names in it: the columns of its header, or the keys of its first object. Never by their
position, and never by the file's own name. Units are stated by the format; where it does not, they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from workloads.readers.bad_rows import OnBadRow
from workloads.request import Workload

Container = Literal["csv", "json", "parquet"]
Unit = Literal["date-time", "s", "ms", "us", "ns", "asked", "none"]


class Sample(NamedTuple):
    """What the beginning of a file shows.

    Args:
        container: json is JSON Lines, an array or a single object.
        keys: column names, or the keys of the first object.
    """

    container: Container
    keys: frozenset[str]


@dataclass(frozen=True, slots=True)
class Reading:
    """How a trace is to be read; None leaves it to the format.

    Args:
        on_bad_row: whether a row that cannot be used ends the reading, or is left out and counted.
        block_size: tokens behind each hash id, of formats that have some.
        time_unit: of formats that do not state it.
        tokens_per_character: of formats that hold texts; asked for there.
        max_model_len: most tokens of prompt and output together.
        closed_loop: True lets a turn wait for the end of the one before it, of formats with conversations.
    """

    on_bad_row: OnBadRow = "error"
    block_size: int | None = None
    time_unit: str | None = None
    tokens_per_character: float | None = None
    max_model_len: int | None = None
    closed_loop: bool | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """A trace format.

    Args:
        name: as in `workload.format=`.
        title: what it is, for people.
        containers: kinds of file it comes in.
        keys: names that must all be there.
        absent: names that must not.
        conversations: whether records say which one they follow, and so can be served in closed loop.
        unit: of its times; "none" if it has no arrivals, "asked" if it does not state one.
        drops: rows that are no requests, in words.
        source: who publishes it.
        licence: of the published files, or why there is none.
        open: makes the workload of a file.
    """

    name: str
    title: str
    containers: tuple[Container, ...]
    keys: frozenset[str]
    unit: Unit
    drops: str
    source: str
    licence: str
    open: Callable[[str, Reading], Workload]
    absent: frozenset[str] = frozenset()
    conversations: bool = False

    def fits(self, sample: Sample) -> bool:
        """Whether a file that begins like this is of the format."""
        return sample.container in self.containers and self.keys <= sample.keys and self.absent.isdisjoint(sample.keys)
