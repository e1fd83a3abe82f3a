"""What a user can get wrong is one line that says what, where and the remedy; what is right comes out typed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from omegaconf import OmegaConf

from sim.cli import main
from sim.config import build, fill
from workloads.errors import UserError

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
TIMES = [f"2023-11-16 18:00:0{second}.0000000" for second in range(3)]
DROP = "Use workload.on_bad_row=drop to skip such rows."
EXPECTED_BLOCK_SIZE = "expected a whole number of at least 1."


def assert_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, overrides: list[str]) -> str:
    """The one line of a `kvtwin sim` that is refused: nothing on stdout, and no results that claim to be whole."""
    folder = tmp_path / "run"
    assert main(["sim", "plots=false", f"hydra.run.dir={folder}", *overrides]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.endswith("\n")
    if (folder / "summary.json").exists():
        assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
    assert not list(folder.glob(".*"))
    return printed.err.removesuffix("\n")


@pytest.mark.parametrize(
    ("second_row", "message"),
    [
        (f"{TIMES[1]},20,-3", f"line 3: GeneratedTokens is -3; expected a whole number of at least 1. {DROP}"),
        (f"{TIMES[1]},0,5", f"line 3: ContextTokens is 0; expected a whole number of at least 1. {DROP}"),
        (f"{TIMES[1]},many,5", f"line 3: ContextTokens is 'many'; expected a whole number of at least 1. {DROP}"),
        (f"{TIMES[1]},20,2.5", f"line 3: GeneratedTokens is 2.5; expected a whole number of at least 1. {DROP}"),
        (
            "2023-11-16 17:59:59.0000000,20,5",
            "line 3: TIMESTAMP 2023-11-16 17:59:59.0000000 is earlier than the row before; expected rows in order of "
            "time. Sort the file by TIMESTAMP.",
        ),
    ],
    ids=["negative", "zero", "text", "fraction", "unsorted"],
)
def test_a_bad_row_is_named_with_its_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, second_row: str, message: str
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("\n".join([HEADER, f"{TIMES[0]},10,3", second_row, f"{TIMES[2]},30,4"]))
    error = assert_refused(capsys, tmp_path, ["workload=azure", f"workload.path={path}"])
    assert error == f"kvtwin: {path}, {message}"


def test_a_wrong_header_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"time,in,out\n{TIMES[0]},10,3\n")
    error = assert_refused(capsys, tmp_path, ["workload=azure", f"workload.path={path}"])
    assert error == (
        f"kvtwin: {path}, line 1: the header is 'time,in,out'; expected the column names "
        f"{HEADER}, each once, in any order. Check that this is the right file and reader."
    )


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "nowhere.csv"
    error = assert_refused(capsys, tmp_path, ["workload=azure", f"workload.path={path}"])
    assert error == (f"kvtwin: {path}: no such file. Check the path; a relative one starts at {Path.cwd()}.")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("memory.block_sise=8", "there is no option memory.block_sise; did you mean memory.block_size?"),
        ("sede=1", "there is no option sede; did you mean seed?"),
        ("engin=vllm_v1", "there is no option engin; did you mean engine?"),
        ("engine=vllm_v2", "there is no engine named vllm_v2; did you mean vllm_v1?"),
        ("model=lama-3.1-8b", "there is no model named lama-3.1-8b; did you mean llama-3.1-8b?"),
        ("memory/allocator=bud", "there is no memory/allocator named bud; did you mean buddy?"),
        (
            "+memory.watermrk=0.1",
            "memory.watermrk is not an option of PagedMemory; did you mean watermark?",
        ),
        (
            "+memory.foo=1",
            "memory.foo is not an option of PagedMemory; the options are block_size, max_model_len, num_blocks, "
            "num_host_blocks, num_reserved_blocks, prefix_caching, reservation, watermark.",
        ),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_or_with_all(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, override: str, message: str
) -> None:
    group = ["engine=orca_max"] if override.startswith("memory/") else []
    assert assert_refused(capsys, tmp_path, [*group, override]) == f"kvtwin: {message}"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("memory.block_size=abc", f"memory.block_size is 'abc'; {EXPECTED_BLOCK_SIZE}"),
        ("memory.block_size=1.5", f"memory.block_size is 1.5; {EXPECTED_BLOCK_SIZE}"),
        ("memory.block_size=0", f"memory.block_size is 0; {EXPECTED_BLOCK_SIZE}"),
        ("memory.block_size=-3", f"memory.block_size is -3; {EXPECTED_BLOCK_SIZE}"),
        ("memory.watermark=2", "memory.watermark is 2.0; expected a share of the pool, at least 0 and below 1."),
        ("memory.num_blocks=1", "memory.num_blocks is 1, of which 1 are never handed out; expected at least 2."),
        ("scheduler.max_num_seqs=0", "scheduler.max_num_seqs is 0; expected a whole number of at least 1."),
        ("scheduler.chunked_prefill=2", "scheduler.chunked_prefill is 2; expected true or false."),
        (
            "workload.rate=0",
            "workload.rate is 0.0; expected a finite number of requests/s above 0. Use workload/arrivals=all_at_once "
            "to have no gaps at all.",
        ),
        ("workload.rate=fast", "workload.rate is 'fast'; expected a number."),
        ("workload.limit=0", "workload.limit is 0; expected a whole number of at least 1, or null for all requests."),
        ("gpu_memory_utilization=2", "gpu_memory_utilization is 2.0; expected a share above 0 and at most 1."),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, override: str, message: str
) -> None:
    assert assert_refused(capsys, tmp_path, [override]) == f"kvtwin: {message}"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("workload.limit=abc", "workload.limit is 'abc'; expected a whole number"),
        ("workload.limit=1.5", "workload.limit is 1.5; expected a whole number"),
        ("seed=abc", "seed is 'abc'; expected a whole number"),
        ("plots=maybe", "plots is 'maybe'; expected true or false"),
    ],
)
def test_a_wrong_type_is_named_also_where_no_constructor_asks_for_the_option(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, override: str, message: str
) -> None:
    error = assert_refused(capsys, tmp_path, [override, "workload.num_requests=3"])
    assert error.startswith(f"kvtwin: {message}")


def test_a_value_that_must_be_given_is_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    error = assert_refused(capsys, tmp_path, ["workload=azure"])
    assert error == "kvtwin: workload.path is not set; give it as workload.path=VALUE."


def test_a_word_that_is_no_override_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "blah" in assert_refused(capsys, tmp_path, ["blah"])


def test_a_model_that_does_not_fit_says_by_how_much(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    # 405.9 billion parameters of 2 bytes are 756 GiB.
    error = assert_refused(capsys, tmp_path, ["model=llama-3.1-405b"])
    assert error.startswith("kvtwin: llama-3.1-405b does not fit on 1 x a100-80gb: 756.0 GiB of weights")
    assert "raise tensor_parallel" in error


@pytest.mark.parametrize("target", ["nowhere.Timer", "sim.timing.constant.Nowhere"])
def test_a_target_that_cannot_be_imported_is_one_line(tmp_path: Path, target: str) -> None:
    # In a process of its own: pytest's log handlers would hide what the import machinery logs to stderr.
    command = [sys.executable, "-c", "import sys; from sim.cli import main; sys.exit(main())"]
    overrides = ["sim", "plots=false", f"hydra.run.dir={tmp_path}", f"timing._target_={target}"]
    done = subprocess.run([*command, *overrides], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"kvtwin: timing._target_={target} cannot be imported")
    assert done.stderr.count("\n") == 1


@dataclass(frozen=True)
class Options:
    """One option of each kind."""

    count: int
    share: float = 0.5
    path: Path = Path()
    flag: bool = False
    choice: Literal["a", "b"] = "a"
    limit: int | None = None
    sizes: list[int] | None = None
    inner: Any = None


def options(**values: Any) -> Options:
    built: Options = build(OmegaConf.create({"_target_": "test_config.Options", **values}), "group")
    return built


def test_options_come_out_in_the_types_of_their_constructor() -> None:
    got = options(count=1e6, share=1, path="x/y", flag=True, choice="b", limit=None, sizes=[1, 2.0])
    assert got == Options(1_000_000, 1.0, Path("x/y"), True, "b", None, [1, 2])
    assert (type(got.count), type(got.share)) == (int, float)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("count", True, "a whole number"),
        ("count", None, "a whole number"),
        ("share", "0.5", "a number"),
        ("flag", 1, "true or false"),
        ("choice", "c", "a or b"),
        ("limit", 0.5, "a whole number or null"),
        ("count", {"x": 1}, "a whole number"),
    ],
)
def test_an_option_of_the_wrong_type_is_refused(name: str, value: Any, expected: str) -> None:
    with pytest.raises(UserError, match=rf"^group\.{name} is .*; expected {expected}\.$"):
        options(**{"count": 1, name: value})


def test_an_option_that_is_left_out_is_asked_for() -> None:
    with pytest.raises(UserError, match=r"^group\.count is not set; give it as \+group\.count=VALUE\.$"):
        options()


def test_parts_within_parts_are_built_and_named_in_full() -> None:
    inner = {"_target_": "test_config.Options", "count": 3}
    assert options(count=1, inner=inner).inner == Options(3)
    with pytest.raises(UserError, match=r"^group\.inner\.count is 'x'; expected a whole number\.$"):
        options(count=1, inner=inner | {"count": "x"})


def test_what_the_run_knows_fills_only_what_the_user_left_open() -> None:
    node = {"_target_": "test_config.Options", "limit": None}
    assert build(OmegaConf.create(node), "group", count=7, limit=9, nobody_asks=1) == Options(7, limit=9)
    assert build(OmegaConf.create(node | {"limit": 3}), "group", count=7, limit=9) == Options(7, limit=3)


def test_a_dataclass_is_filled_from_the_options_of_its_names() -> None:
    @dataclass(frozen=True)
    class Size:
        width: int
        height: int | None

    assert fill(Size, {"width": 3.0, "height": None, "other": 1}) == Size(3, None)
    with pytest.raises(UserError, match=r"^height is not set"):
        fill(Size, {"width": 3})
