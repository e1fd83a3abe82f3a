"""Nothing is lost: sweeps that are interrupted, killed or out of disk, and go on. With real processes and signals."""

from __future__ import annotations

import random
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from gated import reached
from processes import SMALL, Kvtwin, contents, gated_configs, kvtwin

from sim.cli import main
from sim.point import MARK, TABLES, finished, status
from sim.stopping import Claim

Sweep = Callable[..., tuple[int, str, str]]
THREE = [*SMALL, "seed=1,2,3"]
JOBLIB = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
needs_joblib = pytest.mark.skipif(
    find_spec("joblib") is None or find_spec("hydra_plugins.hydra_joblib_launcher") is None,
    reason="needs the extra kvtwin[parallel]",
)


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """Runs a sweep in this process, in `tmp_path`/sweep and without figures; returns exit code, stdout and stderr."""
    monkeypatch.setattr("sim.plots.sweep.draw_sweep", lambda *_: [])

    def run(*overrides: str) -> tuple[int, str, str]:
        with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
            code = main(["sim", "-m", f"hydra.sweep.dir={tmp_path / 'sweep'}", *overrides])
        return code, out.getvalue(), err.getvalue()

    return run


def written(folder: Path) -> dict[str, int]:
    """When each file of a point was written, in nanoseconds; its mark says only that the sweep has it."""
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != MARK}


def parts(folder: Path) -> list[Path]:
    return list(folder.rglob("*.part"))


def statuses(folder: Path) -> list[str | None]:
    return [status(folder / name) for name in ("0", "1", "2")]


def requests(point: Path) -> list[str]:
    table = pd.read_parquet(point / "requests.parquet").sort_values("request_id")
    return list(table["status"])


class Gates:
    """Three points, of which the second and the third wait half-way until their gates are opened.

    Args:
        folder: where the gates are.
    """

    def __init__(self, folder: Path) -> None:
        self.paths = [folder / name for name in "abc"]
        gates = ",".join(map(str, self.paths))
        self.arguments = ["-m", *gated_configs(folder / "configs"), f"workload.gate={gates}"]

    def set(self, *, open_: int) -> None:
        """Opens so many of them, and forgets that a run has been there."""
        for number, path in enumerate(self.paths):
            reached(path).unlink(missing_ok=True)
            path.touch()
            if number >= open_:
                path.unlink()

    def reached(self) -> list[bool]:
        return [reached(path).exists() for path in self.paths]


@pytest.fixture(scope="module")
def gates_and_end(tmp_path_factory: pytest.TempPathFactory) -> tuple[Gates, dict[str, bytes]]:
    """The gates, and the files of their sweep when nothing disturbs it."""
    folder = tmp_path_factory.mktemp("gates")
    gates = Gates(folder)
    gates.set(open_=3)
    go_on(gates.arguments, folder / "sweep")
    return gates, contents(folder / "sweep")


def go_on(arguments: list[str], folder: Path) -> None:
    """Runs the sweep with resume=true, from the beginning or from where it was stopped, to the end."""
    with kvtwin(*arguments, f"hydra.sweep.dir={folder}", "resume=true") as process:
        code, _, err = process.end()
    assert (code, err) == (0, "")


def test_an_interrupted_sweep_keeps_what_it_has_and_goes_on_to_the_same_end(
    gates_and_end: tuple[Gates, dict[str, bytes]], tmp_path: Path
) -> None:
    gates, end = gates_and_end
    gates.set(open_=1)
    folder = tmp_path / "sweep"
    with kvtwin(*gates.arguments, f"hydra.sweep.dir={folder}") as process:
        assert process.wait_until(lambda: gates.reached()[1])
        process.signal_all(signal.SIGINT)
        code, out, err = process.end()
    assert (code, err) == (130, "kvtwin: interrupted\n")
    assert "1 of 3 points are complete" in out
    assert f"resume=true hydra.sweep.dir={folder}" in out
    for table in (pd.read_parquet(folder / "sweep.parquet"), pd.read_csv(folder / "sweep.csv")):
        assert table["status"].tolist() == ["complete", "interrupted"]
    # The request of second 0 has long ended when that of second 200 is read, which is where the gate is.
    assert requests(folder / "1")[0] == "finished"
    assert len(requests(folder / "1")) <= 2
    assert {path.name for path in (folder / "1").iterdir()} == {MARK, "config.yaml", "summary.json", *TABLES}
    assert parts(folder) == []

    gates.set(open_=3)
    before = written(folder / "0")
    go_on(gates.arguments, folder)
    assert written(folder / "0") == before
    assert gates.reached() == [False, True, True]  # what is kept has not even begun again
    assert contents(folder) == end


