"""The Mooncake traces (Qin et al., FAST 2025), and others in their format; NVIDIA Dynamo's own rows are in `dynamo.py`.

JSON Lines with the keys `timestamp` (milliseconds, whole in Mooncake's files and with a fraction in Dynamo's),
`input_length`, `output_length` and `hash_ids`: one id for each 512 tokens of the prompt, the last of which may be a
partial block. An id stands for all of the prompt up to and including its block, so equal ids mean a prefix that can be
shared. Dynamo also writes `created_time`, `input_tokens` and `output_tokens`. Times stay as the trace counts them; they
are not shifted to 0.
"""

from typing import Any

from workloads.errors import UserError
from workloads.readers import token_counts
from workloads.readers.bad_rows import BadRow, OnBadRow
from workloads.readers.format import Format
from workloads.readers.json_lines import required
from workloads.readers.record_trace import Arrival, Record, RecordTrace
from workloads.readers.time_columns import Numbers
from workloads.request import HashIds

TIME = Numbers("timestamp", "ms")
_ALIASES = {"timestamp": "created_time", "input_length": "input_tokens", "output_length": "output_tokens"}


class MooncakeTrace(RecordTrace):
    """A workload from a trace in Mooncake's format; rows are read, and checked, as the iteration reaches them.

    Args:
        path: the JSONL file.
        block_size: tokens behind each hash id. It is not in the file; 512 in the published traces.
        on_bad_row: as in `RecordTrace`.

    Raises:
        UserError: no such file, or a block size below 1. Iterating raises it for rows, and names line and remedy.
    """

    def __init__(self, path: str, block_size: int = 512, on_bad_row: OnBadRow = "error") -> None:
        if block_size < 1:
            raise UserError(
                f"workload.block_size is {block_size}; expected at least 1 token. Mooncake's traces have 512."
            )
        super().__init__(path, self._row, on_bad_row)
        self._block_size = block_size

    def _row(self, row: Record) -> Arrival:
        return request_at(TIME.from_number(either(row, "timestamp")), row, self._block_size)


def request_at(time_ns: int, row: Record, block_size: int) -> Arrival:
    """What a row says but for its time. Raises BadRow."""
    prompt_tokens = token_counts.from_json("input_length", either(row, "input_length"))
    output_tokens = token_counts.from_json("output_length", either(row, "output_length"))
    return Arrival(time_ns, prompt_tokens, output_tokens, hash_ids(row, prompt_tokens, block_size))


def hash_ids(row: Record, prompt_tokens: int, block_size: int) -> HashIds:
    """What `hash_ids` of a row says of its prompt. Raises BadRow."""
    ids = required(row, "hash_ids")
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise BadRow(
            "unreadable hash ids",
            f"hash_ids is {token_counts.shown(ids, quoted=repr)}; expected a list of whole numbers",
        )
    num_blocks = -(-prompt_tokens // block_size)
    if len(ids) != num_blocks:
        raise BadRow(
            "wrong number of hash ids",
            f"{len(ids)} hash_ids; expected {num_blocks} for an input_length of {prompt_tokens} and "
            f"workload.block_size={block_size}",
        )
    return HashIds(tuple(ids), block_size)


def either(row: Record, key: str) -> Any:
    """The value of `key`, or of Dynamo's name for it. Raises BadRow."""
    alias = _ALIASES[key]
    return row[alias] if key not in row and alias in row else required(row, key)


FORMATS = (
    Format(
        name="mooncake",
        title="Mooncake's traces (FAST 2025, and the older one)",
        containers=("json", "parquet"),
        keys=frozenset({"timestamp", "input_length", "output_length", "hash_ids"}),
        unit="ms",
        drops="none; every row is a request",
        source="kvcache-ai/Mooncake",
        licence="Apache-2.0",
        options=frozenset({"block_size"}),
        open=lambda path, reading: MooncakeTrace(path, reading.block_size or 512, reading.on_bad_row),
    ),
)
