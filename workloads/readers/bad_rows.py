"""What happens to a row that cannot be used: it ends the run, or is left out and counted. Never silently."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from workloads.errors import UserError

OnBadRow = Literal["error", "drop"]


class BadRow(Exception):
    """One row is unusable by itself; the rows around it may be fine.

    Args:
        cause: a few words that many rows can share; the key it is counted under.
        message: what this row has and what was expected, without the place.
    """

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class LeftOut(Exception):
    """A row is no request by its format's own rules, such as a span of another kind. It is counted, and no error.

    Args:
        cause: a few words that many rows can share; the key it is counted under.
    """

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of the rows of a trace, as far as it has been read.

    Args:
        kept: rows that became requests.
        dropped: rows left out, by cause.
        first_dropped: where the first of them stands, by cause, such as "line 7".
    """

    kept: int
    dropped: Mapping[str, int]
    first_dropped: Mapping[str, str]

    @property
    def read(self) -> int:
        """Rows that were looked at."""
        return self.kept + sum(self.dropped.values())


class BadRows:
    """The bad rows met while reading one file, and the number of good ones.

    Args:
        path: the file, as the user named it.
        on_bad_row: "error" ends the reading at the first bad row; "drop" leaves bad rows out and counts them.

    Raises:
        UserError: `on_bad_row` is neither.
    """

    def __init__(self, path: str, on_bad_row: OnBadRow) -> None:
        if on_bad_row not in get_args(OnBadRow):
            raise UserError(f"workload.on_bad_row is {on_bad_row!r}; expected one of: {', '.join(get_args(OnBadRow))}.")
        self._path = path
        self._on_bad_row = on_bad_row
        self.begin()

    @property
    def fate(self) -> Fate:
        """Of the rows so far in the latest pass over the file."""
        return Fate(self._kept, dict(self._dropped), dict(self._first))

    @property
    def drops(self) -> bool:
        """Whether bad rows are left out rather than ending the reading."""
        return self._on_bad_row == "drop"

    def begin(self) -> None:
        """Starts a pass over the file: counts from 0 again."""
        self._kept = 0
        self._dropped: dict[str, int] = {}
        self._first: dict[str, str] = {}

    def keep(self, num_rows: int = 1) -> None:
        """Counts rows that can be used."""
        self._kept += num_rows

    def leave_out(self, cause: str, place: str, num_rows: int = 1) -> None:
        """Counts rows that are left out together, the first of them at `place`."""
        self._dropped[cause] = self._dropped.get(cause, 0) + num_rows
        self._first.setdefault(cause, place)

    def meet(self, place: str, bad_row: BadRow) -> None:
        """Drops and counts the row at `place`, such as "line 7", or raises UserError for it."""
        if not self.drops:
            raise UserError(
                f"{self._path}, {place}: {bad_row}. Use workload.on_bad_row=drop to skip such rows."
            ) from bad_row
        self.leave_out(bad_row.cause, place)

    def end(self) -> None:
        """Ends a pass. Raises UserError if no row could be used: nothing can be run then."""
        if self._kept:
            return
        causes = ", ".join(f"{count} × {cause}" for cause, count in self._dropped.items()) or "none dropped"
        raise UserError(f"{self._path} has no usable row ({causes}); expected at least one request. Check the file.")
