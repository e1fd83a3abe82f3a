"""ShareGPT: conversations as texts, without times or token counts.

A JSON array (or JSON Lines) of objects with `conversations`, a list of {from, value}. Two readings, `workload.turns`:

- first: as `vllm bench serve --dataset-name sharegpt` reads it. Of each conversation the first text is the prompt and
  the second the output, whoever wrote them; shorter conversations are left out, and so are prompts or outputs below 4
  tokens, prompts above 1,024 and pairs above 2,048. Later turns, whose prompts would begin alike, are not
  there. vLLM also shuffles, and takes as many as `--num-prompts`; here the file's order stays.
- all: each text of the model is a request, whose prompt is everything before it. Nothing is left out but texts without
  a token. Without closed loop turns come one after another like any other requests. In closed loop
  (`workload.closed_loop=true`) the arrivals are those of the conversations, and a turn is sent the moment the one
  before it has been answered: how long people read and typed is not in the file, so nobody thinks.

Texts follow one another as they are: no chat template, no role names.
"""

from collections.abc import Hashable, Iterator

from workloads.errors import UserError
from workloads.readers.bad_rows import BadRow, LeftOut
from workloads.readers.conversations import Turn
from workloads.readers.format import Format, Reading
from workloads.readers.json_lines import as_object, required_list
from workloads.readers.record_trace import Arrival, Record, RecordTrace
from workloads.readers.text_tokens import TextTokens, text_tokens
from workloads.readers.token_counts import shown
from workloads.request import HashIds, TokenIds, Workload

MODELS = frozenset({"gpt", "chatgpt", "assistant", "model", "bing", "bard", "claude"})
"""Who writes outputs, by the names in `from`."""
_FEWEST, _LONGEST_PROMPT, _LONGEST = 4, 1024, 2048  # tokens


def _first_turns(conversation: Record, tokens: TextTokens) -> Arrival:
    texts = [_text(turn) for turn in required_list(conversation, "conversations")[:2]]
    if len(texts) < 2:
        raise LeftOut("conversation of fewer than two texts")
    prompt = tokens.begin()
    prompt_tokens = prompt.append(texts[0])
    output_tokens = tokens.begin().append(texts[1])
    for cause, left_out in (
        (f"prompt of fewer than {_FEWEST} tokens", prompt_tokens < _FEWEST),
        (f"output of fewer than {_FEWEST} tokens", output_tokens < _FEWEST),
        (f"prompt of over {_LONGEST_PROMPT} tokens", prompt_tokens > _LONGEST_PROMPT),
        (f"over {_LONGEST} tokens", prompt_tokens + output_tokens > _LONGEST),
    ):
        if left_out:
            raise LeftOut(cause)
    return Arrival(0, prompt_tokens, output_tokens, prompt.content())


def _every_turn(conversation: Record, tokens: TextTokens) -> Iterator[tuple[str, Record]]:
    """Each output with what came before it, and with its place among those that are requests."""
    texts = [(_writer(turn), _text(turn)) for turn in required_list(conversation, "conversations")]
    so_far = tokens.begin()
    own = object()  # the conversation's name: parts of one may share their id
    before: Hashable | None = None
    for number, (writer, text) in enumerate(texts, 1):
        if writer in MODELS:
            prompt_tokens, content = so_far.num_tokens, so_far.content()
            turn = Turn((own, number), before)
            output = so_far.append(text)
            yield (
                f"text {number}",
                {"prompt": content, "prompt_tokens": prompt_tokens, "output": output, "turn": turn},
            )
            if prompt_tokens and output:
                before = turn.name
        else:
            so_far.append(text)


def _turn(turn: Record) -> Arrival:
    if not turn["prompt_tokens"]:
        raise LeftOut("output without a prompt")
    if not turn["output"]:
        raise LeftOut("output without a token")
    prompt: TokenIds | HashIds = turn["prompt"]
    return Arrival(0, turn["prompt_tokens"], turn["output"], prompt, turn=turn["turn"])


def _text(turn: object) -> str:
    value = as_object(turn).get("value")
    if not isinstance(value, str):
        raise BadRow("not a text", f"value is {shown(value, quoted=repr)}; expected a text")
    return value


def _writer(turn: object) -> object:
    writer = as_object(turn).get("from")
    return writer.lower() if isinstance(writer, str) else None


def _open(path: str, reading: Reading) -> Workload:
    if reading.closed_loop and reading.turns != "all":
        raise UserError(
            "workload.closed_loop has no use for workload.turns=first, one request a conversation; say "
            "workload.turns=all, or leave it out."
        )
    tokens = text_tokens(reading.tokenizer, reading.tokens_per_character)
    if reading.turns == "all":
        return RecordTrace(
            path,
            _turn,
            reading.on_bad_row,
            parts=lambda row: _every_turn(row, tokens),
            closed_loop=reading.closed_loop is not None,
        )
    return RecordTrace(path, lambda row: _first_turns(row, tokens), reading.on_bad_row)


FORMATS = (
    Format(
        name="sharegpt",
        title="ShareGPT conversations",
        containers=("json", "parquet"),
        keys=frozenset({"conversations"}),
        unit="none",
        drops="turns=first: as vLLM, under 4 tokens, prompts over 1,024, over 2,048 together; turns=all: empty texts",
        source="anon8231489123/ShareGPT_Vicuna_unfiltered",
        licence="Apache-2.0 as published; the texts are their writers'",
        open=_open,
        options=frozenset({"tokenizer", "tokens_per_character", "turns", "closed_loop"}),
        conversations=True,
    ),
)
