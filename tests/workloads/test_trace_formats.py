"""What each trace format leaves out, and what it cannot be read without."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.workloads.trace_samples import BLIS_HEADER, RATE, SAMPLES, T0, lines, otlp, otlp_span
from workloads.arrivals import AllAtOnce, Poisson
from workloads.errors import UserError
from workloads.generate import Synthetic
from workloads.lengths import Fixed
from workloads.readers.recognise import FORMATS
from workloads.readers.trace import Trace
from workloads.request import HashIds, Request

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file and returns its path."""

    def to_file(content: str) -> str:
        file = tmp_path / "log.dat"
        file.write_text(content, encoding="utf-8")
        return str(file)

    return to_file


def refused(path: str, **options: Any) -> str:
    """The line with which reading ends, without the path it begins with."""
    with pytest.raises(UserError) as error:
        list(Trace(path, **options))
    message = str(error.value)
    assert "\n" not in message
    return message.removeprefix(path)


def dropped(path: str, **options: Any) -> tuple[dict[str, int], dict[str, str], list[tuple[int, int]]]:
    """Rows dropped by cause, where the first of each stood, and the lengths of those kept."""
    trace = Trace(path, on_bad_row="drop", **options)
    kept = [(one.prompt_tokens, one.output_tokens) for one in trace]
    assert trace.fate.read == len(kept) + sum(trace.dropped.values())
    return dict(trace.dropped), dict(trace.fate.first_dropped), kept


# Formats that a file cannot tell apart


def test_a_time_in_seconds_or_milliseconds_is_asked_for(write: Write) -> None:
    path = write(SAMPLES["guidellm"].content)
    assert refused(path) == (
        " (input_length, output_length, timestamp) may be guidellm (guidellm's traces without hash ids; times in s) or "
        "aiperf (AIPerf's traces without hash ids; times in ms); say which with workload.format=."
    )
    assert "is taken for aiperf, which has times in ms; leave it out" in refused(path, format="aiperf", time_unit="s")


# Formats without arrivals


@pytest.mark.parametrize("name", ["sharegpt", "bench-lengths", "vidur-lengths"])
def test_a_format_without_arrivals_needs_some_and_one_with_times_takes_none(name: str, write: Write) -> None:
    sample = SAMPLES[name]
    path = write(sample.content)
    without = {key: value for key, value in sample.options.items() if key not in RATE}
    assert refused(path, **without) == (
        f" is taken for {name}, which has no arrivals; give workload/arrivals= (poisson, gamma, constant or "
        "all_at_once) and workload.rate=."
    )
    assert refused(path, **without, arrivals=Poisson()) == (
        "workload.rate is null; give the mean number of arrivals per second."
    )
    assert [one.arrival_s for one in Trace(path, **without, arrivals=AllAtOnce())] == [0.0, 0.0]
    timed = write(SAMPLES["vidur"].content)
    assert "which has arrivals of its own; leave workload/arrivals" in refused(timed, **RATE)


def test_arrivals_are_those_of_a_synthetic_workload_with_the_same_seed(write: Write) -> None:
    path = write("num_prefill_tokens,num_decode_tokens\n" + "5,6\n" * 10_000)  # more than one chunk
    trace = Trace(path, arrivals=Poisson(), rate=3.0, seed=7)
    synthetic = Synthetic(10_000, 3.0, Poisson(), Fixed(5), Fixed(6), seed=7, max_model_len=100)
    # Chunks are summed from their own beginning there, so the last digits differ.
    assert [one.arrival_s for one in trace] == pytest.approx([one.arrival_s for one in synthetic], rel=1e-12)
    assert list(trace) == list(trace)


def test_an_option_that_a_format_has_no_use_for_is_refused(write: Write) -> None:
    path = write(SAMPLES["vidur"].content)
    for option in ({"block_size": 16}, {"tokenizer": "gpt2"}, {"tokens_per_character": 0.25}, {"turns": "all"}):
        assert f"workload.{next(iter(option))} has no use for vidur, which" in refused(path, **option)