def test_a_terminated_sweep_keeps_what_it_has(gates_and_end: tuple[Gates, dict[str, bytes]], tmp_path: Path) -> None:
    gates, _ = gates_and_end
    gates.set(open_=1)
    with kvtwin(*gates.arguments, f"hydra.sweep.dir={tmp_path}") as process:
        assert process.wait_until(lambda: gates.reached()[1])
        process.signal(signal.SIGTERM)
        code, _, err = process.end()
    assert (code, err) == (143, "kvtwin: terminated\n")
    assert statuses(tmp_path) == ["complete", "interrupted", None]
    assert pd.read_parquet(tmp_path / "sweep.parquet")["status"].tolist() == ["complete", "interrupted"]


@needs_joblib
def test_interrupted_workers_wind_up_their_points_are_gone_and_go_on_to_the_same_end(
    gates_and_end: tuple[Gates, dict[str, bytes]], tmp_path: Path
) -> None:
    gates, end = gates_and_end
    stop_workers(gates, tmp_path, Kvtwin.signal_all, signal.SIGINT, (130, "kvtwin: interrupted\n"))
    gates.set(open_=3)
    go_on(gates.arguments, tmp_path)  # the launcher may be another one
    assert gates.reached() == [False, True, True]
    assert contents(tmp_path) == end


@needs_joblib
def test_workers_of_a_terminated_sweep_wind_up_their_points_and_are_gone(
    gates_and_end: tuple[Gates, dict[str, bytes]], tmp_path: Path
) -> None:
    gates, _ = gates_and_end
    stop_workers(gates, tmp_path, Kvtwin.signal, signal.SIGTERM, (143, "kvtwin: terminated\n"))


def stop_workers(
    gates: Gates, folder: Path, send: Callable[[Kvtwin, int], None], number: int, expected: tuple[int, str]
) -> None:
    """Signals a sweep when two workers have a point in progress, and looks at what is left of it."""
    gates.set(open_=1)
    with kvtwin(*gates.arguments, *JOBLIB, f"hydra.sweep.dir={folder}") as process:
        assert process.wait_until(lambda: all(gates.reached()[1:]))
        send(process, number)
        code, _, err = process.end()
        assert (code, err) == expected
        process.wait_for_all()
    assert statuses(folder) == ["complete", "interrupted", "interrupted"]
    assert [requests(folder / name)[0] for name in ("0", "1", "2")] == ["finished"] * 3
    assert pd.read_parquet(folder / "sweep.parquet")["status"].tolist() == ["complete", "interrupted", "interrupted"]
    assert parts(folder) == []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of a sweep of three small points that nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    go_on(["-m", *THREE], folder)
    return contents(folder)


