"""A recorded run as a workload: who comes when, with what content, and what a bad file says."""

import json
from pathlib import Path

import pytest

from workloads.errors import UserError
from workloads.readers.recorded_run import RecordedRun
from workloads.request import HashIds, Request

FIRST = {
    "request_id": "a",
    "dataset_arrival_s": 5.0,
    "queued_s": 0.5,
    "scheduled_s": 0.5,
    "first_token_s": 1.0,
    "last_token_s": 2.0,
    "input_tokens": 33,
    "output_tokens": 4,
    "block_hash_ids": [0, 1],
}
SECOND = FIRST | {
    "request_id": "b",
    "dataset_arrival_s": 5.75,
    "queued_s": 1.5,
    "first_token_s": 1.5,
    "input_tokens": 32,
}


def write(folder: Path, *rows: dict) -> str:
    (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(folder)


def test_requests_come_when_the_client_sent_them_from_the_moment_the_engine_had_the_first(tmp_path):
    # The client's clock reads 5.0 when the engine's reads 0.5: the second, sent 0.75 s later, comes at 1.25, whenever
    # the
    # engine looked. 33 tokens are two full blocks and one token that nobody can share; 32 are just two blocks.
    workload = RecordedRun(write(tmp_path, SECOND, FIRST))
    assert list(workload) == [
        Request(0, 0.5, 33, 4, prompt=HashIds((0, 1, -1), 16)),
        Request(1, 1.25, 32, 4, prompt=HashIds((0, 1), 16)),
    ]
    assert list(workload) == list(workload)
    assert workload.num_requests == 2
    assert [row.name for row in workload.recorded] == ["a", "b"]


def test_a_prompt_of_unknown_content_shares_nothing(tmp_path):
    (request,) = RecordedRun(write(tmp_path, {key: value for key, value in FIRST.items() if key != "block_hash_ids"}))
    assert request.prompt is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"queued_s": "x"}, "line 1: queued_s is 'x'; expected seconds, 0 or more."),
        ({"input_tokens": 0}, "line 1: input_tokens is 0; expected a whole number of at least 1."),
        ({"first_token_s": 3.0}, "line 1: expected queued_s <= first_token_s <= last_token_s."),
        ({"block_hash_ids": [0.5]}, "line 1: block_hash_ids is no list of whole numbers."),
        ({"block_hash_ids": [0]}, "a has 1 block_hash_ids; expected 2 for 33 tokens and workload.block_size=16."),
    ],
)
def test_a_bad_line_is_named(tmp_path, changed, message):
    path = write(tmp_path, FIRST | changed)
    with pytest.raises(UserError, match=r"requests\.jsonl") as error:
        RecordedRun(path)
    assert message in str(error.value)


def test_a_folder_without_requests_and_an_empty_block_size_are_named(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        RecordedRun(str(tmp_path))
    with pytest.raises(UserError, match=r"workload.block_size is 0"):
        RecordedRun(write(tmp_path, FIRST), block_size=0)
