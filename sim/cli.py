"""The console script: looks the command up among the entry points `kvtwin.commands` and calls it.

What a command does with its arguments is its own business (plain Hydra for most). An error that the user can put
right is one line on stderr and exit code 2; nothing else is caught here.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import sys
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path

from workloads.errors import UserError

EPILOG = """
kvtwin COMMAND --help tells more; options are Hydra overrides (key=value), -m sweeps over comma lists.

example:  kvtwin sim workload=sharegpt_like model=llama-3.1-8b hardware=a100-80gb engine=vllm_v1"""


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0 done, 1 points failed, 2 a user's error, 130 Ctrl-C, 143 SIGTERM."""
    arguments = sys.argv[1:] if argv is None else argv
    commands = {point.name: point for point in entry_points(group="kvtwin.commands")}
    try:
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            print(_help(commands))
            return 0
        if arguments[0] in ("-V", "--version"):
            print(f"kvtwin {version('kvtwin')}")
            return 0
        return _lookup(commands, arguments[0]).load()(arguments[1:]) or 0
    except UserError as error:
        print(f"kvtwin: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvtwin: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `kvtwin … | head`: the reader has what it wanted
        sys.stderr.close()
        return 0


def _lookup(commands: dict[str, EntryPoint], name: str) -> EntryPoint:
    if name in commands:
        return commands[name]
    close = difflib.get_close_matches(name, commands, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(sorted(commands))}."
    raise UserError(f"there is no command {name}; {hint}")


def _help(commands: dict[str, EntryPoint]) -> str:
    lines = [f"  {name:<12}{_first_line(commands[name])}" for name in sorted(commands)]
    return "\n".join(["usage: kvtwin COMMAND [key=value …]", "", *lines, EPILOG])


def _first_line(command: EntryPoint) -> str:
    """First line of the command module's docstring, read without importing it: an import may need an extra."""
    spec = importlib.util.find_spec(command.module)
    if spec is None or spec.origin is None:
        return ""
    docstring = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]