@pytest.mark.parametrize("launcher", ["basic", pytest.param("joblib", marks=needs_joblib)])
def test_a_sweep_that_is_killed_at_any_moment_goes_on_to_the_same_end(
    launcher: str, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    folder = tmp_path / "sweep"
    arguments = ["-m", *THREE, f"hydra/launcher={launcher}", f"hydra.sweep.dir={folder}", "resume=true"]
    moments = random.Random(7)
    with ExitStack() as orphans:  # workers of a killed sweep are not waited for: a user would not know of them
        for _ in range(3):
            process = orphans.enter_context(kvtwin(*arguments))
            # A moment is a number of changes seen in the folder: three points make 21 files and folders that stay, and
            # three moments come to 18 at most.
            assert process.wait_until(Changes(folder, moments.randint(1, 6)))
            process.kill()
        with kvtwin(*arguments) as process:
            code, _, err = process.end()
    assert (code, err) == (0, "")
    assert contents(folder) == undisturbed


class Changes:
    """Whether so many files have come or gone since."""

    def __init__(self, folder: Path, number: int) -> None:
        self._folder = folder
        self._left = number
        self._seen = set(folder.rglob("*"))

    def __call__(self) -> bool:
        now = set(self._folder.rglob("*"))
        self._left -= len(now ^ self._seen)
        self._seen = now
        return self._left <= 0


def test_a_single_run_that_is_terminated_keeps_what_it_has(tmp_path: Path) -> None:
    gate, folder = tmp_path / "gate", tmp_path / "run"
    arguments = [*gated_configs(tmp_path / "configs"), f"workload.gate={gate}", f"hydra.run.dir={folder}"]
    with kvtwin(*arguments) as process:
        assert process.wait_until(reached(gate).exists)
        process.signal(signal.SIGTERM)
        assert process.end() == (143, "", "kvtwin: terminated\n")
    assert status(folder) == "interrupted"
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "summary.json", *TABLES}
    assert requests(folder)[0] == "finished"


# Short outputs cost little time. Only the second point does not fit: its requests have four times and two ids each.
FULL = ["-m", *SMALL, "workload.output_lengths.tokens=2", "workload.num_requests=6,4000,7"]


def test_a_disk_that_fills_up_is_one_line_and_leaves_earlier_points_whole(tmp_path: Path) -> None:
    # No file may be larger than 100 kB, which the process meets as it would meet a full disk. A sweep table of a row
    # has half of it.
    folder = tmp_path / "sweep"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    with kvtwin(*FULL, f"hydra.sweep.dir={folder}", prepare=limit) as process:
        code, out, err = process.end()
    assert code == 2
    assert err.startswith(f"kvtwin: cannot write {folder / '1'}/")
    assert "File too large" in err
    assert err.count("\n") == 1
    assert "1 of 3 points are complete" in out
    assert [status(folder / name) for name in ("0", "1", "2")] == ["complete", None, None]
    assert not (folder / "2").exists()  # it would fare no better
    assert parts(folder) == []

    go_on(FULL, folder)
    assert pd.read_parquet(folder / "sweep.parquet")["completed"].tolist() == [6, 4000, 7]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 200 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no right to mount a file system here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_file_system_is_one_line_for_a_run_too(small_disk: Path) -> None:
    folder = small_disk / "run"
    with kvtwin(
        *SMALL, "workload.output_lengths.tokens=2", "workload.num_requests=20000", f"hydra.run.dir={folder}"
    ) as process:
        code, _, err = process.end()
    assert code == 2
    assert err.startswith(f"kvtwin: cannot write {folder}/")
    assert "No space left on device" in err
    assert err.count("\n") == 1
    assert parts(folder) == []  # what is of no use makes room


