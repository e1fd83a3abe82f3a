"""A trace of whatever format: `workload=trace`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import count

from workloads.arrivals import ArrivalProcess
from workloads.errors import UserError
from workloads.readers.bad_rows import Fate, OnBadRow
from workloads.readers.format import Reading, Turns
from workloads.readers.recognise import format_named, recognise
from workloads.readers.time_columns import UNITS
from workloads.request import Request, Workload
from workloads.timed import Timed


class Trace:
    """A workload from a file of any format that is known.

    Args:
        path: the file; it may be compressed with gzip or zstd.
        format: name of the format; "auto" recognises it by the names in the file.
        on_bad_row: "error" ends at the first row that cannot be used; "drop" leaves such rows out and counts them.
        block_size: tokens behind each hash id, of formats that have some; None: as the published traces have it.
        time_unit: s, ms, us or ns, where formats of several units have the same names.
        tokenizer: name or folder of the tokenizer that counts the tokens of formats that hold texts.
        tokens_per_character: estimates them instead.
        turns: of formats that hold conversations; "first" or "all" of their turns are requests. None: the first.
        arrivals: how arrivals follow one another, of formats without any.
        rate: their mean in requests/s.
        seed: of those arrivals.
        rebase: arrivals count from the first request's instead of the trace's own zero.
        max_total_tokens: longest prompt and output together; longer requests are left out and counted. None: all stay,
            and what the model cannot take is for the scheduler to refuse.
        closed_loop: of formats with conversations: a turn waits until the one before it has been answered, instead of
            coming by its time alone.

    Attributes:
        format: what the file was taken for.

    Raises:
        UserError: no such file, a format that is unknown or cannot be told, or an option that it lacks or has no use
            for.
    """

    def __init__(
        self,
        path: str,
        format: str = "auto",
        on_bad_row: OnBadRow = "error",
        block_size: int | None = None,
        time_unit: str | None = None,
        tokenizer: str | None = None,
        tokens_per_character: float | None = None,
        turns: Turns | None = None,
        arrivals: ArrivalProcess | None = None,
        rate: float | None = None,
        seed: int | None = None,
        rebase: bool = False,
        max_total_tokens: int | None = None,
        closed_loop: bool = False,
    ) -> None:
        if block_size is not None and block_size < 1:
            raise UserError(f"workload.block_size is {block_size}; expected at least 1 token.")
        if max_total_tokens is not None and max_total_tokens < 2:
            raise UserError(f"workload.max_total_tokens is {max_total_tokens}; expected at least 2 tokens, or null.")
        if time_unit is not None and time_unit not in UNITS:
            raise UserError(f"workload.time_unit is {time_unit!r}; expected {', '.join(UNITS)}.")
        self.format = recognise(path, time_unit) if format == "auto" else format_named(format)
        if time_unit not in (None, self.format.unit):
            raise UserError(
                f"workload.time_unit is {time_unit}, but {path} is taken for {self.format.name}, which has "
                f"{_UNIT.get(self.format.unit, self.format.unit)}; leave it out, or say workload.format=."
            )
        if closed_loop and not self.format.conversations:
            raise UserError(
                f"workload.closed_loop is true, but {path} is taken for {self.format.name}, whose requests do not say "
                "which one they follow; leave it out."
            )
        waits = True if closed_loop else None
        reading = Reading(on_bad_row, block_size, tokens_per_character, tokenizer, turns, waits)
        for option in (field.name for field in fields(Reading) if field.name != "on_bad_row"):
            if getattr(reading, option) is not None and option not in self.format.options:
                raise UserError(
                    f"workload.{option} has no use for {self.format.name}, which {path} is taken for; leave it out."
                )
        self._trace = self.format.open(path, reading)
        self._workload = self._timed(path, arrivals, rate, seed)
        self._rebase = rebase
        self._max_total_tokens = max_total_tokens
        self._over = 0

    def _timed(self, path: str, arrivals: ArrivalProcess | None, rate: float | None, seed: int | None) -> Workload:
        """The trace, with the arrivals that were asked for if it has none."""
        if self.format.unit == "none":
            if arrivals is None:
                raise UserError(
                    f"{path} is taken for {self.format.name}, which has no arrivals; give workload/arrivals= (poisson, "
                    "gamma, constant or all_at_once) and workload.rate=."
                )
            return Timed(self._trace, arrivals, rate, 0 if seed is None else seed)
        if arrivals is not None or rate is not None:
            raise UserError(
                f"{path} is taken for {self.format.name}, which has arrivals of its own; leave workload/arrivals and "
                "workload.rate out. workload.time_scale= makes them faster or slower."
            )
        return self._trace

    @property
    def num_requests(self) -> int | None:
        """As the format's reader knows it; None if some may be left out for their length."""
        return self._workload.num_requests if self._max_total_tokens is None else None

    @property
    def unchanged(self) -> Workload | None:
        """What reads the file, if its requests are those of this workload as they stand; None if they are not."""
        return self._workload if self._max_total_tokens is None and not self._rebase else None

    @property
    def fate(self) -> Fate:
        """Of the rows read so far in the latest iteration."""
        read: Fate = self._trace.fate  # type: ignore[attr-defined]
        if not self._over:
            return read
        over = {f"over {self._max_total_tokens} tokens": self._over}
        return Fate(read.kept - self._over, {**read.dropped, **over}, read.first_dropped)

    @property
    def dropped(self) -> Mapping[str, int]:
        """Rows dropped so far in the latest iteration, by cause."""
        return self.fate.dropped

    def __iter__(self) -> Iterator[Request]:
        requests = iter(self._workload)
        if self._max_total_tokens is not None:
            requests = self._within(requests, self._max_total_tokens)
        return _from_first(requests) if self._rebase else requests

    def _within(self, requests: Iterator[Request], limit: int) -> Iterator[Request]:
        """Those of at most `limit` tokens, and of a conversation the turns before the first that is longer."""
        self._over = 0
        new_ids: list[int | None] = []  # of the trace's requests, by their position
        request_ids = count()
        for request in requests:
            alone = request.after is None
            after = None if request.after is None else new_ids[request.after]
            if request.prompt_tokens + request.output_tokens > limit or (not alone and after is None):
                self._over += 1
                new_ids.append(None)
                continue
            request = request._replace(request_id=next(request_ids), after=after)
            new_ids.append(request.request_id)
            yield request


_UNIT = {"none": "no times", "date-time": "dates with times of day"} | {unit: f"times in {unit}" for unit in UNITS}


def _from_first(requests: Iterator[Request]) -> Iterator[Request]:
    """The requests, their arrivals counted from that of the first."""
    zero: float | None = None
    for request in requests:
        if zero is None:
            zero = request.arrival_s
        yield request._replace(arrival_s=request.arrival_s - zero)
