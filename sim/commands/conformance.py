"""Replay recorded scheduler cases and report the first difference in each."""

from __future__ import annotations

import argparse
from pathlib import Path

from workloads.errors import UserError


def main(argv: list[str]) -> int:
    """`kvtwin conformance DIR …`: exit code 1 if any case differs.

    Raises:
        UserError: a folder that is no case and holds none.
    """
    parser = argparse.ArgumentParser(
        prog="kvtwin conformance",
        description="Lets kvtwin's scheduler and memory decide recorded vLLM workloads, and compares every decision.",
        epilog="example:  kvtwin conformance tests/data/conformance",
    )
    parser.add_argument("dir", nargs="+", type=Path, help="a case folder, or a folder of them")
    folders = [case for folder in parser.parse_args(argv).dir for case in _cases(folder)]

    from sim.conformance import check_case

    differing = 0
    for folder in folders:
        # Both as the rules are written and with the shortcut for decode steps that kvtwin sim takes.
        verdict = check_case(folder)
        if verdict.difference is None:
            verdict = check_case(folder, leap=True)
        print(f"{verdict.name}: {verdict.lines} lines compared, ", end="")
        if verdict.difference is None:
            print("identical")
            continue
        differing += 1
        at = verdict.difference
        where = at.step if isinstance(at.step, str) else f"step {at.step}"
        print(f"differs first in {where}, {at.field}: expected {at.expected}, got {at.got}")
    print(f"{len(folders) - differing} of {len(folders)} cases identical")
    return 1 if differing else 0


def _cases(folder: Path) -> list[Path]:
    """The folder itself if it is a case, else the cases directly in it."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give a conformance case or a folder of cases.")
    if any(folder.glob("config.json*")):
        return [folder]
    cases = sorted({path.parent for path in folder.glob("*/config.json*")})
    if not cases:
        raise UserError(f"{folder} holds no conformance case; a case is a folder with config.json and trace.jsonl.")
    return cases
