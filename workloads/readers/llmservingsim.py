"""LLMServingSim's workloads, flat and agentic, and what its vLLM benchmark recorded.

Workloads are JSON Lines with input_toks, output_toks and arrival_time_ns; input_tok_ids, if there, are the prompt. An
agentic row is a session: arrival_time_ns and sub_requests, each of which waits for the one before and then
tool_duration_ns more. How long a model takes is not in the file, so without closed loop a sub-request comes as if it
took no time: when the session came, plus the tools before it. In closed loop (`workload.closed_loop=true`) it is sent
when the one before has been answered and that one's tool has run; the other time is no later, so nobody waits for it.

The benchmark's requests.jsonl has arrival_time in seconds of Unix time; its other stamps are of another clock and are
not looked at. Requests that gave no metrics have null there.
"""

from collections.abc import Hashable, Iterator

from workloads.readers import token_counts
from workloads.readers.bad_rows import BadRow
from workloads.readers.conversations import Turn
from workloads.readers.format import Format
from workloads.readers.json_lines import as_object, required, required_list
from workloads.readers.record_trace import Arrival, Record, RecordTrace
from workloads.readers.time_columns import Numbers
from workloads.request import TokenIds

_NS = Numbers("arrival_time_ns", "ns")
_TOOL = Numbers("tool_duration_ns", "ns")
_UNIX = Numbers("arrival_time", "s")


def _lengths(row: Record) -> tuple[int, int]:
    prompt = token_counts.from_json("input_toks", required(row, "input_toks"))
    return prompt, token_counts.from_json("output_toks", required(row, "output_toks"))


def _row(row: Record) -> Arrival:
    time_ns = _NS.from_number(required(row, "arrival_time_ns"))
    prompt_tokens, output_tokens = _lengths(row)
    return Arrival(time_ns, prompt_tokens, output_tokens, _prompt(row, prompt_tokens))


def _sub_request(row: Record) -> Arrival:
    return _row(row)._replace(turn=row["turn"])


def _recorded(row: Record) -> Arrival:
    if required(row, "arrival_time") is None:
        raise BadRow("failed", "arrival_time is null: the request gave no metrics")
    return Arrival(_UNIX.from_number(row["arrival_time"]), *_lengths(row))


def _prompt(row: Record, prompt_tokens: int) -> TokenIds | None:
    ids = row.get("input_tok_ids")
    if not ids:
        return None
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        shown = token_counts.shown(ids, quoted=repr)
        raise BadRow("unreadable token ids", f"input_tok_ids is {shown}; expected a list of whole numbers")
    if len(ids) != prompt_tokens:
        raise BadRow("wrong number of token ids", f"{len(ids)} input_tok_ids; expected input_toks, {prompt_tokens}")
    return TokenIds(tuple(ids))


def _sub_requests(session: Record) -> Iterator[tuple[str, Record]]:
    """Each with the time at which it would come if the model took none, and its place in the session."""
    now_ns = _NS.from_number(required(session, "arrival_time_ns"))
    own = object()  # the session's name: a session_id need be there only once, or not at all
    before: Hashable | None = None
    tool_ns = 0
    timed = []
    for number, one in enumerate(required_list(session, "sub_requests"), 1):
        sub_request = as_object(one)
        turn = Turn((own, number), before, tool_ns)
        timed.append((f"sub-request {number}", {**sub_request, "arrival_time_ns": now_ns, "turn": turn}))
        tool = sub_request.get("tool_duration_ns")
        tool_ns = 0 if tool is None else _TOOL.from_number(tool)
        now_ns += tool_ns
        before = turn.name
    yield from timed


FORMATS = (
    Format(
        name="llmservingsim",
        title="LLMServingSim's flat workloads",
        containers=("json", "parquet"),
        keys=frozenset({"input_toks", "output_toks", "arrival_time_ns"}),
        unit="ns",
        drops="none; every row is a request",
        source="casys-kaist/LLMServingSim",
        licence="MIT",
        open=lambda path, reading: RecordTrace(path, _row, reading.on_bad_row),
    ),
    Format(
        name="llmservingsim-agentic",
        title="LLMServingSim's agentic sessions",
        containers=("json", "parquet"),
        keys=frozenset({"sub_requests", "arrival_time_ns"}),
        unit="ns",
        drops="none; every sub-request is a request",
        source="casys-kaist/LLMServingSim",
        licence="MIT",
        options=frozenset({"closed_loop"}),
        conversations=True,
        open=lambda path, reading: RecordTrace(
            path,
            _sub_request,
            reading.on_bad_row,
            any_order=True,
            parts=_sub_requests,
            closed_loop=reading.closed_loop is not None,
        ),
    ),
    Format(
        name="llmservingsim-bench",
        title="requests recorded by LLMServingSim's benchmark of vLLM",
        containers=("json", "parquet"),
        keys=frozenset({"input_toks", "output_toks", "arrival_time"}),
        unit="s",
        drops="requests that gave no metrics",
        source="casys-kaist/LLMServingSim",
        licence="MIT",
        open=lambda path, reading: RecordTrace(path, _recorded, reading.on_bad_row, from_first=True, any_order=True),
    ),
)
