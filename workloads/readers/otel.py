"""OpenTelemetry spans of generative AI calls, one object a line: OTLP as its file exporter writes it, or single spans.

OTLP lines have resourceSpans, with startTimeUnixNano in nanoseconds and attributes as a list; Python's `Span.to_json`
has start_time as a date and attributes as an object. A request is a span with gen_ai.usage.input_tokens and
output_tokens, or as older conventions and vLLM call them, prompt_tokens and completion_tokens. The input is the full
context, so spans are not added up. A span whose gen_ai.operation.name is none of a model's, such as invoke_agent, is no
request: it sums up those below it. Where both client and server are traced, each call has two spans; give one of them.

Files promise no order, so spans are sorted by time. The conventions are still in development.
"""

from collections.abc import Iterator
from typing import Any

from workloads.readers import token_counts
from workloads.readers.bad_rows import BadRow, LeftOut
from workloads.readers.format import Format
from workloads.readers.json_lines import as_object, required, required_list, required_object
from workloads.readers.record_trace import Arrival, Record, RecordTrace
from workloads.readers.time_columns import DateTimes, Numbers

_START_NS = Numbers("startTimeUnixNano", "ns")
_START = DateTimes("start_time")
_MODEL_CALLS = ("chat", "text_completion", "generate_content")
_PROMPT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
_OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")


def _spans(line: Record) -> Iterator[tuple[str, Record]]:
    spans = [
        as_object(span)
        for resource in required_list(line, "resourceSpans")
        for scope in required_list(as_object(resource), "scopeSpans")
        for span in required_list(as_object(scope), "spans")
    ]
    for number, span in enumerate(spans, 1):
        yield f"span {number}", span


def _otlp(span: Record) -> Arrival:
    pairs = [as_object(pair) for pair in (required_list(span, "attributes") if "attributes" in span else [])]
    attributes = {str(required(pair, "key")): _value(required_object(pair, "value")) for pair in pairs}
    status = span.get("status")
    failed = isinstance(status, dict) and status.get("code") in (2, "STATUS_CODE_ERROR")
    tokens = _tokens(attributes, failed)
    return Arrival(_START_NS.from_value(required(span, "startTimeUnixNano")), *tokens)


def _python(span: Record) -> Arrival:
    status = span.get("status")
    failed = isinstance(status, dict) and status.get("status_code") == "ERROR"
    tokens = _tokens(required_object(span, "attributes"), failed)
    return Arrival(_START.from_value(required(span, "start_time")), *tokens)


def _value(value: dict[str, Any]) -> object:
    """What an OTLP value holds; its whole numbers are strings in JSON."""
    if "intValue" in value:
        number = value["intValue"]
        return int(number) if isinstance(number, str) and number.isdecimal() and len(number) < 20 else number
    return next(iter(value.values()), None)


def _tokens(attributes: dict[str, Any], failed: bool) -> tuple[int, int]:
    """Of prompt and output. Raises LeftOut for a span that is no call of a model, BadRow for a call that failed."""
    operation = attributes.get("gen_ai.operation.name")
    prompt, output = (next((name for name in names if name in attributes), None) for names in (_PROMPT, _OUTPUT))
    if operation not in _MODEL_CALLS and (operation is not None or prompt is None or output is None):
        raise LeftOut("span of another kind")
    if failed or output is None or attributes[output] == 0:
        raise BadRow("failed", "the span has an error, or no output tokens: the request failed")
    if prompt is None:
        raise BadRow("missing key", f"the attribute {_PROMPT[0]!r} is missing")
    return token_counts.from_json(prompt, attributes[prompt]), token_counts.from_json(output, attributes[output])


FORMATS = (
    Format(
        name="otel",
        title="OpenTelemetry GenAI spans as OTLP lines",
        containers=("json",),
        keys=frozenset({"resourceSpans"}),
        unit="ns",
        drops="spans of another kind; calls that failed",
        source="open-telemetry/semantic-conventions",
        licence="one's own files",
        open=lambda path, reading: RecordTrace(
            path, _otlp, reading.on_bad_row, from_first=True, any_order=True, parts=_spans
        ),
    ),
    Format(
        name="otel-python",
        title="OpenTelemetry GenAI spans, one a line, of Python's Span.to_json",
        containers=("json",),
        keys=frozenset({"attributes", "start_time", "context"}),
        unit="date-time",
        drops="spans of another kind; calls that failed",
        source="open-telemetry/opentelemetry-python",
        licence="one's own files",
        open=lambda path, reading: RecordTrace(path, _python, reading.on_bad_row, from_first=True, any_order=True),
    ),
)
