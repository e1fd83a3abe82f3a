"""The Mooncake traces (Qin et al., FAST 2025) and others in their format, with the identity of each prompt's content.

JSON Lines with the keys `timestamp` (milliseconds), `input_length`, `output_length` and `hash_ids`: one id for each
512 tokens of the prompt, the last of which may be a partial block. An id stands for all of the prompt up to and
including its block, so equal ids mean a prefix that can be shared. Times stay as the trace counts them; they are not
shifted to 0.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from workloads.errors import UserError
from workloads.readers import token_counts
from workloads.readers.bad_rows import BadRow, BadRows, OnBadRow
from workloads.readers.json_lines import json_lines, json_object, required
from workloads.readers.source_file import source_file
from workloads.request import HashIds, Request

_MAX_MS = 1e13  # three centuries; a greater number, or infinity, is a fault of the file


class MooncakeTrace:
    """A workload from a trace in Mooncake's format; rows are read, and checked, as the iteration reaches them.

    Args:
        path: the JSONL file.
        block_size: tokens behind each hash id. It is not in the file; 512 in the published traces.
        on_bad_row: "error" ends at the first row that cannot be used; "drop" leaves such rows out and counts them in
            `dropped`. Rows out of order are no fault of one row, and always an error.

    Raises:
        UserError: no such file, or a block size below 1. Iterating raises it for rows, and names line and remedy.
    """

    def __init__(self, path: str, block_size: int = 512, on_bad_row: OnBadRow = "error") -> None:
        if block_size < 1:
            raise UserError(
                f"workload.block_size is {block_size}; expected at least 1 token. Mooncake's traces have 512."
            )
        self._path = path
        self._file = source_file(path)
        self._block_size = block_size
        self._bad_rows = BadRows(path, on_bad_row)

    @property
    def num_requests(self) -> int | None:
        """None: only reading the file would tell."""
        return None

    @property
    def dropped(self) -> Mapping[str, int]:
        """Rows dropped so far in the latest iteration, by cause."""
        return self._bad_rows.dropped

    def __iter__(self) -> Iterator[Request]:
        self._bad_rows.begin()
        num_kept = 0
        latest_s = 0.0
        for line, text in json_lines(self._file):
            try:
                request = self._request(num_kept, json_object(text))
            except BadRow as bad_row:
                self._bad_rows.meet(line, bad_row)
                continue
            if request.arrival_s < latest_s:
                raise UserError(
                    f"{self._path}, line {line}: timestamp {request.arrival_s * 1e3:.15g} is earlier than the row "
                    "before; expected rows in order of time. Sort the file by timestamp."
                )
            latest_s = request.arrival_s
            num_kept += 1
            yield request
        self._bad_rows.end(num_kept)

    def _request(self, request_id: int, row: dict[str, Any]) -> Request:
        """The request that a row describes. Raises BadRow."""
        arrival_s = _milliseconds(required(row, "timestamp")) / 1e3
        prompt_tokens = token_counts.from_json("input_length", required(row, "input_length"))
        output_tokens = token_counts.from_json("output_length", required(row, "output_length"))
        ids = _hash_ids(required(row, "hash_ids"))
        num_blocks = -(-prompt_tokens // self._block_size)
        if len(ids) != num_blocks:
            raise BadRow(
                "wrong number of hash ids",
                f"{len(ids)} hash_ids; expected {num_blocks} for an input_length of {prompt_tokens} and "
                f"workload.block_size={self._block_size}",
            )
        return Request(request_id, arrival_s, prompt_tokens, output_tokens, prompt=HashIds(ids, self._block_size))


def _milliseconds(value: object) -> float:
    """A time in milliseconds, as it stands. Raises BadRow."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MAX_MS:
        return value
    raise BadRow(
        "unreadable time",
        f"timestamp is {token_counts.shown(value, quoted=repr)}; expected milliseconds from 0 to {_MAX_MS:.0f}",
    )


def _hash_ids(value: object) -> tuple[int, ...]:
    """The ids, in order. Raises BadRow."""
    if not isinstance(value, list) or not all(type(hash_id) is int for hash_id in value):
        raise BadRow(
            "unreadable hash ids",
            f"hash_ids is {token_counts.shown(value, quoted=repr)}; expected a list of whole numbers",
        )
    return tuple(value)
