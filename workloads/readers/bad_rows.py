"""What happens to a row that cannot be used: it ends the run, or is left out and counted. Never silently."""

from collections import Counter
from collections.abc import Mapping
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


class BadRows:
    """The bad rows met while reading one file.

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
        self._dropped: Counter[str] = Counter()

    @property
    def dropped(self) -> Mapping[str, int]:
        """Rows dropped so far in the latest pass over the file, by cause."""
        return dict(self._dropped)

    @property
    def drops(self) -> bool:
        """Whether bad rows are left out rather than ending the reading."""
        return self._on_bad_row == "drop"

    def drop(self, cause: str | None, num_rows: int) -> None:
        """Counts rows that were left out together, if there are any."""
        if num_rows:
            assert cause is not None
            self._dropped[cause] += num_rows

    def begin(self) -> None:
        """Starts a pass over the file: counts from 0 again."""
        self._dropped.clear()

    def meet(self, place: str, bad_row: BadRow) -> None:
        """Drops and counts the row at `place`, such as "line 7", or raises UserError for it."""
        if not self.drops:
            raise UserError(
                f"{self._path}, {place}: {bad_row}. Use workload.on_bad_row=drop to skip such rows."
            ) from bad_row
        self._dropped[bad_row.cause] += 1

    def end(self, num_kept: int) -> None:
        """Ends a pass that kept `num_kept` rows. Raises UserError if there were none: nothing can be run then."""
        if num_kept:
            return
        causes = ", ".join(f"{count} × {cause}" for cause, count in self._dropped.items()) or "none dropped"
        raise UserError(f"{self._path} has no usable row ({causes}); expected at least one request. Check the file.")
