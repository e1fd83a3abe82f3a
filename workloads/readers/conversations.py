"""Which earlier request each turn of a trace follows: `workload.closed_loop=true`.

A reader of a format whose records name their conversation puts a `Turn` into each `Arrival`; whoever serves the trace
in closed loop gets `Request.after` and `Request.think_s` from here. Without closed loop every record comes at its own
time, and nothing of this is looked at. A format says `conversations=True` of itself to have the option.

What a reader puts in, by what its format knows:

- a name for each record and that of the one before it (Bailian's chat_id and parent_chat_id): `Turn(name, parent)`,
  with the record's own time as the earliest at which it is sent;
- a session's name, its records in order (Dynamo's session_id): the record's place within for a name, and the one before
  it for the parent, such as `Turn((session, n), (session, n - 1))`, or None for the first;
- the client's own delay (Dynamo's delay, LLMServingSim's tool calls): `think_ns`; then the time of the session's first
  record will do for all of them.
"""

from collections.abc import Hashable
from typing import NamedTuple

from workloads.errors import UserError


class Turn(NamedTuple):
    """The place of a record in its conversation.

    Args:
        name: of this record; no other of the trace has it.
        parent: name of the record that it follows; None for the first of a conversation.
        think_ns: nanoseconds from the end of that one to this one's being sent, at least 0; 0 if only the record's own
            time is known, which it then waits for.
    """

    name: Hashable
    parent: Hashable | None
    think_ns: int = 0


class Conversations:
    """Finds the request that each turn follows, as turns come in order of time.

    A parent that is not in the trace at all is taken for one from before its beginning: the turn follows nobody. So
    every turn that has come is remembered, by its name.

    Args:
        path: of the trace, for messages.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._request_ids: dict[Hashable, int] = {}
        self._missing: dict[Hashable, int] = {}  # parents that had not come, and the request that named each first

    def follows(self, turn: Turn, request_id: int) -> int | None:
        """The request that this turn, request `request_id`, follows.

        Raises:
            UserError: its name is not its own, or it is its own parent, or the parent of one that came before it. Every
                circle of parents has a turn of the latter two kinds.
        """
        name, parent = turn.name, turn.parent
        if name in self._request_ids:
            raise UserError(
                f"{self._path}: requests {self._request_ids[name]} and {request_id} are both turn {name!r}; expected "
                "a name for each. Correct the file, or leave workload.closed_loop out."
            )
        if name == parent or name in self._missing:
            child = request_id if name == parent else self._missing[name]
            raise UserError(
                f"{self._path}: request {child} follows turn {name!r}, which is request {request_id} and does not come "
                "before it. Correct the file, or leave workload.closed_loop out."
            )
        self._request_ids[name] = request_id
        if parent is None:
            return None
        after = self._request_ids.get(parent)
        if after is None:
            self._missing.setdefault(parent, request_id)
        return after
