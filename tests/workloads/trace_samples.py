"""A small file of each trace format with its quirks, and exactly the requests that it holds."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workloads.arrivals import Constant
from workloads.request import HashIds, Request, TokenIds


@dataclass(frozen=True)
class TraceSample:
    """A file.

    Args:
        content: what it holds; each row is a request.
        requests: those.
        options: of `Trace`, without which it cannot be read.
        overrides: the same for the command line.
        one_object: the file is a single JSON object, which can be no row of an array.
    """

    content: str
    requests: list[Request]
    options: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    one_object: bool = False

    def rows(self) -> list[dict[str, Any]]:
        """The rows as objects."""
        if self.content.startswith("{"):
            return [json.loads(line) for line in self.content.splitlines()]
        reader = csv.DictReader(io.StringIO(self.content))
        return [{name: _number(text) for name, text in row.items()} for row in reader]


def _number(text: str) -> object:
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text


def lines(*rows: dict[str, Any]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def otlp_span(span_id: str, start_ns: int, **attributes: object) -> dict[str, Any]:
    """Names with __ for dots; whole numbers are strings, as OTLP has it."""
    pairs = [
        {
            "key": key.replace("__", "."),
            "value": {"stringValue": one} if isinstance(one, str) else {"intValue": f"{one}"},
        }
        for key, one in attributes.items()
    ]
    return {"spanId": span_id, "startTimeUnixNano": str(start_ns), "attributes": pairs, "status": {}}


def otlp(*spans: dict[str, Any]) -> dict[str, Any]:
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": list(spans)}]}]}


BURSTGPT_1 = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,10,3,13,API log\n"
)
BURSTGPT_3 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "19440110,1,2.5,ChatGPT,472,18,490,Conversation log\n19440150.5,,0.1,GPT-4,10,3,13,API log\n"
)
BLIS_HEADER = (
    "request_id,client_id,tenant_id,slo_class,session_id,round_index,prefix_group,prefix_length,streaming,input_tokens,"
    "output_tokens,text_tokens,image_tokens,audio_tokens,video_tokens,reason_ratio,model,deadline_us,"
    "server_input_tokens,arrival_time_us,send_time_us,first_chunk_time_us,last_chunk_time_us,num_chunks,status,"
    "error_message,finish_reason\n"
)
T0 = 1_700_000_000
RATE = {"arrivals": Constant(), "rate": 4.0}  # every 0.25 s, the first after one gap
RATE_OVERRIDES = ("workload/arrivals=constant", "workload.rate=4")

SAMPLES: dict[str, TraceSample] = {
    "azure": TraceSample(
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"
        "2025-01-01 00:00:00,1,374,44\n2025-01-01 00:00:01.5,0,396,109\n",
        [Request(0, 0.0, 374, 44), Request(1, 1.5, 396, 109)],
    ),
    "burstgpt": TraceSample(BURSTGPT_3, [Request(0, 19440110.0, 472, 18), Request(1, 19440150.5, 10, 3)]),
    "mooncake": TraceSample(
        lines(
            {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
            {"timestamp": 3000, "input_length": 512, "output_length": 7, "hash_ids": [0]},
        ),
        [
            Request(0, 0.0, 600, 5, prompt=HashIds((0, 1), 512)),
            Request(1, 3.0, 512, 7, prompt=HashIds((0,), 512)),
        ],
    ),
    "dynamo": TraceSample(
        lines(
            {"created_time": 0.25, "input_tokens": 600, "output_tokens": 5, "hash_ids": [0, 1]},
            {"created_time": 1500.5, "input_tokens": 512, "output_tokens": 7, "hash_ids": [0]},
        ),
        [
            Request(0, 0.00025, 600, 5, prompt=HashIds((0, 1), 512)),
            Request(1, 1.5005, 512, 7, prompt=HashIds((0,), 512)),
        ],
    ),
    "bailian": TraceSample(
        lines(
            {
                "chat_id": 159,
                "parent_chat_id": -1,
                "timestamp": 61.114,
                "input_length": 20,
                "output_length": 5,
                "type": "text",
                "turn": 1,
                "hash_ids": [1089, 1090],
            },
            {
                "chat_id": 160,
                "parent_chat_id": 159,
                "timestamp": 62.5,
                "input_length": 32,
                "output_length": 9,
                "type": "text",
                "turn": 2,
                "hash_ids": [1089, 1091],
            },
        ),
        [
            Request(0, 61.114, 20, 5, prompt=HashIds((1089, 1090), 16)),
            Request(1, 62.5, 32, 9, prompt=HashIds((1089, 1091), 16)),
        ],
    ),
    # 20 characters are 5 tokens, 16 are 4. What blocks are called is nobody's business; see `test_sharegpt.py`.
    "sharegpt": TraceSample(
        lines(
            {
                "id": "a_0",
                "conversations": [{"from": "human", "value": "x" * 20}, {"from": "gpt", "value": "y" * 16}],
            },
            {"id": "b_0", "conversations": [{"from": "user", "value": "x" * 17}, {"from": "gpt", "value": "z" * 40}]},
        ),
        [Request(0, 0.25, 5, 4), Request(1, 0.5, 5, 10)],
        {"tokens_per_character": 0.25, **RATE},
        ("workload.tokens_per_character=0.25", *RATE_OVERRIDES),
    ),
    # Requests stand in the order in which they were sent, not started.
    "vllm-bench": TraceSample(
        lines(
            {
                "completed": 2,
                "total_input_tokens": 30,
                "duration": 3.0,
                "input_lens": [10, 20],
                "output_lens": [5, 6],
                "ttfts": [0.5, 0.25],
                "itls": [[0.1] * 4, [0.2] * 5],
                "start_times": [101.5, 100.0],
                "generated_texts": ["a", "b"],
                "errors": ["", ""],
            }
        ),
        [Request(0, 0.0, 20, 6), Request(1, 1.5, 10, 5)],
        one_object=True,
    ),
    "bench-lengths": TraceSample(
        lines(
            {
                "backend": "sglang",
                "dataset_name": "random",
                "request_rate": 4.0,
                "total_input_tokens": 30,
                "input_lens": [10, 20],
                "output_lens": [5, 6],
                "ttfts": [0.5, 0.25],
                "itls": [[0.1] * 4, [0.2] * 5],
                "errors": ["", ""],
            }
        ),
        [Request(0, 0.25, 10, 5), Request(1, 0.5, 20, 6)],
        RATE,
        RATE_OVERRIDES,
        one_object=True,
    ),
    "guidellm": TraceSample(
        lines(
            {"timestamp": 0.5, "input_length": 100, "output_length": 5},
            {"timestamp": 2, "input_length": 200, "output_length": 7},
        ),
        [Request(0, 0.5, 100, 5), Request(1, 2.0, 200, 7)],
        {"time_unit": "s"},
        ("workload.time_unit=s",),
    ),
    "aiperf": TraceSample(
        lines(
            {"timestamp": 500, "input_length": 100, "output_length": 5, "session_id": "s1"},
            {"timestamp": 2000.5, "input_length": 200, "output_length": 7},
        ),
        [Request(0, 0.5, 100, 5), Request(1, 2.0005, 200, 7)],
        {"time_unit": "ms"},
        ("workload.time_unit=ms",),
    ),
    # In the order in which they ended.
    "aiperf-export": TraceSample(
        lines(
            *(
                {
                    "metadata": {"request_start_ns": T0 * 10**9 + start_ns, "benchmark_phase": "profiling"},
                    "metrics": {
                        "input_sequence_length": {"value": prompt, "unit": "tokens"},
                        "output_sequence_length": {"value": output, "unit": "tokens"},
                    },
                    "error": None,
                }
                for start_ns, prompt, output in ((250_000_001, 100, 5), (0, 200, 7))
            )
        ),
        [Request(0, 0.0, 200, 7), Request(1, 0.250000001, 100, 5)],
    ),
    "vidur": TraceSample(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n0.25,396,109\n",
        [Request(0, 0.0, 374, 44), Request(1, 0.25, 396, 109)],
    ),
    "vidur-lengths": TraceSample(
        "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n374,44,418,8.5\n396,109,505,3.6\n",
        [Request(0, 0.25, 374, 44), Request(1, 0.5, 396, 109)],
        RATE,
        RATE_OVERRIDES,
    ),
    "blis": TraceSample(
        BLIS_HEADER + "0,c1,t1,standard,s1,0,,0,true,100,50,100,0,0,0,0.0,,0,100,0,10,5010,10010,50,ok,,stop\n"
        '1,c1,t1,standard,s1,1,,0,true,120,7,120,0,0,0,0.0,,0,0,100001,100010,105010,110010,7,ok,"",\n',
        [Request(0, 0.0, 100, 50), Request(1, 0.100001, 120, 7)],
    ),
    "llmservingsim": TraceSample(
        lines(
            {"input_toks": 3, "output_toks": 5, "arrival_time_ns": 0, "input_tok_ids": [7, 8, 9]},
            {"input_toks": 4, "output_toks": 6, "arrival_time_ns": 1_500_000_000, "input_tok_ids": [7, 8, 9, 1]},
        ),
        [Request(0, 0.0, 3, 5, prompt=TokenIds((7, 8, 9))), Request(1, 1.5, 4, 6, prompt=TokenIds((7, 8, 9, 1)))],
    ),
    # The second sub-request of the first session would come 2 s after 1 s: after the second session.
    "llmservingsim-agentic": TraceSample(
        lines(
            {
                "session_id": 0,
                "arrival_time_ns": 1_000_000_000,
                "sub_requests": [
                    {"input_toks": 2, "output_toks": 5, "input_tok_ids": [7, 8], "tool_duration_ns": 2_000_000_000},
                    {"input_toks": 3, "output_toks": 6, "input_tok_ids": [7, 8, 9], "tool_duration_ns": 0},
                ],
            },
            {
                "session_id": 1,
                "arrival_time_ns": 1_500_000_000,
                "sub_requests": [{"input_toks": 40, "output_toks": 1}],
            },
        ),
        [
            Request(0, 1.0, 2, 5, prompt=TokenIds((7, 8))),
            Request(1, 1.5, 40, 1),
            Request(2, 3.0, 3, 6, prompt=TokenIds((7, 8, 9))),
        ],
    ),
    # Unix time beside a monotonic clock; asyncio may swap requests of one moment.
    "llmservingsim-bench": TraceSample(
        lines(
            {"request_id": "bench-0", "input_toks": 3, "output_toks": 5, "arrival_time": T0 + 0.5, "queued_ts": 91.25},
            {"request_id": "bench-1", "input_toks": 4, "output_toks": 6, "arrival_time": T0, "queued_ts": 91.25},
        ),
        [Request(0, 0.0, 4, 6), Request(1, 0.5, 3, 5)],
    ),
    # Spans come in the order in which they ended, several of them on a line.
    "otel": TraceSample(
        lines(
            otlp(
                otlp_span(
                    "b",
                    T0 * 10**9 + 1,
                    gen_ai__operation__name="chat",
                    gen_ai__usage__input_tokens=9,
                    gen_ai__usage__output_tokens=2,
                ),
                otlp_span("a", T0 * 10**9, gen_ai__usage__prompt_tokens=8, gen_ai__usage__completion_tokens=3),
            ),
            otlp(otlp_span("c", (T0 + 2) * 10**9, gen_ai__usage__input_tokens=7, gen_ai__usage__output_tokens=4)),
        ),
        [Request(0, 0.0, 8, 3), Request(1, 1e-9, 9, 2), Request(2, 2.0, 7, 4)],
    ),
    "otel-python": TraceSample(
        lines(
            *(
                {
                    "name": "chat model",
                    "context": {"trace_id": "0x1", "span_id": "0x2"},
                    "start_time": start,
                    "status": {"status_code": "UNSET"},
                    "attributes": {"gen_ai.usage.input_tokens": prompt, "gen_ai.usage.output_tokens": output},
                }
                for start, prompt, output in (
                    ("2026-01-01T00:00:01.250000Z", 9, 2),
                    ("2026-01-01T00:00:00.000000Z", 8, 3),
                )
            )
        ),
        [Request(0, 0.0, 8, 3), Request(1, 1.25, 9, 2)],
    ),
}
