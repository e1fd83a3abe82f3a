"""The Qwen-Bailian traces (ATC 2025): two hours of Alibaba's model service, with prompts hashed in blocks of 16.

JSON Lines with chat_id, parent_chat_id (-1 for the first turn of a conversation), timestamp (seconds, with a
fraction), input_length, output_length, type, turn and hash_ids, one chained id for each 16 tokens of the prompt. Each
row holds the whole context of its turn, so turns are not added up. What a turn generates is in the ids of the turns
behind it only, so a cache finds prompts again, and outputs are computed again as part of the next prompt.

In closed loop (`workload.closed_loop=true`) a turn is sent at its own time, or when its parent has been answered if
that is later: the trace does not say when that was, so it says nothing of how long anybody thought.
"""

from workloads.readers import token_counts
from workloads.readers.conversations import Turn
from workloads.readers.format import Format
from workloads.readers.json_lines import required
from workloads.readers.mooncake import hash_ids
from workloads.readers.record_trace import Arrival, Record, RecordTrace
from workloads.readers.time_columns import Numbers

_TIME = Numbers("timestamp", "s")
_NO_PARENT = -1
BLOCK_SIZE = 16
"""Tokens behind each hash id in the published traces."""


class _Row:
    """Reads rows whose hash ids stand for so many tokens each."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def __call__(self, row: Record) -> Arrival:
        time_ns = _TIME.from_number(required(row, "timestamp"))
        prompt_tokens = token_counts.from_json("input_length", required(row, "input_length"))
        output_tokens = token_counts.from_json("output_length", required(row, "output_length"))
        parent = required(row, "parent_chat_id")
        return Arrival(
            time_ns,
            prompt_tokens,
            output_tokens,
            hash_ids(row, prompt_tokens, self._block_size),
            turn=Turn(required(row, "chat_id"), None if parent == _NO_PARENT else parent),
        )


FORMATS = (
    Format(
        name="bailian",
        title="Qwen-Bailian traces A and B, coder and thinking",
        containers=("json", "parquet"),
        keys=frozenset({"chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "hash_ids"}),
        unit="s",
        drops="none; every row is a request",
        source="alibaba-edu/qwen-bailian-usagetraces-anon",
        licence="Apache-2.0",
        options=frozenset({"block_size", "closed_loop"}),
        conversations=True,
        open=lambda path, reading: RecordTrace(
            path,
            _Row(reading.block_size or BLOCK_SIZE),
            reading.on_bad_row,
            closed_loop=reading.closed_loop is not None,
        ),
    ),
)
