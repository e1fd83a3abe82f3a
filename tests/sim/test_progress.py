"""What a terminal shows of a sweep; nothing is shown elsewhere."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from processes import CODE, SMALL

from sim.progress import SweepProgress


def end(folder: Path, number: int, status: str) -> None:
    """Makes a point end."""
    (folder / str(number)).mkdir()
    (folder / str(number) / "summary.json").write_text(json.dumps({"status": status}))
    (folder / str(number) / "point.json").write_text("{}")


def test_what_is_left_is_reckoned_from_the_points_that_ended_here(tmp_path: Path) -> None:
    end(tmp_path, 0, "complete")  # kept from before: says nothing about how long a point takes
    progress = SweepProgress(tmp_path, 10)
    assert progress.describe(50.0) == ""
    end(tmp_path, 1, "complete")
    end(tmp_path, 2, "complete")
    progress.look(100.0)
    # Two points in 100 s, seven to go: 350 s, of which 80 have passed. 270 s are 4.5 minutes, rounded to even.
    assert progress.describe(180.0) == ", 4 min left"
    end(tmp_path, 3, "failed")
    progress.look(201.0)
    # Three in 201 s, six to go: 402 s, or 6.7 minutes.
    assert progress.describe(201.0) == ", 1 failed, 7 min left"
    for number in range(4, 10):
        end(tmp_path, number, "complete")
    progress.look(400.0)
    assert progress.describe(401.0) == ", 1 failed"


def test_hours_and_seconds_are_said_as_such(tmp_path: Path) -> None:
    progress = SweepProgress(tmp_path, 3)
    end(tmp_path, 0, "complete")
    progress.look(1860.0)
    assert progress.describe(1860.0) == ", 1 h 2 min left"  # two more of 31 minutes
    assert progress.describe(5530.0) == ", 50 s left"
    assert progress.describe(9999.0) == ", 1 s left"  # it takes longer than the first one


def test_a_terminal_shows_the_points_of_a_sweep_and_not_the_requests_of_each(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-c", CODE, "sim", "-m", *SMALL, "seed=1,2", f"hydra.sweep.dir={tmp_path}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=follower)
    os.close(follower)
    shown = b""
    try:
        while data := os.read(leader, 65536):
            shown += data
    except OSError:  # how a terminal ends whose other side is closed
        pass
    os.close(leader)
    assert process.wait(120) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "0/2 points" in text
    assert "2/2 points" in text
    assert "requests" not in text