def test_a_sweep_on_a_disk_that_cannot_be_written_to_is_one_line(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = main(["sim", "-m", f"hydra.sweep.dir={small_disk / 'sweep'}", *THREE])
    assert (code, out.getvalue()) == (2, "")
    assert err.getvalue().startswith(f"kvtwin: cannot write {small_disk / 'sweep'}: Read-only file system")
    assert err.getvalue().count("\n") == 1


def test_a_point_whose_folder_cannot_be_made_is_one_line(sweep: Sweep, tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "1").touch()
    code, out, err = sweep(*SMALL, "seed=1,2,3")
    assert code == 2
    assert err.startswith(f"kvtwin: cannot write {tmp_path / 'sweep' / '1'}: ")
    assert err.count("\n") == 1
    assert "1 of 3 points are complete" in out
    assert status(tmp_path / "sweep" / "0") == "complete"


def test_points_of_an_earlier_sweep_are_neither_replaced_nor_mixed_in(sweep: Sweep, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    assert sweep(*SMALL, "seed=1,2")[0] == 0
    before = contents(folder)
    code, out, err = sweep(*SMALL, "seed=3")
    assert (code, out) == (2, "")
    assert err == (
        f"kvtwin: {folder} holds 2 points of an earlier sweep; resume=true keeps those that are finished, "
        "hydra.sweep.dir= takes another folder.\n"
    )
    assert contents(folder) == before


def test_a_resumed_sweep_takes_no_point_of_a_larger_one(sweep: Sweep, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    assert sweep(*SMALL, "seed=1,2,3")[0] == 0
    before = written(folder / "0"), written(folder / "2")
    assert sweep(*SMALL, "seed=1,4", "resume=true")[0] == 0
    assert pd.read_parquet(folder / "sweep.parquet")["seed"].tolist() == [1, 4]
    assert (written(folder / "0"), written(folder / "2")) == before  # not lost either, should the larger one go on


def test_only_what_was_made_from_the_same_config_is_kept(sweep: Sweep, tmp_path: Path) -> None:
    points = [tmp_path / "sweep" / name for name in ("0", "1")]
    assert sweep(*SMALL, "seed=1,2")[0] == 0
    before, end = [written(point) for point in points], contents(tmp_path / "sweep")
    # Same overrides, but the first was made from something else, as if a default had changed since.
    config = points[0] / "config.yaml"
    config.write_text(config.read_text().replace("max_num_seqs: ", "max_num_seqs: 1"))
    (points[0] / ".steps.parquet.part").write_text("half of it")
    assert sweep(*SMALL, "seed=1,2", "resume=true")[0] == 0
    assert written(points[1]) == before[1]
    assert not set(written(points[0]).items()) & set(before[0].items())
    assert contents(tmp_path / "sweep") == end


def test_a_point_is_finished_only_with_all_its_files(simulate: Callable[..., Path], tmp_path: Path) -> None:
    folder = simulate(*SMALL)
    config = (folder / "config.yaml").read_text()
    assert finished(folder, config)
    assert not finished(folder, config + " ")
    for name in ("config.yaml", "summary.json", *TABLES):
        copy = tmp_path / name
        shutil.copytree(folder, copy)
        (copy / name).unlink()
        assert not finished(copy, config), name
    (copy / "summary.json").write_text("{")
    assert status(copy) is None


def test_failed_points_are_tried_again(sweep: Sweep, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    overrides = ["workload=azure", f"workload.path={trace}", "timing=constant", "seed=1,2"]
    code, _, err = sweep(*overrides)
    assert (code, err.count("failed: ")) == (1, 2)
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.0000000,3,2\n")
    assert sweep(*overrides, "resume=true")[0] == 0
    assert pd.read_parquet(tmp_path / "sweep" / "sweep.parquet")["completed"].tolist() == [1, 1]


def test_two_sweeps_do_not_share_a_folder(sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.stopping.CLAIM_S", 0.1)
    folder = tmp_path / "sweep"
    folder.mkdir()
    claim = Claim(folder)
    code, _, err = sweep(*SMALL, "seed=1")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"kvtwin: another sweep is at work in {folder};")
    claim.drop()
    assert sweep(*SMALL, "seed=1")[0] == 0


def test_resume_without_a_folder_or_without_a_sweep_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["sim", "-m", "seed=1,2", "resume=true"]) == 2
    assert capsys.readouterr().err == "kvtwin: resume=true needs the folder of the sweep: hydra.sweep.dir=FOLDER.\n"
    assert main(["sim", f"hydra.run.dir={tmp_path}", "seed=1", "resume=true"]) == 2
    assert capsys.readouterr().err == "kvtwin: resume=true is for sweeps; a single run (without -m) starts anew.\n"
