"""The requests of a recorded serving run: a folder with `requests.jsonl`, one object a line.

Its keys are `request_id`, `dataset_arrival_s` (when the client meant to send it), `queued_s`, `scheduled_s`,
`first_token_s`, `last_token_s` (when the engine did what the name says), `input_tokens`, `output_tokens` and, if the
prompt's content is known, `block_hash_ids`: one chained id for each *full* block of the prompt. Engine times count from
the first request's `queued_s`.

Requests come when the client sent them, not when the engine queued them: an engine looks at its inbox only between
steps, so `queued_s` already holds what its steps took. The client's clock is moved so that the first request comes when
the engine queued it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workloads.errors import UserError
from workloads.readers import token_counts
from workloads.readers.bad_rows import BadRow
from workloads.readers.json_lines import json_lines, json_object, required
from workloads.readers.source_file import source_file
from workloads.request import HashIds, Request

REQUESTS = "requests.jsonl"


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One line of the file; times in seconds of the engine's clock.

    Args:
        name: its `request_id`.
        arrival_s: when the client sent it.
        queued_s: when the engine took it in.
        first_token_s: when its first token was handed out.
        last_token_s: when its last token was.
        hash_ids: of the full blocks of its prompt, or None.
    """

    name: str
    arrival_s: float
    queued_s: float
    first_token_s: float
    last_token_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None


def recorded_requests(folder: str) -> list[RecordedRequest]:
    """Everything that the folder's `requests.jsonl` says, in order of arrival.

    Raises:
        UserError: no such file, or a line that cannot be used; it names the line.
    """
    path = Path(folder) / REQUESTS
    rows: list[RecordedRequest] = []
    for line, text in json_lines(source_file(str(path))):
        try:
            rows.append(_request(json_object(text)))
        except BadRow as bad_row:
            raise UserError(f"{path}, line {line}: {bad_row}. Record the run again or remove the line.") from bad_row
    if not rows:
        raise UserError(f"{path} holds no request; expected one JSON object a line.")
    rows.sort(key=lambda row: row.arrival_s)
    shift = rows[0].queued_s - rows[0].arrival_s
    return [
        RecordedRequest(
            row.name,
            max(0.0, row.arrival_s + shift),
            row.queued_s,
            row.first_token_s,
            row.last_token_s,
            row.input_tokens,
            row.output_tokens,
            row.hash_ids,
        )
        for row in rows
    ]


class RecordedRun:
    """A workload from a recorded run: request i is the i-th to arrive.

    Args:
        path: the run's folder.
        block_size: tokens behind each of `block_hash_ids`; the engine's block size.

    Raises:
        UserError: no such file, a bad line, or a block size that does not fit the ids.
    """

    def __init__(self, path: str, block_size: int = 16) -> None:
        if block_size < 1:
            raise UserError(f"workload.block_size is {block_size}; expected at least 1 token.")
        self.recorded = recorded_requests(path)
        for row in self.recorded:
            if row.hash_ids is not None and len(row.hash_ids) != row.input_tokens // block_size:
                raise UserError(
                    f"{Path(path) / REQUESTS}: {row.name} has {len(row.hash_ids)} block_hash_ids; expected "
                    f"{row.input_tokens // block_size} for {row.input_tokens} tokens and "
                    f"workload.block_size={block_size}."
                )
        self._block_size = block_size

    @property
    def num_requests(self) -> int | None:
        """All of them are read at once."""
        return len(self.recorded)

    def __iter__(self) -> Iterator[Request]:
        for index, row in enumerate(self.recorded):
            prompt = None
            if row.hash_ids is not None:
                rest = (-1 - index,) if row.input_tokens % self._block_size else ()  # shared with nobody
                prompt = HashIds(row.hash_ids + rest, self._block_size)
            yield Request(index, row.arrival_s, row.input_tokens, row.output_tokens, prompt=prompt)


def _request(row: dict[str, Any]) -> RecordedRequest:
    """What a line describes. Raises BadRow."""
    times = {key: _seconds(row, key) for key in ("dataset_arrival_s", "queued_s", "first_token_s", "last_token_s")}
    if not times["queued_s"] <= times["first_token_s"] <= times["last_token_s"]:
        raise BadRow("times out of order", "expected queued_s <= first_token_s <= last_token_s")
    ids = row.get("block_hash_ids")
    if ids is not None and not (isinstance(ids, list) and all(type(one) is int and one >= 0 for one in ids)):
        raise BadRow("unreadable hash ids", "block_hash_ids is no list of whole numbers")
    return RecordedRequest(
        str(required(row, "request_id")),
        times["dataset_arrival_s"],
        times["queued_s"],
        times["first_token_s"],
        times["last_token_s"],
        token_counts.from_json("input_tokens", required(row, "input_tokens")),
        token_counts.from_json("output_tokens", required(row, "output_tokens")),
        None if ids is None else tuple(ids),
    )


def _seconds(row: Mapping[str, Any], key: str) -> float:
    value = required(dict(row), key)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf"):
        return float(value)
    raise BadRow("unreadable time", f"{key} is {token_counts.shown(value, quoted=repr)}; expected seconds, 0 or more")
