"""Compile the simulator's core for this machine: same results, faster."""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import NoReturn

from workloads.errors import UserError

DESCRIPTION = """\
Compiles the core of the simulator to machine code, once for this environment; runs are then about twice as fast, with
the same bytes as results. Takes a minute, a C compiler and Python's headers (Debian: gcc python3-dev). A build is used
as long as the sources are those it was made from; KVTWIN_COMPILED=0 ignores it.
"""
EXAMPLE = "example:\n  kvtwin compile"


class _Parser(ArgumentParser):
    """argparse, but what is wrong becomes one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"compile: {message}. See kvtwin compile --help.")


def main(argv: list[str]) -> int:
    """Compiles, prints where the build is, and returns 0.

    Raises:
        UserError: something that compiling needs is missing.
    """
    parser = _Parser(
        prog="kvtwin compile", description=DESCRIPTION, epilog=EXAMPLE, formatter_class=RawDescriptionHelpFormatter
    )
    parser.parse_args(argv)
    from sim.compiled import build

    print(f"compiled: {build()}")
    return 0
