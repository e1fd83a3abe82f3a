"""Our decisions against those that vLLM's own scheduler recorded, in every field of every step."""

import gzip
import json
import shutil
from pathlib import Path

import pytest

from sim.cli import main
from sim.conformance import Run, check_case, request_of
from workloads.request import HashIds, Request

ROOT = Path(__file__).parents[2]
OURS = ROOT / "tests" / "data" / "conformance"
SHARED = ROOT.parent / "shared" / "conformance" / "vllm"
SYNTHETIC = sorted(path.parent for path in OURS.glob("*/config.json"))
FROM_TRACES = ["azure_code_300", "azure_conv_300", "mooncake_conv_200_roomy", "mooncake_conv_200_tight"]


@pytest.mark.parametrize("case", SYNTHETIC, ids=lambda case: case.name)
def test_every_decision_is_vllms_own(case: Path):
    verdict = check_case(case)
    assert verdict.difference is None
    assert verdict.lines > 40  # a case that compares nothing proves nothing


def test_all_twelve_synthetic_cases_are_there():
    assert len(SYNTHETIC) == 12


@pytest.mark.parametrize("name", FROM_TRACES)
def test_every_decision_on_a_real_trace_is_vllms_own(name: str):
    if not (SHARED / name).is_dir():
        pytest.skip(f"needs {SHARED / name}, cases made from public traces that are not ours to pass on")
    verdict = check_case(SHARED / name)
    assert verdict.difference is None
    assert verdict.lines > 3000


@pytest.mark.parametrize("name", ["mooncake_conv_200_roomy", "mooncake_conv_200_tight"])
def test_hash_ids_decide_as_the_tokens_that_they_stand_for(name: str):
    folder = SHARED / name
    if not folder.is_dir():
        pytest.skip(f"needs {folder}, a case made from a public trace that is not ours to pass on")
    config = json.loads((folder / "config.json").read_text())
    trace = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    run = Run(config, trace)
    run._arrivals = [_by_hash_ids(request, trace[request.request_id]) for request in run._arrivals]
    expected = map(json.loads, unpacked(folder / "steps.jsonl.gz"))
    for recorded, got in zip(expected, run.steps(), strict=True):
        assert recorded == got


def unpacked(path: Path) -> list[str]:
    return gzip.decompress(path.read_bytes()).decode().splitlines()


def _by_hash_ids(request: Request, line: dict[str, object]) -> Request:
    prompt = HashIds(tuple(line["hash_ids"]), 512)  # type: ignore[arg-type]
    return Request(request.request_id, request.arrival_s, request.prompt_tokens, request.output_tokens, 0, prompt)


def test_token_ids_follow_the_recordings_formulas():
    # Prompt token j of request i: 1,000,000 + i + (j * 7919) mod 1,000,003; for i = 3: 1000003, 1007922.
    # Output token k: (i * 7919 + k * 104729 + 12345) mod 32000; 23757 + 12345 = 36102 -> 4102, then 140831 -> 12831.
    line = {"arrival_step": 0, "prompt_tokens": 2, "output_tokens": 2}
    assert request_of(3, line, caching=True).prompt.ids == (1_000_003, 1_007_922, 4_102, 12_831)
    # With hash ids, position 513 of ids (7, 9): (9 * 512 + 1) mod 50021 + 100 = 4709.
    line = {"arrival_step": 0, "prompt_tokens": 514, "output_tokens": 1, "hash_ids": [7, 9]}
    assert request_of(0, line, caching=True).prompt.ids[513] == 4_709


def broken_copy(tmp_path: Path, name: str) -> Path:
    copy = tmp_path / name
    shutil.copytree(OURS / name, copy)
    steps = copy / "steps.jsonl.gz"
    lines = unpacked(steps)
    record = json.loads(lines[20])
    record["free_list"] = record["free_list"][::-1]
    lines[20] = json.dumps(record)
    steps.unlink()
    (copy / "steps.jsonl").write_text("\n".join(lines))
    return copy


def test_the_first_difference_is_named_and_the_exit_code_is_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    copy = broken_copy(tmp_path, "basic_bs16")
    step = json.loads((copy / "steps.jsonl").read_text().splitlines()[20])["step"]
    assert main(["conformance", str(OURS / "identical_bs16"), str(copy)]) == 1
    printed = capsys.readouterr().out
    assert "identical_bs16: 181 lines compared, identical" in printed
    assert f"differs first in step {step}, free_list: expected [" in printed
    assert "1 of 2 cases identical" in printed


@pytest.mark.parametrize("lines_kept", [60, 106])
def test_a_recording_that_ends_before_we_do_is_a_difference(tmp_path: Path, lines_kept: int):
    copy = broken_copy(tmp_path, "basic_bs16")
    lines = unpacked(OURS / "basic_bs16" / "steps.jsonl.gz")[:lines_kept]
    (copy / "steps.jsonl").write_text("\n".join(lines))
    assert check_case(copy).difference is not None


def test_a_recording_that_goes_on_after_we_end_is_a_difference(tmp_path: Path):
    copy = broken_copy(tmp_path, "basic_bs16")
    lines = unpacked(OURS / "basic_bs16" / "steps.jsonl.gz")
    (copy / "steps.jsonl").write_text("\n".join([*lines, lines[-1]]))
    assert check_case(copy).difference is not None


@pytest.mark.parametrize(
    ("file", "content", "line"),
    [
        ("steps.jsonl", None, "has no steps.jsonl or steps.jsonl.gz"),
        ("config.json", "{", "config.json, line 1: not JSON"),
        ("config.json", "{}", "config.json has no"),
        ("trace.jsonl", '{"request_id": "r0"}', "trace.jsonl, line 1: has no"),
    ],
)
def test_a_broken_case_gives_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, content: str | None, line: str
):
    copy = broken_copy(tmp_path, "basic_bs16")
    if content is None:
        (copy / file).unlink()
    else:
        (copy / file).write_text(content)
    assert main(["conformance", str(copy)]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


def test_a_folder_without_cases_gives_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["conformance", str(tmp_path)]) == 2
    assert "holds no conformance case" in capsys.readouterr().err
