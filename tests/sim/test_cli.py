"""The console script: finds commands, imports nothing else, and keeps errors to a line."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from sim.cli import main

ROOT = Path(__file__).parents[2]


def modules_loaded(code: str) -> set[str]:
    """Top-level packages that a fresh interpreter has imported after `code`."""
    report = "import json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def imports(file: Path) -> set[str]:
    """Top-level packages that a file imports anywhere, also within functions."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def test_help_lists_every_command_with_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for command in ("capacity", "plot", "sim"):
        (line,) = [line for line in lines if line.split()[:1] == [command]]
        assert len(line.split()) > 3


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: kvtwin COMMAND")


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvtwin {version('kvtwin')}\n"


def test_an_unknown_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simm", "seed=1"]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "kvtwin: there is no command simm; did you mean sim?\n")


def test_a_command_that_is_like_no_other_is_answered_with_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zzz"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvtwin: there is no command zzz; the commands are bench, calibrate, capacity, ")
    assert error.count("\n") == 1


def test_help_imports_neither_hydra_nor_numpy() -> None:
    loaded = modules_loaded("from sim.cli import main; main(['--help'])")
    assert "sim" in loaded
    assert loaded & {"hydra", "omegaconf", "numpy", "pandas", "pyarrow", "matplotlib", "rich", "simpy"} == set()


def test_a_simulation_imports_neither_torch_nor_the_gpu_room(tmp_path: Path) -> None:
    arguments = ["sim", "plots=false", "workload.num_requests=2", f"hydra.run.dir={tmp_path}"]
    loaded = modules_loaded(f"from sim.cli import main; assert main({arguments}) == 0")
    assert {"sim", "workloads", "simpy"} <= loaded
    assert loaded & {"torch", "triton", "transformers", "gpu", "matplotlib"} == set()


def test_rooms_import_downwards_only() -> None:
    for room, forbidden in (("sim", {"gpu", "torch", "triton"}), ("workloads", {"gpu", "sim", "torch", "triton"})):
        files = list((ROOT / room).rglob("*.py"))
        assert files
        for file in files:
            assert imports(file) & forbidden == set(), file


def test_help_of_a_command_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--help"]) == 0
    assert "kvtwin sim workload=azure workload.path=trace.csv" in capsys.readouterr().out


def test_an_interrupt_is_one_line_and_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def press(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("sim.commands.simulate.main", press)
    assert main(["sim"]) == 130
    assert capsys.readouterr().err == "kvtwin: interrupted\n"


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    # `kvtwin --help | head -1`: the pipe is closed before anything is written into it.
    code = "import sys; from sim.cli import main; sys.stdin.read(); sys.exit(main(['--help']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin and process.stdout and process.stderr
    process.stdout.close()
    process.stdin.close()
    assert process.stderr.read() == b""
    assert process.wait(20) == 0