def test_requests_over_a_limit_are_left_out_and_counted(write: Write) -> None:
    path = write("arrived_at,num_prefill_tokens,num_decode_tokens\n0,90,10\n1,90,11\n2,3,4\n")
    trace = Trace(path, max_total_tokens=100)
    assert list(trace) == [Request(0, 0.0, 90, 10), Request(1, 2.0, 3, 4)]
    assert (trace.dropped, trace.fate.read, trace.fate.kept) == ({"over 100 tokens": 1}, 3, 2)


# ShareGPT


def talk(*texts: tuple[str, str]) -> dict[str, Any]:
    return {"id": "1", "conversations": [{"from": writer, "value": text} for writer, text in texts]}


CHAT = {"tokens_per_character": 1.0, **RATE}  # a character is a token


def test_sharegpt_first_turns_follow_vllms_rule(write: Write) -> None:
    path = write(
        lines(
            talk(("human", "x" * 4), ("gpt", "y" * 4), ("human", "z" * 9), ("gpt", "z" * 9)),
            talk(("human", "x" * 100)),
            talk(("human", "x" * 3), ("gpt", "y" * 100)),
            talk(("human", "x" * 100), ("gpt", "y" * 3)),
            talk(("human", "x" * 1025), ("gpt", "y" * 100)),
            talk(("gpt", "x" * 1024), ("gpt", "y" * 1024)),  # whoever wrote them
            talk(("human", "x" * 1024), ("gpt", "y" * 1025)),
            talk(),
        )
    )
    trace = Trace(path, **CHAT)  # by the format's rule, so no error without on_bad_row=drop
    assert [(one.prompt_tokens, one.output_tokens) for one in trace] == [(4, 4), (1024, 1024)]
    assert trace.dropped == {
        "conversation of fewer than two texts": 2,
        "prompt of fewer than 4 tokens": 1,
        "output of fewer than 4 tokens": 1,
        "prompt of over 1024 tokens": 1,
        "over 2048 tokens": 1,
    }
    assert trace.fate.first_dropped["conversation of fewer than two texts"] == "line 2"


def test_sharegpt_all_turns_have_everything_before_them_as_prompt(write: Write) -> None:
    path = write(
        lines(
            talk(("system", "s" * 10), ("human", "a" * 30), ("gpt", "b" * 20), ("human", "c" * 5), ("gpt", "d" * 2)),
            talk(("gpt", "nobody asked"), ("human", "a"), ("gpt", "")),
        )
    )
    trace = Trace(path, turns="all", **CHAT)
    first, second = trace
    assert (first.prompt_tokens, first.output_tokens) == (40, 20)
    assert (second.prompt_tokens, second.output_tokens) == (65, 2)
    assert trace.dropped == {"output without a prompt": 1, "output without a token": 1}
    assert trace.fate.first_dropped["output without a token"] == "line 2, text 3"
    # Blocks of 16: both prompts begin with the same 40 characters, which are two full blocks.
    assert isinstance(first.prompt, HashIds) and isinstance(second.prompt, HashIds)
    assert [len(one.prompt.ids) for one in (first, second)] == [3, 5]
    assert first.prompt.ids[:2] == second.prompt.ids[:2]
    assert len({*first.prompt.ids, *second.prompt.ids}) == 6


