"""The page on workloads: every command on it runs as it stands, and it names every choice there is."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from sim.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/workloads.md").read_text(encoding="utf-8")
COMMANDS = [
    line for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S) for line in block.splitlines() if line
]


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"{number * number},{100 + number},{20 + number}" for number in range(30)]
    Path("trace.csv").write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *rows]))
    turns = [
        {
            "chat_id": number,
            "parent_chat_id": number - 1 if number % 3 else -1,
            "timestamp": float(number),
            "input_length": 32 * (1 + number % 3),
            "output_length": 8,
            "type": "text",
            "turn": 1 + number % 3,
            "hash_ids": [100 * (number // 3) + block for block in range(2 * (1 + number % 3))],
        }
        for number in range(12)
    ]
    Path("chats.jsonl").write_text("\n".join(map(json.dumps, turns)))
    program, *words = shlex.split(command)
    assert program == "kvtwin"
    assert main([*words, "plots=false", "hydra.run.dir=run"]) == 0
    summary = json.loads(Path("run/summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "complete"
    assert summary["completed"] > 0
    assert summary["failed"] == summary["never_sent"] == 0


@pytest.mark.parametrize("group", ["arrivals", "sampling", "turns", "think"])
def test_the_page_names_every_choice(group: str) -> None:
    for file in (ROOT / "conf/workload" / group).glob("*.yaml"):
        assert f"`{file.stem}`" in PAGE, file.stem
