"""Launchers: whichever processes run the points of a sweep, in whatever order, the results are the same bytes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest
from hydra import compose, initialize_config_module
from processes import SMALL, contents, gated_configs, kvtwin

from sim.cli import main
from sim.config import EXTRAS
from workloads.request import Request

PLUGINS = {
    "joblib": "hydra_plugins.hydra_joblib_launcher",
    "ray": "hydra_plugins.hydra_ray_launcher",
    "submitit_local": "hydra_plugins.hydra_submitit_launcher",
    "submitit_slurm": "hydra_plugins.hydra_submitit_launcher",
}
# The points of one block fail: none is left to hand out. The others take different times, and the longer ones have
# enough tokens (51,200) for linear algebra to share its sums among threads if it has any, and to round otherwise then.
POINTS = [*SMALL, "memory.num_blocks=100,1,50", "workload.num_requests=400,6"]


def installed(launcher: str) -> bool:
    return find_spec("hydra_plugins") is not None and find_spec(PLUGINS[launcher]) is not None


def needs(launcher: str) -> pytest.MarkDecorator:
    extra = EXTRAS["hydra/launcher"][launcher]
    return pytest.mark.skipif(not installed(launcher), reason=f"needs the extra kvtwin[{extra}]")


def run(folder: Path, *arguments: str) -> tuple[dict[str, bytes], str]:
    """Runs the points, two of which fail; returns every file but the launcher's own, and what went to stderr."""
    with kvtwin("-m", *POINTS, *arguments, f"hydra.sweep.dir={folder}") as process:
        code, _, err = process.end()
        process.wait_for_all()
    assert code == 1
    return {name: content for name, content in contents(folder).items() if not name.startswith(".submitit")}, err


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], str]:
    return run(tmp_path_factory.mktemp("serial"))


@pytest.mark.parametrize("launcher", [pytest.param(name, marks=needs(name)) for name in ("joblib", "submitit_local")])
def test_workers_leave_the_same_bytes_as_a_serial_sweep(
    launcher: str, tmp_path: Path, serial: tuple[dict[str, bytes], str]
) -> None:
    files, err = run(tmp_path, f"hydra/launcher={launcher}")
    assert files.keys() == serial[0].keys()
    assert [name for name, content in files.items() if content != serial[0][name]] == []
    assert err == serial[1]
    assert [line.startswith("kvtwin: point ") for line in err.splitlines()] == [True, True]
    assert len(files) > 4 * 6


@needs("ray")
def test_ray_on_this_machine_leaves_the_same_bytes_as_a_serial_sweep(
    tmp_path: Path, serial: tuple[dict[str, bytes], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # where Ray keeps a token of its own
    files, err = run(tmp_path / "sweep", "hydra/launcher=ray")
    assert files == serial[0]
    assert [line for line in err.splitlines() if line.startswith("kvtwin: ")] == serial[1].splitlines()


@needs("joblib")
def test_joblib_has_a_worker_for_each_core_unless_told_otherwise() -> None:
    import joblib

    with initialize_config_module("conf", version_base="1.3"):
        composed = compose("sim", ["hydra/launcher=joblib"], return_hydra_config=True)
    assert joblib.effective_n_jobs(composed.hydra.launcher.n_jobs) == joblib.cpu_count() >= 1


@needs("submitit_slurm")
def test_slurm_composes_and_says_so_where_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with initialize_config_module("conf", version_base="1.3"):
        composed = compose("sim", ["hydra/launcher=submitit_slurm"], return_hydra_config=True)
    assert composed.hydra.launcher._target_.endswith(".SlurmLauncher")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["sim", "-m", "hydra/launcher=submitit_slurm", f"hydra.sweep.dir={tmp_path}", "seed=1,2"]) == 2
    line = "kvtwin: hydra/launcher=submitit_slurm needs Slurm: srun is not on the path of this machine.\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("launcher", EXTRAS["hydra/launcher"])
def test_a_launcher_without_its_extra_is_one_line(launcher: str, capsys: pytest.CaptureFixture[str]) -> None:
    if installed(launcher):
        pytest.skip("its extra is installed here")
    assert main(["sim", "-m", f"hydra/launcher={launcher}", "seed=1,2"]) == 2
    extra = {"joblib": "parallel", "ray": "ray"}.get(launcher, "slurm")
    expected = f"kvtwin: hydra/launcher={launcher} needs the extra: pip install 'kvtwin[{extra}]'\n"
    assert capsys.readouterr().err == expected


class Deadly:
    """A workload whose process is killed, as for want of memory, once another point is finished."""

    def __init__(self, finished: Path) -> None:
        self.num_requests: int | None = 1
        self._finished = finished

    def __iter__(self) -> Iterator[Request]:
        while not self._finished.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
        yield Request(0, 0.0, 1, 1)


@needs("joblib")
def test_a_worker_that_is_killed_is_one_line_and_leaves_finished_points_whole(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    arguments = [*gated_configs(tmp_path / "configs"), "workload=gated,deadly", "hydra/launcher=joblib"]
    deadly = f"_target_: test_launchers.Deadly\nfinished: {folder}/0/point.json\n"
    (tmp_path / "configs" / "workload" / "deadly.yaml").write_text(deadly)
    with kvtwin("-m", *arguments, f"hydra.sweep.dir={folder}") as process:
        code, out, err = process.end()
        process.wait_for_all()
    assert code == 2
    assert err.startswith("kvtwin: a worker process of the sweep was killed, perhaps for want of memory.")
    assert err.count("\n") == 1
    assert "1 of 2 points are complete" in out
    assert pd.read_parquet(folder / "sweep.parquet")["status"].tolist() == ["complete"]
