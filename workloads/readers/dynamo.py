"""NVIDIA Dynamo's rows in Mooncake's form, and their sessions.

Names are Dynamo's own (created_time, input_tokens, output_tokens) or Mooncake's. Rows of one `session_id` are the turns
of a session, in the file's order, and each holds the whole context of its turn. Without closed loop a session is
nothing but rows, and each needs its time.

In closed loop (`workload.closed_loop=true`) a turn follows the one before it, by the rules of Dynamo's own replay but
for one:

- with `delay` (or `delay_ms`, both in milliseconds) it is sent so long after that one's end, whatever time it has;
- with neither a delay nor a time it is sent at that end;
- with a time alone it is sent at that time, or at that end if it is later. Dynamo adds the two turns' difference of
  times to the end, which counts the first turn's service twice.

The first turn of a session has a time and no delay, and times do not go back within one. A row without a session
follows nobody.
"""

from collections.abc import Callable

from workloads.readers.bad_rows import BadRow, OnBadRow
from workloads.readers.conversations import Turn
from workloads.readers.format import Format, Reading
from workloads.readers.mooncake import TIME, MooncakeTrace, either, request_at
from workloads.readers.record_trace import Arrival, Record, RecordTrace
from workloads.readers.time_columns import Numbers
from workloads.readers.token_counts import shown
from workloads.request import Workload

_TIMES = ("timestamp", "created_time")
_DELAYS = (Numbers("delay", "ms"), Numbers("delay_ms", "ms"))
_BLOCK_SIZE = 512  # tokens behind each hash id, as in Mooncake's


class _Sessions:
    """Reads the rows of one pass, and remembers of each session how many turns it has had, and since when."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._so_far: dict[str | int, tuple[int, int]] = {}

    def __call__(self, row: Record) -> Arrival:
        session = _session(row)
        if session is None:
            return request_at(TIME.from_number(either(row, "timestamp")), row, self._block_size)
        delay_ns = _delay_ns(row)
        if session not in self._so_far:
            if delay_ns:
                raise BadRow("delay of a first turn", f"session_id {shown(session, quoted=repr)} begins with a delay")
            number, time_ns = 0, TIME.from_number(either(row, "timestamp"))
        else:
            number, latest_ns = self._so_far[session]
            timed = delay_ns is None and any(row.get(name) is not None for name in _TIMES)
            time_ns = TIME.from_number(either(row, "timestamp")) if timed else latest_ns
            if time_ns < latest_ns:
                raise BadRow("turns out of order", f"session_id {shown(session, quoted=repr)} was later before")
        turn = Turn((session, number), (session, number - 1) if number else None, delay_ns or 0)
        arrival = request_at(time_ns, row, self._block_size)._replace(turn=turn)
        self._so_far[session] = (number + 1, time_ns)  # not before the row is known to be a good one
        return arrival


class SessionTrace(RecordTrace):
    """A workload of Dynamo's sessions in closed loop; all of it is in memory, as turns may come in any order of time.

    Args:
        path: the file.
        block_size: tokens behind each hash id.
        on_bad_row: as in `RecordTrace`.

    Raises:
        UserError: no such file. Iterating raises it for rows.
    """

    def __init__(self, path: str, block_size: int, on_bad_row: OnBadRow) -> None:
        super().__init__(path, _Sessions(block_size), on_bad_row, any_order=True, closed_loop=True)
        self._block_size = block_size

    def _reader(self) -> Callable[[Record], Arrival]:
        return _Sessions(self._block_size)


def _session(row: Record) -> str | int | None:
    session = row.get("session_id")
    if session is None or type(session) is int or isinstance(session, str):
        return session
    raise BadRow("unreadable session", f"session_id is {shown(session, quoted=repr)}; expected a text or whole number")


def _delay_ns(row: Record) -> int | None:
    for delay in _DELAYS:
        if row.get(delay.name) is not None:
            return delay.from_number(row[delay.name])
    return None


def _open(path: str, reading: Reading) -> Workload:
    block_size = reading.block_size or _BLOCK_SIZE
    if reading.closed_loop:
        return SessionTrace(path, block_size, reading.on_bad_row)
    return MooncakeTrace(path, block_size, reading.on_bad_row)


FORMATS = (
    Format(
        name="dynamo",
        title="NVIDIA Dynamo's rows in Mooncake's form",
        containers=("json", "parquet"),
        keys=frozenset({"created_time", "input_tokens", "output_tokens", "hash_ids"}),
        unit="ms",
        drops="none; every row is a request",
        source="ai-dynamo/dynamo",
        licence="one's own files; Dynamo publishes none",
        options=frozenset({"block_size", "closed_loop"}),
        conversations=True,
        open=_open,
    ),
)
