"""Arguments without a key, such as a file or a name, where Hydra knows only key=value."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from workloads.errors import UserError

# Options of Hydra whose value is a word of its own.
_TAKES_A_WORD = {
    *("-c", "--cfg", "-p", "--package", "-cn", "--config-name", "-cp", "--config-path", "-cd", "--config-dir"),
    *("-i", "--info", "--experimental-rerun"),
}
_PLAIN = re.compile(r"[A-Za-z0-9_./-]+")


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """The bare arguments, and all others in their order. A word with = in it is bare only if there is such a file."""
    bare: list[str] = []
    rest: list[str] = []
    for before, word in zip(["", *argv], argv, strict=False):
        is_bare = not word.startswith("-") and before not in _TAKES_A_WORD and ("=" not in word or Path(word).is_file())
        (bare if is_bare else rest).append(word)
    return bare, rest


def quoted(value: str) -> str:
    """The value as Hydra's grammar takes it for text, whatever is in it."""
    if _PLAIN.fullmatch(value):
        return value
    # Within quotes Hydra takes backslashes for themselves, unless they stand before the quote.
    escaped = re.sub(r"(\\*)'", lambda match: match[1] * 2 + r"\'", value)
    escaped = re.sub(r"\\+$", lambda match: match[0] * 2, escaped).replace("${", r"\${")
    return f"'{escaped}'"


def with_path(argv: list[str]) -> list[str]:
    """The arguments, a bare one as the path of the workload: `FILE` is `workload.path=FILE`.

    Raises:
        UserError: there are several, or a path besides.
    """
    bare, rest = split(argv)
    if len(bare) > 1:
        raise UserError(f"one file at a time, not {' and '.join(bare)}; options are given as key=value.")
    if bare and any(word.startswith("workload.path=") for word in rest):
        raise UserError(f"the file is given twice: {bare[0]} and workload.path=. Leave one of them out.")
    return [*rest, *(f"workload.path={quoted(path)}" for path in bare)]


def on_command_line(path: Path) -> str:
    """The path as a shell hands it to Hydra, to be copied from the screen."""
    return shlex.quote(quoted(str(path)))