@pytest.mark.parametrize("rate", [0.1, 0.25, 0.3, 1.0, 4.0])
def test_equal_beginnings_are_equal_blocks_and_others_are_not(rate: float, write: Write) -> None:
    path = write(
        lines(*(talk(("human", "x" * same + tail), ("gpt", "y" * 9)) for same, tail in ((400, "a"), (400, "b"))))
    )
    trace = Trace(path, turns="all", tokens_per_character=rate, **RATE)
    contents = [one.prompt for one in trace]
    (one, other) = (content.ids for content in contents if isinstance(content, HashIds))
    full = int(400 * rate + 1e-9) // 16  # tokens of the 400 characters that fill blocks
    assert one[:full] == other[:full] and not set(one[full:]) & set(other[full:])
    assert len(one) == len(other) == -(-trace_tokens(401, rate) // 16)


def trace_tokens(characters: int, rate: float) -> int:
    """Rounded up."""
    return -int(-characters * rate // 1)


def test_texts_need_a_tokenizer_or_an_estimate(write: Write, tmp_path: Path) -> None:
    path = write(SAMPLES["sharegpt"].content)
    assert "neither of workload.tokenizer= (name or folder)" in refused(path, **RATE)
    assert "and both of workload.tokenizer=" in refused(path, tokenizer="x", tokens_per_character=1.0, **RATE)
    assert "tokens_per_character is 0.0; expected a number above 0" in refused(path, tokens_per_character=0.0, **RATE)
    pytest.importorskip("transformers")
    assert "cannot be loaded" in refused(path, tokenizer=str(tmp_path / "none"), **RATE)


def test_a_tokenizer_counts_the_tokens(write: Write, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "words")
    path = write(lines(talk(("human", "a b a b a"), ("gpt", "b b b b"))))
    (request,) = Trace(path, tokenizer=str(tmp_path / "words"), **RATE)
    assert (request.prompt_tokens, request.output_tokens) == (5, 4)
    assert request.prompt is not None and request.prompt.ids == (0, 1, 0, 1, 0)


# Results of benchmarks


def bench(**columns: Any) -> str:
    return json.dumps({"duration": 1.0, "total_input_tokens": 6, "total_output_tokens": 6, **columns}, indent=2)


def test_requests_of_a_benchmark_that_failed_are_errors_or_dropped(write: Write) -> None:
    path = write(
        bench(input_lens=[1, 2, 3], output_lens=[4, 0, 6], start_times=[9.0, 8.0, 7.5], errors=["", "", "timeout"])
    )
    assert refused(path) == (
        ", request 2: output_lens is 0: the request failed. Use workload.on_bad_row=drop to skip such rows."
    )
    assert dropped(path) == ({"failed": 2}, {"failed": "request 2"}, [(1, 4)])


def test_a_summary_without_requests_says_how_to_get_them(write: Write) -> None:
    assert "is the summary of a benchmark, without its requests; run vllm bench serve with" in refused(write(bench()))


def test_several_runs_in_one_file_are_refused_instead_of_trimmed(write: Write) -> None:
    path = write(SAMPLES["bench-lengths"].content * 2)
    assert "goes on after its first object; expected one run" in refused(path, **RATE)


def test_columns_of_different_length_are_refused(write: Write) -> None:
    path = write(bench(input_lens=[1, 2], output_lens=[4], start_times=[9.0, 8.0]))
    assert refused(path).startswith(": input_lens, output_lens, start_times differ in length")


# The others


def test_blis_requests_that_failed_are_errors_or_dropped(write: Write) -> None:
    row = "0,,,,,0,,0,true,{prompt},{output},5,0,0,0,0.0,,0,5,{time},0,0,0,0,{status},,\n".format
    content = BLIS_HEADER + row(prompt=5, output=2, time=0, status="ok")
    content += row(prompt=5, output=0, time=1, status="error") + row(prompt=0, output=0, time=1, status="timeout")
    path = write(content + row(prompt=6, output=3, time=2, status="ok"))
    assert refused(path).startswith(", line 3: status is 'error': the request failed. Use")
    assert dropped(path) == ({"failed": 2}, {"failed": "line 3"}, [(5, 2), (6, 3)])
    broken = write(
        content + row(prompt="x", output=3, time=2, status="ok") + row(prompt=6, output=3, time=2, status="ok")
    )
    assert dropped(broken)[0] == {"failed": 2, "not a number": 1}  # line by line now
    assert "is the header of a BLIS trace; give the CSV beside it" in refused(write("trace_version: 2\nmode: real\n"))


def test_llmservingsim_rows_that_say_too_little_are_errors_or_dropped(write: Write) -> None:
    good = {"input_toks": 3, "output_toks": 5, "arrival_time": T0}
    path = write(lines(good, {**good, "arrival_time": None}))
    assert dropped(path) == ({"failed": 1}, {"failed": "line 2"}, [(3, 5)])
    flat = {"input_toks": 3, "output_toks": 5, "arrival_time_ns": 0}
    path = write(lines(flat, {**flat, "input_tok_ids": [1]}, {**flat, "input_tok_ids": ["x"]}))
    assert dropped(path)[0] == {"wrong number of token ids": 1, "unreadable token ids": 1}


def test_spans_of_another_kind_are_no_requests_and_failed_ones_are_errors_or_dropped(write: Write) -> None:
    usage = {"gen_ai__usage__input_tokens": 9, "gen_ai__usage__output_tokens": 2}
    failed = {**otlp_span("f", 5, **usage), "status": {"code": 2}}
    spans = [
        otlp_span("agent", 1, gen_ai__operation__name="invoke_agent", **usage),  # sums up the calls below it
        otlp_span("http", 2, http__method="GET"),
        {"spanId": "bare", "startTimeUnixNano": "2"},
        otlp_span("embedding", 2, gen_ai__operation__name="embeddings", gen_ai__usage__input_tokens=9),
        otlp_span("call", 3, gen_ai__operation__name="chat", **usage),
    ]
    trace = Trace(write(lines(otlp(*spans))))
    assert list(trace) == [Request(0, 0.0, 9, 2)]
    assert trace.dropped == {"span of another kind": 4}
    assert trace.fate.first_dropped == {"span of another kind": "line 1, span 1"}
    no_output = otlp_span("cut", 4, gen_ai__operation__name="chat", gen_ai__usage__input_tokens=9)
    path = write(lines(otlp(*spans, failed, no_output)))
    assert refused(path).startswith(", line 1, span 6: the span has an error, or no output tokens")
    assert dropped(path)[0] == {"span of another kind": 4, "failed": 2}


def test_aiperf_warm_up_is_no_part_of_the_run(write: Write) -> None:
    row, other = SAMPLES["aiperf-export"].rows()
    warm_up = {**row, "metadata": {**row["metadata"], "benchmark_phase": "warmup"}}
    failed = {**row, "error": {"code": 500}}
    path = write(lines(warm_up, row, failed, other))
    assert dropped(path) == (
        {"warm-up": 1, "failed": 1},
        {"warm-up": "line 1", "failed": "line 3"},
        [(200, 7), (100, 5)],
    )


def test_a_later_turn_that_waits_for_another_has_no_time(write: Write) -> None:
    first = {"timestamp": 0, "input_length": 5, "output_length": 5, "session_id": "a"}
    later = {"delay": 500, "input_length": 5, "output_length": 5, "session_id": "a"}
    assert "line 2: the key 'timestamp' is missing" in refused(write(lines(first, later)), format="aiperf")


# Conversations in closed loop


def turns(requests: Iterable[Request]) -> list[tuple[float, int, int | None, float]]:
    """Of each request when it comes at the earliest, its prompt, whom it follows and how long after."""
    return [(one.arrival_s, one.prompt_tokens, one.after, one.think_s) for one in requests]


def test_a_sub_request_follows_the_one_before_it_after_its_tool(write: Write) -> None:
    # The second session comes between the two sub-requests of the first, 2 s apart by the tool of the first one.
    path = write(SAMPLES["llmservingsim-agentic"].content)
    expected = [(1.0, 2, None, 0.0), (1.5, 40, None, 0.0), (3.0, 3, 0, 2.0)]
    assert turns(Trace(path, closed_loop=True)) == expected
    # Sessions of one name are not one session.
    session = SAMPLES["llmservingsim-agentic"].rows()[0]
    twice = turns(Trace(write(lines(session, session)), closed_loop=True))
    assert [after for _, _, after, _ in twice] == [None, None, 0, 1]


def dynamo(prompt: int, **more: Any) -> dict[str, Any]:
    return {"input_tokens": prompt, "output_tokens": 5, "hash_ids": [prompt], **more}


def test_a_turn_of_dynamo_follows_the_one_before_it_in_its_session(write: Write) -> None:
    path = write(
        lines(
            dynamo(1, session_id="a", created_time=1000),
            dynamo(2, session_id="b", created_time=2000),
            dynamo(3, session_id="a", delay=250.5),
            dynamo(4, session_id="b", created_time=9000),
            dynamo(5, created_time=3000),
            dynamo(6, session_id="b", delay_ms=500, created_time=1),  # the delay counts, and not the time
            dynamo(7, session_id="a"),
        )
    )
    trace = Trace(path, closed_loop=True)
    expected = [
        (1.0, 1, None, 0.0),
        (1.0, 3, 0, 0.2505),
        (1.0, 7, 1, 0.0),
        (2.0, 2, None, 0.0),
        (3.0, 5, None, 0.0),
        (9.0, 4, 3, 0.0),
        (9.0, 6, 5, 0.5),
    ]
    assert turns(trace) == expected
    assert turns(trace) == expected  # sessions begin anew
    assert "line 3: the key 'timestamp' is missing" in refused(path)


def test_rows_of_a_session_that_cannot_follow_are_errors_or_dropped(write: Write) -> None:
    path = write(
        lines(
            dynamo(1, session_id="a", created_time=1000),
            dynamo(2, session_id="a", created_time=999),
            dynamo(3, session_id="b", created_time=5, delay=1),
            dynamo(4, session_id=["a"], created_time=5),
            dynamo(5, session_id="c"),
            dynamo(0, session_id="a", delay=5),
            dynamo(7, session_id="a", delay=-1),
            dynamo(8, session_id="a", delay=1000),
        )
    )
    trace = Trace(path, closed_loop=True, on_bad_row="drop")
    assert turns(trace) == [(1.0, 1, None, 0.0), (1.0, 8, 0, 1.0)]  # who was dropped is nobody's parent
    assert trace.dropped == {
        "turns out of order": 1,
        "delay of a first turn": 1,
        "unreadable session": 1,
        "missing key": 1,
        "below 1": 1,
        "unreadable time": 1,
    }
    assert "line 2: session_id 'a' was later before" in refused(path, closed_loop=True)


def test_a_turn_of_sharegpt_follows_the_answer_before_it_and_conversations_have_the_rate(write: Write) -> None:
    path = write(
        lines(
            talk(("human", "aaa"), ("gpt", "bb"), ("human", "c"), ("gpt", ""), ("human", "d"), ("gpt", "eeee")),
            talk(("human", "ffff"), ("gpt", "g")),
        )
    )
    # Conversations come every 0.25 s. The second answer is empty, so the third, after 3 + 2 + 1 + 1 characters, follows
    # the first.
    expected = [(0.25, 3, None, 0.0), (0.25, 7, 0, 0.0), (0.5, 4, None, 0.0)]
    assert turns(Trace(path, turns="all", closed_loop=True, **CHAT)) == expected
    assert [one.arrival_s for one in Trace(path, turns="all", **CHAT)] == [0.25, 0.5, 0.75]
    assert refused(path, closed_loop=True, **CHAT).startswith(
        "workload.closed_loop has no use for workload.turns=first"
    )


@pytest.mark.parametrize("name", [name for name, one in FORMATS.items() if one.conversations])
def test_without_closed_loop_nobody_follows_anybody(name: str, write: Write) -> None:
    sample = SAMPLES[name]
    options: dict[str, Any] = {**sample.options, **({"turns": "all"} if name == "sharegpt" else {})}
    assert all(one.after is None and not one.think_s for one in Trace(write(sample.content), **options))
