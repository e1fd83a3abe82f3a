"""What a trace format is to us: how it is recognised, what its times count, and who reads it.

A file is recognised by the names in it: the columns of its header, or the keys of its first object. Never by their
position, and never by the file's own name. A format states its unit; where names fit formats of different units, the
user is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from workloads.readers.bad_rows import OnBadRow
from workloads.readers.sample import Container, Sample
from workloads.request import Workload

Unit = Literal["date-time", "s", "ms", "us", "ns", "none"]
Turns = Literal["first", "all"]


@dataclass(frozen=True, slots=True)
class Reading:
    """How a trace is to be read; None leaves it to the format.

    Args:
        on_bad_row: whether a row that cannot be used ends the reading, or is left out and counted.
        block_size: tokens behind each hash id, of formats that have some.
        tokens_per_character: of formats that hold texts, unless `tokenizer` is given.
        tokenizer: name or folder of the tokenizer for them.
        turns: of formats that hold conversations, which turns are requests.
        closed_loop: True lets a turn wait for the end of the one before it, of formats with conversations.
    """

    on_bad_row: OnBadRow = "error"
    block_size: int | None = None
    tokens_per_character: float | None = None
    tokenizer: str | None = None
    turns: Turns | None = None
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
        unit: of its times; "none" if it has no arrivals.
        drops: rows that are no requests, in words.
        source: who publishes it.
        licence: of the published files, or why there is none.
        open: makes the workload of a file.
        options: fields of `Reading` that it has a use for.
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
    options: frozenset[str] = frozenset()
    conversations: bool = False

    def fits(self, sample: Sample) -> bool:
        """Whether a file that begins like this is of the format."""
        return sample.container in self.containers and self.keys <= sample.keys and self.absent.isdisjoint(sample.keys)
