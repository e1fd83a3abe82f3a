"""The compiled core is the same simulator: same bytes, same messages, and never that of other sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from sim import compiled
from workloads.errors import UserError

HEADERS = Path(sysconfig.get_path("include")) / "Python.h"
COMPILER = (sysconfig.get_config_var("CC") or "cc").split()[0]
RUNS = {
    "prefix caching and preemptions": ["workload=sharegpt_like", "workload.rate=30", "memory.num_blocks=900"],
    "async, conversations": ["workload=conversations", "scheduler.async_scheduling=true", "memory.num_blocks=1500"],
    "swaps of parallel samples": [
        "workload=alpaca_like",
        "workload/sampling=parallel",
        "workload.sampling.n=4",
        "scheduler/recovery=swap",
        "memory.num_blocks=300",
    ],
    "beams": ["workload=alpaca_like", "workload/sampling=beam", "workload.sampling.width=4", "memory.num_blocks=300"],
    "an interpreted scheduler on the compiled base": ["engine=vllm_v0", "workload=sharegpt_like", "workload.rate=30"],
    "an interpreted memory": ["engine=vattention", "workload=sharegpt_like", "workload.rate=30"],
    "a radix tree": ["engine=sglang", "workload=sharegpt_like", "workload.rate=30", "memory.num_blocks=20000"],
}


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a build of the core."""
    if shutil.which(COMPILER) is None or not HEADERS.exists():
        pytest.skip("there is no C compiler, or Python's headers are not installed")
    folder = tmp_path_factory.mktemp("builds")
    made = kvtwin("compile", builds=folder)
    assert made.returncode == 0, made.stderr
    assert [path.parent for path in folder.glob("*/sim")] == [folder / compiled._digest()]
    return folder


def kvtwin(*arguments: str, builds: Path | str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with the builds of that folder."""
    command = [sys.executable, "-c", "import sys; from sim.cli import main; sys.exit(main())", *arguments]
    environment = {**os.environ, compiled.SWITCH: str(builds)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_the_core_is_imported_from_its_build(builds: Path) -> None:
    code = "import sim.engine, sim.memory.paged; print(sim.engine.__file__, sim.memory.paged.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, compiled.SWITCH: str(builds)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(Path(path).is_relative_to(builds) for path in found.stdout.split())


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS.keys())
def test_tables_and_summary_of_a_compiled_run_are_the_same_bytes(
    options: list[str], builds: Path, tmp_path: Path
) -> None:
    for name, core in (("compiled", builds), ("interpreted", "0")):
        run = kvtwin("sim", "plots=false", f"hydra.run.dir={tmp_path / name}", *options, builds=core)
        assert run.returncode == 0, run.stderr
    for file in ("requests.parquet", "steps.parquet", "events.parquet", "summary.json"):
        assert (tmp_path / "compiled" / file).read_bytes() == (tmp_path / "interpreted" / file).read_bytes(), file


@pytest.mark.parametrize("option", ["memory.block_size=many", "memory.blok_size=16", "scheduler.max_num_seqs=0"])
def test_a_wrong_option_is_refused_in_the_same_words(option: str, builds: Path, tmp_path: Path) -> None:
    answers = [kvtwin("sim", f"hydra.run.dir={tmp_path}", f"++{option}", builds=core) for core in (builds, "0")]
    assert [answer.returncode for answer in answers] == [2, 2]
    assert answers[0].stderr == answers[1].stderr


def test_a_build_of_other_sources_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.SWITCH, str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    (tmp_path / "0123456789abcdef").mkdir()
    assert not compiled.prefer_compiled()
    (tmp_path / compiled._digest()).mkdir()
    assert compiled.prefer_compiled()


def test_without_a_compiler_one_line_says_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.SWITCH, str(tmp_path / "builds"))
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(compiled, "CORE", ("sim.tables",))
    with pytest.raises(UserError, match="C compiler and Python's headers"):
        compiled.build()
    assert not (tmp_path / "builds").exists()
