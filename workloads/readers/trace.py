"""A trace of whatever format: `workload=trace`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from workloads.errors import UserError
from workloads.readers.bad_rows import OnBadRow
from workloads.readers.format import Reading
from workloads.readers.recognise import format_named, recognise
from workloads.readers.time_columns import UNITS
from workloads.request import Request


class Trace:
    """A workload from a file of any format that is known.

    Args:
        path: the file; it may be compressed with gzip or zstd.
        format: name of the format; "auto" recognises it by the names in the file.
        on_bad_row: "error" ends at the first row that cannot be used; "drop" leaves such rows out and counts them.
        block_size: tokens behind each hash id; None: as the format's published traces have it.
        time_unit: s, ms, us or ns, of formats that do not state it.
        tokens_per_character: of formats that hold texts instead of token counts.
        rebase: arrivals count from the first request's instead of the trace's own zero.
        max_model_len: most tokens of prompt and output together.
        closed_loop: of formats with conversations: a turn waits until the one before it has been answered, instead of
            coming by its time alone.

    Attributes:
        format: what the file was taken for.

    Raises:
        UserError: no such file, a format that is unknown or cannot be told, or an option that it lacks.
    """

    def __init__(
        self,
        path: str,
        format: str = "auto",
        on_bad_row: OnBadRow = "error",
        block_size: int | None = None,
        time_unit: str | None = None,
        tokens_per_character: float | None = None,
        rebase: bool = False,
        max_model_len: int | None = None,
        closed_loop: bool = False,
    ) -> None:
        if block_size is not None and block_size < 1:
            raise UserError(f"workload.block_size is {block_size}; expected at least 1 token.")
        if time_unit is not None and time_unit not in UNITS:
            raise UserError(f"workload.time_unit is {time_unit!r}; expected {', '.join(UNITS)}.")
        self.format = recognise(path) if format == "auto" else format_named(format)
        if self.format.unit == "asked" and time_unit is None:
            raise UserError(
                f"{path} is taken for {self.format.name}, which does not state the unit of its times; give "
                f"workload.time_unit=, one of {', '.join(UNITS)}."
            )
        if self.format.unit not in ("asked", "none") and time_unit is not None:
            raise UserError(
                f"workload.time_unit is {time_unit}, but times of {self.format.name} are in {self.format.unit}; "
                "leave it out."
            )
        if closed_loop and not self.format.conversations:
            raise UserError(
                f"workload.closed_loop is true, but {path} is taken for {self.format.name}, whose requests do not say "
                "which one they follow; leave it out."
            )
        waits = True if closed_loop else None
        reading = Reading(on_bad_row, block_size, time_unit, tokens_per_character, max_model_len, waits)
        self._workload = self.format.open(path, reading)
        self._rebase = rebase

    @property
    def num_requests(self) -> int | None:
        """As the format's reader knows it."""
        return self._workload.num_requests

    @property
    def dropped(self) -> Mapping[str, int]:
        """Rows dropped so far in the latest iteration, by cause."""
        dropped: Mapping[str, int] = getattr(self._workload, "dropped", {})
        return dropped

    def __iter__(self) -> Iterator[Request]:
        if not self._rebase:
            return iter(self._workload)
        return _from_first(iter(self._workload))


def _from_first(requests: Iterator[Request]) -> Iterator[Request]:
    """The requests, their arrivals counted from that of the first."""
    zero: float | None = None
    for request in requests:
        if zero is None:
            zero = request.arrival_s
        yield request._replace(arrival_s=request.arrival_s - zero)
